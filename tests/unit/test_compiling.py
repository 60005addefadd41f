"""Compiling: a slow structure keeps neither the event loop nor another structure waiting."""

import asyncio
import threading

import pytest

from paceline.server.compiling import Compilers
from paceline.server.errors import ApiError


def test_the_loop_goes_on_and_what_takes_too_long_is_refused_without_its_seat():
    async def main():
        compilers, is_over = Compilers(limit_s=0.02), threading.Event()
        for _ in range(4):
            with pytest.raises(ApiError, match="takes longer than") as caught:
                await compilers.run(is_over.wait, param="tools")
            assert (caught.value.status, caught.value.param) == (400, "tools")
        with pytest.raises(ApiError) as caught:
            await compilers.run(is_over.wait, param="tools")
        assert caught.value.status == 503
        is_over.set()
        while compilers._num_left:
            await asyncio.sleep(0.001)
        assert await compilers.run(lambda: 5, param="tools") == 5
        compilers.close()

    asyncio.run(main())


def test_a_problem_of_the_work_is_its_callers():
    async def main():
        compilers = Compilers()
        with pytest.raises(ZeroDivisionError):
            await compilers.run(lambda: 1 // 0, param="tools")
        compilers.close()

    asyncio.run(main())
