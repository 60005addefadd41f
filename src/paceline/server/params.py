"""From the fields of a request to sampling parameters, structures, priorities and prompts."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.errors import ParameterError
from paceline.server.admission import Deadline
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.server.schema import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from paceline.server.texts import split_texts
from paceline.types import MAX_LOGPROBS, SamplingParams, Structured

MAX_PROMPTS = 256  # prompts in one completions call
MAX_CHOICES = 1024  # of all of them together: each takes time on the event loop to begin
# Lower runs first (`--policy priority`); a request without a tier has 0.
_TIERS = {"priority": -100, "auto": 0, "default": 0, "flex": 100}

_COPIED = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "seed", "n",
)  # fmt: skip


def sampling_params(
    request: ChatRequest | CompletionRequest, defaults: dict[str, Any]
) -> SamplingParams:
    """Return the request's parameters over `defaults`. Raises ParameterError or ApiError."""
    given = {name: getattr(request, name) for name in _COPIED}
    given["bad_words"] = None if request.bad_words is None else tuple(request.bad_words)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    given["max_tokens"] = _max_tokens(request)
    given["logprobs"] = _num_logprobs(request)
    given["structured"] = _structured(request)
    if isinstance(request, CompletionRequest) and request.echo:
        given["prompt_logprobs"] = request.logprobs
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**defaults, **chosen})


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.max_tokens == 0 and not (request.echo and request.logprobs is not None):
            raise ApiError(
                400, "max_tokens is 0: it must be at least 1; to score a prompt send echo: true "
                "and logprobs with it",
                param="max_tokens",
            )  # fmt: skip
        return request.max_tokens
    if request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise ApiError(
            400,
            f"max_tokens is {request.max_tokens} and max_completion_tokens is "
            f"{request.max_completion_tokens}: send one of them",
            param="max_tokens",
        )
    if request.max_completion_tokens < 1:
        raise ApiError(
            400,
            f"max_completion_tokens is {request.max_completion_tokens}: it must be at least 1",
            param="max_completion_tokens",
        )
    return request.max_completion_tokens


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is None:
        return 0 if request.logprobs else None
    if not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise ApiError(
            400,
            f"top_logprobs is {request.top_logprobs}: it must be between 0 and {MAX_LOGPROBS}",
            param="top_logprobs",
        )
    return request.top_logprobs


def priority(request: ChatRequest | CompletionRequest) -> int:
    """Return the request's own priority, else that of its service tier."""
    if request.priority is not None:
        return request.priority
    return _TIERS[request.service_tier or "default"]


def deadline(
    request: ChatRequest | CompletionRequest, header: str | None, call: Call
) -> Deadline | None:
    """Return the deadline of the answer, by field or by header; both count from its arrival.

    Of two the earlier holds: a proxy may set the one, its client the other. Raises ApiError for a
    header that is no number of milliseconds.
    """
    asked_ms = [ms for ms in (request.deadline_ms, header_ms(header)) if ms is not None]
    if not asked_ms:
        return None
    deadline_ms = min(asked_ms)
    spent_ns = call.mark_ns - call.begin_ns
    return Deadline(deadline_ms, max(deadline_ms / 1e3 - spent_ns / 1e9, 0.0))


def header_ms(header: str | None) -> float | None:
    """Return the milliseconds of an X-Request-Deadline-Ms. Raises ApiError."""
    if header is None:
        return None
    try:
        deadline_ms = float(header)
    except ValueError:
        deadline_ms = 0.0
    if not 0 < deadline_ms <= 86_400_000:
        raise ApiError(
            400, f"x-request-deadline-ms is {header[:80]!r}: send milliseconds, up to a day",
            param="x-request-deadline-ms",
        )  # fmt: skip
    return deadline_ms


def check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    """Raise ApiError where `stream_options` ask for what the request does not send."""
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise ApiError(
            400, "continuous_usage_stats needs include_usage: true",
            param="stream_options.continuous_usage_stats",
        )  # fmt: skip


def structured_field(request: ChatRequest | CompletionRequest) -> str:
    """Return the name of the field that a request's structure came from."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _structured(request: ChatRequest | CompletionRequest) -> Structured | None:
    wanted = request.response_format if isinstance(request, ChatRequest) else None
    if request.structured_outputs is not None:
        if isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
            raise ApiError(
                400, "response_format and structured_outputs are both given: send one of them",
                param="structured_outputs",
            )  # fmt: skip
        return _structured_outputs(request.structured_outputs)
    if isinstance(wanted, JsonSchemaFormat):
        return Structured(json_schema=wanted.json_schema.schema)
    return Structured(json_object=True) if isinstance(wanted, JsonObjectFormat) else None


def _structured_outputs(given: StructuredOutputs) -> Structured:
    fields = msgspec.structs.asdict(given)
    sent = [name for name, value in fields.items() if value not in (None, False, [])]
    if len(sent) != 1:
        raise ApiError(
            400, f"structured_outputs has {' and '.join(sent) or 'nothing'}: give exactly one of "
            f"{', '.join(fields)}", param="structured_outputs",
        )  # fmt: skip
    fields["json_schema"] = fields.pop("json")
    fields["choice"] = None if given.choice is None else tuple(given.choice)
    try:
        return Structured(**{name: value for name, value in fields.items() if value is not None})
    except ParameterError as error:
        param = f"structured_outputs.{error.param}"
        raise ApiError(400, f"structured_outputs.{error}", param=param) from None


def check_num_choices(num_prompts: int, n: int) -> None:
    """Raise ApiError for a call that asks for too many answers at once."""
    if num_prompts * n > MAX_CHOICES:
        raise ApiError(
            400, f"n is {n} for each of {num_prompts} prompts: a call has at most {MAX_CHOICES} "
            "answers, send several", param="n",
        )  # fmt: skip


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a completions call: a string, token ids, or a list of either."""
    return split_texts(prompt, param="prompt", most=MAX_PROMPTS)
