"""Statistics: means, quantiles and shares, each with its 95 % confidence interval.

The intervals take requests as independent. Under a queue they are not quite: neighbours share
their luck, and the true interval is wider. Repeat the run, or compare in rounds, before you lean
on a small difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Interval = tuple[float | None, float | None]
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LEVEL = 0.95
_Z = 1.959964
# Student's t at 97.5 % for 1 to 10 degrees of freedom; beyond, an expansion is exact to 0.1 %.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_MAX_EXACT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One estimate; an interval's end is None where the sample is too small to bound it."""

    value: float
    low: float | None
    high: float | None

    def as_dict(self, scale: float = 1.0) -> dict[str, float | None]:
        ends = {"low": self.low, "high": self.high}
        scaled = {name: None if end is None else end * scale for name, end in ends.items()}
        return {"value": self.value * scale, **scaled}


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % factor for `degrees` of freedom, at least 1."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)


def mean_figure(values: Sequence[float] | np.ndarray[Any, Any]) -> Figure:
    """Return the mean of at least one value, with Student's interval."""
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if sample.size < 2:
        return Figure(value=mean, low=None, high=None)
    half = student_t(sample.size - 1) * float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return Figure(value=mean, low=mean - half, high=mean + half)


def quantile_figure(ordered: np.ndarray[Any, Any], q: float) -> Figure:
    """Return quantile `q` of sorted values, with the interval between two order statistics.

    The ranks are those of the binomial distribution, free of any assumption on the values' own.
    """
    n = int(ordered.size)
    value = float(np.quantile(ordered, q))
    low, high = rank_interval(n, q)
    return Figure(
        value=value,
        low=float(ordered[low - 1]) if low >= 1 else None,
        high=float(ordered[high - 1]) if high <= n else None,
    )


def rank_interval(n: int, q: float) -> tuple[int, int]:
    """Return ranks (from 1; 0 and n + 1 mean unbounded) that enclose quantile q at 95 %."""
    if n > _MAX_EXACT:
        half = _Z * math.sqrt(n * q * (1 - q))
        return max(0, math.floor(n * q - half)), min(n + 1, math.ceil(n * q + half) + 1)
    logs = np.array(
        [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    )
    k = np.arange(n + 1)
    below = np.cumsum(np.exp(logs + k * math.log(q) + (n - k) * math.log1p(-q)))  # P(X <= k)
    tail = (1 - LEVEL) / 2
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1 - tail, side="left")) + 1
    return low, high


def share_figure(count: int, total: int) -> Figure:
    """Return count / total with Wilson's interval; `total` is at least 1."""
    p = count / total
    centre = (p + _Z**2 / (2 * total)) / (1 + _Z**2 / total)
    half = _Z / (1 + _Z**2 / total) * math.sqrt(p * (1 - p) / total + _Z**2 / (4 * total**2))
    return Figure(value=p, low=max(0.0, centre - half), high=min(1.0, centre + half))


def ratio_figure(pairs: Sequence[tuple[float, float]]) -> Figure | None:
    """Return the geometric mean of a / b over rounds, with Student's interval of the logarithm.

    None where a figure is missing or not above 0.
    """
    if not pairs or any(not (a > 0 and b > 0) for a, b in pairs):
        return None
    logs = mean_figure([math.log(a / b) for a, b in pairs])
    return Figure(
        value=math.exp(logs.value),
        low=None if logs.low is None else math.exp(logs.low),
        high=None if logs.high is None else math.exp(logs.high),
    )


def summarise(values: Sequence[float] | np.ndarray[Any, Any], scale: float = 1.0) -> dict[str, Any]:
    """Return count, mean, deviation, ends and quantiles of the values that are numbers, times
    `scale`.

    `std` is the sample's, None of one value. Without any, only the count: nothing is averaged from
    nothing.
    """
    sample = np.asarray(values, dtype=np.float64)
    sample = np.sort(sample[np.isfinite(sample)])
    if sample.size == 0:
        return {"count": 0}
    summary: dict[str, Any] = {"count": int(sample.size)}
    mean = mean_figure(sample)
    if mean.low is not None and sample[0] >= 0:  # no mean of what is never negative is
        mean = replace(mean, low=max(0.0, mean.low))
    summary["mean"] = mean.as_dict(scale)
    summary["std"] = float(sample.std(ddof=1)) * scale if sample.size > 1 else None
    summary["min"] = float(sample[0]) * scale
    for name, q in QUANTILES.items():
        summary[name] = quantile_figure(sample, q).as_dict(scale)
    summary["max"] = float(sample[-1]) * scale
    return summary
