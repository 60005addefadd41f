"""Deltas on their way from the engine thread to the coroutines that answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import BackendError, PacelineError
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.types import Delta, Request

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.server.admission import Admission, Deadline

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(Exception):
    """The client hung up; nobody is left to answer."""


class Attended(Protocol):
    """What a client waits for."""

    def attended(self, receive: Receive) -> AbstractAsyncContextManager[None]:
        """While inside, a client that hangs up is noticed."""


class Outbox:
    """Carries deltas over to the event loop, with one wake-up for a burst of any length."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Generation, int, Delta]] = deque()
        self._is_awake = False

    def post(self, generation: Generation, request_idx: int, delta: Delta) -> None:
        """Called by the engine thread."""
        self._posted.append((generation, request_idx, delta))
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first: a delta posted during the loop below is taken by it or by the next call.
        self._is_awake = False
        while self._posted:
            generation, request_idx, delta = self._posted.popleft()
            generation.receive(request_idx, delta)


class Generation:
    """The engine requests of one HTTP call. Choice `i` of request `r` is choice `r * n + i`.

    `names` are those of the call's fields, by the parameters that they became, where they differ.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        requests: Sequence[Request],
        call: Call,
        *,
        admission: Admission,
        deadline: Deadline | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.requests = requests
        self.call = call
        self._engine = engine
        self._outbox = outbox
        self._admission = admission
        self._deadline = deadline
        self._names = names or {}
        self._tenant = requests[0].tenant
        self.n = requests[0].params.n
        self._arrived: list[tuple[int, Delta]] = []
        self._news = asyncio.Event()
        self._num_open = [self.n] * len(requests)
        self._is_gone = False
        self._failure: ApiError | None = None
        self._num_waiting = len(requests)  # without a token yet
        self._has_news = [False] * len(requests)
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def has_begun(self) -> bool:
        """Whether each prompt has its first token, or has ended without."""
        return not self._num_waiting

    @property
    def num_choices(self) -> int:
        return self.n * len(self.requests)

    def submit(self) -> None:
        """Queue all requests, or none: raises for the first that the engine refuses.

        Raises ApiError 429 where the queue is too long, or too long for the deadline.
        """
        for request in self.requests:
            self._engine.check(request)
        num_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        self._admission.check(
            num_requests=len(self.requests), num_tokens=num_tokens, deadline=self._deadline,
            tenant=self._tenant,
        )  # fmt: skip
        self._admission.enter(len(self.requests), num_tokens, tenant=self._tenant)
        for idx, request in enumerate(self.requests):
            try:
                self._engine.submit(request, self._sink(idx))
            except PacelineError as error:
                self.cancel()
                for unsent in range(idx, len(self.requests)):
                    self._leave_queue(unsent, is_served=False)
                if isinstance(error, BackendError):
                    raise ApiError(503, str(error)) from error
                raise
        self._start_timers()

    def _start_timers(self) -> None:
        loop = asyncio.get_running_loop()
        timeout_s, deadline = self._admission.limits.timeout_s, self._deadline
        if timeout_s is not None:
            self._timers.append(loop.call_later(timeout_s, self._time_out, timeout_s))
        if deadline is not None:
            error = ApiError(
                504, f"the deadline of {deadline.asked_ms:g} ms has passed: give it more time, or "
                "ask for less", code="deadline_exceeded",
            )  # fmt: skip
            self._timers.append(loop.call_later(deadline.left_s, self.end, error))

    def _time_out(self, timeout_s: float) -> None:
        if self._num_waiting:
            error = ApiError(
                503, f"no token within {timeout_s:g} s: the server is overloaded, try again later",
                code="queue_timeout",
                retry_after_s=self._admission.predict_s(tenant=self._tenant) or 1.0,
            )  # fmt: skip
            self.end(error)

    def end(self, error: ApiError) -> bool:
        """End the call with `error`; return False where all of it has come already."""
        if not any(self._num_open):
            return False
        self._failure = error
        self.cancel()
        self._news.set()
        return True

    def _leave_queue(self, request_idx: int, *, is_served: bool) -> None:
        if not self._has_news[request_idx]:
            self._has_news[request_idx] = True
            self._num_waiting -= 1
            num_tokens = len(self.requests[request_idx].prompt_token_ids)
            self._admission.leave(1, num_tokens, is_served=is_served, tenant=self._tenant)

    def _sink(self, request_idx: int) -> Callable[[Delta], None]:
        return lambda delta: self._outbox.post(self, request_idx, delta)

    def receive(self, request_idx: int, delta: Delta) -> None:
        self._leave_queue(request_idx, is_served=bool(delta.token_ids))
        choice_idx = request_idx * self.n + delta.index
        if delta.finish_reason is not None:
            self._num_open[request_idx] -= 1
            self.call.ended(choice_idx, delta)
        self._arrived.append((choice_idx, delta))
        self._news.set()

    def cancel(self) -> None:
        """Abort whatever still runs."""
        for request, num_open in zip(self.requests, self._num_open, strict=True):
            if num_open:
                self._engine.abort(request.id)

    @asynccontextmanager
    async def attended(self, receive: Receive | None) -> AsyncIterator[None]:
        """While inside, a client that hangs up ends `bursts`; leaving aborts what still runs.

        None: nobody waits, and nobody can hang up.
        """
        watcher = None if receive is None else asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            if watcher is not None:
                watcher.cancel()
            for timer in self._timers:
                timer.cancel()
            self.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = self.call.is_gone = True
        self.cancel()
        self._news.set()

    async def bursts(
        self, *, quiet_s: float | None = None
    ) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yield (choice index, delta) as they arrive, until every choice is finished.

        After each `quiet_s` without any an empty burst is yielded. Raises ClientGoneError when the
        client hung up, ApiError when the engine failed or the time was up.
        """
        while True:
            if quiet_s is not None and not await self._has_news_within(quiet_s):
                yield []
                continue
            await self._news.wait()
            self._news.clear()
            if self._is_gone:
                raise ClientGoneError
            if self._failure is not None:
                raise self._failure
            burst, self._arrived = self._arrived, []
            failure = next((d for _, d in burst if d.finish_reason in ("error", "abort")), None)
            if failure is not None:
                if failure.finish_reason == "abort":
                    raise ApiError(
                        503, "the server is shutting down: try again later",
                        code="shutting_down", retry_after_s=1,
                    )  # fmt: skip
                if failure.error_param is not None:
                    param = self._names.get(failure.error_param, failure.error_param)
                    raise ApiError(400, failure.error or "", param=param)
                raise ApiError(500, failure.error or "the engine failed on this request")
            yield burst
            if not any(self._num_open) and not self._arrived:
                return

    async def _has_news_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        return True
