"""Server-sent events: a response that ends when the client hangs up."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.delivery import Attended, ClientGoneError
from paceline.server.errors import ApiError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStream(Response):
    """Sends `events` as they come. A failure on the way is sent as `failure` writes it, at last.

    Starlette's StreamingResponse learns that a client left only when it next sends; this one is
    told at once, so that a request that waits in the queue is dropped too.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        attended: Attended,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        *,
        failure: Callable[[ApiError], bytes],
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**fixed, **headers})
        del self.headers["content-length"]
        self._attended = attended
        self._events = events
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._attended.attended(receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with aclosing(self._events) as events:
                    async for data in events:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            except ClientGoneError:
                return
            except ApiError as error:
                level = logging.ERROR if error.status >= 500 else logging.INFO
                logger.log(level, "stream cut: %s", error)
                data = self._failure(error)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
