"""The app: its routes, who may ask, and how errors look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from paceline import __version__
from paceline.engine.build import LoadedModel
from paceline.errors import PacelineError
from paceline.server.admission import Limits
from paceline.server.body import HeldBodies, request_id
from paceline.server.cors import add_cors
from paceline.server.door import Door, Keys, Life
from paceline.server.embeddings import EMBEDDINGS_PATH, Embeddings
from paceline.server.errors import ApiError, as_api_error, error_response
from paceline.server.models.entry import Entry
from paceline.server.models.models import Models
from paceline.server.models.routes import ModelRoutes, UseUntilEnd
from paceline.server.openapi import describe
from paceline.server.page.routes import add_page
from paceline.server.reports import Observer, Reports
from paceline.server.responses.routes import ResponseRoutes
from paceline.server.status import Status
from paceline.server.timekeeping import Timekeeping
from paceline.server.turnstile import Turnstile

_PREFIXES = "/v1/cache/prefixes"
_GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", _PREFIXES}
)


def create_app(
    loaded: LoadedModel,
    *,
    observers: Iterable[Observer] = (),
    life: Life | None = None,
    keys: Keys | None = None,
    limits: Limits | None = None,
    page: bool = True,
    embeddings: Embeddings | None = None,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Return the ASGI app that serves `loaded` alone; `limits` bound its queue.

    `embeddings` answers /v1/embeddings. The rest is as in `create_models_app`.
    """
    num_tenants = 1 if keys is None else keys.num_tenants
    models = Models([Entry.of(loaded, embeddings)], limits=limits, num_tenants=num_tenants)
    return create_models_app(
        models, observers=observers, life=life, keys=keys, page=page, cors_origins=cors_origins,
        embeds=embeddings is not None,
    )  # fmt: skip


def create_models_app(
    models: Models,
    *,
    observers: Iterable[Observer] = (),
    life: Life | None = None,
    keys: Keys | None = None,
    page: bool = True,
    cors_origins: Sequence[str] = (),
    embeds: bool = True,
) -> FastAPI:
    """Return the ASGI app that serves `models`; its lifespan starts and stops their engines.

    The lifespan's end closes the observers, too. `life` is where it looks whether it is being
    stopped; `keys` are the only ones that it answers, None answers all. `page` says whether
    `GET /` is a page, `embeds` whether there is a /v1/embeddings. Pages of `cors_origins` may call.
    """
    reports = Reports(models, observers)
    life = life or Life()
    status = Status(models, life)
    routes = ModelRoutes(models)
    responses = ResponseRoutes(routes, life)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with models.lifespan(app):
                yield
        finally:
            await responses.background.ended()
            await asyncio.to_thread(reports.close)

    app = FastAPI(
        title="Paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for path, method, endpoint in (
        ("/health", "GET", status.health),
        ("/ready", "GET", status.ready),
        ("/version", "GET", status.version),
        ("/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/v1/models", "GET", status.models),
        ("/v1/models/{name:path}", "GET", status.model),
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completions),
        ("/v1/messages", "POST", routes.message),
        ("/v1/messages/count_tokens", "POST", routes.count_tokens),
        ("/v1/responses", "POST", responses.create),
        ("/v1/responses/{response_id}", "GET", responses.retrieve),
        ("/v1/responses/{response_id}", "DELETE", responses.delete),
        ("/v1/responses/{response_id}/cancel", "POST", responses.cancel),
        ("/v1/responses/{response_id}/input_items", "GET", responses.input_items),
        (_PREFIXES, "POST", routes.warm_prefix),
        (_PREFIXES, "GET", routes.pinned),
        (_PREFIXES + "/{name:path}", "DELETE", routes.unpin),
        ("/v1/requests/{key:path}/timeline", "GET", reports.timeline),
        ("/v1/trace", "GET", reports.trace),
        ("/v1/paceline/live", "GET", reports.live),
        ("/metrics", "GET", reports.metrics),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    if embeds:
        app.add_api_route(EMBEDDINGS_PATH, routes.embeddings, methods=["POST"], response_model=None)
    if page:
        add_page(app)
    app.add_middleware(HeldBodies)
    app.add_middleware(UseUntilEnd)
    app.add_middleware(Door, life=life, keys=keys, counted=_GENERATING | {EMBEDDINGS_PATH})
    app.add_middleware(Timekeeping, paths=_GENERATING | {EMBEDDINGS_PATH}, on_open=reports.open,
                       on_close=reports.add)  # fmt: skip
    add_cors(app, cors_origins)
    app.add_middleware(Turnstile)
    add_error_handlers(app)
    describe(app, has_keys=keys is not None)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of the app's routes look as the API's errors do."""

    @app.exception_handler(PacelineError)
    async def on_error(http: HttpRequest, error: PacelineError) -> Response:
        name = {"x-request-id": request_id(http)}
        return error_response(as_api_error(error), name, path=http.url.path)

    @app.exception_handler(HTTPException)
    async def on_http_error(http: HttpRequest, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        return error_response(ApiError(error.status_code, message), headers, path=http.url.path)

    @app.exception_handler(Exception)
    async def on_bug(http: HttpRequest, error: Exception) -> Response:
        bug = ApiError(500, "the server failed on this request; its log says why")
        # The server closes the connection after it: who would reuse it must be told.
        return error_response(bug, {"connection": "close"}, path=http.url.path)
