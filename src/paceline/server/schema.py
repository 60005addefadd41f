"""What clients may send: OpenAI's fields, our extras, and a refusal by name for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from paceline.server.errors import ApiError
from paceline.types import MAX_LOGPROBS, SamplingParams

MAX_PROMPTS = 256  # prompts in one completions call

# Fields of OpenAI that this server does not act on, and the values that ask for nothing.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "parallel_tool_calls": lambda v: isinstance(v, bool),
    "response_format": lambda v: v == {"type": "text"},
    "modalities": lambda v: v == ["text"],
    "audio": lambda v: False,
    "prediction": lambda v: False,
    "reasoning_effort": lambda v: v == "none",
    "verbosity": lambda v: False,
    "web_search_options": lambda v: False,
    "service_tier": lambda v: v in ("auto", "default"),
    "store": lambda v: v is False,
    "echo": lambda v: v is False,
    "suffix": lambda v: v == "",
    "best_of": lambda v: v == 1 and not isinstance(v, bool),
}
# Documented as informational: checked for their type, kept nowhere.
_INFORMATIONAL: dict[str, type] = {
    "user": str,
    "metadata": dict,
    "safety_identifier": str,
    "prompt_cache_key": str,
}

Words = Annotated[list[str], msgspec.Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both endpoints share. None means: the model's own default, or ours."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=4096)] | None = None
    bad_words: Words | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    n: int | None = None
    timings: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: int | None = None


_RequestT = TypeVar("_RequestT", bound=GenerationFields)
_LOCATION = re.compile(r"^(?P<rule>.*) - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def parse(body: bytes, kind: type[_RequestT]) -> _RequestT:
    """Return `body` as a request of `kind`. Raises ApiError 400 naming the field at fault."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    wanted = {name: value for name, value in fields.items() if value is not None}
    for name in _NEUTRAL.keys() & wanted.keys():
        if not _NEUTRAL[name](wanted.pop(name)):
            raise ApiError(
                400, f"{name} is not supported by this server: leave it out", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
    for name in _INFORMATIONAL.keys() & wanted.keys():
        if not isinstance(wanted.pop(name), _INFORMATIONAL[name]):
            rule = "an object" if _INFORMATIONAL[name] is dict else "a string"
            raise ApiError(400, f"{name} must be {rule}", param=name)
    try:
        return msgspec.convert(wanted, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def _refusal(message: str) -> ApiError:
    """Turn a msgspec message into a 400 that names the field."""
    location = _LOCATION.match(message)
    path, rule = (location["path"], location["rule"]) if location else ("", message)
    if unknown := _UNKNOWN.search(rule):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return ApiError(
            400, f"{name} is not a field this server knows: leave it out", param=name,
            code="unknown_parameter",
        )  # fmt: skip
    if missing := _MISSING.search(rule):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    return ApiError(400, f"{path or 'the body'}: {rule.replace('`', '')}", param=path or None)


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
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**defaults, **chosen})


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest) or request.max_completion_tokens is None:
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


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a completions call: a string, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty: send text or token ids", param="prompt")
    if _are_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt holds {len(prompt)} prompts: send at most {MAX_PROMPTS}", param="prompt"
        )
    for idx, item in enumerate(prompt):
        if not isinstance(item, str) and not (isinstance(item, list) and item and _are_ids(item)):
            raise ApiError(
                400, f"prompt[{idx}] is neither a string nor a list of token ids", param="prompt"
            )
    return prompt


def _are_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)
