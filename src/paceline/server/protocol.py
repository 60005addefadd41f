"""BoundedProtocol: connections that send nothing, or no end of headers, are closed."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from paceline.server.timekeeping import TimedProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(TimedProtocol):
    """Gives a request's head HEAD_TIMEOUT_S, from the connection's or its own first byte on.

    uvicorn bounds the time between requests only, and neither the time nor the length of a head: a
    few hundred silent connections would use up the process's files.
    """

    HEAD_TIMEOUT_S: ClassVar[float] = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._has_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.HEAD_TIMEOUT_S, self._close)

    def _has_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
