"""What clients of OpenAI's Responses API may send, and a refusal by name for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from paceline.server.conversation import CacheBreakpoint
from paceline.server.errors import ApiError
from paceline.server.schema import (
    Effort,
    JsonObjectFormat,
    Neutral,
    ServiceTier,
    SharedFields,
    TextFormat,
    converted,
)
from paceline.server.tools import MAX_TOOLS

# Fields of OpenAI that this server does not act on, and the values that ask for nothing.
_NEUTRAL: Neutral = {
    "include": ([],),
    "prompt_cache_retention": ("in_memory",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    **dict.fromkeys(
        ("access_programs", "background_options", "context_management", "conversation", "image",
         "max_tool_calls", "moderation", "prompt", "prompt_cache_options"),
        (),
    ),
}  # fmt: skip

_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class OutputText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class Refusal(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["refusal"]
    refusal: str


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None


class CallItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class OutputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None


class ReasoningText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking of an earlier answer, sent back. Summaries and what is encrypted are others'."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    content: list[ReasoningText] | None = None
    status: Status | None = None


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class SchemaFormat(
    msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    strict: bool | None = None  # a schema is always kept to
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: None = None  # thinking is told as it is


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # nothing is obfuscated


Part = InputText | OutputText | Refusal
Item = MessageItem | CallItem | OutputItem | ReasoningItem
PARTS: Mapping[str, type[Part]] = {
    "input_text": InputText, "output_text": OutputText, "refusal": Refusal,
}  # fmt: skip
ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem, "function_call": CallItem, "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}  # fmt: skip
TOOLS: Mapping[str, type[FunctionTool]] = {"function": FunctionTool}
CHOICES: Mapping[str, type[NamedFunction]] = {"function": NamedFunction}


class ResponseRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/responses. What has a type by itself is read by `typed`."""

    neutral: ClassVar[Neutral] = _NEUTRAL
    noted: ClassVar[dict[str, Any]] = {
        "user": str, "safety_identifier": str, "prompt_cache_key": str
    }  # fmt: skip

    input: str | list[dict[str, Any]]
    background: bool | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None


def typed(
    value: dict[str, Any], kinds: Mapping[str, type[Any]], path: str, default: str = ""
) -> Any:
    """Return `value` as the one of `kinds` that its `type` names. Raises ApiError naming `path`."""
    kind = value.get("type", default)
    found = kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise ApiError(
            400, f"{path}.type is {repr(kind)[:80]}, which this server does not support: send "
            f"{' or '.join(kinds)}",
            param=f"{path}.type", code="unsupported_parameter",
        )  # fmt: skip
    wanted = {name: item for name, item in value.items() if item is not None}
    return converted(wanted, found, within=path)
