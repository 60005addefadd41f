"""Turnstile: requests that come together begin one after the other, and streams go on between."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send


class Turnstile:
    """ASGI middleware: lets one request begin in each turn of the event loop.

    Reading, checking and refusing a request keeps the loop for up to a millisecond. asyncio runs
    all that is ready before it looks for more, so 500 at once would hold the tokens of every
    stream up for half a second. A request alone waits for one turn, some ten microseconds.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gate = asyncio.Lock()  # first come, first served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            async with self._gate:
                await asyncio.sleep(0)
        await self._app(scope, receive, send)
