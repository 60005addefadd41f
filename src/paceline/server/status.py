"""What a server says about itself: its health, its version and its model."""

from __future__ import annotations

import time

import msgspec
from starlette.responses import Response

from paceline import __version__
from paceline.engine.build import LoadedModel
from paceline.server.door import Life
from paceline.server.errors import ApiError
from paceline.server.openai import model_object
from paceline.server.tokens import check_model


class Status:
    """The routes that ask for nothing but how things are."""

    def __init__(self, loaded: LoadedModel, life: Life) -> None:
        self._loaded = loaded
        self._life = life
        self._created = int(time.time())

    async def health(self) -> Response:
        stats = self._loaded.engine.stats()
        body = {"status": "ok", "version": __version__, "model": self._loaded.name, "engine": stats}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def ready(self) -> Response:
        """Say whether new calls are taken: what a load balancer asks."""
        if self._life.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return Response(b'{"status":"ready"}', media_type="application/json")

    async def version(self) -> Response:
        return Response(
            msgspec.json.encode({"version": __version__}), media_type="application/json"
        )

    async def models(self) -> Response:
        body = {"object": "list", "data": [self._model()]}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def model(self, name: str) -> Response:
        check_model(name, self._loaded.name)
        return Response(msgspec.json.encode(self._model()), media_type="application/json")

    def _model(self) -> dict[str, object]:
        max_model_len = self._loaded.config.max_model_len
        assert max_model_len is not None
        return model_object(self._loaded.name, self._created, max_model_len)
