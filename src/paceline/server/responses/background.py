"""Background: responses that are made while nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from paceline.server.delivery import Generation
from paceline.server.door import Life
from paceline.server.errors import ApiError
from paceline.server.responses.events import EventLogs, Follower

if TYPE_CHECKING:
    from paceline.server.responses.writer import ResponseWriter

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 2.0


class Job:
    """A response under way, which `writer` keeps whenever its state changes.

    `logs` have its events, where it was asked for as a stream.
    """

    def __init__(self, writer: ResponseWriter, generation: Generation, logs: EventLogs) -> None:
        self._writer = writer
        self._generation = generation
        self._logs = logs
        self._is_cancelled = False
        self.is_unwanted = False  # it was deleted
        self.task: asyncio.Task[None] | None = None

    @property
    def body(self) -> bytes:
        """The response so far: it has no output before it has ended."""
        return self._writer.pending("in_progress" if self._generation.has_begun else "queued")

    async def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work`, after which the writer has kept the answer, or keep why there is none."""
        try:
            await work
        except ApiError as error:
            self._give_up(error)
        except Exception:
            logger.exception("a response in the background failed")
            self._give_up(ApiError(500, "the server failed on this response"))

    async def record(self, events: AsyncGenerator[bytes, None]) -> None:
        """Add events to the log as they are made."""
        async with aclosing(events):
            async for data in events:
                self._logs.add(self._writer.response_id, data)

    def _give_up(self, error: ApiError) -> None:
        writer = self._writer
        is_cancelled = self._is_cancelled
        self._logs.add(
            writer.response_id, writer.broken(error) if is_cancelled else writer.failure(error)
        )
        writer.give_up(None if is_cancelled else error)

    async def cancel(self) -> None:
        """End it, and wait until its end is known; one that has just ended stays as it is."""
        cancelled = ApiError(409, "the response was cancelled", code="response_cancelled")
        if self._generation.end(cancelled):
            self._is_cancelled = self._generation.call.is_gone = True
        if self.task is not None:
            await asyncio.wait({self.task})


class Background:
    """The jobs of a server, by the ids of their responses. Used on the event loop.

    A server that is being stopped waits for them as for other calls.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._jobs: dict[str, Job] = {}
        self.logs = EventLogs()

    def begin(
        self, writer: ResponseWriter, generation: Generation, work: Coroutine[Any, Any, Any]
    ) -> bytes:
        """Have `work` done from now on; return the response as it is by now."""
        return self._start(Job(writer, generation, self.logs), writer, work)

    def stream(
        self, writer: ResponseWriter, generation: Generation, events: AsyncGenerator[bytes, None]
    ) -> Follower:
        """Have `events` made and kept from now on; return a reader of them."""
        job = Job(writer, generation, self.logs)
        log = self.logs.open(writer.response_id, generation.requests[0].tenant)
        self._start(job, writer, job.record(events))
        return Follower(log, 0)

    def _start(self, job: Job, writer: ResponseWriter, work: Coroutine[Any, Any, Any]) -> bytes:
        self._jobs[writer.response_id] = job
        self._life.num_calls += 1
        body = writer.keep_pending("queued")
        job.task = asyncio.create_task(job.run(work))
        job.task.add_done_callback(lambda _: self._ended(writer, job))
        return body

    def find(self, response_id: str) -> Job | None:
        return self._jobs.get(response_id)

    async def ended(self) -> None:
        """Return when no job is left. Precondition: the engines have been stopped.

        One whose engine did not stop in time is left as it is.
        """
        if tasks := {job.task for job in self._jobs.values() if job.task is not None}:
            _, late = await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _ended(self, writer: ResponseWriter, job: Job) -> None:
        self._life.num_calls -= 1
        del self._jobs[writer.response_id]
        self.logs.end(writer.response_id)
        if job.is_unwanted:
            writer.forget()
            self.logs.drop(writer.response_id)
