"""Stage: one load on one target, from its plan to its summary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.arrivals import Arrivals, Closed
from paceline.bench.conversation import Source, Workload
from paceline.bench.course import Limits
from paceline.bench.load import Load
from paceline.bench.objective import Objectives
from paceline.bench.packets import both_clocks
from paceline.bench.plots import plot_data
from paceline.bench.prose import TokenCounter
from paceline.bench.recorder import LineWriter, Recorder
from paceline.bench.summary import Price, summarise_run
from paceline.bench.target import Target

_PREPARED_CLOSED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of every target alike."""

    workload: Workload
    objectives: Objectives
    limits: Limits
    seed: str = "0"
    count_tokens: TokenCounter | None = None
    price: Price = field(default_factory=Price)

    def with_seed(self, suffix: object) -> Plan:
        return replace(self, seed=f"{self.seed}/{suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """`summary` is for JSON, `plots` for the HTML report."""

    summary: dict[str, Any]
    plots: dict[str, Any]


class Session:
    """Runs stages one after the other, and is what Ctrl-C and the live display speak to."""

    def __init__(
        self,
        *,
        write_line: LineWriter | None = None,
        on_progress: Callable[[Load, dict[str, Any]], None] | None = None,
    ) -> None:
        self.is_interrupted = False
        self.has_begun = False
        self._write_line = write_line
        self._on_progress = on_progress
        self._load: Load | None = None

    def interrupt(self) -> None:
        """End the stage that runs; no further one begins."""
        self.is_interrupted = True
        if self._load is not None:
            self._load.stop()

    async def run(
        self,
        plan: Plan,
        target: Target,
        arrivals: Arrivals | Closed,
        *,
        labels: dict[str, Any] | None = None,
        max_missed: int | None = None,
    ) -> StageResult:
        """Return the result of one load. More than `max_missed` misses end it: the case is lost."""
        self.has_begun = True
        shown = {"target": target.name, **(labels or {})}
        recorder = Recorder(
            plan.objectives,
            count_tokens=plan.count_tokens,
            write_line=self._write_line,
            labels=shown,
        )

        def on_tick() -> None:
            if self._on_progress is not None:
                self._on_progress(load, shown)
            if max_missed is not None and recorder.num_missed > max_missed:
                load.stop()

        load = Load(
            target,
            Source(plan.workload, plan.seed, _num_prepared(arrivals, plan.limits)),
            arrivals,
            plan.limits,
            recorder,
            seed=plan.seed,
            on_tick=on_tick,
            keeps_text=plan.count_tokens is not None,
        )
        self._load = load
        try:
            await load.run()
        finally:
            self._load = None
        summary = {**shown, **summarise_run(recorder, load.probe, plan.price)}
        now, wall = both_clocks()
        summary["began_at"] = wall - (now - recorder.epoch)
        summary["interrupted"] = self.is_interrupted
        return StageResult(summary=summary, plots=plot_data(recorder))


def _num_prepared(arrivals: Arrivals | Closed, limits: Limits) -> int:
    """Return how many conversations to make before the clock runs."""
    if limits.num_requests is not None:
        return limits.num_requests + limits.warmup_requests
    if isinstance(arrivals, Closed) or arrivals.rate is None or limits.duration_s is None:
        return _PREPARED_CLOSED
    return int(1.3 * arrivals.rate * (limits.warmup_s + limits.duration_s)) + 16
