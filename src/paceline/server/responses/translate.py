"""From a body of the Responses API to the chat request that it asks for."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.server.dialect import Frame, Names
from paceline.server.errors import ApiError
from paceline.server.responses.background import Background
from paceline.server.responses.schema import (
    CHOICES,
    ITEMS,
    PARTS,
    TOOLS,
    CallItem,
    FunctionTool,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponseRequest,
    SchemaFormat,
    TextConfig,
    typed,
)
from paceline.server.responses.store import ResponseStore, Stored
from paceline.server.responses.writer import ResponseWriter
from paceline.server.schema import ChatRequest, JsonSchemaFormat, NamedSchema, parse
from paceline.server.tools import Function, FunctionName, NamedTool, Tool, ToolChoice

_FIELDS = (
    (r"^max_tokens\b", "max_output_tokens"),
    (r"^(prompt$|messages\b)", "input"),
    (r"^response_format\b", "text.format"),
    (r"^reasoning_effort\b", "reasoning.effort"),
    (r"\.function\.parameters$", ".parameters"),
)
_encode = msgspec.json.Encoder().encode


class ResponsesAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A call of /v1/responses, read. `sent` are all items before the answer, as JSON."""

    request: ChatRequest
    names: Names
    echo: dict[str, Any]  # fields of the body that the response has, too
    sent: bytes
    tenant: str
    store: ResponseStore | None  # None: the response is not to be kept
    background: Background | None  # None: the call waits for it

    @property
    def id_prefix(self) -> str:
        return "resp_"

    @property
    def wants_objects(self) -> bool:
        return False

    @property
    def pins(self) -> bool:
        return False

    def writer(self, frame: Frame) -> ResponseWriter:
        return ResponseWriter(frame, self.echo, keep=self._keep)

    def in_its_words(self, error: PacelineError) -> PacelineError:
        return self.names.applied(error)

    def _keep(self, response_id: str, body: bytes | None) -> None:
        if self.store is None:
            return
        if body is None:
            self.store.delete(self.tenant, response_id)
        else:
            self.store.put(self.tenant, response_id, Stored(body, self.sent))


def read_response(
    body: bytes, store: ResponseStore, tenant: str, background: Background
) -> ResponsesAsked:
    """Return a body of /v1/responses, read. Raises ApiError.

    `store` has what it may go on from; what does not wait goes to `background`.
    """
    request = parse(body, ResponseRequest)
    if request.background:
        _check_background(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    earlier = _earlier(request.previous_response_id, store, tenant)
    items = _items(request.input)
    _refuse_twins(earlier, items)
    conversation = _Conversation()
    if request.instructions:
        conversation.add("system", request.instructions, "instructions")
    for item in earlier:
        conversation.take(item, "previous_response_id")
    for i, item in enumerate(items):
        conversation.take(item, "input" if isinstance(request.input, str) else f"input[{i}]")
    given = {
        name: getattr(request, name)
        for name in ("model", "stream", "temperature", "top_p", "top_k", "seed", "deadline_ms",
                     "timings", "priority", "cache_salt", "service_tier", "parallel_tool_calls")
    }  # fmt: skip
    tools = [
        typed(tool, TOOLS, f"tools[{i}]") for i, tool in enumerate(request.tools or ())
    ]  # fmt: skip
    chat = ChatRequest(
        messages=conversation.messages,
        max_tokens=request.max_output_tokens,
        tools=[_tool(tool) for tool in tools] or None,
        tool_choice=_tool_choice(request.tool_choice),
        response_format=_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        **given,
    )
    return ResponsesAsked(
        request=chat,
        names=Names(messages=conversation.sources, fields=_FIELDS),
        echo=_echo(request, tools),
        sent=_encode([*earlier, *items]),
        tenant=tenant,
        store=None if request.store is False else store,
        background=background if request.background else None,
    )


def _check_background(request: ResponseRequest) -> None:
    """Raise ApiError for what cannot be had of a response that nobody waits for."""
    if request.store is False:
        raise ApiError(
            400, "store is false and background is true: the response could not be asked for, "
            "leave out store", param="store",
        )  # fmt: skip


def _earlier(response_id: str | None, store: ResponseStore, tenant: str) -> list[dict[str, Any]]:
    """Return the conversation up to the end of a response that is kept."""
    if response_id is None:
        return []
    stored = store.get(tenant, response_id)
    if stored is None:
        raise ApiError(
            400, f"previous_response_id is {response_id[:80]!r}: no such response is kept; send "
            "the conversation as input",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    if stored.status not in ("completed", "incomplete"):
        raise ApiError(
            400, f"previous_response_id is {response_id[:80]!r}, which is {stored.status}: a "
            "response goes on from one that has an answer", param="previous_response_id",
        )  # fmt: skip
    return stored.conversation()


def _items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the input as items that all have an id, a status and a list of parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[dict[str, Any]] = []
    for i, raw in enumerate(given):
        path = f"input[{i}]"
        item = typed(raw, ITEMS, path, default="message")
        fields = {**msgspec.to_builtins(item), "status": item.status or "completed"}
        if isinstance(item, MessageItem):
            fields["id"] = item.id or new_id("msg")
            fields["content"] = _parts(item.content, item.role, f"{path}.content")
        elif isinstance(item, CallItem):
            fields["id"] = item.id or new_id("fc")
        elif isinstance(item, ReasoningItem):
            fields["id"] = item.id or new_id("rs")
            fields["summary"], fields["content"] = [], fields["content"] or []
        else:
            assert isinstance(item, OutputItem)
            fields["id"] = item.id or new_id("fco")
            if not isinstance(item.output, str):
                fields["output"] = _parts(item.output, "user", f"{path}.output")
        items.append(fields)
    return items


def _refuse_twins(earlier: Iterable[dict[str, Any]], items: Iterable[dict[str, Any]]) -> None:
    """Raise ApiError for an id that two items have: a list of them could not go on after it."""
    known = {item["id"] for item in earlier}
    for i, item in enumerate(items):
        if item["id"] in known:
            raise ApiError(
                400, f"input[{i}].id is {item['id'][:80]!r}: an item before it has that id, leave "
                "one of them or its id out", param=f"input[{i}].id",
            )  # fmt: skip
        known.add(item["id"])


def _parts(content: str | list[dict[str, Any]], role: str, path: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        if role == "assistant":
            return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
        return [{"type": "input_text", "text": content}]
    for i, part in enumerate(content):
        typed(part, PARTS, f"{path}[{i}]")
    return content


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class _Conversation(msgspec.Struct):
    """Messages as chat templates know them, and where each comes from."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    sources: list[str] = msgspec.field(default_factory=list)
    names: dict[str, str] = msgspec.field(default_factory=dict)  # of functions, by call_id
    thought: str = ""  # for the assistant's turn that comes next

    def add(self, role: str, text: str, source: str, **fields: Any) -> None:
        if role == "assistant" and self.thought:
            fields["reasoning_content"] = self.thought
        self.thought = ""
        self.messages.append({"role": role, "content": text, **fields})
        self.sources.append(source)

    def take(self, item: dict[str, Any], source: str) -> None:
        """Add an item; a call goes into the assistant's turn before it, if there is one."""
        if item["type"] == "reasoning":
            self.thought += _text(item["content"])
        elif item["type"] == "message":
            self.add(item["role"], _text(item["content"]), source)
        elif item["type"] == "function_call":
            self.names[item["call_id"]] = item["name"]
            is_going_on = bool(self.messages) and self.messages[-1]["role"] == "assistant"
            if self.thought or not is_going_on:
                self.add("assistant", "", source)
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            self.messages[-1].setdefault("tool_calls", []).append(call)
        else:
            self._take_output(item, source)

    def _take_output(self, item: dict[str, Any], source: str) -> None:
        name = self.names.get(item["call_id"])
        if name is None:
            raise ApiError(
                400, f"{source}.call_id is {item['call_id'][:80]!r}: no function_call before it "
                "has that id", param=f"{source}.call_id",
            )  # fmt: skip
        output = item["output"]
        text = output if isinstance(output, str) else _text(output)
        self.add("tool", text, source, tool_call_id=item["call_id"], name=name)


def _text(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in parts)


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _tool_choice(choice: Any) -> ToolChoice | None:
    if not isinstance(choice, dict):
        chosen: ToolChoice | None = choice
        return chosen
    named = typed(choice, CHOICES, "tool_choice")
    return NamedTool(type="function", function=FunctionName(named.name))


def _format(text: TextConfig | None) -> Any:
    given = text.format if text else None
    if not isinstance(given, SchemaFormat):
        return given
    return JsonSchemaFormat(
        NamedSchema(
            name=given.name,
            schema=given.schema,
            strict=given.strict,
            description=given.description,
        )
    )


def _echo(request: ResponseRequest, tools: Sequence[FunctionTool]) -> dict[str, Any]:
    """Return the fields of a response that repeat what was asked."""
    text = request.text or TextConfig()
    format_ = {"type": "text"} if text.format is None else msgspec.to_builtins(text.format)
    return {
        "background": request.background is True,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        "store": request.store is not False,
        "text": {"format": format_, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [msgspec.to_builtins(tool) for tool in tools],
        "service_tier": request.service_tier or "default",
    }
