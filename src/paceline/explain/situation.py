"""Situation: what a run tells, as levers look at it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from paceline.errors import PacelineError
from paceline.explain.causes import Finding, findings
from paceline.explain.costs import Machine, StepCosts, fit_steps, scaled_costs
from paceline.explain.facts import Facts, ServerFacts
from paceline.explain.load import load_of
from paceline.explain.simulation import Outcomes, simulate


class Situation(Struct, frozen=True, kw_only=True):
    """All that a lever may look at."""

    facts: Facts
    findings: Sequence[Finding]
    steps: StepCosts | None
    machine: Machine | None
    simulated: Outcomes | None = None  # the run as it was; None: not enough is known of it

    @property
    def server(self) -> ServerFacts | None:
        return self.facts.server

    @property
    def mean_seqs(self) -> float:
        """Sequences in a step, on the mean over time."""
        total_s = sum(step.duration_s for step in self.facts.steps)
        weighted = sum(step.num_seqs * step.duration_s for step in self.facts.steps)
        return weighted / total_s if total_s else 1.0

    @property
    def full_seats(self) -> float:
        """The share of the steps' time in which every seat was taken."""
        if self.server is None:
            return 0.0
        total_s = sum(step.duration_s for step in self.facts.steps)
        full_s = sum(
            step.duration_s
            for step in self.facts.steps
            if step.num_seqs >= self.server.max_num_seqs
        )
        return full_s / total_s if total_s else 0.0

    @property
    def usual_chunk(self) -> float:
        """Tokens of prompts in the step of a token of a prompt, on the mean."""
        counts = [step.num_prefill for step in self.facts.steps]
        total = sum(counts)
        return sum(count * count for count in counts) / total if total else math.inf

    @property
    def repeated_share(self) -> float:
        """The share of the prompts' tokens that repeat a beginning and were computed anew."""
        calls = self.facts.calls
        repeated = sum(call.recomputed_tokens for call in calls)
        in_all = sum(call.prompt_tokens for call in calls)
        return repeated / in_all if in_all else 0.0

    def simulate(self, server: ServerFacts, *, finds_all: bool = False) -> Outcomes | None:
        """Return what another server would make of the load; None where that is not known.

        What the prefix cache had given up it does not find either, unless it `finds_all`.
        """
        if self.steps is None:
            return None
        has_cache = self.server is not None and self.server.prefix_cache
        load = load_of(self.facts.calls, finds_all=finds_all or not has_cache)
        return simulate(load, server, self.steps)

    def mean_waiting(self, part: str) -> float:
        """Return how many calls were in a part of the ledger at once, on the mean."""
        calls = self.facts.calls
        waited_ms = sum(call.parts.get(part, 0.0) for call in calls)
        begins = [call.began_at * 1e3 for call in calls]
        ends = [call.began_at * 1e3 + call.wall_ms for call in calls]
        span_ms = max(ends) - min(begins) if calls else 0.0
        return waited_ms / span_ms if span_ms > 0 else 0.0


def situation_of(facts: Facts, machine: Machine | None) -> Situation:
    """Return what levers look at. Raises PacelineError where no call was answered."""
    if not facts.num_calls:
        raise PacelineError(
            f"{facts.source} has no answered call ({facts.num_failed} others): send some, or look "
            "further back with --last"
        )
    if machine is not None and machine.table is not None:
        steps: StepCosts | None = scaled_costs(machine.table, facts.steps)
    else:
        steps = fit_steps(facts.steps)
    if steps is not None:
        steps = steps.as_long_as(facts.steps)
    found = Situation(facts=facts, findings=findings(facts), steps=steps, machine=machine)
    return found if facts.server is None else replace(found, simulated=found.simulate(facts.server))
