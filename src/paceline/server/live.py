"""LiveView: the last minutes, second by second. Nothing is computed unless somebody looks."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from paceline.measure.ledger import Part
from paceline.server.calls import MAX_CALLS, Call
from paceline.server.timeline import describe

if TYPE_CHECKING:
    from paceline.engine.stats import EngineStats
    from paceline.measure.recorder import StepRecorder
    from paceline.measure.steps import StepRecord

HISTORY_S = 300
GAPS_S = 60  # of the percentiles of gaps between tokens
NUM_LISTED = 8  # calls
_MAX_SEQUENCES = 4096  # whose last token's time is kept
_LOG_STEP = math.log(1.02)  # gaps are kept to 1 %
_SAME_STEP = round(math.log(1000) / _LOG_STEP)  # of tokens that one step gave: a microsecond


RANKS = ("wall", "ttft", "tpot")


class Seen(Struct, eq=False):
    """A call that has ended, and what it is ranked by; 0: not at all."""

    call: Call
    is_ok: bool
    wall: float
    ttft: float
    tpot: float


class Second(Struct, eq=False):
    """The steps and calls that ended in one second of the monotonic clock."""

    tokens: Counter[Part] = field(default_factory=Counter)
    num_steps: int = 0
    num_new: int = 0  # tokens chosen
    num_rows: int = 0  # of logits
    num_keys: int = 0
    kv_bytes: int = 0
    work_ns: int = 0  # the backend computed
    gaps: Counter[int] = field(default_factory=Counter)  # log of the gap, in steps of 2 %
    ttft_ms: list[float] = field(default_factory=list)
    state: tuple[int, int, float] | None = None  # running, waiting, KV use; None: nobody looked


class LiveView:
    """Reads what the recorder and the calls' log keep anyway; bounded by HISTORY_S seconds.

    However many look, each step and each call is read once.
    """

    def __init__(self, recorder: StepRecorder | None) -> None:
        self.recorder = recorder
        self._seconds: dict[int, Second] = {}
        self._last_ns: dict[tuple[str, int], int] = {}  # a sequence's last token
        self._calls: deque[Seen] = deque(maxlen=MAX_CALLS)
        self._steps_until_ns = 0
        self._lock = threading.Lock()

    def look(
        self,
        stats: EngineStats,
        calls: Sequence[Call],
        *,
        after_s: int,
        by: str,
    ) -> dict[str, Any]:
        """Return the seconds after `after_s`, percentiles, and the slowest calls by a rank."""
        now_ns = time.monotonic_ns()
        now_s = now_ns // 10**9
        with self._lock:
            if self.recorder is not None:
                self._take_steps(self.recorder.log.since(self._steps_until_ns))
            self._take_calls(calls)
            begin_ns = now_ns - HISTORY_S * 10**9
            recent = [seen for seen in self._calls if seen.call.end_ns > begin_ns]
            self._second(now_s).state = stats.num_running, stats.num_waiting, stats.kv_use
            for second in [s for s in self._seconds if s <= now_s - HISTORY_S]:
                del self._seconds[second]
            first = max(after_s, now_s - HISTORY_S) + 1
            return {
                "now_s": now_s,
                "seconds": self._columns(range(first, now_s + 1)),
                "itl_ms": self._itl_ms(now_s),
                "ttft_ms": _percentiles_ms([s.ttft / 1e6 for s in recent if s.is_ok and s.ttft]),
                "slowest": [describe(seen.call) for seen in _slowest(recent, by)],
            }

    def _second(self, second: int) -> Second:
        found = self._seconds.get(second)
        if found is None:
            found = self._seconds[second] = Second()
        return found

    def _take_steps(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self._steps_until_ns = record.end_ns
            second = self._second(record.end_ns // 10**9)
            tokens = record.tokens_by_kind()
            num_confirmed = sum(record.num_confirmed.values())
            second.tokens.update(tokens)
            second.num_steps += 1
            second.num_new += record.num_sampled + num_confirmed
            second.num_rows += record.num_sampled + tokens.get(Part.VERIFY, 0)
            if num_confirmed:  # they came with the token before
                second.gaps[_SAME_STEP] += num_confirmed
            second.num_keys += record.num_keys
            second.kv_bytes += record.kv_bytes
            second.work_ns += record.work_ns - record.built_ns
            for chunk in record.chunks:
                if chunk.is_last:
                    key = chunk.request_id, chunk.choice
                    last_ns = self._last_ns.pop(key, 0)
                    self._last_ns[key] = record.sampled_ns
                    if last_ns:
                        gap_ns = max(record.sampled_ns - last_ns, 1)
                        second.gaps[round(math.log(gap_ns) / _LOG_STEP)] += 1
        while len(self._last_ns) > _MAX_SEQUENCES:
            del self._last_ns[next(iter(self._last_ns))]

    def _take_calls(self, calls: Sequence[Call]) -> None:
        """Keep what is new in the log of calls: those after the last one that was seen."""
        new: list[Call] = []
        last = self._calls[-1].call if self._calls else None
        for call in reversed(calls):
            if call is last:
                break
            new.append(call)
        for call in reversed(new):
            seen = _see(call)
            self._calls.append(seen)
            if seen.is_ok and seen.ttft:
                self._second(call.end_ns // 10**9).ttft_ms.append(seen.ttft / 1e6)

    def _columns(self, seconds: range) -> dict[str, list[Any]]:
        """Return each figure as a list over `seconds`; None where there was nothing to measure."""
        shown = [self._seconds.get(second, Second()) for second in seconds]
        states = [second.state or (None, None, None) for second in shown]
        columns: dict[str, list[Any]] = {
            "at_s": list(seconds),
            "running": [state[0] for state in states],
            "waiting": [state[1] for state in states],
            "kv_use": [state[2] for state in states],
            "ttft_ms": [_quantile(second.ttft_ms, 0.5) for second in shown],
        }
        if self.recorder is None:
            return columns
        for kind in (Part.PREFILL, Part.RECOMPUTE, Part.DECODE, Part.VERIFY):
            columns[kind.label] = [second.tokens[kind] for second in shown]
        columns["steps"] = [second.num_steps for second in shown]
        columns["new_tokens"] = [second.num_new for second in shown]
        columns["itl_p50_ms"] = [_gap_ms(second.gaps, 0.5) for second in shown]
        columns["itl_p99_ms"] = [_gap_ms(second.gaps, 0.99) for second in shown]
        work = self.recorder.counters.work
        if work is not None:
            columns["read_bytes_per_s"] = [
                _rate(work.weight_bytes * s.num_steps + s.kv_bytes, s) for s in shown
            ]
            columns["macs_per_s"] = [
                _rate(
                    work.macs(
                        num_tokens=s.tokens.total(), num_logit_rows=s.num_rows, num_keys=s.num_keys
                    ),
                    s,
                )
                for s in shown
            ]
        return columns

    def _itl_ms(self, now_s: int) -> dict[str, Any]:
        gaps: Counter[int] = Counter()
        for second in range(now_s - GAPS_S + 1, now_s + 1):
            if second in self._seconds:
                gaps.update(self._seconds[second].gaps)
        values = {f"p{q}": _gap_ms(gaps, q / 100) for q in (50, 95, 99)}
        return {"count": gaps.total(), **values}


def _see(call: Call) -> Seen:
    last, outcome = call.last, call.outcome
    if outcome == "refused":  # fast for no merit of the engine's
        return Seen(call=call, is_ok=False, wall=0, ttft=0, tpot=0)
    return Seen(
        call=call,
        is_ok=outcome == "ok",
        wall=call.wall_ns(),
        ttft=call.ttft_ns or 0,
        tpot=0 if last is None else last.timings.tpot_s or 0,
    )


def _slowest(calls: Iterable[Seen], by: str) -> list[Seen]:
    ranked = [seen for seen in calls if getattr(seen, by)]
    return sorted(ranked, key=lambda seen: getattr(seen, by), reverse=True)[:NUM_LISTED]


def _rate(amount: int, second: Second) -> float | None:
    """Return `amount` a second of computing."""
    return amount / second.work_ns * 1e9 if second.work_ns else None


def _quantile(values: Sequence[float], q: float) -> float | None:
    """Return the smallest value with a share `q` at or below it."""
    return sorted(values)[max(math.ceil(q * len(values)), 1) - 1] if values else None


def _percentiles_ms(values: Sequence[float]) -> dict[str, Any]:
    return {"count": len(values)} | {f"p{q}": _quantile(values, q / 100) for q in (50, 95, 99)}


def _gap_ms(gaps: Counter[int], q: float) -> float | None:
    wanted = max(math.ceil(q * gaps.total()), 1)
    seen = 0
    for step, count in sorted(gaps.items()):
        seen += count
        if seen >= wanted:
            return math.exp(step * _LOG_STEP) / 1e6
    return None
