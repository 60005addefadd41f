"""Fold: where a scale of a linear's input columns is taken up exactly, so that no op is added.

Columns of an input divided by s, and those of the weights that read it multiplied by s, change no
output. Dividing costs nothing where the input is linear in something that the file stores:

- a norm's output in the norm's weight (and bias);
- attention's output in the rows and bias of v_proj, with one scale for the query heads that share
  a KV head;
- act(gate) * up in the rows and bias of up_proj.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
from msgspec import Struct

from paceline.plan.plan import Op, Plan
from paceline.quantize.base import F32


class Fold(Struct, frozen=True):
    """What is divided by a scale, under the plan's names: `vectors`, and the rows of `matrix`.

    Columns of the input that come from one of their elements, `repeat` runs of `width`, share it.
    """

    vectors: tuple[str, ...]
    matrix: str | None = None
    repeat: int = 1
    width: int = 1

    def shared(self, columns: F32) -> F32:
        """Return `columns` [K] with those that share a scale replaced by their mean."""
        runs = columns.reshape(-1, self.repeat, self.width)
        return np.repeat(runs.mean(axis=1, keepdims=True), self.repeat, axis=1).reshape(-1)

    def elements(self, columns: F32) -> F32:
        """Return of `columns` [K], a scale, what each element is divided by: [K / repeat]."""
        return columns.reshape(-1, self.repeat, self.width)[:, 0].reshape(-1)


def scaled_matrix(weight: F32, columns: F32, rows: F32 | None = None) -> F32:
    """Return `weight` [N, K] for an input that was divided by `columns`, its output by `rows`."""
    scaled = weight * columns
    if rows is not None:
        scaled /= rows[:, None]
    return scaled


def divided_vector(vector: F32, scale: F32, lacking: float = 0.0) -> F32:
    """Return the stored `vector` divided; the file leaves `lacking` out of every element."""
    offset = np.float32(lacking)
    return (vector + offset) / scale - offset


def find_folds(plan: Plan, linears: Collection[str]) -> dict[int, Fold]:
    """Map values to their folds: those that only `linears` read, which take up what is divided."""
    uses = Counter(name for op in plan.ops for name in op.weights)
    producers = {op.out.id: op for op in plan.ops}
    readers: dict[int, list[Op]] = {}
    for op in plan.ops:
        for value in op.inputs:
            readers.setdefault(value.id, []).append(op)
    outputs = {value.id for value in plan.outputs.values()}
    folds = {}
    for id_, ops in readers.items():
        is_free = all(op.name == "linear" and op.weights[0] in linears for op in ops)
        if not is_free or id_ in outputs:
            continue
        fold = _fold_of(producers[id_], producers, {i: len(ops) for i, ops in readers.items()})
        if fold is None or any(uses[name] > 1 for name in fold.vectors):
            continue
        if fold.matrix is None or (fold.matrix in linears and uses[fold.matrix] == 1):
            folds[id_] = fold
    return folds


def _fold_of(op: Op, producers: dict[int, Op], num_reads: dict[int, int]) -> Fold | None:
    """Return what takes up a scale of the value of `op`; None if nothing does exactly."""
    if op.name == "layer_norm" or (op.name == "rms_norm" and op.attrs["heads"] == 1):
        return Fold(vectors=op.weights)
    repeat, width = 1, 1
    if op.name == "attention":
        factor = op.inputs[2]
        width = op.attrs["head_dim"]
        repeat = op.attrs["heads"] // op.attrs["kv_heads"]
    elif op.name == "gated_act" and len(op.inputs) == 2:
        factor = op.inputs[1]
    else:
        return None
    linear = producers[factor.id]
    if linear.name != "linear" or num_reads[factor.id] > 1:
        return None
    biases = tuple(name for name in linear.attrs["biases"] if name)
    return Fold(vectors=biases, matrix=linear.weights[0], repeat=repeat, width=width)
