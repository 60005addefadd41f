"""ModelRoutes: finds the model that a call asks for, has it loaded, and lets it answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.measure.ledger import Part
from paceline.server.answers import USES, Read
from paceline.server.body import is_short, read_body
from paceline.server.calls import Call
from paceline.server.door import tenant
from paceline.server.embeddings import writes_nothing
from paceline.server.models.entry import Entry
from paceline.server.models.models import Models
from paceline.server.models.served import Served, ServedEncoder
from paceline.server.openai import read_chat, read_completion
from paceline.server.prefixes import no_pin
from paceline.server.timekeeping import CALL


class UseUntilEnd:
    """ASGI middleware: a model that a call found is in use until its reply has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as uses:
            scope.setdefault("state", {})[USES] = uses
            await self._app(scope, receive, send)


class _Body(msgspec.Struct):
    model: Any = None


class ModelRoutes:
    """The routes that one model answers; `answer` is for dialects that are not a model's own."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def chat(self, http: HttpRequest) -> Response:
        return await self.answer(http, read_chat)

    async def completions(self, http: HttpRequest) -> Response:
        return await self.answer(http, read_completion)

    async def answer(
        self, http: HttpRequest, read: Read, *, is_quick: Callable[[bytes], bool] = is_short
    ) -> Response:
        served = await self._writer(http)
        return await served.answers.answer(http, read, is_quick=is_quick)

    async def message(self, http: HttpRequest) -> Response:
        return await (await self._writer(http)).messages.create(http)

    async def count_tokens(self, http: HttpRequest) -> Response:
        return await (await self._writer(http)).messages.count_tokens(http)

    async def tokenize(self, http: HttpRequest) -> Response:
        return await (await self._writer(http)).tokens.tokenize(http)

    async def detokenize(self, http: HttpRequest) -> Response:
        return await (await self._writer(http)).tokens.detokenize(http)

    async def embeddings(self, http: HttpRequest) -> Response:
        embeddings = (await self._served(http, await self._asked(http))).embeddings
        assert embeddings is not None
        return await embeddings.embeddings(http)

    async def warm_prefix(self, http: HttpRequest) -> Response:
        return await (await self._writer(http)).prefixes.create(http)

    async def pinned(self, http: HttpRequest) -> Response:
        """List the pins of whoever asks, of all models that are loaded: others have none."""
        owner = tenant(http.scope)
        data = [pin for served in self._loaded() for pin in served.prefixes.pinned(owner)]
        body = {"object": "list", "data": data}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def unpin(self, http: HttpRequest, name: str) -> Response:
        owner = tenant(http.scope)
        if not any(served.prefixes.unpin(owner, name) for served in self._loaded()):
            raise no_pin(name)
        body = {"id": name, "object": "cache.prefix", "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")

    def _loaded(self) -> list[Served]:
        """Return those that write; encoders have no prefixes."""
        served = (entry.served for entry in self._models.entries)
        return [one for one in served if isinstance(one, Served)]

    async def _writer(self, http: HttpRequest) -> Served:
        """Return the loaded model of a call that encoders cannot answer. Raises ApiError 400."""
        entry = await self._asked(http)
        if entry.is_encoder:
            if (call := http.scope["state"].get(CALL)) is not None:
                call.model = entry.name
            raise writes_nothing(entry.name)
        served = await self._served(http, entry)
        assert isinstance(served, Served)
        return served

    async def _served(self, http: HttpRequest, entry: Entry) -> Served | ServedEncoder:
        """Return the loaded model of a call, in use from now until the reply's end."""
        uses: ExitStack = http.scope["state"][USES]
        uses.enter_context(entry.in_use())
        call: Call | None = http.scope["state"].get(CALL)
        if call is None:
            return await self._models.use(entry)
        call.model = entry.name
        if entry.served is None:
            call.lap(Part.RECEIVE)
            try:
                return await self._models.use(entry)
            finally:
                call.lap(Part.LOAD)
        return entry.served

    async def _asked(self, http: HttpRequest) -> Entry:
        """Return the model that a body names; one that cannot be read is for the first to refuse.

        A model of its own needs no look at the body: it refuses other names itself.
        """
        models = self._models
        if len(models.entries) == 1:
            return models.first
        body = await read_body(http)
        # A long one would hold up the streams of others.
        name = _model(body) if is_short(body) else await asyncio.to_thread(_model, body)
        if (call := http.scope["state"].get(CALL)) is not None:
            call.asked_for(name)
        return models.find(name) if isinstance(name, str) else models.first


def _model(body: bytes) -> object:
    """Return the field `model` of a body, None if it has none or cannot be read."""
    try:
        return msgspec.json.decode(body, type=_Body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
