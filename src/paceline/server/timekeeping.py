"""The edges of a call's time: the first byte that uvicorn reads and the last that it writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.calls import Call
from paceline.server.timeline import server_timing

_FIRST_BYTE = "paceline_first_byte_ns"
_DRAIN = "paceline_drain"
CALL = "paceline_call"


class TimedProtocol(HttpToolsProtocol):
    """Notes when a request's first byte is read, and hands bytes to the kernel before going on.

    uvicorn by itself buffers up to 64 KiB that a slow reader has not taken, so that the end of a
    response would look sooner than it is.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # An empty buffer of a TLS transport has reached a limit of 0, and would never be left.
        is_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=1 if is_tls else 0)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        state: dict[str, Any] = self.scope["state"]
        state[_FIRST_BYTE] = time.monotonic_ns()
        state[_DRAIN] = self.flow.drain


class Timekeeping:
    """ASGI middleware: gives each POST to `paths` a Call, and tells it of its response's ends."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: frozenset[str],
        on_open: Callable[[Call], None],
        on_close: Callable[[Call], None],
    ) -> None:
        self._app = app
        self._paths = paths
        self._on_open = on_open
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        client = scope.get("client")
        call = Call(
            path=scope["path"],
            begin_ns=state.get(_FIRST_BYTE) or time.monotonic_ns(),
            on_close=self._on_close,
            client=client[0] if client else "",
        )
        state[CALL] = call
        self._on_open(call)

        async def timed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.started(message["status"])
                told = server_timing(call, time.monotonic_ns())
                MutableHeaders(scope=message).setdefault("server-timing", told)
            await send(message)

        try:
            await self._app(scope, receive, timed_send)
            drain: Callable[[], Awaitable[None]] | None = state.get(_DRAIN)
            if drain is not None:
                await drain()
        except Exception:
            call.started(500)  # the handler outside of this one writes it
            raise
        finally:
            call.responded()
