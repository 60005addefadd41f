"""/openapi.json: the API, told by the types that bodies are decoded with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from paceline.server.schema import Fields

if TYPE_CHECKING:
    from paceline.server.operations import Operation

_REF = "#/components/schemas/{name}"
_DEADLINE = "x-request-deadline-ms"
_HEADERS: dict[str, dict[str, Any]] = {
    "x-request-id": {"type": "string", "maxLength": 128, "pattern": "^[ -~]*$"},
    _DEADLINE: {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400_000},
    "x-paceline-timings": {"enum": ["true", "false"]},
}


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Let /openapi.json tell of all routes that `app` has by then; it is made when asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi(app, has_keys=has_keys)
        return app.openapi_schema

    told: Callable[[], dict[str, Any]] = document
    app.openapi = told  # type: ignore[method-assign]


def openapi(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of an app whose routes are all among OPERATIONS, or hidden."""
    from paceline.server.operations import OPERATIONS

    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    shown = {
        (method, path): OPERATIONS[method, path]
        for path, methods in found["paths"].items()
        for method in methods
    }
    schemas, components = _schemas(shown.values())
    for (method, path), operation in shown.items():
        told = found["paths"][path][method]
        told["summary"] = operation.summary
        told.pop("description", None)
        told["parameters"] = [
            *(p for p in told.get("parameters", ()) if p["in"] == "path"),
            *(_parameter("query", name, dict(schema)) for name, schema in operation.query.items()),
        ]
        if operation.streams:
            told["parameters"] += [_parameter("header", *header) for header in _HEADERS.items()]
        elif 504 in operation.statuses:
            told["parameters"].append(_parameter("header", _DEADLINE, _HEADERS[_DEADLINE]))
        if operation.body is not None:
            told["requestBody"] = _content(schemas[operation.body], required=True)
        told["responses"] = _responses(path, operation, schemas, has_keys=has_keys)
    found["components"] = {"schemas": components}
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for (method, path), _ in shown.items():
            if path not in _open_paths():
                found["paths"][path][method]["security"] = [{"key": []}]
    return found


def _open_paths() -> Iterable[str]:
    from paceline.server.door import OPEN_PATHS

    return OPEN_PATHS


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": False, "schema": schema}


def _content(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}, **more}


def _responses(
    path: str, operation: Operation, schemas: dict[Any, dict[str, Any]], *, has_keys: bool
) -> dict[str, Any]:
    from paceline.server import shapes
    from paceline.server.operations import STATUSES

    if isinstance(operation.answer, str):
        good: dict[str, Any] = {"content": {operation.answer: {"schema": {"type": "string"}}}}
    else:
        good = _content(schemas[operation.answer])
    if operation.streams or "stream" in operation.query:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = shapes.MessageError if path.startswith("/v1/messages") else shapes.Error
    statuses = {*operation.statuses, *((401,) if has_keys and path not in _open_paths() else ())}
    return {
        "200": {"description": "The answer.", **good},
        **{str(s): _content(schemas[error], description=STATUSES[s]) for s in sorted(statuses)},
    }


def _schemas(
    operations: Iterable[Operation],
) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """Return a schema for each type that `operations` have, and what these refer to."""
    from paceline.server import shapes

    bodies = [operation.body for operation in operations if operation.body is not None]
    answers = [o.answer for o in operations if not isinstance(o.answer, str)]
    noted = [kind for body in bodies if issubclass(body, Fields) for kind in body.noted.values()]
    types = list(dict.fromkeys([*bodies, *noted, *answers, shapes.Error, shapes.MessageError]))
    told, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, told, strict=True))
    for body in bodies:
        _tell_of_nulls_and_neutral_fields(components[body.__name__], body, schemas)
    return schemas, components


def _tell_of_nulls_and_neutral_fields(
    schema: dict[str, Any], body: type[msgspec.Struct], schemas: dict[Any, dict[str, Any]]
) -> None:
    """Add what `parse` allows besides the fields of a type.

    A field that is null counts as absent, and some fields of OpenAI are known but not acted upon.
    """
    properties, required = schema["properties"], schema.get("required", ())
    if issubclass(body, Fields):
        for name, kind in body.noted.items():
            properties[name] = {**schemas[kind], "description": "Checked, and kept nowhere."}
        for name, values in body.neutral.items():
            properties[name] = {"description": "Refused unless it asks for nothing."}
            if values:
                properties[name]["enum"] = list(values)
    for name, told in properties.items():
        if name not in required and {"type": "null"} not in told.get("anyOf", ()):
            properties[name] = {"anyOf": [told, {"type": "null"}]}
