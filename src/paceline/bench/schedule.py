"""Schedule: the moments at which an open loop sends, kept to a tenth of a millisecond."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator

from paceline.bench.arrivals import Arrivals
from paceline.bench.course import Course

_SPIN_S = 0.0015  # event loops round their timers to milliseconds: the last one is polled
_MAX_SPIN_RATE = 100.0


class Schedule:
    """Hands out when requests are due, in order, until their course sends no more.

    A moment is *held* from then on until `release`: what ends meanwhile leaves it unsent.
    """

    def __init__(self, arrivals: Arrivals, seed: str, course: Course) -> None:
        self.has_ended = False  # of itself, as a trace does: not by the course's limits
        self._rate = arrivals.rate
        self._course = course
        self._held: float | None = None
        self._left = self._moments(arrivals.times(seed))

    def __iter__(self) -> Iterator[float]:
        for moment in self._left:
            self._held = moment
            yield moment

    def release(self) -> None:
        """Take note that the request of the last moment is on its way."""
        self._held = None

    async def wait(self, moment: float) -> None:
        """Return at a moment; at high rates without polling, which would take the CPU."""
        await until(moment, polls=self._rate is None or self._rate <= _MAX_SPIN_RATE)

    def num_unsent(self, most_walked: int) -> int:
        """Return how many arrivals were due in the window and did not get their turn.

        The client had as many requests open as it may, or was late: either way a request that
        nobody answered. Beyond `most_walked` of them the rate tells the rest.
        """
        window, most = self._course.window, self._course.num_left
        if not math.isfinite(window.start):
            return 0
        held = [] if self._held is None else [self._held]
        num, moment = 0, window.start
        for moment in itertools.chain(held, self._left):
            if moment >= window.end or num >= min(most, most_walked):
                break
            num += moment >= window.start
        else:
            return num
        if num == most_walked < most and self._rate is not None:
            num += round(self._rate * max(0.0, window.end - moment))
        return int(min(num, most))

    def _moments(self, times: Iterator[float]) -> Iterator[float]:
        for at_s in times:
            moment = self._course.begin_at + at_s
            if moment >= self._course.window.end or self._course.is_all_sent:
                return
            yield moment
        self.has_ended = True


async def until(moment: float, *, polls: bool = False) -> None:
    """Return at `moment`, to a tenth of a millisecond with `polls`."""
    left = moment - time.perf_counter()
    if not polls:
        if left > 0:
            await asyncio.sleep(left)
        return
    if left > _SPIN_S:
        await asyncio.sleep(left - _SPIN_S)
    while time.perf_counter() < moment:
        await asyncio.sleep(0)
