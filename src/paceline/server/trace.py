"""A trace of steps and calls, in the Trace Event Format that Perfetto and Chrome read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from paceline.measure.ledger import Part
from paceline.measure.steps import StepRecord
from paceline.server.calls import Call
from paceline.server.timeline import describe, engine_id

_ENGINE, _CALLS = 1, 2  # process ids, which the viewers show as groups
_EVENTS_A_PIECE = 256
Event = dict[str, Any]


def trace_pieces(
    steps: Sequence[StepRecord], calls: Iterable[Call], about: dict[str, Any]
) -> Iterator[bytes]:
    """Yield the trace of these steps and finished calls as JSON; time zero is the earliest of them.

    `about` describes the server; viewers show it as it is. Each piece takes about a millisecond to
    make: a full log in one, some megabytes, would hold up other threads and stay in the allocator.

    The engine is one row: steps, and their phases inside them. Each call has a row as long as it
    lasts: its phases, and inside them its chunks, each from its step's begin to its sampling.
    """
    calls = sorted(calls, key=lambda call: call.begin_ns)
    begins = [step.start_ns for step in steps[:1]] + [call.begin_ns for call in calls[:1]]
    zero_ns = min(begins, default=0)  # by the monotonic clock
    events = _events(steps, calls, zero_ns)
    before = b'{"traceEvents":['
    while batch := list(islice(events, _EVENTS_A_PIECE)):
        yield before + msgspec.json.encode(batch)[1:-1]
        before = b","
    rest = {"displayTimeUnit": "ms", "otherData": {"paceline": about, "zero_ns": zero_ns}}
    yield b"]," + msgspec.json.encode(rest)[1:]


def _events(steps: Sequence[StepRecord], calls: Sequence[Call], zero_ns: int) -> Iterator[Event]:
    yield _name("process_name", _ENGINE, 0, "engine")
    yield _name("thread_name", _ENGINE, 1, "steps")
    yield _name("process_name", _CALLS, 0, "calls")
    for step in steps:
        yield from _step_events(step, zero_ns)
    chunks = _chunks_by_request(steps)
    for call, row in zip(calls, _rows(calls), strict=True):
        yield from _call_events(call, row, chunks, zero_ns)


def _step_events(step: StepRecord, zero_ns: int) -> Iterator[Event]:
    tokens = step.tokens_by_kind()
    args = {
        "tokens": {kind.label: count for kind, count in tokens.items() if count},
        "requests": sorted({chunk.request_id for chunk in step.chunks}),
        "num_seqs": len(step.chunks),
        "num_keys": step.num_keys,
        "forward_ms": (step.work_ns - step.built_ns) / 1e6,
    }
    span = step.start_ns - zero_ns, step.end_ns - zero_ns
    yield _slice(_ENGINE, 1, f"step {step.number}", *span, args)
    for name, begin_ns, end_ns in step.phases:
        if name == "grammar" and begin_ns == end_ns:
            continue  # nothing in the step was structured
        yield _slice(_ENGINE, 1, name, begin_ns - zero_ns, end_ns - zero_ns)
    by_kind = {kind.label: count for kind, count in tokens.items()}
    yield {"ph": "C", "pid": _ENGINE, "name": "tokens", "ts": span[0] / 1e3, "args": by_kind}


def _call_events(
    call: Call,
    row: int,
    chunks: dict[str, list[tuple[StepRecord, Part, int]]],
    zero_ns: int,
) -> Iterator[Event]:
    title = f"{call.endpoint} {call.outcome}"
    begin_ns, end_ns = call.begin_ns - zero_ns, call.end_ns - zero_ns
    yield _slice(_CALLS, row, title, begin_ns, end_ns, describe(call))
    for name, begin_ns, end_ns in call.phases():
        yield _slice(_CALLS, row, name, begin_ns - zero_ns, end_ns - zero_ns)
    if call.num_choices == 1:  # the chunks of several would overlap in one row
        for step, kind, num_tokens in chunks.get(engine_id(call.id, 0), ()):
            span = step.start_ns - zero_ns, step.sampled_ns - zero_ns
            args = {"step": step.number, "tokens": num_tokens, "step_tokens": step.num_tokens}
            yield _slice(_CALLS, row, kind.label, *span, args)


def _chunks_by_request(
    steps: Iterable[StepRecord],
) -> dict[str, list[tuple[StepRecord, Part, int]]]:
    chunks: dict[str, list[tuple[StepRecord, Part, int]]] = {}
    for step in steps:
        for chunk in step.chunks:
            chunks.setdefault(chunk.request_id, []).append((step, chunk.kind, chunk.num_tokens))
    return chunks


def _rows(calls: Iterable[Call]) -> list[int]:
    """Give each call, in order of begin, the first row that is free by then."""
    free_at: list[int] = []
    rows = []
    for call in calls:
        row = next((i for i, end_ns in enumerate(free_at) if end_ns <= call.begin_ns), None)
        if row is None:
            row = len(free_at)
            free_at.append(0)
        free_at[row] = call.end_ns
        rows.append(row + 1)
    return rows


def _slice(
    pid: int, tid: int, name: str, begin_ns: int, end_ns: int, args: Event | None = None
) -> Event:
    event: Event = {
        "ph": "X", "pid": pid, "tid": tid, "name": name,
        "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3,
    }  # fmt: skip
    return event if args is None else {**event, "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
