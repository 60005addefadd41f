"""What is whole in a JSON object that was cut."""

from __future__ import annotations

from typing import Any

import msgspec

_CLOSED_BY = {"{": "}", "[": "]"}


def whole_members(text: str) -> dict[str, Any]:
    """Return the object that `text` is or begins: of one that was cut, what came whole.

    >>> whole_members('{"a": [1, 2, 3')
    {'a': [1, 2]}

    {} where it is no object at all.
    """
    end, closing = 0, ""  # the last place where a value was whole, and what closes the rest there
    brackets: list[str] = []
    is_in_string = is_escaped = False
    for i, char in enumerate(text):
        if is_in_string:
            is_in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
            continue
        is_in_string = char == '"'
        if char in "{[":
            brackets.append(char)
        elif char in "}]" and brackets:
            brackets.pop()
        elif char != ",":
            continue
        end, closing = i + (char != ","), _closing(brackets)
    try:
        found = msgspec.json.decode(text[:end] + closing)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _closing(brackets: list[str]) -> str:
    return "".join(_CLOSED_BY[bracket] for bracket in reversed(brackets))
