"""GPTQ as AutoGPTQ and GPTQModel store it: 4 or 8 bits, with and without act-order.

qweight int32 [K * bits / 32, N]: a word holds inputs that follow each other, of one output. qzeros
int32 [groups, N * bits / 32], scales [groups, N], g_idx int32 [K] the group of each input.
weight = (code - zero) * scale. The first format stores zero - 1, `gptq_v2` the zero itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.weights.fields import Fields
from paceline.weights.quantised.grouped import F32, Grouped, checked_groups, sequential
from paceline.weights.quantised.module import (
    DAMAGED,
    FLOATS,
    I32,
    U8,
    Module,
    all_fields_are,
    as_f32,
    unpack,
)

BITS = (4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}  # -> what to add to a stored zero


class GPTQ(Struct, frozen=True):
    """What config.json says of all linears."""

    bits: int
    group: int  # -1: a whole row
    zero_offset: int
    dynamic: bool  # linears may differ in bits and group

    def open(self, module: Module) -> Grouped:
        words = module.matrix("qweight", "I32")  # [K * bits / 32, N]
        rows = words.shape[1]
        bits = self._bits_of(module, len(words))
        cols = len(words) * 32 // bits
        scales = module.matrix("scales", *FLOATS)
        if scales.shape[1] != rows or rows * bits % 32:
            raise ModelFormatError(
                f"{module.label('scales')} has shape {list(scales.shape)}, qweight has {rows} "
                f"outputs, and {32 // bits} of them share a word of qzeros: {DAMAGED}"
            )
        groups = self._groups(module, cols, len(scales))
        zeros = module.array("qzeros", (len(scales), rows * bits // 32), "I32")
        middle = 1 << (bits - 1)
        is_symmetric = all_fields_are(zeros, middle - self.zero_offset, bits)
        return Grouped(
            where=module.label("qweight"), kind="int4" if bits == 4 else "int8",
            shape=(rows, cols), groups=groups,
            codes=lambda part: _codes(words[:, part], bits),
            scales=lambda part: as_f32(scales[:, part]).T,
            zeros=None if is_symmetric else lambda part: self._zeros(zeros, part, bits),
        )  # fmt: skip

    def _bits_of(self, module: Module, num_words: int) -> int:
        """Bits of this linear: the config's, unless `dynamic` lets it have its own."""
        if not self.dynamic or not module.has("g_idx"):
            return self.bits
        cols = module.tensor("g_idx").shape[0]
        bits = num_words * 32 // max(cols, 1)
        if bits not in BITS or num_words * 32 != bits * cols:
            raise UnsupportedModelError(
                f"{module.label('qweight')} has {num_words} words for {cols} inputs: 4 and 8 bits "
                "are read: quantise the model again with those"
            )
        return bits

    def _groups(self, module: Module, cols: int, num_groups: int) -> I32:
        if module.has("g_idx"):
            g_idx = module.array("g_idx", (cols,), "I32")
            return checked_groups(g_idx, num_groups, module.label("g_idx"))
        groups = sequential(cols, self.group)
        if groups[-1] + 1 != num_groups:
            raise ModelFormatError(
                f"{module.label('scales')} has {num_groups} groups, {cols} inputs in groups of "
                f"{self.group} make {groups[-1] + 1}: {DAMAGED}"
            )
        return groups

    def _zeros(self, words: I32, part: slice, bits: int) -> F32:
        per_word = 32 // bits
        begin, end = part.start // per_word, -(-part.stop // per_word)
        stored = unpack(words[:, begin:end], bits)[:, : part.stop - part.start].T
        # A zero of 0 was stored as -1, all ones: its successor is 0 again.
        return ((stored + np.uint8(self.zero_offset)) & np.uint8((1 << bits) - 1)).astype(
            np.float32
        )


def read_gptq(table: Fields) -> GPTQ:
    """The method from `quantization_config`; what it cannot read is refused by name."""
    fmt = table.text("checkpoint_format", table.text("format", "gptq")).lower()
    if table.optional_flag("is_marlin_format"):
        fmt = "marlin"
    if fmt not in _FORMATS:
        raise UnsupportedModelError(
            f"{table.where}: GPTQ in the format {fmt!r} is not supported: "
            f"{' and '.join(_FORMATS)} are: save the model again in one of them"
        )
    bits = table.integer("bits")
    if bits not in BITS:
        raise UnsupportedModelError(
            f"{table.where}: GPTQ of {bits} bits is not supported: 4 and 8 are"
        )
    group = table.integer("group_size", 128, low=-1)
    if group == 0:
        raise ModelFormatError(f"{table.where}: group_size is 0: it must be -1 or positive")
    dynamic = bool(table.table("dynamic").values)
    return GPTQ(bits, group, _FORMATS[fmt], dynamic)


def _codes(words: npt.NDArray[np.int32], bits: int) -> U8:
    """[K * bits / 32, n] -> [n, K]."""
    return unpack(np.ascontiguousarray(words.T), bits)
