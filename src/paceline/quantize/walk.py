"""Walk: a calibration text run through the model, op by op, with a stop before its linears.

True sequential: what a linear reads was computed with the rounded weights of all linears before it,
as far as they were replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from paceline.backends.base import I32, KVSpec, StepInput, StepLimits
from paceline.backends.reference import ReferenceBackend
from paceline.models.base import EMBEDDING, build_plan
from paceline.plan.arena import last_uses
from paceline.plan.plan import Op, Value
from paceline.quantize.base import F32, U8, Blocks
from paceline.quantize.curvature import Curvature
from paceline.weights.tensor import QTensor

if TYPE_CHECKING:
    from paceline.quantize.calibration import Calibration
    from paceline.quantize.recipe import Recipe, TensorRecipe
    from paceline.quantize.source import Source


class Reader(Struct, frozen=True):
    """A linear to round: what it becomes, and its name in the plan."""

    planned: TensorRecipe
    blocks: Blocks
    canonical: str

    @property
    def name(self) -> str:
        """As the source's files have it."""
        return self.planned.tensor.name


class Site:
    """A value that linears to round are about to read; `values` is an array a window."""

    def __init__(self, walk: Walk, value: Value, readers: tuple[Reader, ...]) -> None:
        self.value = value
        self.readers = readers
        self._walk = walk
        self._curvature: Curvature | None = None

    @property
    def values(self) -> list[F32]:
        return self._walk.values[self.value.id]

    @property
    def curvature(self) -> Curvature:
        """XᵀX of the value, summed when it is first asked for."""
        if self._curvature is None:
            self._curvature = Curvature(self.values, name=self.readers[0].name)
        return self._curvature

    def mean_size(self) -> F32:
        """Mean |x| of each column."""
        mean: F32 = np.mean([np.abs(x).mean(axis=0, dtype=np.float64) for x in self.values], axis=0)
        return mean.astype(np.float32)

    def divide(self, scale: F32) -> None:
        """Divide the value's columns by `scale`, which the readers' weights take up."""
        for x in self.values:
            x /= scale

    def replace(self, reader: Reader, data: U8) -> None:
        """Go on with the rounded weights `data` of a reader."""
        self._walk.replace(reader.canonical, reader.blocks.format, data)


def sites(
    source: Source, recipe: Recipe, calibration: Calibration,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Site]:  # fmt: skip
    """Yield every site of the recipe's linears, in the order in which they are computed.

    Holds the values that are still to be read. `progress` counts bytes of the readers as they will
    be, after each site. The walk ends with the last linear that the recipe rounds.
    """
    todo = {
        source.canonical[t.tensor.name]: t
        for t in recipe.tensors
        if t.blocks is not None and t.tensor.name in source.linears
    }
    total, done = sum(t.num_bytes for t in todo.values()), 0
    walk = Walk(source, calibration)
    for index, op in enumerate(walk.plan.ops):
        if not todo:
            return
        if op.name == "linear" and op.weights[0] in todo:
            readers = tuple(_readers(walk, op.inputs[0], todo))
            yield Site(walk, op.inputs[0], readers)
            done += sum(reader.planned.num_bytes for reader in readers)
            if progress is not None:
                progress(done, total)
        walk.run(index, op)


def _readers(walk: Walk, value: Value, todo: dict[str, TensorRecipe]) -> Iterator[Reader]:
    """Take the linears that read `value` out of `todo`."""
    for op in walk.plan.ops:
        if op.name == "linear" and op.inputs[0].id == value.id:
            planned = todo.pop(op.weights[0], None)
            if planned is not None and planned.blocks is not None:
                yield Reader(planned, planned.blocks, op.weights[0])


class Walk:
    """The model's plan run op by op over all windows; `values` by id, an array a window."""

    def __init__(self, source: Source, calibration: Calibration) -> None:
        self.plan = build_plan(source.checkpoint.config)
        self.values: dict[int, list[F32]] = {}
        self._last = last_uses(self.plan)
        self._weights = dict(source.checkpoint.tensors)
        # Of the embedding only the rows that the text needs, under ids of their own.
        used, ids = np.unique(np.array(calibration.windows, np.int32), return_inverse=True)
        table = self._weights[EMBEDDING]
        rows = used if table.row_order is None else table.row_order[used]
        self._weights[EMBEDDING] = QTensor(
            table.format, (len(used), table.shape[1]), table.data[rows]
        )
        tokens = ids.reshape(len(calibration.windows), -1).astype(np.int32)
        self._steps = [_step(row) for row in tokens]
        size = tokens.shape[1]
        limits = StepLimits(max_tokens=size, max_logit_rows=1, max_seqs=1, max_blocks_per_seq=1)
        kv = KVSpec(num_blocks=1, block_size=size, dtype="f32")
        self._backend = ReferenceBackend()
        self._backend.load(self.plan, self._weights, kv=kv, limits=limits)

    def replace(self, name: str, fmt: str, data: U8) -> None:
        """Go on with the weights `data`, blocks of `fmt`, of the tensor `name`."""
        before = self._weights[name]
        rows = data.reshape(before.shape[0], -1)
        self._weights[name] = QTensor(fmt, before.shape, rows, before.row_order)

    def run(self, index: int, op: Op) -> None:
        """Compute the op's value for every window, and drop what nobody reads any more."""
        inputs = [self.values[value.id] for value in op.inputs]
        self.values[op.out.id] = [
            self._backend.run_op(op, step, *(value[i] for value in inputs))
            for i, step in enumerate(self._steps)
        ]
        self._backend.drop_weights()
        for value in (op.out, *op.inputs):
            if self._last[value.id] <= index:
                self.values.pop(value.id, None)


def _step(tokens: I32) -> StepInput:
    """One sequence from its beginning, in the cache's only block."""
    positions = np.arange(len(tokens), dtype=np.int32)
    return StepInput(
        tokens=tokens, positions=positions, slots=positions,
        seqs=np.array([[0, len(tokens), 0]], np.int32), block_tables=np.zeros((1, 1), np.int32),
        logit_rows=np.zeros(0, np.int32),
    )  # fmt: skip
