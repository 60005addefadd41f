"""Reading facts: from a server, a trace, an access log, or what `paceline bench` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.engine.build import display_name
from paceline.errors import PacelineError, ParameterError
from paceline.explain.facts import CallFacts, Facts, Parts, ServerFacts, StepFacts
from paceline.explain.recordings import (
    CallRecord,
    Event,
    ModelsRecord,
    RequestRecord,
    Stage,
    StepRecord,
    Summary,
    TraceRecord,
    checked,
)
from paceline.remote import fetch_models, fetch_trace

_WHOLES = frozenset({"wall", "ttft", "tpot"})  # which a bench has beside the parts of a call
_OF_TTFT = "ttft_parts."
# Parts of a call that come before its first token; where a record has no parts of its TTFT.
_BEFORE_FIRST = frozenset({
    "receive", "load", "parse", "template", "tokenise", "queue_budget", "queue_prefix",
    "cache_lookup", "prefill", "prefill_others",
})  # fmt: skip


def from_server(
    base: str, last_s: float, headers: Mapping[str, str] | None = None, *, model: str = ""
) -> Facts:
    """Return what the server's `model`, "" its first, did in its last `last_s` seconds."""
    trace = fetch_trace(base, last_s, headers or {}, model=model)
    return from_trace(read_trace(trace, base), base)


def served_name(base: str, model: str, headers: Mapping[str, str]) -> str:
    """Return the name of one of a server's several models, of which `model` is a name or a file.

    "" where the server has but one: its file may have another name here. Raises ParameterError
    naming the models where it is none of them.
    """
    listed = checked(_whole(fetch_models(base, headers)) or {}, ModelsRecord, base).data
    if sum(not one.root for one in listed) < 2:
        return ""
    names = {one.id: one.root or one.id for one in listed}
    name = model if model in names else display_name(model)
    if name not in names:
        raise ParameterError(
            f"--model is {model!r}, which {base} does not serve: name one of {', '.join(names)}"
        )
    return names[name]


def from_file(path: Path) -> Facts | None:
    """Return the facts of a recording; None for a file that is no recording but a workload."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}") from None
    found = _whole(data)
    if found is not None and "traceEvents" in found:
        return from_trace(found, str(path))
    if found is not None and "stages" in found:
        return from_summary(found, str(path))
    lines = [line for line in (_whole(text) for text in data.splitlines()) if line]
    if any("parts_ms" in line for line in lines):
        return from_access_log(lines, str(path))
    if any(line.get("type") == "request" for line in lines):
        return from_bench_log(lines, str(path))
    return None


def from_trace(trace: Mapping[str, Any], source: str) -> Facts:
    """Return the facts of what /v1/trace answers and `paceline trace` saves."""
    found = checked(trace, TraceRecord, source)
    calls, steps, num_failed = [], [], 0
    for event in found.events:
        if _is_of_a_call(event.args):
            if event.args.get("outcome") == "ok":
                calls.append(_call(event.args, source))
            else:
                num_failed += 1
        elif "forward_ms" in event.args:
            steps.append(_step(event, source, found.about.paceline))
    return Facts(
        source=source,
        calls=tuple(calls),
        steps=tuple(steps),
        server=found.about.paceline,
        num_failed=num_failed,
    )


def _is_of_a_call(details: Mapping[str, Any]) -> bool:
    """Say whether a record is of a call that generates: those that embed have no first token."""
    return "parts_ms" in details and details.get("path") != "/v1/embeddings"


def from_access_log(lines: Iterable[Mapping[str, Any]], source: str) -> Facts:
    """Return the facts of a server's access log. It knows nothing of steps."""
    lines = [line for line in lines if _is_of_a_call(line)]
    answered = [line for line in lines if line.get("outcome") == "ok"]
    calls = tuple(_call(line, source) for line in answered)
    return Facts(source=source, calls=calls, num_failed=len(lines) - len(answered))


def from_bench_log(lines: Iterable[Mapping[str, Any]], source: str) -> Facts:
    """Return the facts of a bench's request lines, where the server told its parts."""
    lines = [x for x in lines if x.get("type") == "request" and not x.get("warmup")]
    answered = [
        checked(line, RequestRecord, source) for line in lines if line.get("outcome") == "ok"
    ]
    calls = []
    for line in answered:
        told = line.server_ms or {}
        _require_ledgers(told, source)
        calls.append(
            CallFacts(
                wall_ms=line.e2e_ms,
                ttft_ms=line.ttft_ms,
                parts=_parts(told),
                first_parts=_first_parts(told),
                others_prefill_ms=told.get("blame.prefill", told.get("prefill_others", 0.0)),
                prompt_tokens=line.input_tokens or 0,
                completion_tokens=line.output_tokens or 0,
                began_at=line.scheduled_s,
            )
        )
    return Facts(source=source, calls=tuple(calls), num_failed=len(lines) - len(answered))


def from_summary(summary: Mapping[str, Any], source: str) -> Facts:
    """Return the facts of what `paceline bench --json` prints; of several stages, of the last."""
    stages = checked(summary, Summary, source).stages
    if not stages:
        raise ParameterError(f"{source} has no stage: the bench measured nothing")
    stage = stages[-1]
    latency, told = stage.latency_ms, stage.server_ms
    num_failed = stage.requests.measured - stage.requests.ok
    if not latency.ttft.count:
        return Facts(source=source, calls=(), num_failed=num_failed)
    _require_ledgers(told, source)
    percentiles = {}
    num_tokens = _mean_output(stage)
    for percentile in (50, 95, 99):
        ms = {name: figure.at(percentile) for name, figure in told.items() if figure.count}
        ttft_ms = latency.ttft.at(percentile)
        tpot_ms = latency.tpot.at(percentile) if num_tokens > 1 else 0.0
        percentiles[percentile] = CallFacts(
            wall_ms=ttft_ms + tpot_ms * max(num_tokens - 1, 0),
            ttft_ms=ttft_ms,
            parts=_parts(ms),
            first_parts=_first_parts(ms),
            others_prefill_ms=ms.get("blame.prefill", ms.get("prefill_others", 0.0)),
            prompt_tokens=0,
            completion_tokens=num_tokens,
        )
    return Facts(
        source=source,
        calls=(),
        percentiles=percentiles,
        num_summed=stage.requests.ok,
        num_failed=num_failed,
    )


def _mean_output(stage: Stage) -> int:
    """Return the tokens of an answer, on the mean; 1 where no answer has two."""
    if not stage.latency_ms.tpot.count:
        return 1
    completed = stage.throughput.requests_per_s
    each = stage.throughput.output_tokens_per_s / completed if completed else 2.0
    return max(round(each), 2)


def _parts(told: Parts) -> Parts:
    """Return the parts of a call among all that a bench has of `usage.paceline`."""
    return {name: ms for name, ms in told.items() if "." not in name and name not in _WHOLES}


def _first_parts(told: Parts) -> Parts:
    """Return the parts of its TTFT; where none are told, those that come before a first token."""
    first = {
        name.removeprefix(_OF_TTFT): ms for name, ms in told.items() if name.startswith(_OF_TTFT)
    }
    return first or {name: ms for name, ms in told.items() if name in _BEFORE_FIRST}


def _require_ledgers(parts: Mapping[str, Any], source: str) -> None:
    if "residual" not in parts:  # it is in every ledger of ours, and in nobody else's
        raise ParameterError(
            f"{source} has no parts of calls: run `paceline bench --server-timings` against a "
            "Paceline server"
        )


def _call(details: Mapping[str, Any], source: str) -> CallFacts:
    call = checked(details, CallRecord, source)
    return CallFacts(
        wall_ms=call.wall_ms,
        ttft_ms=call.ttft_ms,
        parts=call.parts_ms,
        first_parts=call.ttft_parts_ms or {},
        others_prefill_ms=call.blame.prefill_ms,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        num_choices=max(call.num_choices, 1),
        repeated_tokens=call.repeated_tokens,
        cached_tokens=call.cached_tokens,
        unstepped_tokens=call.accepted_tokens + call.forced_tokens,
        rejected_ms=call.blame.rejected_drafts_ms,
        began_at=call.began_at,
    )


def _step(event: Event, source: str, server: ServerFacts | None) -> StepFacts:
    step = checked(event.args, StepRecord, source)
    num_tokens = sum(step.tokens.values())
    seen = num_tokens * (0 if server is None else server.num_layers)
    return StepFacts(
        num_tokens=num_tokens,
        num_decode=step.tokens.get("decode", 0) + step.tokens.get("verify", 0),
        num_guesses=step.tokens.get("verify", 0),
        num_seqs=step.num_seqs,
        forward_s=step.forward_ms / 1e3,
        duration_s=event.dur / 1e6,
        mean_keys=step.num_keys / seen if seen and step.num_keys else None,
    )


def _whole(text: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def read_trace(text: bytes, source: str) -> dict[str, Any]:
    """Return a trace that a server sent. Raises PacelineError where it is none."""
    found = _whole(text)
    if found is None or "traceEvents" not in found:
        raise PacelineError(f"{source} answers no trace: is it a Paceline server?")
    checked(found, TraceRecord, source)
    return found
