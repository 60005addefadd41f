"""Packets: a TCP connection of ours that knows when the kernel received what it reads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

_SO_TIMESTAMPNS = 35  # of Linux; Python's socket module does not name it
_TIMESPEC = struct.Struct("@ll")
_READ_BYTES = 65536
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_SAME_MOMENT_S = 20e-6
_MAX_READINGS = 5


class Reader(Protocol):
    """What takes the packets of one connection. Times are of the monotonic clock."""

    def on_connected(self, now: float) -> None: ...

    def on_data(self, data: bytes, now: float) -> None: ...

    def on_end(self, error: Exception | None, now: float) -> None: ...


class PacketConnection:
    """One connection, opened by `connect`, read until it ends or is closed.

    A packet's time is the kernel's, so an event loop that is late, or a process that waits for a
    CPU, makes no packet late. Where several were received since the last read it is the last one's.
    """

    def __init__(self, reader: Reader) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._last = 0.0
        self._socket: socket.socket | None = None
        self._poll: _Poll | None = None

    async def connect(self, address: str, port: int) -> None:
        """Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # then the time is that of the read
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._poll = _Poll.of(self._loop)
        code = sock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            opened = asyncio.Event()
            self._poll.watch(sock, select.EPOLLOUT, opened.set)
            await opened.wait()
            self._poll.forget(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._last = time.perf_counter()
        self._reader.on_connected(self._last)
        self._poll.watch(sock, select.EPOLLIN, self._read)

    async def write(self, data: bytes, until: asyncio.Future[float]) -> None:
        """Send all, or what the other side takes before `until` is done or the connection ends.

        Why it ended is what reading tells.
        """
        assert self._socket is not None
        try:
            num_sent = self._socket.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return
        if num_sent == len(data):
            return
        rest = self._loop.create_task(self._loop.sock_sendall(self._socket, data[num_sent:]))
        both: set[asyncio.Future[Any]] = {rest, until}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)

    def close(self) -> None:
        """Close now; nothing is read any more."""
        if self._socket is not None:
            if self._poll is not None:
                self._poll.forget(self._socket)
            self._socket.close()

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            # Later than the packet before, also where somebody sets the machine's clock.
            self._last = max(self._last, _received_at(ancillary))
            self._reader.on_data(data, self._last)
        else:
            self._end(None)

    def _end(self, error: OSError | None) -> None:
        assert self._socket is not None
        assert self._poll is not None
        self._poll.forget(self._socket)
        self._reader.on_end(error, time.perf_counter())


class _Poll:
    """The sockets that one event loop waits for, in an epoll set of our own.

    uvloop forgets a socket that reports an error without a word, so a reset would never be seen.
    The set is there while it watches something.
    """

    _polls: ClassVar[dict[asyncio.AbstractEventLoop, _Poll]] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Poll:
        found = cls._polls.get(loop)
        return cls(loop) if found is None else found

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        self._callbacks: dict[int, Callable[[], object]] = {}

    def watch(self, sock: socket.socket, events: int, callback: Callable[[], object]) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._dispatch)
            self._polls[self._loop] = self
        self._epoll.register(sock.fileno(), events)
        self._callbacks[sock.fileno()] = callback

    def forget(self, sock: socket.socket) -> None:
        if self._callbacks.pop(sock.fileno(), None) is None:
            return
        assert self._epoll is not None
        self._epoll.unregister(sock.fileno())
        if not self._callbacks:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
            del self._polls[self._loop]

    def _dispatch(self) -> None:
        assert self._epoll is not None
        for number, _ in self._epoll.poll(0):
            callback = self._callbacks.get(number)
            if callback is not None:  # one before it may have closed this one
                callback()


def _received_at(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Return when the kernel received the packet; now where it does not say."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            now, wall = both_clocks()
            received: float = seconds + 1e-9 * nanoseconds
            return now - max(0.0, wall - received)
    return time.perf_counter()


def both_clocks() -> tuple[float, float]:
    """Return the monotonic and the wall clock's time at one moment.

    A process that loses its CPU between two readings would see its packets come early by that.
    """
    now, wall = time.perf_counter(), time.time()
    for _ in range(_MAX_READINGS):
        again = time.perf_counter()
        if again - now < _SAME_MOMENT_S:
            break
        now, wall = again, time.time()
    return now, wall
