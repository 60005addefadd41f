"""HTTP/1.1 for a load generator: one connection a request, bodies handed on as they arrive.

A fresh connection makes every request alike and leaves no doubt whose fault a broken one is; what
connecting costs is measured apart. Parsing is httptools' (C); 500 streams fit one core.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from paceline.errors import ParameterError


class ConnectionBrokenError(Exception):
    """The connection failed or ended before the response was complete."""


class Sink(Protocol):
    """Takes one response. Times are of the monotonic clock, read once a packet."""

    def on_connected(self, now: float) -> None: ...

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a server listens: `address` is resolved once, `path` stands before every route."""

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
        return cls(host=parts.hostname, port=port, address=str(found[0][4][0]), path=path,
                   is_tls=is_tls)  # fmt: skip

    @property
    def url(self) -> str:
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{self.host}:{self.port}{self.path}"


def request_bytes(
    origin: Origin, method: str, route: str, headers: dict[str, str], body: bytes = b""
) -> bytes:
    """Return a whole HTTP/1.1 request for `origin.path + route`."""
    lines = [f"{method} {origin.path}{route} HTTP/1.1", f"Host: {origin.host}:{origin.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Connection: close"]
    if body or method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


async def send(origin: Origin, request: bytes, sink: Sink) -> None:
    """Send one request and feed its response to `sink`. Raises ConnectionBrokenError.

    Cancelling closes the connection at once.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    try:
        transport, _ = await loop.create_connection(
            lambda: _Exchange(request, sink, done),
            origin.address,
            origin.port,
            ssl=_tls() if origin.is_tls else None,
            server_hostname=origin.host if origin.is_tls else None,
        )
    except OSError as error:
        raise ConnectionBrokenError(f"cannot connect: {error.strerror or error}") from None
    try:
        await done
    finally:
        transport.abort()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the system's certificates: once


class _Exchange(asyncio.Protocol):
    """One request and its response, on a connection of their own."""

    def __init__(self, request: bytes, sink: Sink, done: asyncio.Future[None]) -> None:
        self._request = request
        self._sink = sink
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._now = 0.0
        self._has_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)
        self._sink.on_connected(time.perf_counter())

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is no HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._sink.on_head(self._parser.get_status_code(), self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        self._sink.on_body(data, self._now)

    def on_message_complete(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        is_framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self._has_head and not is_framed:
            self.on_message_complete()  # such a body ends with its connection
        else:
            reason = str(error) if error else "closed before the response was complete"
            self._fail(f"connection lost: {reason}")
        del self._parser  # it holds this object: a cycle that would keep answers alive for long

    def _fail(self, reason: str) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionBrokenError(reason))
