"""Reports: remembers the calls that have ended, and answers what they cost."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.responses import Response

from paceline import __version__
from paceline.cpu import default_num_threads
from paceline.engine.build import LoadedModel
from paceline.engine.memory import kv_token_bytes
from paceline.measure.bandwidth import read_bandwidth
from paceline.server.calls import Call, CallLog
from paceline.server.errors import ApiError
from paceline.server.live import NUM_LISTED, RANKS, LiveView
from paceline.server.meters import CallMeters
from paceline.server.running import RunningCalls
from paceline.server.timeline import describe, timeline
from paceline.server.trace import chrome_trace

if TYPE_CHECKING:
    from paceline.server.metrics import Metrics


class Observer(Protocol):
    """Somebody who wants to know of every call to a model that has ended."""

    def write(self, call: Call) -> None:
        """Called on the event loop: it must be quick."""

    def close(self) -> None:
        """The server ends; no call will follow."""


class Reports:
    """The endpoints that tell of time: metrics, trace, the last minutes, timelines of calls."""

    def __init__(self, loaded: LoadedModel, observers: Iterable[Observer]) -> None:
        self._loaded = loaded
        self._calls = CallLog()
        self._running = RunningCalls(loaded.engine)
        self._live = LiveView(loaded.recorder)
        self._bandwidth: float | None = None  # None: not measured yet
        self._measuring = asyncio.Lock()
        self._meters = CallMeters()
        self._metrics: Metrics | None = None
        self._observers = tuple(observers)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()

    async def timeline(self, key: str, after_step: str = "-1") -> Response:
        """The ledger of a call, by the answer's id or the X-Request-Id; it may still run."""
        after = _integer(after_step, param="after_step")
        call = self._running.find(key) or self._calls.find(key)
        if call is None:
            raise ApiError(
                404,
                f"no call {key!r} runs or is among the last {len(self._calls)} finished ones: "
                "give the answer's id or its x-request-id",
                code="request_not_found",
            )
        recorder = self._loaded.recorder
        body = timeline(call, None if recorder is None else recorder.log, after_step=after)
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def trace(self, last_s: str = "60") -> Response:
        """Steps and finished calls of the last `last_s` seconds, for Perfetto."""
        since_ns = time.monotonic_ns() - int(_seconds(last_s) * 1e9)
        recorder = self._loaded.recorder
        if recorder is None:
            raise ApiError(404, "this server runs with --no-ledger: it has no trace")
        steps = recorder.log.since(since_ns)
        calls = [call for call in self._calls if call.end_ns > since_ns]
        # A full log takes tenths of a second to write: not on the streams' thread.
        body = await asyncio.to_thread(
            lambda: msgspec.json.encode(chrome_trace(steps, calls, about(self._loaded)))
        )
        return Response(body, media_type="application/json")

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        if self._metrics is None:
            self._metrics = await asyncio.to_thread(self._new_metrics)
        metrics = self._metrics
        metrics.read_bandwidth = await self._read_bandwidth()
        return Response(metrics.exposition(), media_type=metrics.content_type)

    def _new_metrics(self) -> Metrics:
        # Imported when it is asked for: prometheus_client would cost the start 25 ms.
        from paceline.server.metrics import Metrics

        loaded = self._loaded
        metrics = Metrics(loaded.engine, loaded.recorder, self._meters, model=loaded.name)
        metrics.int8_macs_s = self._int8_macs
        return metrics

    @cached_property
    def _int8_macs(self) -> float:
        """The machine's int8 multiply-adds a second; 0: `paceline roofline` has not run here."""
        config = self._loaded.config
        if config.backend != "native":
            return 0.0
        from paceline.measure.ceilings import known_int8_macs

        assert config.num_threads is not None
        return known_int8_macs(config.num_threads)

    async def live(self, after_s: str = "0", by: str = "wall") -> Response:
        """The last minutes by the second, after second `after_s`, and the slowest calls."""
        if by not in RANKS:
            raise ApiError(400, f"by is {by!r}: it must be one of {', '.join(RANKS)}", param="by")
        after = _integer(after_s, param="after_s")
        limit = await self._read_bandwidth()
        calls, running = list(self._calls), list(islice(self._running, NUM_LISTED))
        stats, config = self._loaded.engine.stats(), self._loaded.config
        body = {
            "model": self._loaded.name,
            "version": __version__,
            "ledger": self._loaded.recorder is not None,
            "max_num_seqs": config.max_num_seqs,
            "num_threads": config.num_threads,
            "engine": stats,
            "limits": {
                "read_bytes_per_s": limit or None,
                "macs_per_s": self._int8_macs or None,
            },
            "running": [describe(call) for call in running],
        }
        # The first look at a full log takes tens of milliseconds: not on the streams' thread.
        seen = await asyncio.to_thread(self._live.look, stats, calls, after_s=after, by=by)
        return Response(msgspec.json.encode({**body, **seen}), media_type="application/json")

    async def _read_bandwidth(self) -> float:
        """Return the machine's, measured when the engine is first found idle; 0 until then."""
        async with self._measuring:
            if self._bandwidth is None and not self._loaded.engine.stats().num_running:
                self._bandwidth = await asyncio.to_thread(self._measure_bandwidth)
        return self._bandwidth or 0.0

    def _measure_bandwidth(self) -> float:
        config = self._loaded.config
        assert config.num_threads is not None
        return read_bandwidth(config.num_threads) if config.backend == "native" else 0.0

    def open(self, call: Call) -> None:
        """A call has begun."""
        self._running.add(call)

    def add(self, call: Call) -> None:
        """A call has ended: remember it, count it, tell whoever wants to know."""
        self._running.remove(call)
        self._calls.add(call)
        self._meters.observe(call)
        for observer in self._observers:
            observer.write(call)


def _integer(text: str, *, param: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ApiError(400, f"{param} is {text!r}: it must be an integer", param=param) from None


def about(loaded: LoadedModel) -> dict[str, Any]:
    """Return what a server runs, and with which options: no path, nothing of any request."""
    config, model = loaded.config, loaded.checkpoint.config
    names = (
        "num_threads", "max_num_seqs", "max_batched_tokens", "max_model_len", "block_size",
        "kv_dtype", "policy", "prefix_cache", "activations", "speculate",
    )  # fmt: skip
    return {
        "version": __version__,
        "model": loaded.name,
        "isa": loaded.isa,
        "machine_threads": default_num_threads()[0],
        "num_blocks": loaded.kv.num_blocks,
        "kv_token_bytes": kv_token_bytes(model, config.kv_dtype),
        "weight_bytes": loaded.weight_bytes,
        "num_parameters": sum(math.prod(t.shape) for t in loaded.checkpoint.tensors.values()),
        **{name: getattr(config, name) for name in names},
    }


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ApiError(
            400, f"last_s is {text!r}: it must be a number above 0 and below 1e9", param="last_s"
        )
    return seconds
