"""Recordings: the shapes of what can be explained, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from paceline.errors import ParameterError
from paceline.explain.facts import Parts, ServerFacts

_T = TypeVar("_T")
Count = Annotated[int, Meta(ge=0)]


class Blame(Struct):
    prefill_ms: float = 0.0
    rejected_drafts_ms: float = 0.0


class CallRecord(Struct, kw_only=True):
    """A call with its ledger, in a trace or an access log."""

    wall_ms: float
    ttft_ms: float | None
    parts_ms: Parts
    ttft_parts_ms: Parts | None
    prompt_tokens: Count
    completion_tokens: Count
    began_at: float
    repeated_tokens: Count = 0
    cached_tokens: Count = 0
    accepted_tokens: Count = 0
    forced_tokens: Count = 0
    num_choices: Count = 1
    blame: Blame = field(default_factory=Blame)


class StepRecord(Struct, kw_only=True):
    """A step, in a trace. `tokens` by kind."""

    tokens: dict[str, Count]
    num_seqs: int
    forward_ms: float
    num_keys: Count = 0  # attended, over all layers; 0: an older server does not tell


class Event(Struct):
    """An event of a trace: a call, a step, or what only a picture needs."""

    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    dur: float = 0.0  # microseconds


class ServedModel(Struct):
    """A name that a server answers to; an alias has the model's own as its `root`."""

    id: str
    root: str = ""


class ModelsRecord(Struct):
    """What /v1/models answers."""

    data: list[ServedModel]


class AboutTrace(Struct):
    paceline: ServerFacts | None = None


class TraceRecord(Struct):
    """What /v1/trace answers."""

    events: list[Event] = field(name="traceEvents")
    about: AboutTrace = field(name="otherData", default_factory=AboutTrace)


class RequestRecord(Struct, kw_only=True):
    """An answered request in a bench's log."""

    e2e_ms: float
    ttft_ms: float | None
    scheduled_s: float
    server_ms: Parts | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class Value(Struct):
    value: float


class Figure(Struct):
    """The distribution of a latency or of a phase, in a bench's summary."""

    count: int
    p50: Value | None = None
    p95: Value | None = None
    p99: Value | None = None

    def at(self, percentile: int) -> float:
        found: Value | None = getattr(self, f"p{percentile}")
        return 0.0 if found is None else found.value


class Latencies(Struct):
    ttft: Figure
    tpot: Figure


class Requests(Struct):
    measured: int
    ok: int


class Throughput(Struct):
    requests_per_s: float
    output_tokens_per_s: float


class Stage(Struct):
    """A stage of a bench's summary."""

    requests: Requests
    latency_ms: Latencies
    server_ms: dict[str, Figure]
    throughput: Throughput


class Summary(Struct):
    stages: list[Stage]


def checked(value: Mapping[str, Any], kind: type[_T], source: str) -> _T:
    """Return a decoded JSON object as a `kind`. Raises ParameterError saying what is wrong."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ParameterError(
            f"{source} is broken: {error}; record it anew, or name another source"
        ) from None
