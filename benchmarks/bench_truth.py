"""How far the figures of `paceline bench` are from what a server knows of its own writes.

`Truth` is about single requests, `RunTruth` about the figures of a run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

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
        arrivals = arrivals_of(line, epoch=epoch)
        seen = self.writes_of(arrivals, spans)
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

    def writes_of(self, arrivals: Sequence[float], spans: Sequence[Span]) -> list[Span]:
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


def arrivals_of(line: dict[str, Any], *, epoch: float) -> list[float]:
    """Return the moments of a request's line at which text came."""
    if line["ttft_ms"] is None:
        return []
    first = epoch + line["scheduled_s"] + 1e-3 * line["ttft_ms"]
    return list(itertools.accumulate((1e-3 * gap for gap in line["gaps_ms"]), initial=first))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueRequest:
    """What a server knows of a request that it answered as a whole.

    `texts` are the writes that brought text, one an arrival; the end lies in `end`. `line` is the
    bench's own, for the moment at which the request was due: the plan, which no server sees.
    """

    line: dict[str, Any]
    texts: Sequence[Span]
    end: Span
    output_tokens: int


class RunTruth:
    """Bounds of a run's figures, ms: each is one of a mean, quantile or maximum, and so grows with
    every duration in it; the truth lies between its values at all ends of the spans."""

    def __init__(self, requests: Sequence[TrueRequest], *, epoch: float) -> None:
        self._requests = requests
        self._epoch = epoch

    def durations(self) -> dict[str, list[Span]]:
        """Return by metric the bounds of each duration, in ms: one a request, or one a gap."""
        found: dict[str, list[Span]] = {"ttft": [], "e2e": [], "tpot": [], "itl": []}
        for request in self._requests:
            due = self._epoch + request.line["scheduled_s"]
            found["e2e"].append(_ms(request.end, (due, due)))
            if request.texts:
                found["ttft"].append(_ms(request.texts[0], (due, due)))
            found["itl"] += [_ms(after, text) for text, after in itertools.pairwise(request.texts)]
            if request.output_tokens > 1 and request.texts[0] != request.texts[-1]:
                low, high = _ms(request.texts[-1], request.texts[0])
                count = request.output_tokens - 1
                found["tpot"].append((low / count, high / count))
        return found

    def num_met(self, limits_ms: dict[str, float]) -> tuple[int, int]:
        """Return how many surely met a TTFT and an E2E limit, and how many may have."""
        durations = self.durations()
        pairs = list(zip(durations["ttft"], durations["e2e"], strict=True))
        surely, perhaps = (
            sum(
                ttft[end] <= limits_ms["ttft"] + slack and e2e[end] <= limits_ms["e2e"] + slack
                for ttft, e2e in pairs
            )
            for end, slack in ((1, -1.0), (0, 1.0))
        )
        return surely, perhaps

    def wrong(self, latency: dict[str, Any]) -> dict[str, float]:
        """Return the figures that are off by more than 1 ms and 1 %: by how many ms."""
        found = {}
        for metric, spans in self.durations().items():
            # Of gaps, which are counted in a histogram, a quantile is the next one above it.
            method = "inverted_cdf" if metric == "itl" else "linear"
            lows, highs = (_figures([span[end] for span in spans], method) for end in (0, 1))
            for name, low in lows.items():
                high = highs[name]
                told = latency[metric][name]
                value = told["value"] if isinstance(told, dict) else told
                off = _outside(value, (low, high))
                if abs(off) > max(1.0, 0.01 * high):
                    found[f"{metric} {name}"] = off
        return found


def _figures(
    values: Sequence[float], method: Literal["inverted_cdf", "linear"]
) -> dict[str, float]:
    quantiles = {f"p{q}": float(np.percentile(values, q, method=method)) for q in (50, 90, 95, 99)}
    return {"mean": float(np.mean(values)), "min": min(values), "max": max(values), **quantiles}


def _ms(after: Span, before: Span) -> Span:
    """Return the bounds of the ms between two moments."""
    return 1e3 * (after[0] - before[1]), 1e3 * (after[1] - before[0])
