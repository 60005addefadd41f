"""Course: which requests of a run are sent, and which of them are measured."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.bench.recorder import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run ends, and what of it is measured. Warm-up comes before both limits."""

    num_requests: int | None = None
    duration_s: float | None = None
    warmup_s: float = 0.0
    warmup_requests: int = 0
    drain_s: float = 0.0  # after `duration_s`, for answers that are still coming
    timeout_s: float = 600.0
    max_open: int = 4096


class Course:
    """Holds a run to its limits: it counts requests, and opens and ends the window.

    A warm-up by time ends at its moment, one by count with the first request after it. Where a
    duration was asked for, `on_end` is called once it is over.
    """

    def __init__(self, limits: Limits, window: Window, on_end: Callable[[], object]) -> None:
        self.begin_at = 0.0
        self.window = window
        self._limits = limits
        self._on_end = on_end
        self._num_sent = 0

    def begin(self, at: float) -> None:
        self.begin_at = at
        if not self._limits.warmup_requests:
            self._open_window(at + self._limits.warmup_s)

    def admit(self, due: float) -> bool:
        """Count a request that is sent; return whether it is one of the warm-up."""
        if self._num_sent < self._limits.warmup_requests:
            self._num_sent += 1
            return True
        if math.isinf(self.window.start):
            self._open_window(due)
        is_warmup = due < self.window.start
        if not is_warmup or self._limits.warmup_requests:
            self._num_sent += 1  # a warm-up by time does not use up the count
        return is_warmup

    @property
    def num_left(self) -> float:
        """Requests that may still be sent by their count; infinite where it has no limit."""
        if self._limits.num_requests is None:
            return math.inf
        return max(0, self._limits.num_requests + self._limits.warmup_requests - self._num_sent)

    @property
    def is_all_sent(self) -> bool:
        return self.num_left == 0

    @property
    def is_over(self) -> bool:
        """True once nothing new may be sent: answers may still come, for `drain_s`."""
        return self.is_all_sent or time.perf_counter() >= self.window.end

    def _open_window(self, at: float) -> None:
        self.window.start = at
        if self._limits.duration_s is not None:
            self.window.end = at + self._limits.duration_s
            left_s = self.window.end - time.perf_counter()
            asyncio.get_running_loop().call_later(left_s, self._on_end)
