"""A uvicorn server that ends its calls in good order."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from paceline.server.answers import STOP_TIMEOUT_S
from paceline.server.collecting import IdleCollector
from paceline.server.door import Life
from paceline.server.protocol import BoundedProtocol

if TYPE_CHECKING:
    from fastapi import FastAPI

    from paceline.server.tls import Tls


def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    life: Life,
    grace_s: float,
    stop: Callable[[], None],
    tls: Tls | None = None,
) -> None:
    """Serve `app`, which looks at `life`, on `listener` until a signal ends it.

    `stop` ends what its calls wait for; with `tls` all of it is encrypted.
    """
    config = uvicorn.Config(
        app, http=BoundedProtocol, log_config=None, access_log=False, server_header=False,
        lifespan="on", timeout_graceful_shutdown=round(STOP_TIMEOUT_S) + 1,
        ssl_certfile=None if tls is None else tls.cert,
        ssl_keyfile=None if tls is None else tls.key,
    )  # fmt: skip
    with IdleCollector() as collector:
        server = GracefulServer(config, stop, life=life, grace_s=grace_s, collector=collector)
        server.run(sockets=[listener])


class GracefulServer(uvicorn.Server):
    """Ends in good order at a signal.

    From the first one on new calls get a 503 and `/ready` says no, while calls in flight have
    `grace_s` to end; then each gets a 503 or an error event as its end. The server goes on
    listening until then, so that who asks is told. uvicorn would stop listening at once and cancel
    the tasks, which leaves clients without a word and tracebacks in the log. A second signal ends
    the grace.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        stop: Callable[[], None],
        *,
        life: Life,
        grace_s: float,
        collector: IdleCollector,
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._life = life
        self._grace_s = grace_s
        self._collector = collector
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
        self._collector.look(is_idle=not self._life.num_calls)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._stop)
        await super().shutdown(sockets)
