"""Recorder: what is kept of each exchange. About 110 bytes a request, none a token."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.bench.exchange import OUTCOMES, Exchange, Outcome
from paceline.bench.histogram import Histogram
from paceline.bench.objective import Objectives
from paceline.bench.prose import TokenCounter

Verdict = bool | None  # met or missed; None: cut by the run's end, and so not judged
LineWriter = Callable[[dict[str, Any]], None]
_OUTCOME_NAMES = list(OUTCOMES)
NUM_WORST = 12
_MAX_ERRORS = 1000
_LATENCIES = ("ttft", "ttfo", "tpot", "e2e", "lag", "connect")
_FIGURES = (*_LATENCIES, "input_tokens", "output_tokens")
_MAX_PHASES = 200


@dataclass(slots=True)
class Window:
    """The measured part of a run: tokens count by their arrival in it."""

    start: float = math.inf
    end: float = math.inf

    @property
    def duration_s(self) -> float:
        """Seconds; 0 for a run that ended in its warm-up."""
        seconds = self.end - self.start
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0

    def count(self, moments: np.ndarray[Any, Any]) -> int:
        return int(np.count_nonzero((moments >= self.start) & (moments <= self.end)))


@dataclass(slots=True)
class Columns:
    """The measured exchanges of one class, a column a figure; NaN where there is none."""

    at: array[float] = field(default_factory=lambda: array("d"))
    outcome: array[int] = field(default_factory=lambda: array("B"))
    met: array[int] = field(default_factory=lambda: array("b"))  # 1, 0, or -1: not judged
    values: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in _FIGURES}
    )
    gaps: Histogram = field(default_factory=Histogram)
    phases: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    num_valid: int = 0
    num_checked: int = 0
    num_empty: int = 0

    def of(self, metric: str, outcome: Outcome = "ok") -> np.ndarray[Any, Any]:
        """Return a metric of the exchanges that ended so."""
        chosen = np.asarray(self.outcome) == _OUTCOME_NAMES.index(outcome)
        values: np.ndarray[Any, Any] = np.asarray(self.values[metric])[chosen]
        return values

    def num(self, outcome: Outcome) -> int:
        return self.outcome.count(_OUTCOME_NAMES.index(outcome))

    def take(self, other: Columns) -> None:
        """Add the exchanges of `other`."""
        self.at.extend(other.at)
        self.outcome.extend(other.outcome)
        self.met.extend(other.met)
        for name, column in other.values.items():
            self.values[name].extend(column)
        self.gaps.take(other.gaps)
        for name, column in other.phases.items():
            self.phases[name].extend(column)
        self.num_valid += other.num_valid
        self.num_checked += other.num_checked
        self.num_empty += other.num_empty


class Recorder:
    """Takes exchanges as they end, and judges them. Times in lines are relative to `epoch`."""

    def __init__(
        self,
        objectives: Objectives,
        *,
        count_tokens: TokenCounter | None = None,
        write_line: LineWriter | None = None,
        labels: dict[str, Any] | None = None,
    ) -> None:
        self.objectives = objectives
        self.window = Window()
        self.epoch = 0.0
        self.classes: dict[str, Columns] = {}
        # Of requests whose first text came inside the window: input tokens, where usage or a
        # tokenizer told them, the bytes of these requests, and of those that nobody told of.
        self._told_tokens = 0
        self._told_bytes = 0
        self._untold_bytes = 0
        # By arrival inside the window: how the request ended, or "warmup" -> output tokens.
        self.tokens_of: defaultdict[str, float] = defaultdict(float)
        self._usage_tokens = 0  # of answers with usage,
        self._usage_events = 0  # and the text events that brought them
        self.num_completed = 0  # ended well inside the window
        self.num_warmup = 0
        self.num_unsent = 0  # due inside the window, and never sent
        self.num_unread = 0
        self.token_sources: Counter[str] = Counter()
        self.cached_tokens = 0
        self.errors: Counter[str] = Counter()
        self.tokens_by_second: defaultdict[int, float] = defaultdict(float)
        # From second to second, how much longer requests were open in it, summed.
        self.open_changes: defaultdict[int, float] = defaultdict(float)
        self.open_s = 0.0  # that requests were open inside the window, summed
        self.peak_open = 0
        self.worst: list[tuple[float, int, dict[str, Any]]] = []
        self._count = count_tokens
        self._write_line = write_line
        self._labels = labels or {}

    def together(self) -> Columns:
        """Return all classes as one."""
        joined = Columns()
        for columns in self.classes.values():
            joined.take(columns)
        return joined

    @property
    def output_tokens(self) -> float:
        return sum(self.tokens_of.values())

    @property
    def input_tokens(self) -> float | None:
        """Those that came into the window; None where nobody told of any.

        A request that was cut or failed has no usage: its bytes count as many tokens as those of
        the others.
        """
        if not self._untold_bytes:
            return float(self._told_tokens)
        if not self._told_bytes:
            return None
        return self._told_tokens * (1 + self._untold_bytes / self._told_bytes)

    def note_open(self, num_open: int, now: float) -> None:
        """Take note of how many requests are open now."""
        if self.window.start <= now <= self.window.end:
            self.peak_open = max(self.peak_open, num_open)

    @property
    def peak_tokens_per_s(self) -> float | None:
        """Most output tokens of a second that began in the window; None for windows below 1 s.

        Seconds are those since the run's begin.
        """
        if self.window.duration_s < 1:
            return None
        start, end = self.window.start - self.epoch, self.window.end - self.epoch
        return max((n for s, n in self.tokens_by_second.items() if start <= s < end), default=0.0)

    @property
    def num_missed(self) -> int:
        """Misses so far, of requests that were sent."""
        return sum(columns.met.count(0) for columns in self.classes.values())

    @property
    def num_ended(self) -> int:
        return sum(len(columns.outcome) for columns in self.classes.values())

    def add(self, exchange: Exchange) -> None:
        """Take an exchange that has ended."""
        tokens, source = exchange.output_tokens(self._count)
        num_input = exchange.input_tokens(self._count)
        self._add_to_window(exchange, self._spread(exchange, tokens, source), num_input)
        self.num_unread += exchange.answer.num_unread
        gaps = exchange.gaps()
        verdict = self._verdict(exchange, tokens, gaps)
        line = self._line(exchange, tokens, source, num_input, verdict, gaps)
        if self._write_line is not None:
            self._write_line(line)
        if exchange.is_warmup:
            self.num_warmup += 1
            return
        if exchange.outcome == "ok":
            self.token_sources[source] += 1
        self.cached_tokens += exchange.answer.cached_tokens or 0
        if exchange.error is not None:
            what = f"{exchange.outcome}: {exchange.error}"
            is_full = len(self.errors) >= _MAX_ERRORS and what not in self.errors
            self.errors[f"{exchange.outcome}: others" if is_full else what] += 1
        self._add_to_class(exchange, tokens, num_input, verdict, gaps)
        self._keep_if_worst(exchange, line)

    def _verdict(self, exchange: Exchange, tokens: int, gaps: np.ndarray[Any, Any]) -> Verdict:
        if exchange.outcome == "cut":
            return None
        if exchange.outcome != "ok":
            return False
        measured = {
            "ttft": exchange.ttft_s,
            "tpot": exchange.tpot_s(tokens),
            "e2e": exchange.e2e_s,
            "itl": float(gaps.max()) if gaps.size else math.nan,
        }
        # An end token may be the second of two, and has no event.
        is_at_once = tokens > 2 and exchange.answer.num_text_events < 2
        return self.objectives.is_met(exchange.kind, measured, is_at_once=is_at_once)

    def _spread(self, exchange: Exchange, tokens: int, source: str) -> float:
        """Return the tokens of an answer, for the throughput.

        One that was cut or failed has no usage. Its events count as many tokens as those of
        answers with usage did until then, for servers that put several into an event.
        """
        if source == "usage":
            self._usage_tokens += tokens
            self._usage_events += exchange.answer.num_text_events
        elif source == "events" and exchange.outcome != "ok" and self._usage_events:
            return tokens * self._usage_tokens / self._usage_events
        return tokens

    def _add_to_window(self, exchange: Exchange, tokens: float, num_input: int | None) -> None:
        arrivals, window = np.asarray(exchange.answer.arrivals), self.window
        self._add_open(exchange.sent_at - self.epoch, exchange.ended_at - self.epoch)
        opened, ended = max(exchange.sent_at, window.start), min(exchange.ended_at, window.end)
        self.open_s += max(0.0, ended - opened)
        if not arrivals.size:
            return
        weight = tokens / arrivals.size
        owner = "warmup" if exchange.is_warmup else exchange.outcome
        self.tokens_of[owner] += weight * window.count(arrivals)
        seconds, counts = np.unique((arrivals - self.epoch).astype(np.int64), return_counts=True)
        for second, count in zip(seconds.tolist(), counts.tolist(), strict=True):
            self.tokens_by_second[second] += weight * count
        if window.start <= arrivals[0] <= window.end:
            if num_input is None:
                self._untold_bytes += exchange.num_bytes
            else:
                self._told_tokens += num_input
                self._told_bytes += exchange.num_bytes

    def _add_open(self, sent_s: float, ended_s: float) -> None:
        """Spread the time that a request was open over the seconds that it was open in."""
        first, last = math.floor(sent_s), math.floor(ended_s)
        if first == last:
            parts = [(first, ended_s - sent_s)]
        else:
            parts = [(first, first + 1 - sent_s), (first + 1, 1.0), (last, ended_s - last)]
        before = 0.0
        for second, open_s in parts:
            self.open_changes[second] += open_s - before
            before = open_s
        self.open_changes[last + 1] -= before

    def _add_to_class(
        self,
        exchange: Exchange,
        tokens: int,
        num_input: int | None,
        verdict: Verdict,
        gaps: np.ndarray[Any, Any],
    ) -> None:
        columns = self.classes.setdefault(exchange.kind, Columns())
        columns.at.append(exchange.scheduled_at - self.epoch)
        columns.outcome.append(_OUTCOME_NAMES.index(exchange.outcome))
        columns.met.append(-1 if verdict is None else int(verdict))
        for name, value in (
            ("ttft", exchange.ttft_s),
            ("ttfo", exchange.ttfo_s),
            ("tpot", exchange.tpot_s(tokens)),
            ("e2e", exchange.e2e_s),
            ("lag", exchange.lag_s),
            ("connect", exchange.connect_s),
            ("input_tokens", math.nan if num_input is None else num_input),
            ("output_tokens", tokens),
        ):
            columns.values[name].append(value)
        if exchange.outcome != "ok":
            return
        columns.gaps.add(gaps)
        columns.num_empty += not exchange.answer.arrivals
        for name, seconds in exchange.answer.phases.items():
            if name in columns.phases or len(columns.phases) < _MAX_PHASES:
                columns.phases[name].append(seconds)
        if (is_valid := exchange.is_valid()) is not None:
            columns.num_checked += 1
            columns.num_valid += is_valid
        if self.window.start <= exchange.ended_at <= self.window.end:
            self.num_completed += 1

    def _keep_if_worst(self, exchange: Exchange, line: dict[str, Any]) -> None:
        if exchange.outcome == "cut":
            return
        heapq.heappush(self.worst, (exchange.e2e_s, exchange.idx, line))
        if len(self.worst) > NUM_WORST:
            heapq.heappop(self.worst)

    def _line(
        self,
        exchange: Exchange,
        tokens: int,
        source: str,
        num_input: int | None,
        verdict: Verdict,
        gaps: np.ndarray[Any, Any],
    ) -> dict[str, Any]:
        """Return the JSON line of an exchange; docs/bench.md has its schema."""
        answer = exchange.answer
        return {
            "type": "request",
            **self._labels,
            "id": exchange.idx,
            "turn": exchange.turn_idx,
            "class": exchange.kind,
            "warmup": exchange.is_warmup,
            "outcome": exchange.outcome,
            "error": exchange.error,
            "status": answer.status,
            "retry_after_s": exchange.retry_after_s,
            "met": verdict,
            "valid": exchange.is_valid() if exchange.outcome == "ok" else None,
            "finish_reason": answer.finish_reason,
            "scheduled_s": round(exchange.scheduled_at - self.epoch, 6),
            "lag_ms": _ms(exchange.lag_s),
            "connect_ms": _ms(exchange.connect_s),
            "ttft_ms": _ms(exchange.ttft_s),
            "ttfo_ms": _ms(exchange.ttfo_s),
            "tpot_ms": _ms(exchange.tpot_s(tokens)),
            "e2e_ms": _ms(exchange.e2e_s),
            "gaps_ms": np.round(gaps * 1e3, 3).tolist(),
            "input_tokens": num_input,
            "output_tokens": tokens,
            "output_tokens_from": source,
            "cached_tokens": answer.cached_tokens,
            "unread_events": answer.num_unread,
            "server_ms": {name: _ms(seconds) for name, seconds in answer.phases.items()},
        }


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1e3, 3)
