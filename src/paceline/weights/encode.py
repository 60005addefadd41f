"""Float weights to the blocks of a format: `dequantize`, the other way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.errors import ModelFormatError
from paceline.weights.tensor import BLOCK

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

ENCODED_FORMATS = frozenset(BLOCK) - {"f32", "f16", "bf16", "q2_k", "q3_k", "iq4_nl"}
MAX_WEIGHT = 65504.0  # the largest float16, which scales and minimums are
_CHUNK_WEIGHTS = 1 << 18  # that a thread takes at once


def encode(
    values: F32, fmt: str, *, name: str, by_row: bool = False, importance: F32 | None = None,
    num_threads: int = 1,
) -> U8:  # fmt: skip
    """Return the blocks [N, row_bytes] of `fmt` nearest to the matrix `values` [N, K].

    Nearest in squared error, each column's weighed by `importance` [K] (None: all alike). With
    `by_row` the blocks of a row share one scale, which K-quants cannot. The bits depend on the
    values alone, not on the machine or the threads. Raises ModelFormatError, naming
    the tensor `name`, for NaN, infinity, weights beyond 65504, and columns that make no blocks.
    """
    rows, cols = values.shape
    weights, block_bytes = BLOCK[fmt]
    if cols % weights:
        raise ModelFormatError(
            f"tensor {name} has {cols} columns, no multiple of {weights}, the block of {fmt}: "
            "choose a smaller group or another format"
        )
    check_weights(values, name)
    weight = np.ones(cols, np.float32) if importance is None else importance
    source = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, cols // weights * block_bytes), np.uint8)
    step = max(1, _CHUNK_WEIGHTS // cols)
    isa = _native.isas()[0]

    def convert(start: int) -> None:
        part = slice(start, start + step)
        _native.encode(isa, fmt, source[part], weight, by_row, out[part])

    with ThreadPoolExecutor(num_threads) as pool:
        for job in [pool.submit(convert, start) for start in range(0, rows, step)]:
            job.result()
    return out


def check_weights(values: F32, name: str) -> None:
    """Raise ModelFormatError, naming the tensor, for NaN, infinity, weights beyond 65504."""
    if not np.abs(values).max(initial=0) <= MAX_WEIGHT:  # NaN is not <= either
        raise ModelFormatError(
            f"tensor {name} holds {_worst(values)}: weights must be finite and at most "
            f"{MAX_WEIGHT:.0f} in size; download or convert the model again"
        )


def _worst(values: F32) -> str:
    if np.isnan(values).any():
        return "NaN"
    return "infinity" if np.isinf(values).any() else f"a weight of {np.abs(values).max():g}"
