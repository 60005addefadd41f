"""Costs: what steps cost and what they must, as far as a run and this machine tell."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.config import EngineConfig
from paceline.cpu import default_num_threads
from paceline.errors import ParameterError
from paceline.explain.causes import Finding
from paceline.explain.facts import Facts, ServerFacts, StepFacts
from paceline.measure.ceilings import Ceilings, MachineCeilings, find_ceilings
from paceline.measure.floors import ModelCosts, chunk_work, decode_work, floor_s, model_costs
from paceline.measure.step_table import StepTable, read_step_table

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint

_MANY = 256  # tokens of a step whose cost is nearly all theirs


class StepCosts(Struct, frozen=True, kw_only=True):
    """A step of n tokens takes about `base_s + n * token_s`, its Python included.

    With a table of the model on this machine, its costs times `scale` instead: a line through the
    steps that ran says little of steps of another size.
    """

    base_s: float
    token_s: float
    table: StepTable | None = None
    scale: float = 1.0

    def step_s(self, num_seqs: float) -> float:
        """Return the cost of a step in which so many sequences decode."""
        if self.table is None:
            return self.base_s + num_seqs * self.token_s
        return self.scale * self.table.seconds(round(num_seqs), kind="decode")

    def chunk_s(self, num_tokens: int) -> float:
        """Return the cost of a step with so many tokens of one prompt."""
        if self.table is None:
            return self.base_s + num_tokens * self.token_s
        return self.scale * self.table.seconds(num_tokens)

    def prefill_s(self, num_tokens: float, chunk: int) -> float:
        """Return the cost of a prompt that is computed in chunks of so many tokens."""
        if self.table is not None:
            return self.scale * self.table.prefill_s(max(round(num_tokens), 1), chunk=chunk)
        num_steps = max(num_tokens / chunk, 1.0)
        return num_steps * self.base_s + num_tokens * self.token_s


def scaled_costs(table: StepTable, steps: Sequence[StepFacts]) -> StepCosts:
    """Return the table's costs, scaled by what the steps that ran took beside it."""
    ratios = [step.duration_s / table.seconds(step.num_tokens) for step in steps]
    scale = statistics.median(ratios) if ratios else 1.0
    one_s, many_s = (scale * table.seconds(n) for n in (1, _MANY))
    token_s = max((many_s - one_s) / (_MANY - 1), 0.0)
    return StepCosts(
        base_s=max(one_s - token_s, 0.0), token_s=token_s, table=table, scale=scale
    )  # fmt: skip


def fit_steps(steps: Sequence[StepFacts]) -> StepCosts | None:
    """Return the line through the steps that ran; None where they are all of one size.

    Through the medians of the sizes, so that a stall bends it little.
    """
    by_size: dict[int, list[StepFacts]] = defaultdict(list)
    for step in steps:
        by_size[(step.num_tokens - 1).bit_length()].append(step)
    points = [
        (
            statistics.mean(step.num_tokens for step in size),
            statistics.median(step.duration_s for step in size),
            len(size),
        )
        for size in by_size.values()
    ]
    if len(points) < 2:
        return None
    weight = sum(w for _, _, w in points)
    mean_n = sum(n * w for n, _, w in points) / weight
    mean_s = sum(s * w for _, s, w in points) / weight
    spread = sum(w * (n - mean_n) ** 2 for n, _, w in points)
    slope = sum(w * (n - mean_n) * (s - mean_s) for n, s, w in points) / spread
    token_s = max(slope, 0.0)
    smallest_s = min(points)[1]
    # The line can miss the small steps, which are the ones whose base counts.
    return StepCosts(base_s=min(max(mean_s - token_s * mean_n, 0.0), smallest_s), token_s=token_s)


class Machine(Struct, frozen=True, kw_only=True):
    """The machine under the server, where that is this one, and the model's needs."""

    ceilings: MachineCeilings
    costs: ModelCosts
    num_threads: int  # of the server, or of this machine
    table: StepTable | None  # where `paceline roofline` has measured it

    def at(self, num_threads: int) -> Ceilings | None:
        return self.ceilings.at(num_threads)

    def floor_ms(self, finding: Finding) -> float:
        """Return the least that the call of a percentile could take, alone on the machine."""
        ceilings = self.at(self.num_threads)
        assert ceilings is not None
        if finding.metric == "ttft":
            cached = round(finding.cached_tokens)
            computed = max(round(finding.prompt_tokens) - cached, 1)
            work = chunk_work(
                self.costs, num_seqs=1, num_tokens=computed, context=cached, num_logit_rows=1
            )
        else:
            work = decode_work(self.costs, num_streams=1, context=round(finding.context_tokens))
        return floor_s(work, ceilings) * 1e3


def this_machine_with(checkpoint: Checkpoint, server: ServerFacts | None) -> Machine:
    """Return the machine that this process runs on, with the needs of a local model.

    Raises ParameterError for another model than the one that the server has.
    """
    found = weight_bytes(checkpoint)
    if server is not None and found != server.weight_bytes:
        raise ParameterError(
            f"{checkpoint.path} has {found} bytes of weights, the server's {server.model} has "
            f"{server.weight_bytes}: name the same model"
        )
    kv_dtype = "f16" if server is None else server.kv_dtype
    num_threads = default_num_threads()[0] if server is None else server.num_threads
    block_size = EngineConfig().block_size if server is None else server.block_size
    return Machine(
        ceilings=find_ceilings(num_threads),
        costs=model_costs(checkpoint, kv_dtype),
        num_threads=num_threads,
        table=read_step_table(
            checkpoint.path, num_threads=num_threads, kv_dtype=kv_dtype, block_size=block_size
        ),
    )


def weight_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.num_bytes for tensor in checkpoint.tensors.values())


class Situation(Struct, frozen=True, kw_only=True):
    """All that a lever may look at."""

    facts: Facts
    findings: Sequence[Finding]
    steps: StepCosts | None
    machine: Machine | None

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
    def repeated_share(self) -> float:
        """The share of the prompts' tokens that repeat a beginning and were computed anew."""
        calls = self.facts.calls
        repeated = sum(call.recomputed_tokens for call in calls)
        in_all = sum(call.prompt_tokens for call in calls)
        return repeated / in_all if in_all else 0.0

    def prompt_ms(self, num_tokens: float) -> float:
        """Return what a prompt of so many tokens costs by itself, by those that were computed."""
        calls = self.facts.calls
        computed = sum(call.prompt_tokens for call in calls)
        spent_ms = sum(call.parts.get("prefill", 0.0) for call in calls)
        return spent_ms / computed * num_tokens if computed else 0.0

    def mean_waiting(self, part: str) -> float:
        """Return how many calls were in a part of the ledger at once, on the mean."""
        calls = self.facts.calls
        waited_ms = sum(call.parts.get(part, 0.0) for call in calls)
        begins = [call.began_at * 1e3 for call in calls]
        ends = [call.began_at * 1e3 + call.wall_ms for call in calls]
        span_ms = max(ends) - min(begins) if calls else 0.0
        return waited_ms / span_ms if span_ms > 0 else 0.0
