"""Probe: is the client itself the bottleneck? CPU share and how late its event loop runs."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.bench.statistics import summarise

_PERIOD_S = 0.02
_TICK_S = 0.5
MAX_CPU_SHARE = 0.8  # of one core: beyond, packets wait for their time stamp
MAX_LAG_S = 0.02


class Probe:
    """Samples the event loop while it runs, and calls `on_tick` twice a second."""

    def __init__(self, on_tick: Callable[[], None] | None = None) -> None:
        self._on_tick = on_tick
        self._lags = array("f")
        self._began = (0.0, 0.0)
        self._spent = (0.0, 0.0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._began = (time.perf_counter(), time.process_time())
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        wall, cpu = self._began
        self._spent = (time.perf_counter() - wall, time.process_time() - cpu)

    async def _watch(self) -> None:
        next_tick = time.perf_counter()
        while True:
            due = time.perf_counter() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            now = time.perf_counter()
            self._lags.append(max(0.0, now - due))
            if self._on_tick is not None and now >= next_tick:
                self._on_tick()
                next_tick = now + _TICK_S

    def summary(self, send_lags: Sequence[float], num_unsent: int = 0) -> dict[str, Any]:
        """Return the client's own figures; `is_bottleneck` with the reasons, if any."""
        wall, cpu = self._spent
        figures = {
            "cpu_share": cpu / wall if wall else 0.0,
            "loop_lag_ms": summarise(self._lags, 1e3),
            "send_lag_ms": summarise(send_lags, 1e3),
        }
        reasons = signs_of_lateness(figures)
        if num_unsent:
            reasons.append(f"{num_unsent} requests that were due were not sent")
        return {**figures, "is_bottleneck": bool(reasons), "reasons": reasons}


def signs_of_lateness(client: Mapping[str, Any]) -> list[str]:
    """Return in words which of a client's figures are beyond their bounds: then its times are
    also its own."""
    signs = []
    if client["cpu_share"] > MAX_CPU_SHARE:
        signs.append(f"the client used {100 * client['cpu_share']:.0f} % of a core")
    for name, lag in (("event loop", client["loop_lag_ms"]), ("sending", client["send_lag_ms"])):
        if lag["count"] and lag["p99"]["value"] > MAX_LAG_S * 1e3:
            signs.append(f"its {name} lagged by {lag['p99']['value']:.0f} ms (p99)")
    return signs
