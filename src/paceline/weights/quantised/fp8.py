"""FP8 as Hugging Face's `fp8` stores it: E4M3 weights, one scale for a block or for the tensor.

weight F8_E4M3 [N, K]; weight_scale_inv [N / rows, K / columns] of `weight_block_size`, or
weight_scale, one number. weight = value * scale.
"""

from __future__ import annotations

from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.weights.fields import Fields
from paceline.weights.quantised.grouped import Grouped
from paceline.weights.quantised.module import Module
from paceline.weights.quantised.plain import TENSOR, block_scaled


class FP8(Struct, frozen=True):
    """`block` is the rows and columns of a scale; None: one scale a tensor."""

    block: tuple[int, int] | None

    def open(self, module: Module) -> Grouped:
        if self.block is None:
            return block_scaled(module, "fp8", "weight_scale", TENSOR)
        return block_scaled(module, "fp8", "weight_scale_inv", self.block)


def read_fp8(table: Fields) -> FP8:
    """The method from `quantization_config`; what it cannot read is refused by name."""
    kind = table.text("fmt", "e4m3").lower()
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(f"{table.where}: FP8 as {kind!r} is not supported: e4m3 is")
    return FP8(block_shape(table, "weight_block_size"))


def block_shape(table: Fields, key: str) -> tuple[int, int] | None:
    """[rows, columns] under `key`; None where it is absent."""
    value = table.values.get(key)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in value)
    ):
        raise ModelFormatError(f"{table.where}: {key} is {value!r}: two positive integers are read")
    return value[0], value[1]
