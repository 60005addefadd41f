"""Figures over windows of a text: means whose intervals know that neighbours are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.bench.statistics import Figure, student_t


def clustered_mean(groups: Sequence[Sequence[float]]) -> Figure:
    """Return the mean of all values, with a 95 % interval that takes groups as independent.

    The tokens of a window share a topic and an author's habits, so they are no independent sample:
    the error is that of a ratio of sums over whole groups (cluster-robust, m / (m - 1)). One group
    bounds nothing: its ends are None.
    """
    sums = np.array([float(np.sum(group)) for group in groups])
    counts = np.array([len(group) for group in groups])
    total = int(counts.sum())
    mean = float(sums.sum()) / total
    num_groups = len(groups)
    if num_groups < 2:
        return Figure(value=mean, low=None, high=None)
    residuals = sums - mean * counts
    variance = num_groups / (num_groups - 1) * float(residuals @ residuals) / total**2
    half = student_t(num_groups - 1) * math.sqrt(variance)
    return Figure(value=mean, low=mean - half, high=mean + half)


def exponential(figure: Figure) -> Figure:
    """Return exp of a figure: a perplexity from a mean loss, a ratio from a difference."""
    ends = (None if end is None else math.exp(end) for end in (figure.low, figure.high))
    low, high = ends
    return Figure(value=math.exp(figure.value), low=low, high=high)


def as_share(figure: Figure) -> Figure:
    """Return a figure whose interval is cut to [0, 1]."""
    low = None if figure.low is None else max(0.0, figure.low)
    high = None if figure.high is None else min(1.0, figure.high)
    return Figure(value=figure.value, low=low, high=high)
