"""What a server did while the canary of a soak waited too long for its next token."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

_ENGINE, _CALLS = 1, 2  # processes of a trace
_NUM_KEPT = 5


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a token of the canary, by the machine's monotonic clock.

    In `stalled_ms` of it the machine did not let the canary itself run.
    """

    begin_ns: int
    end_ns: int
    stalled_ms: float

    @property
    def server_ms(self) -> float:
        """What is left for the server to answer for."""
        return (self.end_ns - self.begin_ns) / 1e6 - self.stalled_ms


class GapBook:
    """Keeps the longest gaps above a limit, each with what the server's trace says of its time."""

    def __init__(self, port: int, *, limit_ms: float) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/trace"
        self._limit_ms = limit_ms
        self._begin_ns = time.monotonic_ns()
        self.kept: list[dict[str, Any]] = []

    def note(self, gap: Gap) -> None:
        """Look at a gap soon after it ended: a server remembers its last 8,192 steps alone."""
        if gap.server_ms < self._limit_ms:
            return
        if len(self.kept) == _NUM_KEPT and gap.server_ms <= self.kept[-1]["server_ms"]:
            return
        last_s = (time.monotonic_ns() - gap.begin_ns) / 1e9 + 1
        reply = httpx.get(self._url, params={"last_s": f"{last_s:.3f}"}, timeout=600)
        seen = {"trace": reply.text[:300]}  # why there is none
        if reply.status_code == 200:
            seen = what_happened(reply.json(), gap.begin_ns, gap.end_ns)
        told = {
            "at_s": round((gap.begin_ns - self._begin_ns) / 1e9, 1),
            "server_ms": round(gap.server_ms, 1),
            "stalled_ms": round(gap.stalled_ms, 1),
            **seen,
        }
        self.kept = sorted([*self.kept, told], key=lambda g: -g["server_ms"])[:_NUM_KEPT]


def what_happened(trace: dict[str, Any], begin_ns: int, end_ns: int) -> dict[str, Any]:
    """Return what a trace has between two times: steps, the longest, the longest pause, calls."""
    zero_ns = trace["otherData"]["zero_ns"]

    def is_within(event: dict[str, Any]) -> bool:
        since_ns = zero_ns + event.get("ts", 0) * 1e3
        return since_ns < end_ns and since_ns + event.get("dur", 0) * 1e3 > begin_ns

    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and is_within(e)]
    engine = [event for event in events if event["pid"] == _ENGINE]
    steps = [event for event in engine if event["name"].startswith("step ")]
    calls = [e for e in events if e["pid"] == _CALLS and "outcome" in e.get("args", {})]
    told: dict[str, Any] = {
        "num_steps": len(steps),
        "calls": dict(Counter(call["name"] for call in calls)),
    }
    if steps:
        longest = max(steps, key=lambda step: step["dur"])
        end = longest["ts"] + longest["dur"]
        phases: Counter[str] = Counter()
        for phase in engine:
            if phase not in steps and longest["ts"] <= phase["ts"] < end:
                phases[phase["name"]] += phase["dur"] / 1e3
        told["longest_step"] = {
            "name": longest["name"], "ms": longest["dur"] / 1e3, **longest["args"],
            "requests": len(longest["args"]["requests"]), "phases_ms": dict(phases),
        }  # fmt: skip
    pauses = [after["ts"] - before["ts"] - before["dur"] for before, after in
              itertools.pairwise(sorted(steps, key=lambda step: step["ts"]))]  # fmt: skip
    told["longest_pause_ms"] = max(pauses, default=0.0) / 1e3
    return told
