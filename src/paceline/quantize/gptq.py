"""GPTQ (Frantar 2023): weights rounded one input after the other, the rest making up for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import ParameterError
from paceline.quantize.base import F32, U8, Blocks
from paceline.quantize.calibration import Calibration
from paceline.quantize.curvature import DAMPING, Curvature
from paceline.quantize.formats import Target
from paceline.quantize.grid import GRIDS, I8, fit, group_width, pack
from paceline.quantize.walk import sites
from paceline.weights.encode import check_weights, encode
from paceline.weights.tensor import dequantize

if TYPE_CHECKING:
    from paceline.quantize.recipe import Recipe
    from paceline.quantize.source import Source
    from paceline.quantize.staging import Staging

FORMATS = ("int4", "int8", "q4_0", "q4_1", "q8_0")
_LAZY = 128  # columns after which the ones behind them are brought up to date: a multiple of groups


class Gptq:
    """Linears are rounded for the text of `calibration`; embedding and head to the nearest."""

    name = "gptq"

    def __init__(self, calibration: Calibration, *, act_order: bool = True) -> None:
        self._calibration = calibration
        self._act_order = act_order

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "calibration": self._calibration.summary(), "act_order": self._act_order,
            "damping": DAMPING,
        }  # fmt: skip

    def rewrites(self, source: Source) -> frozenset[str]:
        """Nothing: all but matrices stays as it is."""
        return frozenset()

    def prepare(
        self, source: Source, recipe: Recipe, staging: Staging, *, num_threads: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Keep the blocks of every linear. What `staging` has is not made again."""
        for site in sites(source, recipe, self._calibration, progress):
            for reader in site.readers:
                data = staging.kept(reader.name, reader.planned.num_bytes)
                if data is None:
                    weight = dequantize(reader.planned.tensor.load())
                    data = gptq(
                        weight, site.curvature, reader.blocks, name=reader.name,
                        act_order=self._act_order, num_threads=num_threads,
                    )  # fmt: skip
                    staging.keep(reader.name, data)
                site.replace(reader, data)

    def quantize(
        self, tensor: str, weight: F32, blocks: Blocks, *, num_threads: int, first_row: int = 0
    ) -> U8:
        return encode(
            weight, blocks.format, name=tensor, by_row=blocks.by_row, num_threads=num_threads
        )


def check_target(target: Target) -> None:
    """Raise ParameterError for a format whose codes are not d * code + m."""
    if target.format not in FORMATS:
        raise ParameterError(
            f"method gptq does not write {target.format}: choose {', '.join(FORMATS)}, or method "
            "rtn",
            param="format",
        )


def gptq(
    weight: F32, curvature: Curvature, blocks: Blocks, *, name: str, act_order: bool = True,
    num_threads: int = 1,
) -> U8:  # fmt: skip
    """Return the blocks [N, row_bytes] of `weight` [N, K], rounded for inputs of `curvature`.

    Column by column; what a column's error does to the output is taken from the columns that are
    still to come (by U, with UᵀU the inverse of XᵀX). A group's scale fits its weights as they are
    when its first column's turn comes. Columns of one group are weighed by what an error in them
    costs after the later ones have made up for it, 1 / U_jj². Deviates from the paper in act-order:
    groups are ordered, and columns within them, so that a group keeps one scale.
    """
    check_weights(weight, name)
    grid, (rows, cols) = GRIDS[blocks.format], weight.shape
    width = group_width(blocks, cols)
    order, upper = curvature.factor(width, act_order=act_order)
    w = np.ascontiguousarray(weight.T[order], np.float32)  # [K, N]: a column of weights is a run
    codes = np.empty((cols, rows), np.int8)
    scales = np.empty((2, cols // width, rows), np.float32)  # d and m
    for begin in range(0, cols, _LAZY):
        end = min(begin + _LAZY, cols)
        errors = np.empty((end - begin, rows), np.float32)
        for j in range(begin, end):
            group = int(order[j]) // width
            if j % width == 0:
                part = slice(j, j + width)
                cost = np.diag(upper)[part] ** -2.0
                scales[:, group] = fit(
                    w[part].T, blocks, cost / cost.max(), name=name, num_threads=num_threads
                )
            d, m = scales[:, group]
            column = grid.nearest(w[j], d, m)
            codes[j] = column
            errors[j - begin] = (w[j] - (d * column + m)) / upper[j, j]
            w[j + 1 : end] -= upper[j, j + 1 : end, None] * errors[j - begin]
        w[end:] -= upper[begin:end, end:].T @ errors
    placed: I8 = np.empty((rows, cols), np.int8)
    placed[:, order] = codes.T
    return pack(placed, scales[0].T, scales[1].T, blocks)
