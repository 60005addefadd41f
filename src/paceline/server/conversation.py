"""What the messages of a chat may hold: each field has a meaning, asks for nothing, or is refused.

Clients send answers back as they came, from this server or from another one, so an assistant's
message may have fields of replies as long as they are empty. Values of the fields that templates
read are checked where messages are brought to the templates' form (`paceline.text.messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline.server.errors import ApiError
from paceline.server.refusals import refusal
from paceline.text.reasoning import reasons

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every prefix is cached as it is: where a client wants one to be is checked, and no more."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheBreakpoint(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's word for the same."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


_CACHE_MARKS = {"cache_control": CacheControl, "prompt_cache_breakpoint": CacheBreakpoint}
_MESSAGE = {"role": Any, "content": Any, "name": str, **_CACHE_MARKS}
_THINKING = ("reasoning_content", "reasoning")  # two names of one field
# The fields of each role; one of Any is looked at by who uses it. `parsed` and `parsed_arguments`
# are what OpenAI's package made of the text beside them.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("system", "developer", "user"), _MESSAGE),
    "assistant": {**_MESSAGE, "tool_calls": Any, "parsed": Any, **dict.fromkeys(_THINKING, str)},
    "tool": {**_MESSAGE, "tool_call_id": str},
}
_CALL = {"id": str, "type": Literal["function"], "function": Any, "index": int}
_FUNCTION = {"name": Any, "arguments": Any, "parsed_arguments": Any}
_TEXT_PART = {"type": Any, "text": Any, **_CACHE_MARKS}
_PARTS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), _TEXT_PART),
    "refusal": {"type": Any, "refusal": Any},
}
# Of replies, this server's and others': accepted while they are empty.
_OF_REPLIES = frozenset({
    "refusal", "annotations", "audio", "function_call", "tool_calls", *_THINKING,
    "reasoning_details", "thinking_blocks", "images", "logprobs",
    "provider_specific_fields",
})  # fmt: skip


def encode_conversation(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    on_rendered: Callable[[], object] = lambda: None,
) -> list[int]:
    """Return the token ids of a client's messages. Raises ApiError naming a field at fault."""
    template = "" if loaded.template is None else loaded.template.source
    check_messages(messages, template=template)
    return loaded.encode_chat(
        [_with_thinking(message) for message in messages], tools=tools, variables=variables,
        on_rendered=on_rendered,
    )  # fmt: skip


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose thinking stands where chat templates look for it."""
    if message.get("role") != "assistant" or not message.get("reasoning"):
        return message
    told = {**message, "reasoning_content": message["reasoning"]}
    del told["reasoning"]
    return told


def check_messages(messages: Sequence[Mapping[str, Any]], *, template: str) -> None:
    """Raise ApiError for the first field of a message that has no meaning here.

    Thinking of earlier turns (`reasoning_content`, or `reasoning`) has one where the model reasons
    or `template` reads it.
    """
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _FIELDS:
            continue  # the role is refused by whoever reads it
        _check_fields(message, _FIELDS[role], path)
        _check_thinking(message, path, template)
        _check_parts(message.get("content"), f"{path}.content")
        if role == "assistant":
            _check_calls(message.get("tool_calls"), f"{path}.tool_calls")


def _check_thinking(message: Mapping[str, Any], path: str, template: str) -> None:
    given = [name for name in _THINKING if message.get(name)]
    if len({message[name] for name in given}) > 1:
        raise ApiError(
            400, f"{path}.reasoning and {path}.reasoning_content differ: send one of them",
            param=f"{path}.reasoning",
        )  # fmt: skip
    if given and not (reasons(template) or "reasoning_content" in template):
        raise ApiError(
            400, f"{path}.{given[0]} is not read by this model's chat template: leave it out",
            param=f"{path}.{given[0]}", code="unsupported_parameter",
        )  # fmt: skip


def _check_parts(content: object, path: str) -> None:
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _PARTS:
            _check_fields(part, _PARTS[kind], f"{path}[{i}]")


def _check_calls(calls: object, path: str) -> None:
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, Mapping):
            _check_fields(call, _CALL, f"{path}[{i}]")
            if isinstance(function := call.get("function"), Mapping):
                _check_fields(function, _FUNCTION, f"{path}[{i}].function")


def _check_fields(given: Mapping[str, Any], known: Mapping[str, Any], path: str) -> None:
    """Raise ApiError for a field that is not among `known`, or is of another type than there."""
    for name, value in given.items():
        if value is None:
            continue
        kind = known.get(name)
        if kind is None:
            if name not in _OF_REPLIES:
                raise ApiError(
                    400, f"{path}.{name} is not a field this server knows: leave it out",
                    param=f"{path}.{name}", code="unknown_parameter",
                )  # fmt: skip
            if value not in ("", [], {}):
                raise ApiError(
                    400, f"{path}.{name} is not supported by this server: leave it out",
                    param=f"{path}.{name}", code="unsupported_parameter",
                )  # fmt: skip
        elif kind is not Any:
            _check_kind(value, kind, f"{path}.{name}")


def _check_kind(value: Any, kind: Any, path: str) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error), value, kind, within=path) from None
