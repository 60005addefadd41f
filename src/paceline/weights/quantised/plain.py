"""Weights that lie as codes of 8 bits, [N, K] as in the float model, with scales beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.weights.quantised.grouped import F32, U8, Grouped, Kind, sequential
from paceline.weights.quantised.module import Module, as_f32

DTYPES: dict[Kind, str] = {"int8": "I8", "fp8": "F8_E4M3"}
TENSOR, CHANNEL = (-1, -1), (1, -1)  # blocks; -1: all rows, or all columns


def block_scaled(
    module: Module, kind: Kind, scale: str, block: tuple[int, int], zero: str | None = None
) -> Grouped:
    """One scale for each block of rows and columns, of which the last may be smaller.

    `scale` is the part of the scales, `zero` that of signed zero points of the same shape.
    """
    weight = module.matrix("weight", DTYPES[kind])
    rows, cols = weight.shape
    tall, wide = (n if part == -1 else part for n, part in zip(weight.shape, block, strict=True))
    grid = (-(-rows // tall), -(-cols // wide))
    shapes = scale_shapes(grid)
    scales = module.floats(scale, *shapes).reshape(grid)
    zeros = None if zero is None else module.shaped(zero, shapes, "I8").reshape(grid)

    def rows_of(values: npt.NDArray[Any], part: slice) -> npt.NDArray[Any]:
        taken: npt.NDArray[Any] = values[np.arange(part.start, part.stop) // tall]
        return taken

    def zeros_of(part: slice) -> F32:
        assert zeros is not None
        return rows_of(zeros, part).astype(np.float32) + np.float32(128)

    return Grouped(
        where=module.label("weight"), kind=kind, shape=(rows, cols), groups=sequential(cols, wide),
        codes=_codes(weight.view(np.uint8), kind),
        scales=lambda part: as_f32(rows_of(scales, part)),
        zeros=zeros_of if zeros is not None and zeros.any() else None,
    )  # fmt: skip


def scale_shapes(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes under which the scales of `grid` are found: dimensions of 1 may be left out."""
    if grid[1] > 1:
        return (grid,)
    return (grid, (grid[0],), ()) if grid[0] == 1 else (grid, (grid[0],))


def _codes(raw: U8, kind: Kind) -> Callable[[slice], U8]:
    if kind == "fp8":
        return lambda part: raw[part]
    return lambda part: raw[part] ^ np.uint8(128)  # from a signed byte to 0..255
