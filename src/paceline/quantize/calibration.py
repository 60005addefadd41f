"""Calibration: a text run through the model, so that each linear is rounded for its real inputs.

True sequential: what a linear reads was computed with the rounded weights of all linears before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from paceline.backends.base import I32, KVSpec, StepInput, StepLimits
from paceline.backends.reference import ReferenceBackend
from paceline.errors import ParameterError
from paceline.models.base import EMBEDDING, build_plan
from paceline.plan.arena import last_uses
from paceline.plan.plan import Op
from paceline.quantize.base import F32, U8, Blocks
from paceline.quantize.curvature import Curvature
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.tensor import QTensor, dequantize

if TYPE_CHECKING:
    from paceline.quantize.recipe import Recipe, TensorRecipe
    from paceline.quantize.source import Source
    from paceline.quantize.staging import Staging

WINDOW = 512  # tokens that see each other
DEFAULT_TOKENS = 8192
_MAX_CHARACTERS = 1 << 20  # of a long text its beginning is enough
# tensor's name, weights [N, K], blocks, curvature of its inputs -> blocks [N, row_bytes]
Rounding = Callable[[str, F32, Blocks, Curvature], U8]


class Calibration(Struct, frozen=True):
    """Windows of token ids, each a sequence of its own; all of one length."""

    windows: tuple[tuple[int, ...], ...]

    def summary(self) -> dict[str, Any]:
        """What config.json says of it, and what a run that goes on must have the same."""
        ids = np.array(self.windows, np.int64)
        return {
            "windows": len(self.windows), "window_tokens": len(self.windows[0]),
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        }  # fmt: skip


def read_calibration(
    path: Path, source: Source, *, num_tokens: int = DEFAULT_TOKENS
) -> Calibration:
    """Return windows of the text in `path`, about `num_tokens` in all, spread evenly over it.

    Raises ParameterError where the text is not there, is no text, or does not fill one window.
    """
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as text: {error}", param="calibrate") from None
    config = source.checkpoint.config
    tokenizer = build_tokenizer(source.checkpoint.tokenizer)
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    size = min(WINDOW, config.max_context) - len(start)
    ids = tokenizer.encode(text, add_special=False)
    if len(ids) < size:
        raise ParameterError(
            f"the text in {path} has {len(ids)} tokens: calibration needs {size} at least, and "
            f"{num_tokens} or more are better",
            param="calibrate",
        )
    count = max(1, min(num_tokens, len(ids)) // size)
    begins = np.linspace(0, len(ids) - size, count).astype(int).tolist()
    return Calibration(tuple(tuple(start + ids[b : b + size]) for b in begins))


def calibrate(
    source: Source, recipe: Recipe, staging: Staging, calibration: Calibration,
    rounding: Rounding, progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Put the blocks of every linear of the recipe into `staging`, rounded by `rounding`.

    Op by op over all windows: holds the values that are still to be read, the gram matrix of one
    input and its factor, and one matrix of weights in floats. What `staging` has is not made again.
    """
    todo = {
        source.canonical[t.tensor.name]: t
        for t in recipe.tensors
        if t.blocks is not None and t.tensor.name in source.linears
    }
    total = sum(t.num_bytes for t in todo.values())
    walk = _Walk(source, calibration)
    curvature: tuple[int, Curvature] | None = None  # of which value
    done = 0
    for index, op in enumerate(walk.plan.ops):
        if not todo:
            return
        planned = todo.pop(op.weights[0], None) if op.name == "linear" else None
        if planned is not None and planned.blocks is not None:
            name = planned.tensor.name
            data = staging.kept(name, planned.num_bytes)
            if data is None:
                value = op.inputs[0].id
                if curvature is None or curvature[0] != value:
                    curvature = None  # two of them would be much memory
                    curvature = value, Curvature(walk.values[value], name=name)
                weight = dequantize(planned.tensor.load())
                data = rounding(name, weight, planned.blocks, curvature[1])
                staging.keep(name, data)
            walk.replace(op.weights[0], planned, data)
            done += planned.num_bytes
            if progress is not None:
                progress(done, total)
        walk.run(index, op)


class _Walk:
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

    def replace(self, name: str, planned: TensorRecipe, data: U8) -> None:
        """Go on with the rounded weights `data` of the tensor `name`."""
        before = self._weights[name]
        rows = data.reshape(before.shape[0], -1)
        self._weights[name] = QTensor(planned.format, before.shape, rows, before.row_order)

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
