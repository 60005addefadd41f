"""Verify: the same load with and without a change, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from paceline.explain.causes import Metric, find, findings
from paceline.explain.costs import Machine
from paceline.explain.facts import CallFacts, Facts
from paceline.explain.levers import LEVERS
from paceline.explain.predictions import curves_of, predicted
from paceline.explain.proposal import Change, Proposal
from paceline.explain.replay import Planned, run
from paceline.explain.situation import situation_of

OnRun = Callable[[str], None]


class Outcome(Struct, frozen=True, kw_only=True):
    """A percentile as it was, as it was expected to become, and as it became."""

    metric: Metric
    percentile: int
    before_ms: float
    predicted_ms: float
    measured_ms: float


class Verification(Struct, frozen=True, kw_only=True):
    """What was predicted of a change, and what came. `note` says what is odd about it, if any."""

    lever: str
    change: Change
    rounds: int
    num_calls: int  # of each side
    outcomes: tuple[Outcome, ...]
    note: str = ""


def verify(
    lever: str,
    proposal: Proposal,
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

    It is the proposal as it was told that is run. What is predicted of it is reckoned anew from the
    first run without it, so that it speaks of this machine and of the load as it is replayed.
    """
    changed = {**options, **proposal.change}
    what = " ".join(text for option in proposal.change.items() for text in option if text)
    sides: dict[bool, list[Facts]] = {False: [], True: []}
    for idx in range(rounds):
        for is_changed in (idx % 2 == 1, idx % 2 == 0):
            on_run(f"round {idx + 1} of {rounds}, {'with' if is_changed else 'without'} {what}")
            used = changed if is_changed else options
            sides[is_changed].append(run(model, used, planned, concurrency=concurrency))
    first = situation_of(sides[False][0], machine)
    before, after = (pool(sides[side]) for side in (False, True))
    prediction = predicted(proposal.effect(first), curves_of(before.calls))
    found = []
    for finding in findings(before):
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
    is_seen = LEVERS[lever](first) is not None
    return Verification(
        lever=lever,
        change=proposal.change,
        rounds=rounds,
        num_calls=len(before.calls),
        outcomes=tuple(found),
        note="" if is_seen else "replayed, the load did not show this cause again",
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
