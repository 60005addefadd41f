"""A uvicorn server that ends its calls in good order."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from types import FrameType

import uvicorn

from paceline.engine.build import LoadedModel
from paceline.engine.engine import Engine
from paceline.server.app import STOP_TIMEOUT_S, create_app
from paceline.server.reports import Observer
from paceline.server.timekeeping import TimedProtocol

_POLL_S = 0.05


def serve(
    loaded: LoadedModel,
    listener: socket.socket,
    *,
    grace_s: float,
    observers: Iterable[Observer] = (),
    page: bool = True,
) -> None:
    """Serve `loaded` on `listener` until a signal ends it; `observers` are told of each call."""
    config = uvicorn.Config(
        create_app(loaded, observers=observers, page=page), http=TimedProtocol, log_config=None,
        access_log=False, server_header=False, lifespan="on",
        timeout_graceful_shutdown=round(grace_s + STOP_TIMEOUT_S),
    )  # fmt: skip
    GracefulServer(config, loaded.engine, grace_s=grace_s).run(sockets=[listener])


class GracefulServer(uvicorn.Server):
    """Gives calls in flight `grace_s`; then each gets a 503 or an error event as its end.

    uvicorn would cancel their tasks, which leaves clients without a word and tracebacks in the
    log. A second Ctrl-C only ends the grace.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, *, grace_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._is_hurried |= self.force_exit
        self.force_exit = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_calls())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_calls(self) -> None:
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and not self._is_hurried:
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(self._engine.stop, STOP_TIMEOUT_S)
