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
from paceline.server.admission import Limits
from paceline.server.answers import STOP_TIMEOUT_S
from paceline.server.app import create_app
from paceline.server.door import Keys, Life
from paceline.server.protocol import BoundedProtocol
from paceline.server.reports import Observer


def serve(
    loaded: LoadedModel,
    listener: socket.socket,
    *,
    grace_s: float,
    observers: Iterable[Observer] = (),
    keys: Keys | None = None,
    limits: Limits | None = None,
    page: bool = True,
) -> None:
    """Serve `loaded` on `listener` until a signal ends it; `observers` are told of each call."""
    life = Life()
    config = uvicorn.Config(
        create_app(loaded, observers=observers, life=life, keys=keys, limits=limits, page=page),
        http=BoundedProtocol, log_config=None, access_log=False, server_header=False, lifespan="on",
        timeout_graceful_shutdown=round(STOP_TIMEOUT_S) + 1,
    )  # fmt: skip
    GracefulServer(config, loaded.engine, life=life, grace_s=grace_s).run(sockets=[listener])


class GracefulServer(uvicorn.Server):
    """Ends in good order at a signal.

    From the first one on new calls get a 503 and `/ready` says no, while calls in flight have
    `grace_s` to end; then each gets a 503 or an error event as its end. The server goes on
    listening until then, so that who asks is told. uvicorn would stop listening at once and cancel
    the tasks, which leaves clients without a word and tracebacks in the log. A second signal ends
    the grace.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, *, life: Life, grace_s: float
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._life = life
        self._grace_s = grace_s
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.force_exit = False
        if not self._life.is_draining:
            self._deadline = time.monotonic() + self._grace_s
        is_first, self._life.is_draining = not self._life.is_draining, True
        self.should_exit = not (is_first and self._life.num_calls)

    async def on_tick(self, counter: int) -> bool:
        if self._life.is_draining and not self.should_exit:
            is_over = time.monotonic() >= self._deadline
            self.should_exit = is_over or not self._life.num_calls
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._engine.stop, STOP_TIMEOUT_S)
        await super().shutdown(sockets)
