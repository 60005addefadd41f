"""From a body of the Messages API to the chat request that it asks for."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct, field

from paceline.errors import PacelineError
from paceline.server.dialect import Frame, Names
from paceline.server.errors import ApiError
from paceline.server.messages.schema import (
    AnyChoice,
    AnyThinking,
    CountRequest,
    CustomTool,
    MessageRequest,
    NamedChoice,
    NoChoice,
    PromptRequest,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ThinkingOff,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    parse_prompt,
)
from paceline.server.messages.schema import ToolChoice as Choice
from paceline.server.messages.writer import MessageWriter
from paceline.server.schema import ChatRequest, JsonSchemaFormat, NamedSchema
from paceline.server.tools import Function, FunctionName, NamedTool, Tool, ToolChoice

_FIELDS = (
    (r"^stop\b", "stop_sequences"),
    (r"^prompt$", "messages"),
    (r"^response_format\b", "output_config.format"),
    (r"\.function\.parameters$", ".input_schema"),
    (r"^thinking_token_budget\b", "thinking.budget_tokens"),
    (r"^chat_template_kwargs\.enable_thinking is (true|false)", "thinking is given"),
    (r"^chat_template_kwargs\.enable_thinking\b", "thinking"),
    (r"\.reasoning_content\b", ".content.thinking"),
)
_BETWEEN_TURNS = "\n\n"  # where two turns of one side follow each other they become one
_ERROR = "Error: "  # before the result of a tool that failed


class MessagesAsked(Struct, frozen=True, kw_only=True):
    """A call of /v1/messages, read."""

    request: ChatRequest
    names: Names

    @property
    def id_prefix(self) -> str:
        return "msg_"

    @property
    def wants_objects(self) -> bool:
        return True

    @property
    def pins(self) -> bool:
        return False

    @property
    def background(self) -> None:
        return None

    def writer(self, frame: Frame) -> MessageWriter:
        return MessageWriter(frame)

    def in_its_words(self, error: PacelineError) -> PacelineError:
        return self.names.applied(error)


def read_message(body: bytes) -> MessagesAsked:
    """Return a body of /v1/messages, read. Raises ApiError."""
    request = parse_prompt(body, MessageRequest)
    given = {
        name: getattr(request, name)
        for name in ("stream", "max_tokens", "temperature", "top_p", "top_k", "seed",
                     "deadline_ms", "timings", "priority", "cache_salt")
    }  # fmt: skip
    return _asked(request, {**given, "stop": request.stop_sequences})


def read_count(body: bytes) -> MessagesAsked:
    """Return a body of /v1/messages/count_tokens, read. Raises ApiError."""
    return _asked(parse_prompt(body, CountRequest), {})


def _asked(request: PromptRequest, given: dict[str, Any]) -> MessagesAsked:
    conversation = _Conversation()
    if request.system:
        text = request.system if isinstance(request.system, str) else _joined(request.system)
        conversation.add("system", text, "system")
    for i, turn in enumerate(request.messages):
        _add_turn(conversation, turn, f"messages[{i}]")
    if request.messages and request.messages[-1].role == "assistant":
        last = f"messages[{len(request.messages) - 1}]"
        raise ApiError(
            400, f"{last} is the assistant's: this server does not continue a turn that was begun "
            "for it, end with one of the user", param=last, code="unsupported_parameter",
        )  # fmt: skip
    config, choice = request.output_config, request.tool_choice
    chat = ChatRequest(
        model=request.model,
        messages=conversation.messages,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice else None,
        response_format=(
            JsonSchemaFormat(NamedSchema(name="format", schema=config.format.schema))
            if config and config.format
            else None
        ),
        **given,
        **_thinking(request.thinking),
    )
    return MessagesAsked(request=chat, names=Names(messages=conversation.sources, fields=_FIELDS))


def _thinking(wanted: AnyThinking | None) -> dict[str, Any]:
    """Return the fields of a chat for `thinking`; None: the model does as it does."""
    if wanted is None:
        return {}
    fields: dict[str, Any] = {
        "chat_template_kwargs": {"enable_thinking": not isinstance(wanted, ThinkingOff)}
    }
    if isinstance(wanted, Thinking):
        fields["thinking_token_budget"] = wanted.budget_tokens
    return fields


class _Conversation(Struct):
    """Messages as chat templates know them, and where each comes from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    tool_names: dict[str, str] = field(default_factory=dict)  # by the id of their use

    def add(
        self, role: str, text: str, source: str, calls: list[dict[str, Any]] | None = None,
        thought: str = "",
    ) -> None:  # fmt: skip
        """Add a turn; one of the same side as the turn before goes into that one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == role:
            last["content"] = _BETWEEN_TURNS.join(filter(None, (last["content"], text)))
            if calls:
                last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
            if thought:
                last["reasoning_content"] = last.get("reasoning_content", "") + thought
            return
        self.messages.append({"role": role, "content": text})
        self.sources.append(source)
        if calls:
            self.messages[-1]["tool_calls"] = calls
        if thought:
            self.messages[-1]["reasoning_content"] = thought

    def add_result(self, block: ToolResultBlock, source: str) -> None:
        name = self.tool_names.get(block.tool_use_id)
        if name is None:
            raise ApiError(
                400, f"{source}.tool_use_id is {block.tool_use_id[:80]!r}: no tool_use block "
                "before it has that id", param=f"{source}.tool_use_id",
            )  # fmt: skip
        content = block.content or ""
        text = content if isinstance(content, str) else _joined(content)
        self.messages.append({
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "name": name,
            "content": _ERROR + text if block.is_error else text,
        })  # fmt: skip
        self.sources.append(source)


def _add_turn(conversation: _Conversation, turn: Turn, path: str) -> None:
    """Add a turn: of the user, results before words, as templates have it."""
    if isinstance(turn.content, str):
        conversation.add(turn.role, turn.content, path)
        return
    texts: list[TextBlock] = []
    thoughts: list[ThinkingBlock] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block)
        elif isinstance(block, ToolUseBlock):
            conversation.tool_names[block.id] = block.name
            calls.append(_call(block))
        else:
            conversation.add_result(block, f"{path}.content[{i}]")
    has_results = len(texts) + len(thoughts) + len(calls) < len(turn.content)
    if texts or not has_results:
        thought = "".join(block.thinking for block in thoughts)
        conversation.add(turn.role, _joined(texts), path, calls, thought)


def _joined(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: CustomTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _tool_choice(choice: Choice | None) -> ToolChoice | None:
    if isinstance(choice, NamedChoice):
        return NamedTool(type="function", function=FunctionName(choice.name))
    if isinstance(choice, AnyChoice):
        return "required"
    return "none" if isinstance(choice, NoChoice) else None
