"""StepTable: what a step of a model costs on this machine, by its tokens and their context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from paceline.measure.machine import Machine, cache_file, read_cached, this_machine, write_cached
from paceline.measure.step_probe import StepProbe, StepShape

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.engine.build import LoadedModel

StepKind = Literal["prefill", "verify", "decode"]
CONTEXT = 1024  # tokens of the longer context that is measured; the other is none
_LARGEST: dict[StepKind, int] = {"prefill": 512, "verify": 32, "decode": 32}
_CONTEXT_SIZES = (1, 8, 64, 512)  # attention grows evenly: fewer points tell
OnShape = Callable[[str, int, int], None]  # what is measured, how many are done, of how many


class Curve(Struct, frozen=True, kw_only=True):
    """Seconds by number of tokens, at one context; points ascend."""

    kind: StepKind
    context: int
    points: tuple[tuple[int, float], ...]

    def seconds(self, num_tokens: float) -> float:
        """Return the line through the points at `num_tokens`, straight on beyond its ends."""
        if len(self.points) == 1:
            return self.points[0][1]
        above = bisect_left(self.points, num_tokens, key=lambda point: point[0])
        above = min(max(above, 1), len(self.points) - 1)
        (n0, s0), (n1, s1) = self.points[above - 1], self.points[above]
        return s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0)


class StepTable(Struct, frozen=True, kw_only=True):
    """Measured costs of steps (the forward alone: scheduling and sampling come on top).

    - `prefill`: tokens of one sequence, logits for the last. Decides chunk sizes.
    - `verify`: tokens of one sequence, logits for all. Decides how long a draft may be.
    - `decode`: one token for each of so many sequences. Decides how many run at once.
    """

    model: str
    machine: Machine
    num_threads: int
    kv_dtype: str
    block_size: int
    curves: tuple[Curve, ...]

    def seconds(
        self, num_tokens: float, context: float = 0, *, kind: StepKind = "prefill"
    ) -> float:
        """Return what a step costs whose sequences hold `context` tokens before it.

        Between measured sizes and contexts on a straight line, and straight on beyond them.
        """
        curves = [curve for curve in self.curves if curve.kind == kind]
        costs = [(curve.context, curve.seconds(num_tokens)) for curve in curves]
        (c0, s0), (c1, s1) = costs[0], costs[-1]
        if c0 == c1:
            return s0
        return s0 + max(s1 - s0, 0.0) * (context - c0) / (c1 - c0)

    def tokens_within(self, seconds: float, context: int = 0, *, kind: StepKind = "prefill") -> int:
        """Return the most tokens whose step stays within `seconds`; 0 where one is too many."""
        low, high = 0, 1
        while high < 2**16 and self.seconds(high, context, kind=kind) <= seconds:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            is_within = self.seconds(middle, context, kind=kind) <= seconds
            low, high = (middle, high) if is_within else (low, middle)
        return low

    def prefill_s(self, num_tokens: int, *, chunk: int, context: int = 0) -> float:
        """Return the cost of a prompt that is computed in chunks of so many tokens."""
        total = 0.0
        for begin in range(0, num_tokens, chunk):
            total += self.seconds(min(chunk, num_tokens - begin), context + begin)
        return total


def known_step_table(loaded: LoadedModel) -> StepTable | None:
    """Return the model's table if it was measured before on this machine; nothing is measured."""
    config = loaded.config
    assert config.num_threads is not None
    return read_step_table(
        loaded.path, num_threads=config.num_threads, kv_dtype=config.kv_dtype,
        block_size=config.block_size,
    )  # fmt: skip


def read_step_table(
    model: Path, *, num_threads: int, kv_dtype: str, block_size: int
) -> StepTable | None:
    """Return what was kept for a model file and these options; None where there is nothing."""
    path = _path(model, this_machine(), num_threads, kv_dtype, block_size)
    return read_cached(path, StepTable)


def find_step_table(
    loaded: LoadedModel,
    *,
    refresh: bool = False,
    on_shape: OnShape = lambda name, done, total: None,
) -> StepTable:
    """Return the table of a loaded, idle model: kept from before, or measured now (10 s and more).

    Measuring overwrites the KV cache.
    """
    machine = this_machine()
    config = loaded.config
    num_threads = config.num_threads
    assert num_threads is not None
    path = _path(loaded.path, machine, num_threads, config.kv_dtype, config.block_size)
    known = None if refresh else read_cached(path, StepTable)
    if known is not None:
        return known
    table = StepTable(
        model=loaded.name,
        machine=machine,
        num_threads=num_threads,
        kv_dtype=config.kv_dtype,
        block_size=config.block_size,
        curves=_measure(StepProbe(loaded), on_shape),
    )
    write_cached(path, table)
    return table


def shapes_of(kind: StepKind, context: int) -> list[tuple[int, StepShape]]:
    """Return (size, shape) of each point of a curve, the smallest first."""
    largest = _LARGEST[kind]
    sizes = [2**i for i in range(largest.bit_length())]
    if context:
        sizes = [n for n in sizes if n in _CONTEXT_SIZES or n == largest]
    return [(n, _shape(kind, n, context)) for n in sizes]


def _shape(kind: StepKind, n: int, context: int) -> StepShape:
    if kind == "decode":
        return StepShape(num_seqs=n, context=context, num_logit_rows=n)
    num_logit_rows = n if kind == "verify" else 1
    return StepShape(num_tokens=n, context=context, num_logit_rows=num_logit_rows)


def _measure(probe: StepProbe, on_shape: OnShape) -> tuple[Curve, ...]:
    wanted: list[tuple[StepKind, int, list[tuple[int, StepShape]]]] = []
    kinds: tuple[StepKind, ...] = ("prefill", "verify", "decode")
    for kind in kinds:
        for context in (0, CONTEXT):
            shapes = [pair for pair in shapes_of(kind, context) if probe.fits(pair[1])]
            if shapes:
                wanted.append((kind, context, shapes))
    total = sum(len(shapes) for _, _, shapes in wanted)
    num_done = 0
    curves = []
    for kind, context, shapes in wanted:
        points = []
        for n, shape in shapes:
            on_shape(f"{kind} step of {n} tokens at context {context}", num_done, total)
            points.append((n, probe.seconds(shape)))
            num_done += 1
        curves.append(Curve(kind=kind, context=context, points=tuple(points)))
    return tuple(curves)


def _path(model: Path, machine: Machine, num_threads: int, kv_dtype: str, block_size: int) -> Path:
    from paceline.engine.build import source_files
    from paceline.weights.repack import source_fingerprint

    source = source_fingerprint(source_files(model))
    return cache_file("steps", machine, source, num_threads, kv_dtype, block_size)
