"""Tools of a chat request: what may be called, what must be, and the grammar that sees to it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from paceline.errors import ParameterError
from paceline.server.errors import ApiError
from paceline.text.reasoning import Thought
from paceline.text.tool_calls import CallBegun, Content, Piece
from paceline.text.tools import MAX_CALLS, call_grammar
from paceline.types import Structured

if TYPE_CHECKING:
    from paceline.structured.grammar import Grammar
    from paceline.structured.grammars import Grammars

MAX_TOOLS = 128
# What llguidance says of a schema that is none. All else is legal but more than it can keep to.
_BROKEN = re.compile(
    r": (Invalid type|Expected |Pointer |invalid multiple|\w+ must be )|at most|is no JSON"
)


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants of its tools. `callable_tools` are those that an answer may call.

    With `wants_objects` arguments must be JSON, whatever a tool's schema says.
    """

    tools: tuple[Tool, ...]
    callable_tools: tuple[Tool, ...]
    must_call: bool
    max_calls: int
    wants_objects: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_tools)

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [_object(tool) for tool in self.tools]


def tool_use(
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    is_parallel: bool | None,
    *,
    wants_objects: bool = False,
) -> ToolUse | None:
    """Return None where nothing can be called. Raises ApiError for what contradicts itself."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ApiError(400, f"two tools have the name {name!r}", param=f"tools[{i}]")
    if choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in names:
        raise ApiError(
            400, f"tool_choice names {named!r}, which is none of the tools", param="tool_choice"
        )
    is_single = named is not None or is_parallel is False
    return ToolUse(
        tools=tuple(tools),
        callable_tools=tuple(t for t in tools if named in (None, t.function.name)),
        must_call=named is not None or choice == "required",
        max_calls=1 if is_single else MAX_CALLS,
        wants_objects=wants_objects,
    )


def check_tools(tools: Iterable[Tool], grammars: Grammars) -> None:
    """Raise ApiError for the first tool whose parameters are no JSON Schema.

    Where a tool is strict, also for one with parameters that cannot be kept to.
    """
    for i, tool in enumerate(tools):
        if not tool.function.parameters:
            continue
        try:
            grammars.check_schema(_parameters(tool.function))
        except ParameterError as error:
            if tool.function.strict or _BROKEN.search(str(error)):
                raise _refusal(tool.function, i, error) from None


def compile_calls(
    use: ToolUse, structured: Structured | None, template: str, grammars: Grammars
) -> Grammar | None:
    """Return the grammar that `use` needs beside a structure of the answer, None if none.

    A strict tool's arguments keep to its schema, and so do those of any tool that must be called.
    A schema that cannot be kept to is refused where it is strict; else its tool's arguments are
    any object.
    """
    is_strict = any(tool.function.strict for tool in use.callable_tools)
    if not (use.must_call or is_strict or use.wants_objects or structured is not None):
        return None
    answer: Mapping[str, Any] | None = None
    if structured is not None and not use.must_call:
        grammars.compile(structured)  # what is wrong with it is told apart from the tools
        schema = {"type": "object"} if structured.json_object else structured.json_schema
        if not isinstance(schema, Mapping):
            raise ApiError(
                400, "beside tools an answer can be JSON by a schema, and nothing else: leave out "
                "structured_outputs or tools", param="structured_outputs",
            )  # fmt: skip
        answer = schema
    names = use.names
    schemas = {
        tool.function.name: _arguments_schema(tool.function, use, grammars, i)
        for i, tool in enumerate(use.tools)
        if tool.function.name in names
    }
    source = call_grammar(
        schemas, template, options=grammars.json_options, max_calls=use.max_calls,
        must_call=use.must_call, answer=answer,
    )  # fmt: skip
    try:
        return grammars.compile(Structured(grammar=source))
    except ParameterError as error:
        raise ApiError(400, f"the tools together: {error}", param="tools") from None


def _arguments_schema(
    function: Function, use: ToolUse, grammars: Grammars, idx: int
) -> Mapping[str, Any]:
    if not (function.strict or use.must_call):
        return {"type": "object"}
    if not function.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = _parameters(function)
    try:
        grammars.compile(Structured(json_schema=schema))
    except ParameterError as error:
        if not function.strict and not _BROKEN.search(str(error)):
            return {"type": "object"}
        raise _refusal(function, idx, error) from None
    return schema


def _parameters(function: Function) -> dict[str, Any]:
    return {"type": "object", **(function.parameters or {})}


def _refusal(function: Function, idx: int, error: ParameterError) -> ApiError:
    return ApiError(
        400, f"the parameters of tool {function.name!r}: {error}",
        param=f"tools[{idx}].function.parameters",
    )  # fmt: skip


def piece_delta(piece: Piece) -> dict[str, Any]:
    """Return a piece of an answer as the `delta` of a chunk."""
    if isinstance(piece, Thought):
        return thinking_fields(piece.text)
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, CallBegun):
        return {"tool_calls": [{"index": piece.index, **_call(piece.name)}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def message_fields(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the fields of a message that all of `pieces` make; content is null beside calls."""
    content = thought = ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Thought):
            thought += piece.text
        elif isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallBegun):
            calls.append(_call(piece.name))
        else:
            calls[-1]["function"]["arguments"] += piece.text
    told = thinking_fields(thought) if thought else {}
    if calls:
        return {**told, "content": content or None, "tool_calls": calls}
    return {**told, "content": content}


def thinking_fields(thought: str) -> dict[str, str]:
    """Return the thinking under both names that clients know."""
    return {"reasoning_content": thought, "reasoning": thought}


def _call(name: str) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def _object(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
