"""What clients may send: OpenAI's fields, our extras, and a refusal by name for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from paceline.server.errors import ApiError
from paceline.server.refusals import refusal, unsupported
from paceline.server.tools import ToolChoice, Tools

# Fields of OpenAI that this server does not act on, and the values that ask for nothing.
Neutral = Mapping[str, tuple[Any, ...]]
_NEUTRAL_CHAT: Neutral = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
}
_NEUTRAL_COMPLETION: Neutral = {"suffix": ("",), "best_of": (1,)}
# Documented as informational: checked for their type, kept nowhere.
INFORMATIONAL: dict[str, type] = {
    "user": str,
    "metadata": dict,
    "safety_identifier": str,
    "prompt_cache_key": str,
}

_MAX_VALUES = 2_000_000  # in a body: token ids of the longest batches
_MAX_PARTS = 250_000  # lists and objects

ServiceTier = Literal["auto", "default", "flex", "priority"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Words = Annotated[list[str], msgspec.Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far, in every chunk


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    pass


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | bool
    strict: bool | None = None  # a schema is always kept to
    description: str | None = None


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: NamedSchema


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form of what OpenAI has no field for. Exactly one is given."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10_000)] | None = None
    grammar: str | None = None


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body, and what it may hold besides.

    `neutral` are accepted only with the values that ask for nothing, which are listed. `noted` are
    checked for their type and kept nowhere.
    """

    neutral: ClassVar[Neutral] = {}
    noted: ClassVar[dict[str, Any]] = {}


class SharedFields(Fields, kw_only=True, forbid_unknown_fields=True):
    """Fields of every API that generates. None means: the model's own default, or ours."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=86_400_000)] | None = None
    timings: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None


class GenerationFields(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and plain completions share."""

    noted: ClassVar[dict[str, Any]] = INFORMATIONAL

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
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
    n: int | None = None
    structured_outputs: StructuredOutputs | None = None
    service_tier: ServiceTier | None = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    neutral: ClassVar[Neutral] = _NEUTRAL_CHAT

    messages: list[dict[str, Any]]
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    neutral: ClassVar[Neutral] = _NEUTRAL_COMPLETION

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None


_RequestT = TypeVar("_RequestT", bound=msgspec.Struct)
_T = TypeVar("_T")


def parse(body: bytes, kind: type[_RequestT]) -> _RequestT:
    """Return `body` as a request of `kind`. Raises ApiError 400 naming the field at fault."""
    _check_size(body)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        problem = _lone_surrogate(body) or str(error)
        if "out of range" in problem:
            raise ApiError(
                400, "the body holds a number that is too large: send numbers below 1.8e308 in size"
            ) from None
        raise ApiError(400, f"the body is no valid JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    wanted = {name: value for name, value in fields.items() if value is not None}
    if issubclass(kind, Fields):
        _take_out_what_asks_for_nothing(wanted, kind)
    return converted(wanted, kind)


def _check_size(body: bytes) -> None:
    """Raise ApiError for a body of so many values that making them would hold up other threads.

    Of a short one nothing is counted; a text counts by its own commas and brackets.
    """
    if len(body) <= _MAX_PARTS:
        return
    for name, signs, most in (
        ("values", b",", _MAX_VALUES), ("lists and objects", b"[{", _MAX_PARTS)
    ):  # fmt: skip
        count = sum(body.count(sign) for sign in signs)
        if count > most:
            raise ApiError(
                400, f"the body holds some {count} {name}: send at most {most} in a call"
            )


def converted(value: Any, kind: type[_T], *, within: str = "") -> _T:
    """Return a body, or its field `within`, as a `kind`. Raises ApiError naming what is wrong."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise refusal(str(error), value, kind, within=within) from None


def _lone_surrogate(body: bytes) -> str | None:
    """Return what to say of half a surrogate pair in a body that is JSON but for it."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        return (
            f"it holds the lone surrogate \\u{half:04x}, half of a character: send both halves, or "
            "leave it out"
        )
    except (ValueError, RecursionError):
        return None
    return None


def _take_out_what_asks_for_nothing(wanted: dict[str, Any], kind: type[Fields]) -> None:
    """Drop neutral and noted fields. Raises ApiError for those that ask for something."""
    for name in kind.neutral.keys() & wanted.keys():
        value = wanted.pop(name)
        if not any(_is_same(value, neutral) for neutral in kind.neutral[name]):
            raise unsupported(name, value, kind.neutral[name])
    for name in kind.noted.keys() & wanted.keys():
        converted(wanted.pop(name), kind.noted[name], within=name)


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; what is null in an object counts as absent."""
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if item is not None}
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
