"""EventLogs: the events of responses in the background, for clients that come back for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from paceline.server.delivery import ClientGoneError, Receive
from paceline.server.errors import ApiError
from paceline.server.sse import named_event

MAX_BYTES = 64 * 2**20  # of the events of all responses together
MAX_FOLLOWERS = 1024
_MAX_AT_ONCE = 256  # events that one reader is handed before others get their turn
_END = b"\n\n"
_OVERHEAD = 64  # bytes that an event takes besides its own


class EventLog:
    """The events of one response, numbered from 0 on. Used on the event loop.

    What is pushed out is pushed out from the front: numbers go on, and who has read it all by then
    loses nothing.
    """

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self.num_forgotten = 0
        self.is_over = False
        self._events: list[bytes] = []
        self.followers: set[Follower] = set()

    def add(self, data: bytes) -> None:
        """Add whole events; inside of one there is no empty line."""
        events = [event + _END for event in data.split(_END)[:-1]]
        self._events += events
        self.num_bytes += sum(map(len, events)) + _OVERHEAD * len(events)
        self._tell()

    def end(self) -> None:
        """Nothing follows."""
        self.is_over = True
        self._tell()

    def forget(self) -> None:
        """Push out all that has come by now."""
        self.num_forgotten += len(self._events)
        self._events.clear()
        self.num_bytes = 0

    def read(self, number: int) -> list[bytes]:
        """Return some events from `number` on, none if there are none yet. Raises ApiError."""
        if number < self.num_forgotten:
            raise ApiError(
                400, f"starting_after is {number - 1}: the first {self.num_forgotten} events of "
                "this response are no longer kept; ask for it without stream",
                param="starting_after",
            )  # fmt: skip
        first = number - self.num_forgotten
        return self._events[first : first + _MAX_AT_ONCE]

    def _tell(self) -> None:
        for follower in self.followers:
            follower.news.set()


class Follower:
    """Somebody who reads a log from event `number` on, as fast as they like."""

    def __init__(self, log: EventLog, number: int) -> None:
        self.news = asyncio.Event()
        self._log = log
        self._number = number
        self._is_gone = False

    @asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """While inside, a client that hangs up ends `events`, and nothing else."""
        watcher = asyncio.create_task(self._watch(receive))
        self._log.followers.add(self)
        try:
            yield
        finally:
            self._log.followers.discard(self)
            watcher.cancel()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the response has ended. Raises ApiError, ClientGoneError."""
        while True:
            self.news.clear()
            if self._is_gone:
                raise ClientGoneError
            if events := self._log.read(self._number):
                self._number += len(events)
                yield b"".join(events)
                await asyncio.sleep(0)  # a client that reads fast would else keep the event loop
            elif self._log.is_over:
                return
            else:
                await self.news.wait()

    def failure(self, error: ApiError) -> bytes:
        """Return the event that says why this reader cannot read on."""
        told = {"type": "error", "sequence_number": self._number, "code": error.code,
                "message": str(error), "param": error.param}  # fmt: skip
        return named_event("error", msgspec.json.encode(told))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self.news.set()


class EventLogs:
    """The logs of a server by the ids of their responses, in at most `max_bytes`.

    Beyond that the tenant whose logs hold most loses its oldest, as far as it has come.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_followers: int = MAX_FOLLOWERS) -> None:
        self._max_bytes = max_bytes
        self._max_followers = max_followers
        self._logs: dict[str, EventLog] = {}
        self._num_bytes = 0

    def open(self, response_id: str, tenant: str) -> EventLog:
        log = self._logs[response_id] = EventLog(tenant)
        return log

    def find(self, response_id: str) -> EventLog | None:
        return self._logs.get(response_id)

    def drop(self, response_id: str) -> None:
        """Forget a log, if there is one; who follows it reads on."""
        if (log := self._logs.pop(response_id, None)) is not None:
            self._num_bytes -= log.num_bytes

    def add(self, response_id: str, data: bytes) -> None:
        """Add events to a log, if there is one, and make room for them."""
        if (log := self._logs.get(response_id)) is None:
            return
        before = log.num_bytes
        log.add(data)
        self._num_bytes += log.num_bytes - before
        while self._num_bytes > self._max_bytes:
            self._push_out()

    def end(self, response_id: str) -> None:
        """Nothing will be added to a log; one that is empty is forgotten."""
        if (log := self._logs.get(response_id)) is not None:
            log.end()
            if not log.num_bytes:
                del self._logs[response_id]

    def follow(self, response_id: str, number: int) -> Follower:
        """Return a reader from event `number` on. Raises ApiError 400 or 429."""
        log = self.find(response_id)
        if log is None:
            raise ApiError(
                400, "stream: the events of this response are not kept. They are of responses made "
                f"with background and stream, the last {self._max_bytes >> 20} MiB of all keys "
                "together: ask for it without stream", param="stream",
            )  # fmt: skip
        log.read(number)
        if sum(len(one.followers) for one in self._logs.values()) >= self._max_followers:
            raise ApiError(
                429, f"{self._max_followers} clients follow responses: try again later",
                retry_after_s=1,
            )  # fmt: skip
        return Follower(log, number)

    def _push_out(self) -> None:
        held: dict[str, int] = {}
        for log in self._logs.values():
            held[log.tenant] = held.get(log.tenant, 0) + log.num_bytes
        heaviest = max(held, key=held.__getitem__)
        response_id, log = next(
            (name, log)
            for name, log in self._logs.items()
            if log.tenant == heaviest and log.num_bytes
        )
        self._num_bytes -= log.num_bytes
        log.forget()
        if log.is_over:
            del self._logs[response_id]
