"""What clients are told about time: a header, and the whole timeline of a call."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paceline.measure.ledger import Ledger, Part
from paceline.measure.steps import Chunk, StepLog, StepRecord
from paceline.server.calls import Call


def server_timing(call: Call, now_ns: int) -> str:
    """Return the Server-Timing header: milliseconds by part, of all that has happened so far."""
    parts = call.parts(now_ns)
    spent = [f"{part.label};dur={parts[part] / 1e6:.3f}" for part in Part if parts[part]]
    return ", ".join([*spent, f"total;dur={call.wall_ns(now_ns) / 1e6:.3f}"])


def describe(call: Call) -> dict[str, Any]:
    """Return a call in figures, one JSON object; of one that still runs, what is known by now."""
    return {
        "id": call.id or None,
        "request_id": call.request_id or None,
        "began_at": call.began_at,
        "path": call.path,
        "asked_model": call.asked_model or None,
        "model": call.model or None,
        "stream": call.is_stream,
        "status": call.status or None,
        "outcome": call.outcome if call.end_ns else "running",
        "error": call.error,
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "completion_tokens": call.completion_tokens,
        "num_choices": call.num_choices,
        **call.figures(time.monotonic_ns()),
    }


def timeline(call: Call, steps: StepLog | None, *, after_step: int = -1) -> bytes:
    """Return `describe(call)`, its choices, and each of their steps that is still remembered.

    Steps up to number `after_step` are left out: a reader that comes again has them. It is JSON,
    made a choice at a time: encoding a thousand of them in one would hold up other threads.
    """
    records = [] if steps is None else steps.since(call.begin_ns)
    found = _steps_by_choice(call, records)
    choices = []
    for idx, ended in sorted(call.choices.items()):
        taken = found[_key(call, idx)]
        num_over = 0 if ended.ledger is None else _num_over(ended.ledger, records)
        choices.append(msgspec.json.encode({
            "index": idx,
            "finish_reason": ended.finish_reason,
            "prompt_tokens": ended.usage.prompt_tokens,
            "completion_tokens": ended.usage.completion_tokens,
            "tpot_ms": None if ended.timings.tpot_s is None else ended.timings.tpot_s * 1e3,
            "num_preemptions": ended.timings.num_preemptions,
            "num_steps": max(num_over, len(taken)),  # of a running call more may be over by now
            "num_steps_forgotten": max(num_over - len(taken), 0),
            "steps": [
                _step(call, record, own) for record, own in taken if record.number > after_step
            ],
        }))  # fmt: skip
    return msgspec.json.encode(describe(call))[:-1] + b',"choices":[' + b",".join(choices) + b"]}"


def engine_id(answer_id: str, prompt_idx: int) -> str:
    """Return the id in the engine of one prompt of a call: the answer's, for the first."""
    return answer_id if prompt_idx == 0 else f"{answer_id}-{prompt_idx}"


def _num_over(ledger: Ledger, records: Sequence[StepRecord]) -> int:
    """Return how many steps of a choice are over: one that runs is in no record yet.

    Those of the prompt stand with the first choice.
    """
    newest = records[-1].number if records else -1
    is_in_step = ledger.last_step is not None and ledger.last_step > newest
    return ledger.num_steps - ledger.num_common_steps - is_in_step


def _key(call: Call, choice_idx: int) -> tuple[str, int]:
    """Return the request and the choice in the engine of one choice of a call."""
    prompt, choice = divmod(choice_idx, call.n)
    return engine_id(call.id, prompt), choice


def _steps_by_choice(
    call: Call, records: Iterable[StepRecord]
) -> dict[tuple[str, int], list[tuple[StepRecord, Chunk]]]:
    """Return the steps of each choice of a call, and its chunk in them, in one look at all."""
    found: dict[tuple[str, int], list[tuple[StepRecord, Chunk]]] = {
        _key(call, idx): [] for idx in call.choices
    }
    for record in records:
        for chunk in record.chunks:
            steps = found.get((chunk.request_id, chunk.choice))
            if steps is not None:
                steps.append((record, chunk))
    return found


def _step(call: Call, record: StepRecord, own: Chunk) -> dict[str, Any]:
    in_step = record.tokens_by_kind()
    return {
        "step": record.number,
        "begin_ms": (record.start_ns - call.begin_ns) / 1e6,
        "end_ms": (record.end_ns - call.begin_ns) / 1e6,
        "kind": own.kind.label,
        "num_tokens": own.num_tokens,
        "num_drafted": own.num_drafted,
        "new_tokens": own.is_last + record.num_confirmed.get((own.request_id, own.choice), 0),
        "step_tokens": {kind.label: count for kind, count in in_step.items() if count},
        "num_seqs": len(record.chunks),
    }
