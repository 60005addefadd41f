"""Validity: whether a call or an answer in JSON is what the request's schema wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def are_valid_calls(calls: Iterable[Sequence[str]], fields: Mapping[str, Any]) -> bool:
    """True for one call or more, each (name, arguments) of a tool in `fields` and by its schema.

    Without tools in `fields` any name will do, and any object.
    """
    tools = [tool["function"] for tool in fields.get("tools", ())]
    schemas = {tool["name"]: tool.get("parameters", {}) for tool in tools}
    given = list(calls)
    return bool(given) and all(
        (name in schemas or not schemas)
        and _conforms(arguments, {"type": "object", **schemas.get(name, {})})
        for name, arguments in given
    )


def is_valid_json(text: str, fields: Mapping[str, Any]) -> bool:
    """True where all of `text` is an object, by the schema of `fields` where there is one."""
    form = fields.get("response_format", {}).get("json_schema", {})
    return _conforms(text, {"type": "object", **form.get("schema", {})})


def _conforms(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        return _fits(msgspec.json.decode(text.encode()), schema)
    except (ValueError, RecursionError):  # no JSON, or deeper than anything asked for
        return False


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """True where a value keeps to type, enum, properties, required, additionalProperties and
    items: the words that the bench's own schemas use."""
    kind = schema.get("type")
    if kind is not None and not isinstance(value, _TYPES[kind]):
        return False
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(_fits(item, schema.get("items", {})) for item in value)
    if not isinstance(value, dict):
        return True
    known = schema.get("properties", {})
    if schema.get("additionalProperties") is False and not value.keys() <= known.keys():
        return False
    if not value.keys() >= set(schema.get("required", ())):
        return False
    return all(_fits(item, known.get(name, {})) for name, item in value.items())
