"""Histogram: counts of values under fixed bounds, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Five bounds a decade, 0.1 ms to 630 s: neighbours differ by the factor 1.6.
_MANTISSAS = ("1", "1.6", "2.5", "4", "6.3")
SECONDS = tuple(float(f"{m}e{exponent}") for exponent in range(-4, 3) for m in _MANTISSAS)
COUNTS = tuple(float(2**i) for i in range(18))


class Histogram:
    """Written by one thread, read by any. `counts[i]`: values in (bounds[i - 1], bounds[i]]."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last one holds what is above all bounds
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
