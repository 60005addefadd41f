"""AWQ as AutoAWQ's "gemm" layout stores it: 4 bits, integer zero points.

qweight int32 [K, N / 8]: a word holds eight outputs of one input, in the order _ORDER. qzeros
int32 [groups, N / 8] alike, scales [groups, N]. weight = (code - zero) * scale.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.weights.fields import Fields
from paceline.weights.quantised.grouped import F32, U8, Grouped, sequential
from paceline.weights.quantised.module import I32, Module, all_fields_are, as_f32, unpack

_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # output of a word's eight, from its lowest bits on
_FIELD_OF = np.argsort(_ORDER)  # the other way
_BITS = 4


class AWQ(Struct, frozen=True):
    """What config.json says of all linears."""

    group: int  # -1: a whole row

    def open(self, module: Module) -> Grouped:
        words = module.matrix("qweight", "I32")  # [K, N / 8]
        cols, rows = words.shape[0], words.shape[1] * 8
        num_groups = 1 if self.group == -1 else -(-cols // self.group)
        scales = module.floats("scales", (num_groups, rows))
        zeros = module.array("qzeros", (num_groups, words.shape[1]), "I32")
        is_symmetric = all_fields_are(zeros, 8, _BITS)
        return Grouped(
            where=module.label("qweight"), kind="int4", shape=(rows, cols),
            groups=sequential(cols, self.group),
            codes=lambda part: np.ascontiguousarray(_outputs(words, part).T),
            scales=lambda part: as_f32(scales[:, part]).T,
            zeros=None if is_symmetric else lambda part: _zeros(zeros, part),
        )  # fmt: skip


def read_awq(table: Fields) -> AWQ:
    """The method from `quantization_config`; what it cannot read is refused by name."""
    keys = ("version", "checkpoint_format", "format")  # AutoAWQ's, and GPTQModel's two
    version = next((table.text(key) for key in keys if table.has(key)), "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f"{table.where}: AWQ in the layout {version!r} is not supported: use a checkpoint in "
            "the layout 'gemm', AutoAWQ's default"
        )
    bits = table.integer("bits", _BITS)
    if bits != _BITS:
        raise UnsupportedModelError(f"{table.where}: AWQ of {bits} bits is not supported, 4 are")
    group = table.integer("group_size", 128, low=-1)
    if group == 0:
        raise ModelFormatError(f"{table.where}: group_size is 0: it must be -1 or positive")
    return AWQ(group)


def _outputs(words: I32, part: slice) -> U8:
    """Fields of the outputs `part`, [n, outputs]."""
    fields = unpack(words[:, part.start // 8 : part.stop // 8], _BITS)
    return fields.reshape(len(words), -1, 8)[:, :, _FIELD_OF].reshape(len(words), -1)


def _zeros(words: I32, part: slice) -> F32:
    return _outputs(words, part).T.astype(np.float32)
