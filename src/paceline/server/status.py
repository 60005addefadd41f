"""What a server says about itself: its health, its version and its models."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.responses import Response

from paceline import __version__
from paceline.server.door import Life
from paceline.server.errors import ApiError
from paceline.server.models.entry import Entry
from paceline.server.models.models import Models
from paceline.server.openai import model_object


class Status:
    """The routes that ask for nothing but how things are."""

    def __init__(self, models: Models, life: Life) -> None:
        self._models = models
        self._life = life
        self._created = int(time.time())

    async def health(self) -> Response:
        """Tell how the engines are: the first model's by itself, as where there is one alone."""
        first = self._models.first
        body: dict[str, Any] = {
            "status": "ok", "version": __version__, "model": first.name,
            "engine": first.books.stats(),
        }  # fmt: skip
        if len(self._models.entries) > 1:
            body["models"] = {entry.name: _state(entry) for entry in self._models.entries}
        return _json(body)

    async def ready(self) -> Response:
        """Say whether new calls are taken: what a load balancer asks."""
        if self._life.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return Response(b'{"status":"ready"}', media_type="application/json")

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def models(self) -> Response:
        data = [self._model(e, name) for e in self._models.entries for name in e.names]
        return _json({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        return _json(self._model(self._models.find(name), name))

    def _model(self, entry: Entry, name: str) -> dict[str, object]:
        body = model_object(name, self._created, entry.need.max_model_len)
        alias = {} if name == entry.name else {"root": entry.name}
        return {**body, **alias, "loaded": entry.served is not None}


def _state(entry: Entry) -> dict[str, Any]:
    return {
        "writes": not entry.is_encoder,
        "loaded": entry.served is not None,
        "loading": entry.loading is not None,
        "num_loads": entry.books.num_loads,
        "weight_bytes": entry.need.weight_bytes,
        "kv_bytes": entry.need.kv_bytes,
        "engine": entry.books.stats(),
    }


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
