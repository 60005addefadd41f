"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response

from paceline.server.answers import Read
from paceline.server.body import is_short, request_id
from paceline.server.door import Life, tenant
from paceline.server.errors import ApiError
from paceline.server.responses.background import Background
from paceline.server.responses.store import ResponseStore, Stored
from paceline.server.responses.translate import read_response
from paceline.server.sse import EventStream

_Item = tuple[str, msgspec.Raw]  # with its id

_MAX_LISTED = 100
_LISTED = 20  # where no limit is given


class Answering(Protocol):
    """What answers a call whose body `read` understands."""

    async def answer(
        self, http: HttpRequest, read: Read, *, is_quick: Callable[[bytes], bool]
    ) -> Response: ...


class ResponseRoutes:
    """The Responses API of a server. `answers` are those that all APIs share."""

    def __init__(self, answers: Answering, life: Life) -> None:
        self._answers = answers
        self._store = ResponseStore()
        self.background = Background(life)

    async def create(self, http: HttpRequest) -> Response:
        owner = tenant(http.scope)
        return await self._answers.answer(
            http, lambda body: read_response(body, self._store, owner, self.background),
            is_quick=_is_quick,
        )  # fmt: skip

    async def retrieve(self, response_id: str, http: HttpRequest) -> Response:
        """Return a response that is kept, or its events, if it was made in the background."""
        query = _query(http, "stream", "starting_after", "include_obfuscation")
        stored = self._find(response_id, http)
        _flag(query, "include_obfuscation")  # nothing is obfuscated
        if _flag(query, "stream"):
            number = 1 + _number(query["starting_after"]) if "starting_after" in query else 0
            followed = self.background.logs.follow(response_id, number)
            headers = {"x-request-id": request_id(http)}
            return EventStream(followed, followed.events(), headers, failure=followed.failure)
        for name in query.keys() - {"stream"}:
            raise ApiError(400, f"{name} needs stream=true", param=name)
        job = self.background.find(response_id)
        return _json(stored.body if job is None else job.body)

    async def delete(self, response_id: str, http: HttpRequest) -> Response:
        """Forget a response; one that is made in the background is ended."""
        if not self._store.delete(tenant(http.scope), response_id):
            raise _unknown(response_id)
        if (job := self.background.find(response_id)) is not None:
            job.is_unwanted = True
            await job.cancel()
        self.background.logs.drop(response_id)
        body = {"id": response_id, "object": "response", "deleted": True}
        return _json(msgspec.json.encode(body))

    async def cancel(self, response_id: str, http: HttpRequest) -> Response:
        """End a response that is made in the background. Any other ends with its call."""
        stored = self._find(response_id, http)
        if (job := self.background.find(response_id)) is not None:
            await job.cancel()
            stored = self._find(response_id, http)
        if stored.status != "cancelled":
            raise ApiError(
                400, f"the response {response_id[:80]!r} has ended: nothing is left to cancel",
                param="response_id",
            )  # fmt: skip
        return _json(stored.body)

    async def input_items(self, response_id: str, http: HttpRequest) -> Response:
        """List the items that the answer followed, those of earlier responses included."""
        query = _query(http, "after", "limit", "order")
        # A long conversation takes its time to read: not on the streams' thread.
        items = await asyncio.to_thread(self._find(response_id, http).listed)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:80]!r}: choose asc or desc", param="order")
        if order == "desc":
            items.reverse()
        if "after" in query:
            items = _after(items, query["after"])
        limit = _limit(query.get("limit", str(_LISTED)))
        page = items[:limit]
        body = {
            "object": "list",
            "data": [item for _, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": len(items) > limit,
        }
        return _json(msgspec.json.encode(body))

    def _find(self, response_id: str, http: HttpRequest) -> Stored:
        stored = self._store.get(tenant(http.scope), response_id)
        if stored is None:
            raise _unknown(response_id)
        return stored


def _is_quick(body: bytes) -> bool:
    """A short body may go on from a long conversation; an escape could hide that it does."""
    return is_short(body) and b"previous_response_id" not in body and b"\\u" not in body


def _query(http: HttpRequest, *known: str) -> dict[str, str]:
    """Return the query's parameters. Raises ApiError for one that is not `known`."""
    for name in http.query_params:
        if name not in known:
            raise ApiError(
                400, f"{name[:80]} is not a parameter this server knows here: leave it out",
                param=name[:80], code="unknown_parameter",
            )  # fmt: skip
    return dict(http.query_params)


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise ApiError(400, f"{name} is {value[:80]!r}: it must be true or false", param=name)
    return value == "true"


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(
            400, f"starting_after is {text[:80]!r}: it must be the number of an event, from 0 on",
            param="starting_after",
        )  # fmt: skip
    return int(text)


def _after(items: list[_Item], item_id: str) -> list[_Item]:
    for i, (name, _) in enumerate(items):
        if name == item_id:
            return items[i + 1 :]
    raise ApiError(400, f"after is {item_id[:80]!r}: no item has that id", param="after")


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not 1 <= limit <= _MAX_LISTED:
        raise ApiError(
            400, f"limit is {text[:80]!r}: it must be between 1 and {_MAX_LISTED}", param="limit"
        )
    return limit


def _unknown(response_id: str) -> ApiError:
    return ApiError(
        404, f"no response {response_id[:80]!r} is kept: it was deleted, pushed out by later ones, "
        "sent with store: false or never ended",
        param="response_id", code="response_not_found",
    )  # fmt: skip


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
