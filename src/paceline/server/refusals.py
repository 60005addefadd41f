"""What msgspec says of a body, in the words of this server: the field, its value, the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from paceline.server.errors import ApiError

_LOCATION = re.compile(r"^(?P<rule>.*) - at `(?P<key>key` in `)?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
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
        if not unknown[1]:
            return ApiError(
                400, f"{path or 'the body'} has a field without a name: leave it out",
                param=path or None, code="unknown_parameter",
            )  # fmt: skip
        name = f"{path}.{unknown[1][:_MAX_SHOWN]}" if path else unknown[1][:_MAX_SHOWN]
        return ApiError(
            400, f"{name} is not a field this server knows: leave it out", param=name,
            code="unknown_parameter",
        )  # fmt: skip
    if missing := _MISSING.search(rule):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    steps = [index or name for index, name in _STEP.findall(inner)]
    if location and (location["key"] or steps[-1:] == ["..."]):
        return _of_a_map(steps[0], value, kind, rule, is_key=bool(location["key"]))
    wanted = _choices(kind, steps) if _CHOICE.match(rule) else _wanted(rule)
    shown = "".join(f" is {text}" for text in _at(value, steps, rule))
    return ApiError(
        400, f"{path or 'the body'}{shown}: it must be {wanted}", param=path or None
    )  # fmt: skip


def unsupported(name: str, value: Any, accepted: Sequence[Any]) -> ApiError:
    """Return the 400 for a field that may have the `accepted` values, which ask for nothing."""
    also = " or ".join(msgspec.json.encode(one).decode() for one in accepted)
    return ApiError(
        400, f"{name} is {shown(value)}, which this server does not support: leave it out"
        + (f", or send {also}" if also else ""),
        param=name, code="unsupported_parameter",
    )  # fmt: skip


def _of_a_map(field: str, value: Any, kind: Any, rule: str, *, is_key: bool) -> ApiError:
    """Return the 400 for an entry of the map `field`: msgspec does not say which one it is."""
    key, item = next(
        (key, item)
        for key, item in value[field].items()
        if not _fits({"model": "", field: {key: item}}, kind, field)
    )
    name = key[:_MAX_SHOWN]
    if is_key:
        return ApiError(
            400, f"{field} has the key {name!r}: it must be {_wanted(rule)}", param=field
        )
    return ApiError(
        400, f"{field}.{name} is {shown(item)}: it must be {_wanted(rule)}", param=f"{field}.{name}"
    )


def _wanted(rule: str) -> str:
    """Return what a rule asks for: "Expected `int` >= 1" is "an integer of at least 1"."""
    if rule == "Number out of range":
        return "a number below 1.8e308 in size"
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


def shown(value: Any) -> str:
    """Return a value as messages show it: its beginning, of a list or an object the kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return repr(value)[:_MAX_SHOWN]


def _at(value: Any, steps: Sequence[str], rule: str) -> Iterator[str]:
    """Yield the text of the value that `steps` lead to; nothing where they lead nowhere."""
    for step in steps:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (LookupError, TypeError, ValueError):
            return
    is_too_long = isinstance(value, dict) and "of length" in rule
    yield f"an object of {len(value)}" if is_too_long else shown(value)


def _fits(fields: Any, kind: Any, name: str) -> bool:
    """Whether nothing is wrong with the field `name` of a `kind`."""
    try:
        msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        return f"$.{name}" not in str(error)
    return True


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
