"""HTTP/1.1 for a load generator: one connection a request, bodies handed on as they arrive.

A fresh connection makes every request alike and leaves no doubt whose fault a broken one is; what
connecting costs is measured apart. Parsing is httptools' (C); 500 streams fit one core.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from paceline.bench.packets import PacketConnection
from paceline.errors import ParameterError

_LOOK_S = 3.0
_MAX_HEAD_BYTES = 256 << 10
_FIRST_FINAL_STATUS = 200
_UNTRUSTED = (18, 19, 20, 21)  # X509_V_ERR_…: the certificate's own, or of an unknown issuer


class ConnectionBrokenError(Exception):
    """The connection failed or ended before the response was complete."""


class Sink(Protocol):
    """Takes one response. Times are of the monotonic clock, one a packet."""

    def on_connected(self, now: float) -> None: ...

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> bool:
        """Return False where nothing more is to be read: the response ends here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a server listens: `address` is looked up once, `path` stands before every route."""

    host: str
    port: int
    address: str
    path: str
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Return the origin of "http://host:port[/v1]". Raises ParameterError."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ParameterError(f"{url!r} is no URL ({error}): write http://host:port") from None
        if port == 0:
            raise ParameterError(f"{url!r}: nobody listens on port 0, write http://host:port")
        if parts.query or parts.fragment or parts.username is not None:
            raise ParameterError(f"{url!r}: leave out what is not host, port and path")
        if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
            raise ParameterError(f"{url!r}: write the path in ASCII, with %XX for other letters")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ParameterError(f"{url!r} is no URL: write http://host:port or https://host")
        is_tls = parts.scheme == "https"
        port = port or (443 if is_tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter for names that are no host's
            raise ParameterError(
                f"{parts.hostname!r} has no address ({error}): check the URL"
            ) from None
        address = _listening([str(entry[4][0]) for entry in found], port)
        return cls(host=parts.hostname, port=port, address=address, path=path, is_tls=is_tls)

    @property
    def place(self) -> str:
        """Host and port, as a URL and the Host header have them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{self.place}{self.path}"


def _listening(addresses: Sequence[str], port: int) -> str:
    """Return the first address at which somebody listens, the first of all where nobody does.

    "localhost" may be ::1 and 127.0.0.1, of which a server often has the second alone.
    """
    for address in addresses if len(addresses) > 1 else ():
        with suppress(OSError), socket.create_connection((address, port), timeout=_LOOK_S):
            return address
    return addresses[0]


def request_bytes(
    origin: Origin, method: str, route: str, headers: dict[str, str], body: bytes = b""
) -> bytes:
    """Return a whole HTTP/1.1 request for `origin.path + route`."""
    lines = [f"{method} {origin.path}{route} HTTP/1.1", f"Host: {origin.place}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Connection: close", "Accept-Encoding: identity"]
    if body or method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


async def send(origin: Origin, request: bytes, sink: Sink) -> float:
    """Send one request, feed its response to `sink`, and return when that ended.

    Raises ConnectionBrokenError. Cancelling closes the connection at once.
    """
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    exchange = _Exchange(sink, done)
    if origin.is_tls:
        return await _send_over_tls(origin, request, exchange)
    connection = PacketConnection(exchange)
    try:
        try:
            await connection.connect(origin.address, origin.port)
        except OSError as error:
            raise _cannot_connect(error) from None
        await connection.write(request, done)
        return await done
    finally:
        connection.close()


async def _send_over_tls(origin: Origin, request: bytes, exchange: _Exchange) -> float:
    """As `send`; packets have the time at which they are read."""
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: _TlsProtocol(request, exchange),
            origin.address,
            origin.port,
            ssl=_tls(),
            server_hostname=origin.host,
        )
    except OSError as error:
        raise _cannot_connect(error) from None
    try:
        return await exchange.done
    finally:
        transport.abort()


def _cannot_connect(error: OSError) -> ConnectionBrokenError:
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "; SSL_CERT_FILE=FILE.pem trusts it" if error.verify_code in _UNTRUSTED else ""
        return ConnectionBrokenError(f"cannot connect: {error.verify_message}{remedy}")
    return ConnectionBrokenError(f"cannot connect: {error.strerror or error}")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the system's certificates: once


class _TlsProtocol(asyncio.Protocol):
    def __init__(self, request: bytes, exchange: _Exchange) -> None:
        self._request = request
        self._exchange = exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)
        self._exchange.on_connected(time.perf_counter())

    def data_received(self, data: bytes) -> None:
        self._exchange.on_data(data, time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        self._exchange.on_end(error, time.perf_counter())


class _Exchange:
    """The response to one request, on a connection of its own (a packets.Reader)."""

    def __init__(self, sink: Sink, done: asyncio.Future[float]) -> None:
        self.done = done
        self._sink = sink
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._num_head_bytes = 0
        self._now = 0.0
        self._status = 0

    def on_connected(self, now: float) -> None:
        self._sink.on_connected(now)

    def on_data(self, data: bytes, now: float) -> None:
        self._now = now
        if self._parser is None:
            return
        self._num_head_bytes += 0 if self._status else len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is no HTTP: {error}")
        if not self._status and self._num_head_bytes > _MAX_HEAD_BYTES:
            self._fail(f"the response's head is longer than {_MAX_HEAD_BYTES >> 10} KiB")
        if self.done.done():
            self._parser = None  # it holds this object: a cycle that would keep answers for long

    def on_end(self, error: Exception | None, now: float) -> None:
        is_framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self._status and not is_framed:
            self._now = now
            self.on_message_complete()  # such a body ends with its connection
        else:
            reason = str(error) if error else "closed before the response was complete"
            self._fail(f"connection lost: {reason}")
        self._parser = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:  # 100 Continue, 103 Early Hints: the response follows
            self._headers = {}
            return
        self._status = status
        self._sink.on_head(self._status, self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        if not self.done.done() and not self._sink.on_body(data, self._now):
            self.on_message_complete()

    def on_message_complete(self) -> None:
        if self._status and not self.done.done():
            self.done.set_result(self._now)

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionBrokenError(reason))
