"""Predictions: what a change makes of the latencies, as one distribution a metric."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct

from paceline.explain.causes import METRICS, Finding, Metric, curve
from paceline.explain.facts import CallFacts
from paceline.explain.proposal import Predict

Curves = Mapping[Metric, Sequence[Finding]]  # percentiles 0 … 100 of each metric that calls have


class Prediction(Struct, frozen=True, kw_only=True):
    """Each metric after a change, and the mean call as a whole."""

    after_ms: Mapping[Metric, Sequence[float]]  # percentiles 0 … 100, ascending
    whole_gain: float  # of the mean call, first token to last; negative: it gets slower

    def at(self, metric: Metric, percentile: int) -> float:
        return self.after_ms[metric][percentile]


def curves_of(calls: Sequence[CallFacts]) -> Curves:
    """Return the distributions that predictions start from."""
    return {metric: found for metric in METRICS if (found := curve(calls, metric))}


def predicted(predict: Predict, before: Curves) -> Prediction:
    """Return what `predict` makes of each percentile, in order again.

    A change can help the slow more than the fast: who was slowest need not be it afterwards, so
    the percentiles are read from all that is expected, sorted.
    """
    after = {metric: sorted(map(predict, found)) for metric, found in before.items()}
    before_ms = {m: [finding.value_ms for finding in found] for m, found in before.items()}
    tokens = [finding.output_tokens for finding in before.get("tpot", ())]
    num_gaps = statistics.fmean(tokens) - 1 if tokens else 0.0
    whole_ms = _whole_ms(before_ms, num_gaps)
    return Prediction(
        after_ms=after,
        whole_gain=1 - _whole_ms(after, num_gaps) / whole_ms if whole_ms else 0.0,
    )


def _whole_ms(curves: Mapping[Metric, Sequence[float]], num_gaps: float) -> float:
    """Return a mean call's milliseconds: its first token, and its gaps after it."""
    first, gap = (statistics.fmean(curves[m]) if m in curves else 0.0 for m in METRICS)
    return first + num_gaps * gap
