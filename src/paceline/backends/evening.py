"""What a cache of codes does with the bias of its keys: leave it out, and even out what is left.

A scale serves all columns of a head, so a few columns far above the rest leave the rest few codes.
In Qwen2 such columns come from the bias of k, and sit where rope turns slowly: there the turned
bias is nearly the same in every key. A vector that all keys of a head have in common adds the same
to all scores of a query, which changes no softmax, so it is taken off before keys are rounded and
never added again. (SageAttention, Zhang et al. 2025, takes off the mean of a prompt's keys; here it
is known from the weights, so what is stored of a token depends on that token alone.)

What rope turns faster stays, and is made smaller by 2^e while the query is made larger by it: exact
in floats. (SmoothAttention of QServe, Lin et al. 2024, has any factor and finds it on data.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.backends.base import F32, I32
from paceline.plan.plan import Op, RopeTable
from paceline.weights.tensor import QTensor, dequantize

SCALED_DTYPES = ("int8", "fp8", "k8v4", "int4")  # KV formats of codes with a scale
VERSION = "even1"  # of the rule: blocks that are stored by another one are not to be read
NUM_POSITIONS = 4096  # over so many the turned bias is averaged
MAX_EXPONENT = 24  # a bias beyond 2^24 is a broken one
# What is left of a bias is brought below this: as far as the rest of Qwen2's keys gets.
FLOOR = 4.0


class Evening(Struct, frozen=True):
    """Stored are (k - shift) * 2^-e, and asked is q * 2^e; both [kv_heads, head_dim]."""

    shift: F32
    e: I32


def evening(op: Op, weights: Mapping[str, QTensor], kv_dtype: str) -> Evening | None:
    """Return what the keys of an op that stores them are evened out by; None: nothing is done."""
    bias = op.attrs["key_bias"]
    if bias is None or kv_dtype not in SCALED_DTYPES:
        return None
    shape = (op.attrs["kv_heads"], op.attrs["head_dim"])
    return even_out(dequantize(weights[bias.name]).reshape(shape), bias.rope)


def even_out(bias: F32, rope: RopeTable | None) -> Evening:
    """Return the mean of the turned bias [G, D] over the first positions, and e for what is left.

    Two columns that rope turns into each other share an e: the least one for which what is left of
    their bias is at most FLOOR wherever it gets. Columns that are not turned keep nothing of it.
    """
    shift, e = bias.astype(np.float64), np.zeros(bias.shape, np.int32)
    if rope is not None:
        half = len(rope.inv_freq)
        first, second = slice(0, half), slice(half, 2 * half)
        mean, farthest = _turns(rope)
        pairs = shift[:, first] + 1j * shift[:, second]
        shift[:, first], shift[:, second] = (pairs * mean).real, (pairs * mean).imag
        exponents = np.ceil(np.log2(np.maximum(np.abs(pairs) * farthest, FLOOR) / FLOOR))
        exponents = np.where(np.isfinite(exponents), np.minimum(exponents, MAX_EXPONENT), 0)
        e[:, first] = e[:, second] = exponents
    return Evening(shift.astype(np.float32), e)


@lru_cache(maxsize=4)
def _turns(rope: RopeTable) -> tuple[npt.NDArray[np.complex128], npt.NDArray[np.float64]]:
    """Return the mean of e^(i angle) over the first positions, and how far from it any gets."""
    angles = np.arange(NUM_POSITIONS)[:, None] * np.asarray(rope.inv_freq, np.float64)
    turns = np.exp(1j * angles) * rope.mscale
    mean = turns.mean(axis=0)
    return mean, np.abs(turns - mean).max(axis=0)
