"""Verify: the same load with and without a change, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from paceline.explain.causes import Metric, find
from paceline.explain.costs import Machine
from paceline.explain.facts import CallFacts, Facts
from paceline.explain.levers import LEVERS
from paceline.explain.predictions import curves_of, predicted
from paceline.explain.proposal import Change
from paceline.explain.replay import Planned, run
from paceline.explain.report import situation_of

OnRun = Callable[[str], None]


class Outcome(Struct, frozen=True, kw_only=True):
    """A percentile as it was, as it was expected to become, and as it became."""

    metric: Metric
    percentile: int
    before_ms: float
    predicted_ms: float
    measured_ms: float


class Verification(Struct, frozen=True, kw_only=True):
    """`outcomes` is empty where the load did not show the cause again: `note` says so."""

    lever: str
    change: Change
    rounds: int
    num_calls: int  # of each side
    outcomes: tuple[Outcome, ...]
    note: str = ""


def verify(
    lever: str,
    change: Change,
    planned: Sequence[Planned],
    *,
    model: Path,
    options: Mapping[str, str],
    machine: Machine | None,
    concurrency: int,
    rounds: int,
    on_run: OnRun = lambda text: None,
) -> Verification:
    """Run the load `rounds` times on each side, in turns; the order swaps every round.

    The lever proposes anew from the first run without a change, so that its prediction speaks of
    this machine and load, and it is that proposal which is run.
    """
    on_run("without a change")
    sides = {False: [run(model, options, planned, concurrency=concurrency)], True: []}
    proposal = LEVERS[lever](situation_of(sides[False][0], machine))
    if proposal is None or not proposal.change:
        return Verification(
            lever=lever, change=change, rounds=1, num_calls=len(sides[False][0].calls),
            outcomes=(), note="replayed, the load did not show this cause again",
        )  # fmt: skip
    changed = {**options, **proposal.change}
    what = " ".join(text for option in proposal.change.items() for text in option if text)
    for idx in range(rounds):
        for is_changed in (True,) if idx == 0 else (idx % 2 == 1, idx % 2 == 0):
            on_run(f"round {idx + 1} of {rounds}, {'with' if is_changed else 'without'} {what}")
            used = changed if is_changed else options
            sides[is_changed].append(run(model, used, planned, concurrency=concurrency))
    before, after = (pool(sides[side]) for side in (False, True))
    prediction = predicted(proposal.predict, curves_of(before.calls))
    found = []
    for finding in situation_of(before, machine).findings:
        measured = find(after.calls, finding.metric, finding.percentile)
        if measured is not None:
            found.append(
                Outcome(
                    metric=finding.metric,
                    percentile=finding.percentile,
                    before_ms=finding.value_ms,
                    predicted_ms=prediction.at(finding.metric, finding.percentile),
                    measured_ms=measured.value_ms,
                )
            )
    return Verification(
        lever=lever,
        change=proposal.change,
        rounds=rounds,
        num_calls=len(before.calls),
        outcomes=tuple(found),
    )


def pool(runs: Iterable[Facts]) -> Facts:
    """Return several runs of one load as one: each begins where the one before ended."""
    runs = list(runs)
    calls: list[CallFacts] = []
    end = 0.0
    for facts in runs:
        begin = min((call.began_at for call in facts.calls), default=0.0)
        calls += [replace(call, began_at=call.began_at - begin + end) for call in facts.calls]
        end = max((call.began_at + call.wall_ms / 1e3 for call in calls), default=0.0)
    return replace(
        runs[0],
        calls=tuple(calls),
        steps=tuple(chain.from_iterable(facts.steps for facts in runs)),
        num_failed=sum(facts.num_failed for facts in runs),
    )
