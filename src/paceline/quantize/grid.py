"""Grid: the values d * code + m that a group of weights can have, and how they are stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.quantize.base import F32, U8, Blocks
from paceline.weights.encode import encode
from paceline.weights.tensor import BLOCK

I8 = npt.NDArray[np.int8]


class Grid(Struct, frozen=True):
    """Codes from `low` to `high`, in 4 or 8 bits; with or without an f16 minimum m."""

    low: int
    high: int
    has_minimum: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.high - self.low < 16 else 8

    def nearest(self, w: F32, d: F32, m: F32) -> F32:
        """Codes of the values nearest to `w`; 0, or the nearest to 0, where d is 0."""
        inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
        codes: F32 = np.clip(np.rint((w - m) * inverse), self.low, self.high)
        return codes


_INT4, _INT4_MIN = Grid(-8, 7), Grid(0, 15, has_minimum=True)
_INT8, _INT8_MIN = Grid(-127, 127), Grid(-128, 127, has_minimum=True)
GRIDS = {
    "q4_0": _INT4, "i4_g64": _INT4, "i4_g128": _INT4,
    "q4_1": _INT4_MIN, "i4m_g64": _INT4_MIN, "i4m_g128": _INT4_MIN,
    "q8_0": _INT8, "i8_g64": _INT8, "i8_g128": _INT8,
    "i8m_g32": _INT8_MIN, "i8m_g64": _INT8_MIN, "i8m_g128": _INT8_MIN,
}  # fmt: skip


def group_width(blocks: Blocks, cols: int) -> int:
    """Weights that share a scale, of rows of `cols`."""
    return cols if blocks.by_row else BLOCK[blocks.format][0]


def fit(
    weight: F32, blocks: Blocks, importance: F32, *, name: str, num_threads: int
) -> tuple[F32, F32]:
    """Return d and m [N] for one group a row, `weight` [N, K]: those of the least weighed error."""
    data = encode(
        weight, blocks.format, name=name, by_row=blocks.by_row, importance=importance,
        num_threads=num_threads,
    )  # fmt: skip
    d = data[:, 0:2].copy().view("<f2").astype(np.float32)[:, 0]
    if not GRIDS[blocks.format].has_minimum:
        return d, np.zeros_like(d)
    return d, data[:, 2:4].copy().view("<f2").astype(np.float32)[:, 0]


def pack(codes: I8, d: F32, m: F32, blocks: Blocks) -> U8:
    """Return the blocks [N, row_bytes] of codes [N, K] and of d and m [N, groups]."""
    grid, (width, size) = GRIDS[blocks.format], BLOCK[blocks.format]
    rows, cols = codes.shape
    out = np.empty((rows, cols // width, size), np.uint8)
    fields = (d, m) if grid.has_minimum else (d,)
    for i, values in enumerate(fields):  # a scale of a whole row is repeated in its blocks
        per_block = np.repeat(values, out.shape[1] // values.shape[1], axis=1)
        out[:, :, 2 * i : 2 * i + 2] = per_block.astype("<f2")[..., None].view(np.uint8)
    body = out[:, :, 2 * len(fields) :]
    if grid.bits == 8:
        body[:] = codes.view(np.uint8).reshape(rows, -1, width)
    else:  # sixteen bytes hold 32 codes: the first half in the low nibbles
        nibbles = (codes - grid.low).astype(np.uint8).reshape(rows, cols // width, -1, 2, 16)
        body[:] = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).reshape(body.shape)
    return out.reshape(rows, -1)
