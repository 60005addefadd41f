"""Histogram: millions of durations in constant memory, to a quarter of a percent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.bench.statistics import QUANTILES, Figure, rank_interval, student_t

_LOWEST_S = 1e-6
_GROWTH = 1.005  # a value is off by at most half of this step: 0.25 %
_LOG_GROWTH = math.log(_GROWTH)
_NUM_BUCKETS = math.ceil(math.log(3600 * 4 / _LOWEST_S) / _LOG_GROWTH) + 1
_NUM_GROUPS = 20


class Histogram:
    """Durations in buckets of equal ratio, up to four hours; mean, deviation and ends are exact.

    Values of one request are alike, so an interval that took each as independent would be far
    too narrow. Requests are dealt to 20 groups, and the spread is that of the figures with one
    group left out (delete-a-group jackknife, Kott 2001). A quantile barely moves when a group is
    left out, so its interval is that of the share of values up to it, turned into values (Woodruff
    1952), and never narrower than that of as many independent values.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((_NUM_GROUPS, _NUM_BUCKETS), dtype=np.int64)
        self._sums = np.zeros(_NUM_GROUPS)
        self._squares = 0.0  # of the distances from the mean, summed
        self._min = math.inf
        self._max = 0.0
        self._next_group = 0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Add the durations (seconds) of one request."""
        if values.size == 0:
            return
        mean = float(values.mean())
        self._join(values.size, mean, float(((values - mean) ** 2).sum()))
        group = self._next_group
        self._next_group = (group + 1) % _NUM_GROUPS
        idx = np.log(np.maximum(values, _LOWEST_S) / _LOWEST_S) / _LOG_GROWTH
        np.add.at(self._counts[group], np.minimum(idx.astype(np.int64), _NUM_BUCKETS - 1), 1)
        self._sums[group] += float(values.sum())
        self._min = min(self._min, float(values.min()))
        self._max = max(self._max, float(values.max()))

    def take(self, other: Histogram) -> None:
        """Add all that `other` holds."""
        if other.count:
            self._join(other.count, float(other._sums.sum()) / other.count, other._squares)
        self._counts += other._counts
        self._sums += other._sums
        self._min = min(self._min, other._min)
        self._max = max(self._max, other._max)

    def _join(self, count: int, mean: float, squares: float) -> None:
        """Add `squares` of `count` values that are not in the sums yet (Chan 1983, eq. 1.5)."""
        before = self.count
        apart = mean - float(self._sums.sum()) / before if before else 0.0
        self._squares += squares + apart**2 * before * count / (before + count)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def summary(self, scale: float = 1.0) -> dict[str, Any]:
        """Return the same figures as `statistics.summarise`."""
        total = self.count
        if total == 0:
            return {"count": 0}
        summary: dict[str, Any] = {"count": total}
        sums, counts = self._sums, self._counts.sum(axis=1)
        left = [
            (sums.sum() - sums[g]) / (total - counts[g])
            for g in range(_NUM_GROUPS)
            if 0 < counts[g] < total
        ]
        summary["mean"] = _jackknife(float(sums.sum()) / total, left).as_dict(scale)
        summary["std"] = math.sqrt(self._squares / (total - 1)) * scale if total > 1 else None
        summary["min"] = self._min * scale
        for name, q in QUANTILES.items():
            summary[name] = self._quantile_figure(q).as_dict(scale)
        summary["max"] = self._max * scale
        return summary

    def curve(self, scale: float = 1.0, num_points: int = 300) -> list[list[float]]:
        """Return points [value, share at or below], for a cumulative plot."""
        below = np.cumsum(self._counts.sum(axis=0))
        total = int(below[-1])
        if total == 0:
            return []
        shares = [i / num_points for i in range(1, num_points)]
        points = [[self._at_rank(below, q * total) * scale, q] for q in shares]
        return [*points, [self._max * scale, 1.0]]

    def _quantile_figure(self, q: float) -> Figure:
        """Return quantile `q` with its interval; an end is None where no value bounds it."""
        counts = self._counts.sum(axis=1)
        below = np.cumsum(self._counts.sum(axis=0))
        total = int(below[-1])
        idx = int(np.searchsorted(below, q * total))
        up_to = self._counts[:, : idx + 1].sum(axis=1)
        left = [
            float((below[idx] - up_to[g]) / (total - counts[g]))
            for g in range(_NUM_GROUPS)
            if 0 < counts[g] < total
        ]
        value = self._at_rank(below, q * total)
        half = _half_width(float(below[idx]) / total, left)
        if half is None:
            return Figure(value=value, low=None, high=None)
        low, high = rank_interval(total, q)
        low = min(low, math.floor(total * (q - half)))
        high = max(high, math.ceil(total * (q + half)) + 1)
        return Figure(
            value=value,
            low=self._at_rank(below, low) if low >= 1 else None,
            high=self._at_rank(below, high) if high <= total else None,
        )

    def _at_rank(self, below: np.ndarray[Any, Any], rank: float) -> float:
        """Return the value of a rank (from 1), by the counts up to each bucket."""
        idx = int(np.searchsorted(below, rank, side="left"))
        # The middle of the bucket on the log scale; never beyond the exact ends.
        middle = _LOWEST_S * math.exp((idx + 0.5) * _LOG_GROWTH)
        return max(self._min, min(middle, self._max))


def _jackknife(value: float, left_out: list[float]) -> Figure:
    """Return `value` with the interval that the values with one group left out give."""
    half = _half_width(value, left_out)
    if half is None:
        return Figure(value=value, low=None, high=None)
    return Figure(value=value, low=max(0.0, value - half), high=value + half)


def _half_width(value: float, left_out: list[float]) -> float | None:
    """Return half of the 95 % interval of `value`; None for fewer than two groups."""
    num = len(left_out)
    if num < 2:
        return None
    spread = math.sqrt((num - 1) / num * sum((v - value) ** 2 for v in left_out))
    return student_t(num - 1) * spread
