"""Chat messages in OpenAI's shapes, brought to the one shape that templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import TemplateError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 100_000
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_WORD = re.compile(r"[A-Za-z0-9]{1,32}")

Message = dict[str, Any]


def normalize(messages: object, *, knows_developer: bool) -> list[Message]:
    """Return messages whose content is a string and whose tool arguments are objects.

    Null, absent and empty content are all "", parts are joined, an empty `tool_calls` is left
    out, and `developer` is `system` where the template does not know it. Raises TemplateError
    with the path of what is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", messages, "a list of messages")
    if not messages:
        raise TemplateError("messages is empty: send at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise TemplateError(
            f"messages has {len(messages)} entries: at most {MAX_MESSAGES}", param="messages"
        )
    normal = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not knows_developer:
        for message in normal:
            if message["role"] == "developer":
                message["role"] = "system"
    return normal


def check_none_dropped(messages: Sequence[Message], prompt: str) -> None:
    """Raise TemplateError where a turn's words are not in the prompt.

    A template may say nothing about a role it does not know; then the model would answer a
    conversation that its user did not have. Assistant turns are left out: templates strip the
    thinking from them on purpose.
    """
    position = 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            continue
        words = _WORD.findall(message["content"], 0, 4096)
        if not words:
            continue
        probe = max(words, key=len)
        found = prompt.find(probe, position)
        if found < 0 and probe not in prompt:
            raise TemplateError(
                f"the chat template leaves out messages[{i}] (role {message['role']!r}): the "
                "model was not trained for such a turn, send it in another role",
                param=f"messages[{i}]",
            )
        position = max(found, position)


def _message(message: object, path: str) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(path, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise TemplateError(
            f"{path}.role is {role!r}: choose one of {', '.join(ROLES)}", param=f"{path}.role"
        )
    normal = {str(key): value for key, value in message.items() if value is not None}
    tool_calls = normal.pop("tool_calls", None)
    normal["content"] = _content(message.get("content"), f"{path}.content", role)
    if tool_calls:
        normal["tool_calls"] = _tool_calls(tool_calls, f"{path}.tool_calls")
    return normal


def _content(content: object, path: str, role: str) -> str:
    if content is None:
        if role == "assistant":
            return ""
        raise TemplateError(f"{path} is missing: a {role} message needs text", param=path)
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(path, content, "a string or a list of parts")
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _wrong(path, part, "an object with a type")
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise TemplateError(
            f"{path}.type is {kind!r}: this model reads text parts only", param=f"{path}.type"
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise _wrong(f"{path}.{field}", text, "a string")
    return text


def _tool_calls(calls: object, path: str) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise _wrong(path, calls, "a list of tool calls")
    normal = []
    for i, call in enumerate(calls):
        here = f"{path}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise _wrong(here, call, "an object with a function")
        if not isinstance(function.get("name"), str):
            raise _wrong(f"{here}.function.name", function.get("name"), "a string")
        arguments = _arguments(function.get("arguments"), f"{here}.function.arguments")
        normal.append({**call, "function": {**function, "arguments": arguments}})
    return normal


def _arguments(arguments: object, path: str) -> object:
    """Return arguments as an object; a string that is no JSON object stays a string."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise _wrong(path, arguments, "an object or a string of JSON")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool arguments as JSON text, as some templates want them."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            calls = [
                {**call, "function": {**call["function"], "arguments": _dumped(call)}}
                for call in calls
            ]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def has_tool_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def _dumped(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _wrong(path: str, value: object, wanted: str) -> TemplateError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return TemplateError(f"{path} is {shown}: it must be {wanted}", param=path)
