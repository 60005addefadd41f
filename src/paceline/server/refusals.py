"""What msgspec says of a body, in the words of this server: the field, its value, the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.server.errors import ApiError

_LOCATION = re.compile(r"^(?P<rule>.*) - at `(?P<key>key` in `)?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_CHOICE = re.compile(r"^Invalid (?:enum )?value")
_KIND = re.compile(r"^Expected `(?P<kinds>[^`]+)`(?P<rest>.*)$", re.DOTALL)
_BOUND = re.compile(r"^ (?P<of>of length )?(?P<sign>[<>]=?) (?P<limit>\S+)$")
_PATTERN = re.compile(r"^ matching regex '(.*)'$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)")
_KINDS = {
    "int": "an integer", "float": "a number", "str": "a string", "array": "a list",
    "object": "an object", "bool": "true or false", "null": "null",
}  # fmt: skip
_SIGNS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_UNITS = {"str": " characters", "array": " items", "object": " fields"}
_MAX_SHOWN = 80  # characters of a value


def refusal(message: str, value: Any, kind: Any, *, within: str = "") -> ApiError:
    """Return msgspec's `message` about `value` as a `kind` as the 400 that names the field.

    `within` is where `value` stands in the body: "" is the body itself.
    """
    location = _LOCATION.match(message)
    inner, rule = (location["path"], location["rule"]) if location else ("", message)
    path = ".".join(filter(None, (within, inner)))
    if unknown := _UNKNOWN.search(rule):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return ApiError(
            400, f"{name} is not a field this server knows: leave it out", param=name,
            code="unknown_parameter",
        )  # fmt: skip
    if missing := _MISSING.search(rule):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    steps = [index or name for index, name in _STEP.findall(inner)]
    if location and location["key"]:
        return ApiError(400, f"a key of {path}: it must be {_wanted(rule)}", param=path or None)
    wanted = _choices(kind, steps) if _CHOICE.match(rule) else _wanted(rule)
    shown = "".join(f" is {text}" for text in _shown(value, steps))
    return ApiError(
        400, f"{path or 'the body'}{shown}: it must be {wanted}", param=path or None
    )  # fmt: skip


def _wanted(rule: str) -> str:
    """Return what a rule asks for: "Expected `int` >= 1" is "an integer of at least 1"."""
    match = _KIND.match(rule)
    if match is None:
        return f"otherwise ({rule.replace('`', '')})"
    kinds = match["kinds"].split(" | ")
    words = " or ".join(_KINDS.get(kind, kind) for kind in kinds)
    if bound := _BOUND.match(match["rest"]):
        unit = _UNITS.get(kinds[0], "") if bound["of"] else ""
        return f"{words} {_SIGNS[bound['sign']]} {bound['limit'].removesuffix('.0')}{unit}"
    if pattern := _PATTERN.match(match["rest"]):
        return f"{words} that matches {pattern[1]}"
    return words


def _shown(value: Any, steps: Sequence[str]) -> Iterator[str]:
    """Yield the text of the value that `steps` lead to; nothing where they lead nowhere."""
    for step in steps:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (LookupError, TypeError, ValueError):
            return
    if isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, list):
        yield f"a list of {len(value)}"
    elif isinstance(value, dict):
        yield "an object"
    else:
        yield repr(value)[:_MAX_SHOWN]


def _choices(kind: Any, steps: Sequence[str]) -> str:
    """Return the values that the field at the end of `steps` may have."""
    import msgspec.inspect as ins

    def flat(node: ins.Type) -> Iterator[ins.Type]:
        if isinstance(node, ins.UnionType):
            for part in node.types:
                yield from flat(part)
        else:
            yield node.type if isinstance(node, ins.Metadata) else node

    def below(node: ins.Type, step: str) -> Iterator[ins.Type]:
        if isinstance(node, ins.StructType):
            if node.tag_field == step:
                yield ins.LiteralType((str(node.tag),))
            for field in node.fields:
                if field.encode_name == step:
                    yield from flat(field.type)
        elif isinstance(node, ins.ListType):
            yield from flat(node.item_type)
        elif isinstance(node, ins.DictType):
            yield from flat(node.value_type)

    nodes = list(flat(ins.type_info(kind)))
    for step in steps:
        nodes = [part for node in nodes for part in below(node, step)]
    found = [v for node in nodes if isinstance(node, ins.LiteralType) for v in node.values]
    if len(found) == 1:
        return repr(found[0])
    return f"one of {', '.join(map(str, found))}" if found else "another value"
