"""What clients of Anthropic's Messages API may send, and a refusal by name for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from paceline.server.conversation import CacheControl
from paceline.server.errors import ApiError
from paceline.server.schema import Fields, Neutral, SharedFields, parse
from paceline.server.tools import MAX_TOOLS

# Fields of Anthropic that this server does not act on, and the values that ask for nothing.
_NEUTRAL_PROMPT: Neutral = {
    "speed": ("standard",),
    "context_management": (),
    "mcp_servers": ([],),
    "user_profile_id": (),
    "workspace_id": (),
}
_NEUTRAL: Neutral = {
    **_NEUTRAL_PROMPT,
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
}


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class Block(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """A part of a turn."""

    cache_control: CacheControl | None = None


class TextBlock(Block, kw_only=True, tag="text", forbid_unknown_fields=True):
    text: str
    citations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class Caller(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["direct"]


class ThinkingBlock(Block, kw_only=True, tag="thinking", forbid_unknown_fields=True):
    """Thinking of an earlier answer, sent back; its signature says nothing here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Block, kw_only=True, tag="tool_use", forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None


class ToolResultBlock(Block, kw_only=True, tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class CustomTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class Choice(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """What a client wants called."""

    disable_parallel_tool_use: bool | None = None


class AutoChoice(Choice, tag="auto", forbid_unknown_fields=True):
    pass


class AnyChoice(Choice, tag="any", forbid_unknown_fields=True):
    pass


class NoChoice(Choice, tag="none", forbid_unknown_fields=True):
    pass


class NamedChoice(Choice, kw_only=True, tag="tool", forbid_unknown_fields=True):
    name: str


class JsonFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class ThinkingOff(
    msgspec.Struct, kw_only=True, tag_field="type", tag="disabled", forbid_unknown_fields=True
):
    pass


class Thinking(
    msgspec.Struct, kw_only=True, tag_field="type", tag="enabled", forbid_unknown_fields=True
):
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    display: Literal["summarized"] | None = None  # all is shown, as it is


class AdaptiveThinking(
    msgspec.Struct, kw_only=True, tag_field="type", tag="adaptive", forbid_unknown_fields=True
):
    """The model thinks as long as it likes."""

    display: Literal["summarized"] | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: JsonFormat | None = None


System = str | list[TextBlock]
CustomTools = Annotated[list[CustomTool], msgspec.Meta(max_length=MAX_TOOLS)]
AnyThinking = ThinkingOff | Thinking | AdaptiveThinking
ToolChoice = AutoChoice | AnyChoice | NoChoice | NamedChoice


class CountRequest(Fields, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/messages/count_tokens: a prompt."""

    neutral: ClassVar[Neutral] = _NEUTRAL_PROMPT
    noted: ClassVar[dict[str, Any]] = {"cache_control": CacheControl}

    model: str
    messages: list[Turn]
    system: System | None = None
    tools: CustomTools | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: AnyThinking | None = None


class MessageRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/messages."""

    neutral: ClassVar[Neutral] = _NEUTRAL
    noted: ClassVar[dict[str, Any]] = {"cache_control": CacheControl, "metadata": Metadata}

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    messages: list[Turn]
    system: System | None = None
    tools: CustomTools | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: AnyThinking | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None


PromptRequest = CountRequest | MessageRequest
_RequestT = TypeVar("_RequestT", CountRequest, MessageRequest)
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("thinking", "text", "tool_use"),
    "system": ("text",),
}


def parse_prompt(body: bytes, kind: type[_RequestT]) -> _RequestT:
    """Return `body` as a request of `kind`. Raises ApiError 400 naming the field at fault."""
    try:
        request = parse(body, kind)
    except ApiError as error:
        raise _unsupported(body) or error from None
    for i, turn in enumerate(request.messages):
        _check_blocks(turn, f"messages[{i}]")
    return request


def _check_blocks(turn: Turn, path: str) -> None:
    allowed = _BLOCKS[turn.role]
    for i, block in enumerate(turn.content if not isinstance(turn.content, str) else ()):
        kind = str(block.__struct_config__.tag)
        if kind not in allowed:
            raise ApiError(
                400, f"{path}.content[{i}].type is {kind!r}: a turn of the {turn.role} has "
                f"{' and '.join(allowed)} blocks", param=f"{path}.content[{i}].type",
            )  # fmt: skip


def _unsupported(body: bytes) -> ApiError | None:
    """Return what to say of a kind of block or tool that we do not have, the first in `body`."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    if not isinstance(fields, dict):
        return None
    for path, kind in _tool_kinds(fields.get("tools")):
        if kind not in (None, "custom"):
            return _refused(path, kind, "define tools of your own by name and input_schema")
    for path, kind in _block_kinds(fields):
        if kind not in ("text", "thinking", "tool_use", "tool_result"):
            return _refused(path, kind, "send text, thinking, tool_use and tool_result blocks")
    return None


def _refused(path: str, kind: Any, remedy: str) -> ApiError:
    shown = repr(kind)[:80]
    return ApiError(
        400, f"{path}.type is {shown}, which this server does not support: {remedy}",
        param=f"{path}.type", code="unsupported_parameter",
    )  # fmt: skip


def _tool_kinds(tools: Any) -> Iterator[tuple[str, Any]]:
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            yield f"tools[{i}]", tool.get("type")


def _block_kinds(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the place and the type of each block, those inside of tool results included."""
    pending = [("system", fields.get("system"))]
    messages = fields.get("messages")
    for i, turn in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(turn, dict):
            pending.append((f"messages[{i}].content", turn.get("content")))
    for path, blocks in pending:
        for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if isinstance(block, dict):
                here = f"{path}[{i}]"
                yield here, block.get("type")
                if block.get("type") == "tool_result":
                    pending.append((f"{here}.content", block.get("content")))
