"""The app of a model that embeds texts and writes none."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from paceline import __version__
from paceline.server.app import add_error_handlers
from paceline.server.body import HeldBodies
from paceline.server.cors import add_cors
from paceline.server.door import Door, Keys, Life
from paceline.server.embeddings import EMBEDDINGS_PATH, Embeddings, writes_nothing
from paceline.server.errors import ApiError
from paceline.server.openai import model_object
from paceline.server.openapi import describe
from paceline.server.tokens import check_model
from paceline.server.turnstile import Turnstile

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def create_embedding_app(
    embeddings: Embeddings,
    *,
    life: Life | None = None,
    keys: Keys | None = None,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Return the ASGI app of `embeddings`, which the caller closes. The rest is as in an app."""
    life = life or Life()
    status = _Status(embeddings, life)
    app = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None)
    for path, method, endpoint in (
        ("/health", "GET", status.health),
        ("/ready", "GET", status.ready),
        ("/version", "GET", status.version),
        ("/v1/models", "GET", status.models),
        ("/v1/models/{name:path}", "GET", status.model),
        (EMBEDDINGS_PATH, "POST", embeddings.embeddings),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    for path in _GENERATING:
        app.add_api_route(path, status.writes_nothing, methods=["POST"], include_in_schema=False)
    app.add_middleware(HeldBodies)
    app.add_middleware(Door, life=life, keys=keys, counted=frozenset({EMBEDDINGS_PATH}))
    add_cors(app, cors_origins)
    app.add_middleware(Turnstile)
    add_error_handlers(app)
    describe(app, has_keys=keys is not None)
    return app


class _Status:
    """The routes that embed nothing."""

    def __init__(self, embeddings: Embeddings, life: Life) -> None:
        self._embeddings = embeddings
        self._model = embeddings.model
        self._life = life
        self._created = int(time.time())

    async def health(self) -> Response:
        model = self._model
        return _json({
            "status": "ok", "version": __version__, "model": model.name,
            "embedding": {
                "dimensions": model.dim, "max_tokens": model.max_len, "pooling": model.pooling,
                "num_waiting_tokens": self._embeddings.num_waiting_tokens,
            },
        })  # fmt: skip

    async def ready(self) -> Response:
        if self._life.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return _json({"status": "ready"})

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._object()]})

    async def model(self, name: str) -> Response:
        check_model(name, self._model)
        return _json(self._object())

    async def writes_nothing(self) -> Response:
        raise writes_nothing(self._model.name)

    def _object(self) -> dict[str, object]:
        told = model_object(self._model.name, self._created, self._model.max_len)
        return {**told, "loaded": True}


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
