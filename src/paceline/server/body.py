"""What a request brings besides its fields: a bounded body, and its own name."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect

from paceline.measure.ledger import Part
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.server.timekeeping import CALL

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0
_BODY = "paceline_body"


async def read_body(http: HttpRequest) -> bytes:
    """Return the JSON body, at most MAX_BODY_BYTES long. Raises ApiError 408, 413 or 415.

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
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body was not complete after {BODY_TIMEOUT_S:g} s: send it faster"
        ) from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body was complete") from None
    return b"".join(parts)


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
