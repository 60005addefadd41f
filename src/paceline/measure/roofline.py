"""Roofline: a model's steps on this machine, beside the least time that its ceilings allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from paceline.errors import ParameterError
from paceline.measure.ceilings import Ceilings
from paceline.measure.floors import (
    ModelCosts,
    OpCost,
    Work,
    chunk_work,
    compute_bound_batch,
    compute_s,
    floor_s,
    memory_s,
    model_costs,
    op_costs,
    prefill_work,
)
from paceline.measure.step_probe import StepProbe, StepShape
from paceline.measure.step_table import StepTable, find_step_table

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel

_OVERHEAD_PROMPT, _OVERHEAD_TOKENS = 8, 24
OnStage = Callable[[str, int, int], None]  # what is measured, how many are done, of how many


class OpRow(Struct, frozen=True, kw_only=True):
    """All ops of one kind in one step. A floor of 0: it multiplies and reads next to nothing."""

    kind: str
    num_ops: int
    macs: int
    num_bytes: int
    compute_s: float
    memory_s: float
    floor_s: float  # the longer of the two
    measured_s: float


class StepReport(Struct, frozen=True, kw_only=True):
    """One step, its work, its floor, and what it took."""

    shape: StepShape
    macs: int
    num_bytes: int
    compute_s: float
    memory_s: float
    floor_s: float  # the longer of the two
    bound: Literal["compute", "memory"]
    measured_s: float
    ops: tuple[OpRow, ...]


class Latency(Struct, frozen=True, kw_only=True):
    """A TTFT or TPOT: `measured_s` is forwards and `engine_s` (scheduling, sampling, text)."""

    floor_s: float
    measured_s: float
    engine_s: float
    ratio: float  # measured / floor
    num_steps: int


class CostPoint(Struct, frozen=True, kw_only=True):
    """A step of so many tokens of one sequence without context, and its floor."""

    num_tokens: int
    measured_s: float
    floor_s: float


class Roofline(Struct, frozen=True, kw_only=True):
    """Everything that `paceline roofline MODEL` says."""

    model: str
    num_threads: int
    batch: int
    context: int
    kv_dtype: str
    weight_bytes: int
    token_macs: int  # linears of one token
    logit_macs: int  # of one row of logits
    kv_token_bytes: int
    ceilings: Ceilings
    ttft: Latency  # of a prompt of `context` tokens, alone
    tpot: Latency  # of `batch` streams that hold `context` tokens
    prefill: StepReport  # the prompt's first chunk
    decode: StepReport
    compute_bound_batch: int | None
    table: StepTable
    step_costs: tuple[CostPoint, ...]


def measure_roofline(
    loaded: LoadedModel,
    ceilings: Ceilings,
    *,
    batch: int,
    context: int,
    refresh: bool = False,
    on_stage: OnStage = lambda name, done, total: None,
    on_shape: OnStage = lambda name, done, total: None,
) -> Roofline:
    """Return the roofline of a loaded, idle model. The KV cache is overwritten."""
    config = loaded.config
    costs = model_costs(loaded.checkpoint, config.kv_dtype)
    ops = op_costs(loaded.checkpoint, config.kv_dtype)
    on_stage("the engine around a step", 0, 4)
    engine_s = engine_step_s(loaded, batch)
    probe = StepProbe(loaded)
    chunk = config.max_batched_tokens
    decode = StepShape(num_seqs=batch, context=context, num_logit_rows=batch)
    chunks = [
        StepShape(num_tokens=min(chunk, context - begin), context=begin)
        for begin in range(0, context, chunk)
    ]
    for shape in (decode, *chunks):
        _require_fit(probe, shape)
    on_stage(f"a prompt of {context} tokens", 1, 4)
    prefill_s = sum(probe.seconds(shape) for shape in chunks)
    first = _step_report(probe, chunks[0], costs, ops, ceilings)
    on_stage(f"a decode step of {batch} at context {context}", 2, 4)
    step = _step_report(probe, decode, costs, ops, ceilings)
    on_stage("the cost of a step by its tokens", 3, 4)
    table = find_step_table(loaded, refresh=refresh, on_shape=on_shape)
    assert config.num_threads is not None
    return Roofline(
        model=loaded.name,
        num_threads=config.num_threads,
        batch=batch,
        context=context,
        kv_dtype=config.kv_dtype,
        weight_bytes=costs.weight_bytes,
        token_macs=costs.token_macs,
        logit_macs=costs.logit_macs,
        kv_token_bytes=costs.kv_bytes,
        ceilings=ceilings,
        ttft=_latency(
            floor_s(prefill_work(costs, context), ceilings), prefill_s, engine_s, len(chunks)
        ),
        tpot=_latency(step.floor_s, step.measured_s, engine_s, 1),
        prefill=first,
        decode=step,
        compute_bound_batch=compute_bound_batch(costs, ceilings, context=context),
        table=table,
        step_costs=_step_costs(table, costs, ceilings),
    )


def _latency(least_s: float, forward_s: float, engine_step_s: float, num_steps: int) -> Latency:
    engine_s = engine_step_s * num_steps
    return Latency(
        floor_s=least_s,
        measured_s=forward_s + engine_s,
        engine_s=engine_s,
        ratio=(forward_s + engine_s) / least_s,
        num_steps=num_steps,
    )


def engine_step_s(loaded: LoadedModel, num_seqs: int) -> float:
    """Return what a decode step of `num_seqs` costs beside its forward, on the mean.

    Precondition: the engine keeps a ledger and its thread does not run.
    """
    from paceline.types import Request, SamplingParams

    assert loaded.recorder is not None
    counters = loaded.recorder.counters
    params = SamplingParams(temperature=0.0, max_tokens=_OVERHEAD_TOKENS, ignore_eos=True)
    prompt = tuple(range(_OVERHEAD_PROMPT))
    for i in range(num_seqs):
        request = Request(id=f"roofline-{i}", prompt_token_ids=prompt, params=params)
        loaded.engine.submit(request, lambda delta: None)
    loaded.engine.step()  # the prompts: their step is long and tells nothing
    steps, total, forward = counters.num_steps, counters.duration_s.total, _forward_ns(loaded)
    while loaded.engine.step():
        pass
    num_steps = counters.num_steps - steps
    spent = counters.duration_s.total - total - (_forward_ns(loaded) - forward) / 1e9
    return max(spent, 0.0) / max(num_steps, 1)


def _forward_ns(loaded: LoadedModel) -> int:
    assert loaded.recorder is not None
    return loaded.recorder.counters.phase_ns["forward"]


def _require_fit(probe: StepProbe, shape: StepShape) -> None:
    if not probe.fits(shape):
        raise ParameterError(
            f"{shape.num_seqs} sequences of {shape.context + shape.num_tokens} tokens do not fit: "
            "lower --batch or --context, or free memory"
        )


def _step_report(
    probe: StepProbe,
    shape: StepShape,
    costs: ModelCosts,
    ops: Sequence[OpCost],
    ceilings: Ceilings,
) -> StepReport:
    work = chunk_work(
        costs, num_seqs=shape.num_seqs, num_tokens=shape.num_tokens, context=shape.context,
        num_logit_rows=shape.num_logit_rows,
    )  # fmt: skip
    multiply_s, read_s = compute_s(work, ceilings), memory_s(work, ceilings)
    return StepReport(
        shape=shape,
        macs=work.macs,
        num_bytes=work.num_bytes,
        compute_s=multiply_s,
        memory_s=read_s,
        floor_s=max(multiply_s, read_s),
        bound="compute" if multiply_s >= read_s else "memory",
        measured_s=probe.seconds(shape),
        ops=_op_rows(ops, probe.op_seconds(shape), shape, ceilings, work.num_bytes),
    )


def _op_rows(
    ops: Sequence[OpCost],
    seconds: Sequence[float],
    shape: StepShape,
    ceilings: Ceilings,
    working_set: int,
) -> tuple[OpRow, ...]:
    """Return a row for each kind of op, the longest first.

    All of a step's bytes are read in turn, so each op's come from where the whole set fits.
    """
    bytes_s = ceilings.read_bytes_s(working_set)
    kinds: dict[str, list[tuple[Work, float]]] = {}
    for op, measured_s in zip(ops, seconds, strict=True):
        work = op.work(
            num_seqs=shape.num_seqs, num_tokens=shape.num_tokens, context=shape.context,
            num_logit_rows=shape.num_logit_rows,
        )  # fmt: skip
        kinds.setdefault(op.kind, []).append((work, measured_s))
    rows = [_op_row(kind, entries, ceilings, bytes_s) for kind, entries in kinds.items()]
    return tuple(sorted(rows, key=lambda row: -row.measured_s))


def _op_row(
    kind: str, entries: Sequence[tuple[Work, float]], ceilings: Ceilings, bytes_s: float
) -> OpRow:
    num_bytes = sum(work.num_bytes for work, _ in entries)
    multiply_s = sum(compute_s(work, ceilings) for work, _ in entries)
    return OpRow(
        kind=kind,
        num_ops=len(entries),
        macs=sum(work.macs for work, _ in entries),
        num_bytes=num_bytes,
        compute_s=multiply_s,
        memory_s=num_bytes / bytes_s,
        floor_s=max(multiply_s, num_bytes / bytes_s),
        measured_s=sum(measured_s for _, measured_s in entries),
    )


def _step_costs(table: StepTable, costs: ModelCosts, ceilings: Ceilings) -> tuple[CostPoint, ...]:
    curve = next(c for c in table.curves if c.kind == "prefill" and c.context == 0)
    return tuple(
        CostPoint(num_tokens=n, measured_s=s, floor_s=floor_s(prefill_work(costs, n), ceilings))
        for n, s in curve.points
    )
