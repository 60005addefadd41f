"""Reports: remembers the calls that have ended, and answers what they cost."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline import __version__
from paceline.measure.bandwidth import read_bandwidth
from paceline.server.books import Books
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.server.live import NUM_LISTED, RANKS
from paceline.server.running import RunningCalls
from paceline.server.timeline import describe, timeline
from paceline.server.trace import trace_pieces

if TYPE_CHECKING:
    from paceline.server.metrics import Metrics
    from paceline.server.models.models import Models

MAX_TRACES = 8  # at once: each keeps the steps that it has not told yet
TRACE_TIMEOUT_S = 60.0  # for a client to read one
_INTEGER = re.compile(r"-?[0-9]{1,19}")


class Observer(Protocol):
    """Somebody who wants to know of every call to a model that has ended."""

    def write(self, call: Call) -> None:
        """Called on the event loop: it must be quick."""

    def close(self) -> None:
        """The server ends; no call will follow."""


class Reports:
    """The endpoints that tell of time: metrics, trace, the last minutes, timelines of calls.

    Each model has books of its own. A `model` says whose are asked for, "" means the first's.
    """

    def __init__(self, models: Models, observers: Iterable[Observer]) -> None:
        self._models = models
        self._books = {entry.name: entry.books for entry in models.entries}
        self._running = RunningCalls(lambda call: self._books[call.model].engine)
        self._bandwidth: float | None = None  # None: not measured yet
        self._measuring = asyncio.Lock()
        self._making = asyncio.Lock()  # a long report, or a piece of one
        self._num_traces = 0  # that are being read
        self._metrics: dict[str, Metrics] = {}
        self._observers = tuple(observers)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()

    def _find(self, model: str) -> Books:
        return self._models.find(model or self._models.first.name).books

    async def timeline(self, http: HttpRequest, key: str, after_step: str = "-1") -> Response:
        """The ledger of a call, by the answer's id or the X-Request-Id; it may still run."""
        _refuse_unknown(http, ("after_step",))
        after = _integer(after_step, param="after_step")
        ended = (books.calls.find(key) for books in self._books.values())
        call = self._running.find(key) or next(filter(None, ended), None)
        if call is None:
            num_kept = sum(len(books.calls) for books in self._books.values())
            raise ApiError(
                404,
                f"no call {key[:200]!r} runs or is among the last {num_kept} finished ones: "
                "give the answer's id or its x-request-id",
                code="request_not_found",
            )
        recorder = self._books[call.model].recorder
        log = None if recorder is None else recorder.log
        # Of many choices in a full log it takes tenths of a second: not on the streams' thread.
        async with self._making:
            body = await asyncio.to_thread(timeline, call, log, after_step=after)
        return Response(body, media_type="application/json")

    async def trace(self, http: HttpRequest, last_s: str = "60", model: str = "") -> Response:
        """A model's steps and finished calls of the last `last_s` seconds, for Perfetto."""
        _refuse_unknown(http, ("last_s", "model"))
        since_ns = time.monotonic_ns() - int(_seconds(last_s) * 1e9)
        books = self._find(model)
        about, recorder = books.about, books.recorder
        if books.is_encoder:
            raise ApiError(404, f"{books.name} embeds texts and writes none: it has no trace")
        if about is None:
            raise ApiError(404, f"{books.name} has not been loaded yet: it has no trace")
        if recorder is None:
            raise ApiError(404, "this server runs with --no-ledger: it has no trace")
        if self._num_traces >= MAX_TRACES:
            raise ApiError(
                429, f"{MAX_TRACES} traces are being read: try again later", retry_after_s=1
            )
        steps = recorder.log.since(since_ns)
        calls = [call for call in books.calls if call.end_ns > since_ns]
        told = self._told(trace_pieces(steps, calls, about))
        return _TimedStream(told, self._reading())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Count a trace as being read while inside."""
        self._num_traces += 1
        try:
            yield
        finally:
            self._num_traces -= 1

    async def _told(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield pieces of a trace. A full log takes tenths of a second: not on the streams' thread.

        One piece is made at a time, whoever asks, so that threads which work on traces do not
        outnumber those that wait for the interpreter with tokens.
        """
        while True:
            async with self._making:
                piece = await asyncio.to_thread(next, pieces, b"")
            if not piece:
                return
            yield piece

    async def metrics(self) -> Response:
        """Prometheus' text format, of all models."""
        if not self._metrics:
            self._metrics = await asyncio.to_thread(self._new_metrics)
        from prometheus_client import CONTENT_TYPE_LATEST

        from paceline.server.metrics import exposition

        bandwidth = await self._read_bandwidth()
        for name, metrics in self._metrics.items():
            books = self._books[name]
            metrics.recorder, metrics.read_bandwidth = books.recorder, bandwidth
            metrics.int8_macs_s = await asyncio.to_thread(books.int8_macs)
            metrics.is_loaded, metrics.num_loads = books.is_loaded, books.num_loads
        body = exposition(list(self._metrics.values()))
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    def _new_metrics(self) -> dict[str, Metrics]:
        # Imported when it is asked for: prometheus_client would cost the start 25 ms.
        from paceline.server.metrics import Metrics

        made = {}
        for name, books in self._books.items():
            made[name] = Metrics(books, books.recorder, books.meters, model=name)
        return made

    async def live(
        self, http: HttpRequest, after_s: str = "0", by: str = "wall", model: str = ""
    ) -> Response:
        """The last minutes by the second, after second `after_s`, and the slowest calls."""
        _refuse_unknown(http, ("after_s", "by", "model"))
        if by not in RANKS:
            known = ", ".join(RANKS)
            raise ApiError(400, f"by is {by[:80]!r}: it must be one of {known}", param="by")
        after = _integer(after_s, param="after_s")
        books = self._find(model)
        limit = await self._read_bandwidth()
        own = (call for call in self._running if call.model == books.name)
        calls, running = list(books.calls), list(islice(own, NUM_LISTED))
        stats, config = books.stats(), books.config
        body = {
            "model": books.name,
            "models": [name for name, one in self._books.items() if not one.is_encoder],
            "loaded": books.is_loaded,
            "version": __version__,
            "ledger": config.ledger,
            "max_num_seqs": config.max_num_seqs,
            "num_threads": books.num_threads,
            "engine": stats,
            "limits": {
                "read_bytes_per_s": limit or None,
                "macs_per_s": await asyncio.to_thread(books.int8_macs) or None,
            },
            "running": [describe(call) for call in running],
        }
        # The first look at a full log takes tens of milliseconds: not on the streams' thread.
        seen = await asyncio.to_thread(books.live.look, stats, calls, after_s=after, by=by)
        return Response(msgspec.json.encode({**body, **seen}), media_type="application/json")

    async def _read_bandwidth(self) -> float:
        """Return the machine's, measured when all engines are first found idle; 0 until then."""
        async with self._measuring:
            is_busy = any(books.stats().num_running for books in self._books.values())
            if self._bandwidth is None and not is_busy:
                self._bandwidth = await asyncio.to_thread(self._measure_bandwidth)
        return self._bandwidth or 0.0

    def _measure_bandwidth(self) -> float:
        books = self._models.first.books
        return read_bandwidth(books.num_threads) if books.config.backend == "native" else 0.0

    def open(self, call: Call) -> None:
        """A call has begun. Until it is known whose it is, it is the first model's."""
        call.model = self._models.first.name
        self._running.add(call)

    def add(self, call: Call) -> None:
        """A call has ended: remember it, count it, tell whoever wants to know."""
        self._running.remove(call)
        books = self._books[call.model]
        books.calls.add(call)
        books.meters.observe(call)
        for observer in self._observers:
            observer.write(call)


class _TimedStream(StreamingResponse):
    """JSON that a client has TRACE_TIMEOUT_S to read; its connection is closed after that.

    It is `reading` until then, and what it has not read is let go: a generator that nobody asks
    any more would wait for the garbage collection, and keep what it tells of.
    """

    def __init__(
        self, told: AsyncGenerator[bytes, None], reading: AbstractContextManager[None]
    ) -> None:
        super().__init__(told, media_type="application/json")
        self._told, self._reading = told, reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reading, suppress(TimeoutError):
            async with asyncio.timeout(TRACE_TIMEOUT_S), aclosing(self._told):
                await super().__call__(scope, receive, send)


def _refuse_unknown(http: HttpRequest, known: tuple[str, ...]) -> None:
    for name in http.query_params:
        if name not in known:
            raise ApiError(
                400, f"{http.url.path} has no parameter {name[:80]!r}: it has {', '.join(known)}",
                param=name,
            )  # fmt: skip


def _integer(text: str, *, param: str) -> int:
    number = int(text) if _INTEGER.fullmatch(text) else 2**63
    if not -(2**63) <= number < 2**63:
        raise ApiError(
            400, f"{param} is {text[:80]!r}: it must be an integer of 64 bits", param=param
        )
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ApiError(
            400, f"last_s is {text[:80]!r}: it must be a number above 0 and below 1e9",
            param="last_s",
        )  # fmt: skip
    return seconds
