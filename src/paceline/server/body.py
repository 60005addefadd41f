"""What a request brings besides its fields: a bounded body, and its own name."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import Request as HttpRequest
from msgspec import Struct
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.measure.ledger import Part
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.server.timekeeping import CALL

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0
MAX_HELD_BYTES = 256 * 2**20  # of the bodies of all calls that are open
_SHORT_BODY_BYTES = 4096
_BODY = "paceline_body"
_HELD = "paceline_held"


class _Held(Struct):
    """Bytes of the bodies of one call, or of all."""

    num_bytes: int = 0


class HeldBodies:
    """ASGI middleware: bodies take memory until their call ends, in all MAX_HELD_BYTES at most."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._all = _Held()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = _Held()
        scope.setdefault("state", {})[_HELD] = (own, self._all)
        try:
            await self._app(scope, receive, send)
        finally:
            self._all.num_bytes -= own.num_bytes


def is_short(body: bytes) -> bool:
    """Say whether parsing and tokenising `body` takes well under a millisecond.

    A longer one goes to a thread, so that it does not hold up the streams of others.
    """
    return len(body) <= _SHORT_BODY_BYTES


async def read_body(http: HttpRequest) -> bytes:
    """Return the JSON body, at most MAX_BODY_BYTES long. Raises ApiError 408, 413, 415 or 429.

    It is read once: who asks again, to look for the model or to answer, gets the same.
    """
    state = http.scope.setdefault("state", {})
    if _BODY not in state:
        call: Call | None = state.get(CALL)
        try:
            state[_BODY] = await _read_body(http)
        finally:  # what of it came was waited for, too
            if call is not None:
                call.lap(Part.RECEIVE)
    body: bytes = state[_BODY]
    return body


async def _read_body(http: HttpRequest) -> bytes:
    # Scripts may leave the type out; a page of another site could send such a body unasked.
    default = "" if "origin" in http.headers else "application/json"
    kind = http.headers.get("content-type", default).split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"content-type is {kind!r}: send application/json")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in http.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise ApiError(
                        413, f"the body is longer than {MAX_BODY_BYTES} bytes: shorten it"
                    )
                _hold(http, len(part))
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body was not complete after {BODY_TIMEOUT_S:g} s: send it faster"
        ) from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body was complete") from None
    return b"".join(parts)


def _hold(http: HttpRequest, num_bytes: int) -> None:
    """Count bytes that stay until the call ends. Raises ApiError 429 where all have too many."""
    for held in http.scope["state"].get(_HELD, ()):
        held.num_bytes += num_bytes
        if held.num_bytes > MAX_HELD_BYTES:
            raise ApiError(
                429, f"the bodies of open calls have {MAX_HELD_BYTES} bytes: try again later",
                retry_after_s=1,
            )  # fmt: skip


def request_id(http: HttpRequest) -> str:
    """Return the caller's X-Request-Id if it is a plain short one, else one that the call keeps."""
    call: Call | None = http.scope.get("state", {}).get(CALL)
    if call is not None and call.request_id:
        return call.request_id
    given = http.headers.get("x-request-id", "")
    is_plain = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    chosen = given if is_plain else uuid.uuid4().hex
    if call is not None:
        call.request_id = chosen
    return chosen
