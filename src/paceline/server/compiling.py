"""Compilers: structures are compiled beside the event loop, each within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from paceline.server.errors import ApiError

LIMIT_S = 30.0  # the first structure of a process indexes a vocabulary, too
_AT_ONCE = 2
_MAX_LEFT = 4  # compiles that nobody waits for any more; native code cannot be interrupted
_T = TypeVar("_T")


class Compilers:
    """Runs work on threads, two at a time. Used by the event loop's thread.

    Work that takes longer than `limit_s`, or whose caller has left, is left to end by itself: it
    takes the seat of no other, and while too many of these run no more begin.
    """

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._seats = asyncio.Semaphore(_AT_ONCE)
        self._threads = ThreadPoolExecutor(_AT_ONCE + _MAX_LEFT, thread_name_prefix="grammar")
        self._num_left = 0

    async def run(self, work: Callable[[], _T], *, param: str) -> _T:
        """Return `work()`. Raises ApiError naming `param` where it takes too long."""
        async with self._seats:
            if self._num_left >= _MAX_LEFT:
                raise ApiError(
                    503, "too many structures take long to compile: try again later",
                    retry_after_s=self._limit_s,
                )  # fmt: skip
            future = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                await asyncio.wait({future}, timeout=self._limit_s)
                if future.done():
                    return future.result()
            finally:
                if not future.done():
                    self._num_left += 1
                    future.add_done_callback(self._ended)
        raise ApiError(
            400, f"{param}: compiling takes longer than {self._limit_s:g} s: make it smaller",
            param=param,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads; what they have not begun is left."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._num_left -= 1
        if not future.cancelled():
            future.exception()  # nobody else asks for it
