"""How far the figures of `paceline bench` are from what a server knows of its own writes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

Span = tuple[float, float]  # a write's beginning and end: it happened between them

_OVERDUE_S = 1e-3  # writes nearer to each other than this were not planned so


class Truth:
    """Gathers errors in ms. An error is what lies outside of all that the server's stamps allow.

    An arrival that stands for several writes, because they came in one packet, is compared with
    the last of them. They came together because the server was late and wrote them at once, or
    because the client read late.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[float]] = {"ttft_ms": [], "gap_ms": [], "tpot_ms": []}
        self._reading_ms: list[float] = []
        self._write_ms: list[float] = []
        self._num_true_ttft = 0
        self._num_merged = {"server_was_late": 0, "client_read_late": 0}

    def add(
        self, line: dict[str, Any], spans: Sequence[Span], *, came_at: float, epoch: float
    ) -> None:
        """Compare a request's line with the writes of its texts."""
        due = epoch + line["scheduled_s"]
        self._write_ms += [1e3 * (end - begin) for begin, end in spans]
        connected = due + 1e-3 * (line["lag_ms"] + line["connect_ms"])
        self._reading_ms.append(1e3 * (came_at - connected))
        gaps_s = [1e-3 * gap for gap in line["gaps_ms"]]
        arrivals = list(itertools.accumulate(gaps_s, initial=due + 1e-3 * line["ttft_ms"]))
        seen = self._writes_of(arrivals, spans)
        error = 1e3 * _outside(arrivals[0] - due, (seen[0][0] - due, seen[0][1] - due))
        self._errors["ttft_ms"].append(error)
        self._num_true_ttft += abs(error) <= max(1.0, 0.01 * 1e3 * (seen[0][0] - due))
        for gap, (before, after) in zip(gaps_s, itertools.pairwise(seen), strict=True):
            error = _outside(gap, (after[0] - before[1], after[1] - before[0]))
            self._errors["gap_ms"].append(1e3 * error)
        if len(spans) > 1:
            most, least = seen[-1][1] - seen[0][0], seen[-1][0] - seen[0][1]
            error = _outside(1e-3 * line["tpot_ms"] * (len(spans) - 1), (least, most))
            self._errors["tpot_ms"].append(1e3 * error / (len(spans) - 1))

    def _writes_of(self, arrivals: Sequence[float], spans: Sequence[Span]) -> list[Span]:
        """Return for each arrival the last write that it stands for, in order."""
        num_missing = len(spans) - len(arrivals)
        seen: list[Span] = []
        position = 0
        for arrival in arrivals:
            while num_missing and abs(_outside(arrival, spans[position + 1])) < abs(
                _outside(arrival, spans[position])
            ):
                is_overdue = spans[position + 1][0] - spans[position][1] < _OVERDUE_S
                self._num_merged["server_was_late" if is_overdue else "client_read_late"] += 1
                num_missing, position = num_missing - 1, position + 1
            seen.append(spans[position])
            position += 1
        return seen

    def report(self) -> dict[str, Any]:
        return {
            "requests": len(self._reading_ms),
            "ttft_within_1_ms_or_1_percent": self._num_true_ttft,
            "gaps": len(self._errors["gap_ms"]),
            "gaps_wrong_by_more_than_1_ms": sum(abs(e) > 1 for e in self._errors["gap_ms"]),
            "writes_that_came_with_the_next": self._num_merged,
            "server_read_ms": _sizes(self._reading_ms),
            "server_write_ms": _sizes(self._write_ms),
            **{name: _sizes(errors) for name, errors in self._errors.items()},
        }


def _outside(value: float, span: Span) -> float:
    """Return by how much `value` lies above the span, or below it (negative); 0 within."""
    return value - min(max(value, span[0]), span[1])


def _sizes(values: Sequence[float]) -> dict[str, float]:
    sizes = sorted(abs(value) for value in values)
    return {
        "median": statistics.median(sizes),
        "p99": sizes[int(0.99 * len(sizes))],
        "worst": sizes[-1],
    }
