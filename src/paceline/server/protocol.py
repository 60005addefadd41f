"""BoundedProtocol: connections that send nothing, too much, or take nothing are closed."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import ClassVar

from paceline.server.timekeeping import TimedProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 64  # requests that a connection sends before it has the answers
_TAKEN = slice(120, 128)  # tcpi_bytes_acked in Linux's struct tcp_info, since 4.1


class TooMuchError(Exception):
    """A connection sent more than it may: it gets a 400, and is closed."""


class BoundedProtocol(TimedProtocol):
    """Gives a request's head HEAD_TIMEOUT_S, from the connection's or its own first byte on.

    A reply that nobody takes stays in memory, megabytes of it: a client that takes no byte for
    SEND_TIMEOUT_S is cut off. A slow one has all the time that it needs.

    uvicorn bounds the time between requests only, and neither the time nor the length of a head: a
    few hundred silent connections would use up the process's files. Nor does it bound the requests
    in one read, whose ten thousand heads would hold up the streams of others for 0.1 s.
    """

    HEAD_TIMEOUT_S: ClassVar[float] = 10.0
    SEND_TIMEOUT_S: ClassVar[float] = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        self._is_taken()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise TooMuchError
        super().on_message_begin()
        self._num_told_bytes = 0  # of the head, by what is in it
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        """A head that is read at once is bounded, too."""
        self._num_told_bytes += num_bytes
        if self._num_told_bytes > MAX_HEAD_BYTES:
            raise TooMuchError

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

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None and not self.transport.is_closing():
            self._await_reader()

    def resume_writing(self) -> None:
        self._is_taken()
        super().resume_writing()

    def _await_reader(self) -> None:
        taken = _num_taken(self.transport)
        self._send_timer = self.loop.call_later(self.SEND_TIMEOUT_S, self._cut, taken)

    def _is_taken(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _cut(self, num_bytes: int) -> None:
        """Cut a client off that has taken nothing since it had `num_bytes`."""
        self._send_timer = None
        if _num_taken(self.transport) > num_bytes:
            self._await_reader()
        else:
            self.transport.abort()


def _num_taken(transport: asyncio.Transport) -> int:
    """Return the bytes that the other side has acknowledged, -1 if the connection is lost.

    Buffers tell less: that of the kernel, up to 4 MiB, takes more only when a third of it is free.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return -1
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TAKEN.stop)
    return int.from_bytes(info[_TAKEN], sys.byteorder)
