"""Search: the highest rate at which enough requests are within their objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.arrivals import Arrivals
from paceline.bench.stage import Plan, Session, StageResult
from paceline.bench.target import Target

MIN_REQUESTS = 20  # of a stage: a share of fewer says little
_MAX_STRETCH = 10.0  # times the duration that was asked for, at low rates
_MAX_DOUBLINGS = 8
KEEPS_UP = 0.95


@dataclass(slots=True, kw_only=True)
class Search:
    """`good` and `bad` enclose the rate: the highest that held, the lowest that did not."""

    target: str
    at_least: float
    good: float | None = None
    bad: float | None = None
    stages: list[StageResult] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        rates = [stage.summary["rate"] for stage in self.stages]
        return {
            "target": self.target,
            "at_least": self.at_least,
            "rate": self.good,
            "held_not_at": self.bad,
            "stages": rates,
        }


async def find_rate(
    session: Session,
    plan: Plan,
    target: Target,
    arrivals_at: Callable[[float], Arrivals],
    *,
    start: float,
    at_least: float,
    tolerance: float = 0.1,
) -> Search:
    """Double or halve the rate until it is enclosed, then bisect on the logarithm.

    A stage holds where at least the share `at_least` of all its requests met their objective,
    those that the end cut counted as missed. It ends with good and bad within `tolerance`, or where
    a stage does not hold though no two of its requests were open at once: no lower rate would.
    """
    search = Search(target=target.name, at_least=at_least)

    async def holds(rate: float) -> bool:
        stage = await _try(session, plan, target, arrivals_at(rate), rate, at_least)
        search.stages.append(stage)
        share = stage.summary["goodput"]["attainment_if_cut_missed"]
        is_held = not stage.summary["lost_early"] and share is not None and share >= at_least
        if not session.is_interrupted:
            if is_held:
                search.good = max(rate, search.good or 0.0)
            else:
                search.bad = min(rate, search.bad or math.inf)
        return is_held

    rate = start
    for _ in range(_MAX_DOUBLINGS):
        is_held = await holds(rate)
        if session.is_interrupted or (search.good is not None and search.bad is not None):
            break
        if not is_held and search.stages[-1].summary["concurrency"]["peak"] == 1:
            break
        rate = rate * 2 if is_held else rate / 2
    while (
        search.good is not None
        and search.bad is not None
        and search.good < search.bad / (1 + tolerance)
        and not session.is_interrupted
    ):
        await holds(math.sqrt(search.good * search.bad))
    return search


async def _try(
    session: Session, plan: Plan, target: Target, arrivals: Arrivals, rate: float, at_least: float
) -> StageResult:
    asked = plan.limits.duration_s
    assert asked is not None
    duration_s = min(max(asked, MIN_REQUESTS / rate), asked * _MAX_STRETCH)
    plan = replace(
        plan.with_seed(f"rate {rate:.6g}"), limits=replace(plan.limits, duration_s=duration_s)
    )
    # Half as many misses again as the share allows: then no luck in the rest could save it.
    max_missed = math.ceil(1.5 * (1 - at_least) * rate * duration_s) + 1
    stage = await session.run(
        plan, target, arrivals, labels={"rate": round(rate, 6)}, max_missed=max_missed
    )
    stage.summary["lost_early"] = stage.summary["goodput"]["missed"] > max_missed
    return stage


def find_knee(summaries: Sequence[dict[str, Any]]) -> float | None:
    """Return the highest swept rate up to which the server kept up, None for not even the lowest.

    It keeps up where at least 95 % of what could complete in the window did: all that came, but
    for the last, which need the time that an answer takes at the lowest rate.
    """
    knee = None
    in_order = sorted(summaries, key=lambda summary: float(summary["rate"]))
    for summary in in_order:
        e2e = in_order[0]["latency_ms"]["e2e"]
        if not e2e["count"] or not summary["window_s"]:
            return None
        in_time = max(0.0, 1 - e2e["p50"]["value"] / 1e3 / summary["window_s"])
        possible = summary["offered_per_s"] * in_time
        if summary["throughput"]["requests_per_s"] < KEEPS_UP * possible:
            break
        knee = float(summary["rate"])
    return knee
