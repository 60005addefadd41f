"""Plot data: the curves of a run, thinned to what a screen can show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.bench.exchange import OUTCOMES
from paceline.bench.recorder import Columns, Recorder

_MAX_CURVE = 300
_MAX_POINTS = 3000
_MAX_SECONDS = 1200


def plot_data(recorder: Recorder) -> dict[str, Any]:
    """Return cumulative curves (ms), points over time (s, ms), series a second, worst requests."""
    together = recorder.together()
    return {
        "curves": {
            **{name: _curve(together, name) for name in ("ttft", "tpot", "e2e")},
            "itl": [[_round(x), _round(y)] for x, y in together.gaps.curve(1e3, _MAX_CURVE)],
        },
        "points": _points(recorder),
        "series": _series(recorder),
        "worst": [line for _, _, line in sorted(recorder.worst, key=lambda item: -item[0])],
    }


def _curve(columns: Columns, metric: str) -> list[list[float]]:
    """Return points [ms, share at or below] of complete answers."""
    values = columns.of(metric)
    values = np.sort(values[np.isfinite(values)]) * 1e3
    if values.size == 0:
        return []
    picked = np.unique(np.linspace(0, values.size - 1, min(values.size, _MAX_CURVE)).astype(int))
    return [[_round(values[i]), _round((i + 1) / values.size)] for i in picked]


def _points(recorder: Recorder) -> list[list[Any]]:
    """Return [scheduled s, TTFT ms, E2E ms, outcome, class] in order of time."""
    rows: list[list[Any]] = []
    outcomes = list(OUTCOMES)
    for kind, columns in recorder.classes.items():
        for at, ttft, e2e, outcome in zip(
            columns.at, columns.values["ttft"], columns.values["e2e"], columns.outcome, strict=True
        ):
            first = None if math.isnan(ttft) else _round(ttft * 1e3)
            rows.append([_round(at), first, _round(e2e * 1e3), outcomes[outcome], kind])
    rows.sort(key=lambda row: row[0])
    return rows[:: math.ceil(len(rows) / _MAX_POINTS) or 1]


def _series(recorder: Recorder) -> dict[str, list[float]]:
    """Return output tokens a second and open requests on average, second by second or coarser."""
    seconds = [*recorder.tokens_by_second, *recorder.open_changes]
    if not seconds:
        return {"at": [], "tokens_per_s": [], "open": []}
    first, last = min(seconds), max(seconds)
    step = math.ceil((last - first + 1) / _MAX_SECONDS)
    at: list[float] = []
    tokens: list[float] = []
    num_open: list[float] = []
    level = 0.0
    for begin in range(first, last + 1, step):
        span = range(begin, begin + step)
        open_s = 0.0
        for second in span:
            level += recorder.open_changes.get(second, 0.0)
            open_s += level
        at.append(begin)
        tokens.append(_round(sum(recorder.tokens_by_second.get(s, 0.0) for s in span) / step))
        num_open.append(_round(max(0.0, round(open_s / step, 6))))  # a sum may end beside 0
    return {"at": at, "tokens_per_s": tokens, "open": num_open}


def _round(value: float) -> float:
    return float(f"{value:.6g}")
