"""Tools: how a model is told of them, and how it writes that it calls one."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
MAX_CALLS = 16  # in one answer, where a grammar asks for calls
_MENTIONS_TOOLS = re.compile(r"\btools\b")
_WRITES_CALLS = re.compile(r"tool_calls|['\"]tool['\"]")
_LLAMA = re.compile(r"python_tag|ipython|\"parameters\"")

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class ToolStyle(enum.Enum):
    """How calls are written: Hermes and Qwen put them between markers, Llama 3 writes bare JSON.

    DESCRIBED is the form with markers, for a model whose template knows nothing of tools: the
    prompt says how.
    """

    TAGGED = enum.auto()
    BARE = enum.auto()
    DESCRIBED = enum.auto()


def tool_style(template: str) -> ToolStyle:
    """Return how a model with this chat template writes its calls."""
    if not _MENTIONS_TOOLS.search(template):
        return ToolStyle.DESCRIBED
    return ToolStyle.TAGGED if CALL_BEGIN in template else ToolStyle.BARE


def arguments_key(template: str) -> str:
    """Return the key that the arguments of a call stand under."""
    is_llama = tool_style(template) is ToolStyle.BARE and _LLAMA.search(template)
    return "parameters" if is_llama else "arguments"


def described(messages: Sequence[Any], tools: Sequence[Tool], *, template: str) -> list[Any]:
    """Return messages for a template that knows no tools: all about them is said in words.

    The tools go to the system turn; calls to the assistant's words and results to user turns,
    unless the template writes those itself.
    """
    writes_calls = _WRITES_CALLS.search(template) is not None
    told = list(messages) if writes_calls else [_in_words(message) for message in messages]
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"These functions can be called:\n{listed}\n"
        "To call one, write its name and its arguments as JSON between markers, and nothing else:\n"
        f'{CALL_BEGIN}\n{{"name": "...", "arguments": {{...}}}}\n{CALL_END}'
    )
    first = told[0] if told else None
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        content = first.get("content")
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": f"\n\n{text}"}]
        else:
            content = f"{content or ''}\n\n{text}"
        return [{**first, "content": content}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _in_words(message: Any) -> Any:
    """Return a message without fields that only a tool-aware template would write."""
    if not isinstance(message, Mapping):
        return message
    calls = message.get("tool_calls")
    if message.get("role") == "tool" and isinstance(message.get("content"), str):
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return message
    content = message.get("content")
    parts = [content] if isinstance(content, str) and content else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return message  # what is wrong with it is said where messages are checked
        arguments = function.get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        parts.append(f'{CALL_BEGIN}\n{{"name": {name}, "arguments": {text}}}\n{CALL_END}')
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}


def call_grammar(
    schemas: Mapping[str, Mapping[str, Any]],
    template: str,
    *,
    options: Mapping[str, Any],
    max_calls: int,
    must_call: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return a Lark grammar of an answer with calls; `schemas` are the arguments' by tool.

    With `must_call` it is one to `max_calls` calls and nothing else. Else it may have words as
    well, or instead be JSON by the schema `answer`. `options` are llguidance's for JSON.
    """
    rules = []
    for i, (name, schema) in enumerate(schemas.items()):
        head = f'{{"name": {json.dumps(name)}, "{arguments_key(template)}": '
        rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {_with_options(schema, options)}")
    rules.append("one: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    is_tagged = tool_style(template) is not ToolStyle.BARE
    calls = "one"
    if is_tagged:
        body = f'"\\n" one "\\n{CALL_END}"'
        rules.append(f'tagged: "{CALL_BEGIN}" {body}')
        calls = "tagged" if max_calls == 1 else f'tagged ("\\n" tagged){{0,{max_calls - 1}}}'
    if must_call:
        start = calls
    elif answer is not None:
        rules.append(f"answer: %json {_with_options(answer, options)}")
        start = f"({calls}) | answer"
    elif is_tagged:
        # A lazy rule ends at the first marker, so no words can hold one that is not followed up.
        rules += [f'words_and_marker[lazy]: WORDS "{CALL_BEGIN}"', r"WORDS: /(.|\n)*/"]
        start = f"(words_and_marker {body})* WORDS"
    else:
        rules.append(r"WORDS: /([^{ \n](.|\n)*)?/")
        start = "one | WORDS"
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": dict(options)})
