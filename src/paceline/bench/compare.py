"""Compare: several targets, the same requests, interleaved rounds, a verdict where one is due."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from paceline.bench.arrivals import Arrivals, Closed
from paceline.bench.probe import signs_of_lateness
from paceline.bench.stage import Plan, Session, StageResult
from paceline.bench.statistics import Figure, ratio_figure
from paceline.bench.target import Target

# (name, path in a summary, unit, is less better)
METRICS: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
    ("TTFT p50", ("latency_ms", "ttft", "p50", "value"), "ms", True),
    ("TTFT p95", ("latency_ms", "ttft", "p95", "value"), "ms", True),
    ("TPOT mean", ("latency_ms", "tpot", "mean", "value"), "ms", True),
    ("ITL p99", ("latency_ms", "itl", "p99", "value"), "ms", True),
    ("E2E p50", ("latency_ms", "e2e", "p50", "value"), "ms", True),
    ("output", ("throughput", "output_tokens_per_s"), "tok/s", False),
    ("goodput", ("goodput", "requests_per_s"), "req/s", False),
)
MIN_ROUNDS = 3  # for a verdict: two rounds bound nothing
MAX_UNANSWERED = 0.05  # more than the other's share; beyond, latencies are of other requests


async def run_rounds(
    session: Session,
    plan: Plan,
    targets: Sequence[Target],
    loads: Sequence[tuple[dict[str, Any], Arrivals | Closed]],
    num_rounds: int,
) -> list[StageResult]:
    """Run each load on each target, `num_rounds` times in turn; the order swaps every round.

    In a round all targets get the same requests at the same times. Every round and load has
    requests of its own, so that no cache of an earlier one can answer.
    """
    results: list[StageResult] = []
    for labels, load in loads:
        for idx in range(num_rounds):
            seeded = plan.with_seed(f"{sorted(labels.items())} round {idx}")
            for target in targets if idx % 2 == 0 else list(reversed(targets)):
                if session.is_interrupted:
                    return results
                shown = {**labels, "round": idx} if num_rounds > 1 else labels
                results.append(await session.run(seeded, target, load, labels=shown))
    return results


def compare(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that set each other target beside the first, metric by metric and rate by rate.

    `ratio` is first / other, paired by round. `verdict` names the better one, only where the 95 %
    interval of the ratio excludes 1; else `no_verdict_because` says why there is none. Latencies
    are those of answers: who answered fewer of its requests than the other has no verdict for
    them, as it may have left out the slow ones. A run whose client was late judges no server.
    """
    by_cell: defaultdict[Any, defaultdict[str, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for summary in summaries:
        by_cell[summary.get("rate")][summary["target"]].append(summary)
    rows: list[dict[str, Any]] = []
    for rate, by_target in by_cell.items():
        first, *others = by_target
        for other in others:
            for metric in METRICS:
                if metric[0] == "goodput" and not by_target[first][0]["goodput"]["objectives_ms"]:
                    continue  # it would be the rate of answers
                row = _row(metric, first, other, by_target[first], by_target[other])
                if row is not None:
                    rows.append({"rate": rate, **row})
    return rows


def _row(
    metric: tuple[str, tuple[str, ...], str, bool],
    first: str,
    other: str,
    ours: Sequence[dict[str, Any]],
    theirs: Sequence[dict[str, Any]],
) -> dict[str, Any] | None:
    name, path, unit, is_less_better = metric
    pairs = [(_dig(a, path), _dig(b, path)) for a, b in zip(ours, theirs, strict=False)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return None
    ratio = ratio_figure(known)
    answered = _answered(ours), _answered(theirs)
    num_late = sum(bool(signs_of_lateness(stage["client"])) for stage in (*ours, *theirs))
    better, reason = None, None
    if num_late:
        reason = "the client was the bottleneck"
    elif ratio is None:
        reason = "a figure is 0"
    elif len(known) < MIN_ROUNDS:
        reason = f"it takes {MIN_ROUNDS} rounds"
    elif (is_first := _is_first_better(ratio, is_less_better=is_less_better)) is None:
        reason = "the interval holds 1"
    else:
        better = first if is_first else other
        lead = answered[0] - answered[1] if is_first else answered[1] - answered[0]
        if path[0] == "latency_ms" and lead < -MAX_UNANSWERED:
            better, reason = None, f"{better} answered fewer"
    return {
        "metric": name,
        "unit": unit,
        "less_is_better": is_less_better,
        "first": first,
        "other": other,
        "first_median": statistics.median(a for a, _ in known),
        "other_median": statistics.median(b for _, b in known),
        "first_answered": answered[0],
        "other_answered": answered[1],
        "rounds": len(known),
        "runs_with_a_late_client": num_late,
        "ratio": None if ratio is None else ratio.as_dict(),
        "verdict": better,
        "no_verdict_because": reason,
    }


def _is_first_better(ratio: Figure, *, is_less_better: bool) -> bool | None:
    """Return whether the first of two is better, None where the interval leaves that open."""
    assert ratio.low is not None
    assert ratio.high is not None
    if ratio.low <= 1 <= ratio.high:
        return None
    return (ratio.value < 1) == is_less_better


def _answered(stages: Sequence[dict[str, Any]]) -> float:
    """Return the share of all requests that were due which got a complete answer."""
    counts = [stage["requests"] for stage in stages]
    num_due = sum(count["measured"] + count["unsent"] for count in counts)
    return float(sum(count["ok"] for count in counts) / num_due) if num_due else 0.0


def _dig(summary: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else float(value)
