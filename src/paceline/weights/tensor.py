"""QTensor: a weight in the bytes of its source format, and what those bytes mean.

`dequantize` is the definition of every format; layouts follow ggml's `block_*` structs. Formats of
our own serve groups of 64 and 128 and FP8: iN is signed, iNm has a minimum, gN is the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from paceline.errors import UnsupportedModelError

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

# format -> (weights in a block, bytes of a block)
BLOCK: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2),
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq4_nl": (32, 18),
    "i4_g64": (64, 34), "i4_g128": (128, 66), "i4m_g64": (64, 36), "i4m_g128": (128, 68),
    "i8_g64": (64, 66), "i8_g128": (128, 130), "i8m_g32": (32, 36), "i8m_g64": (64, 68),
    "i8m_g128": (128, 132), "f8_g32": (32, 34), "f8_g64": (64, 66), "f8_g128": (128, 130),
}  # fmt: skip
F8_FORMATS = frozenset({"f8_g32", "f8_g64", "f8_g128"})
# Linears over these read float activations, over all others int8 ones.
FLOAT_FORMATS = frozenset({"f32", "f16", "bf16"}) | F8_FORMATS
# format -> byte offsets of the float16 scales in a block
SCALE_OFFSETS: dict[str, tuple[int, ...]] = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
    "iq4_nl": (0,), "i4_g64": (0,), "i4_g128": (0,), "i4m_g64": (0, 2), "i4m_g128": (0, 2),
    "i8_g64": (0,), "i8_g128": (0,), "i8m_g32": (0, 2), "i8m_g64": (0, 2), "i8m_g128": (0, 2),
    "f8_g32": (0,), "f8_g64": (0,), "f8_g128": (0,),
}  # fmt: skip
IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_BLOCKS_AT_ONCE = 1 << 14  # bounds the temporaries of dequantize to a few MB
_SCALES_AT_ONCE = 1 << 18  # and those of is_finite


class QTensor(Struct, frozen=True):
    """A weight of `shape` [N, K], or [N] for vectors.

    `stored` is its bytes, or makes them: what is repacked is made when it is wanted, and anew each
    time. With `row_order`, row i of the weight is row `row_order[i]` of the bytes: an order costs
    no copy, since no format mixes rows. With `column_order`, column j of the bytes is column
    `column_order[j]` of the weight; only linears may have one.
    """

    format: str
    shape: tuple[int, ...]
    stored: U8 | Callable[[], U8]
    row_order: npt.NDArray[np.int32] | None = None
    column_order: npt.NDArray[np.int32] | None = None

    @property
    def data(self) -> U8:
        """The bytes: uint8 [N, row_bytes], or [row_bytes] for vectors."""
        return self.stored() if callable(self.stored) else self.stored

    @property
    def num_bytes(self) -> int:
        if not callable(self.stored):
            return int(self.stored.nbytes)
        weights, block_bytes = BLOCK[self.format]
        return math.prod(self.shape) // weights * block_bytes

    def loaded(self) -> QTensor:
        """The same with its bytes at hand."""
        return replace(self, stored=self.data) if callable(self.stored) else self


class StoredTensor(Struct, frozen=True):
    """Where a tensor lies in a mapped file. `format` may be one that this build cannot read."""

    name: str
    format: str
    shape: tuple[int, ...]  # outermost first
    data: U8 | None  # None: a format whose size is not known

    def load(self) -> QTensor:
        """The tensor as a view of the file. Raises UnsupportedModelError if it is unreadable."""
        if self.data is None or self.format not in BLOCK:
            raise UnsupportedModelError(
                f"tensor {self.name!r} is in format {self.format}, which is not supported: "
                f"use a file with {', '.join(BLOCK)}"
            )
        return QTensor(self.format, self.shape, self.data.reshape(*self.shape[:-1], -1))


def from_floats(values: npt.ArrayLike) -> QTensor:
    """QTensor in f32 of a float array."""
    array = np.ascontiguousarray(values, dtype="<f4")
    return QTensor("f32", array.shape, array.view(np.uint8))


def dequantize(tensor: QTensor) -> F32:
    """Return the weights as float32 of `tensor.shape`: the definition of every format."""
    weights, block_bytes = BLOCK[tensor.format]
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, block_bytes)
    out = np.empty((len(blocks), weights), np.float32)
    unpack = _UNPACK[tensor.format]
    step = _BLOCKS_AT_ONCE * max(1, 256 // weights)
    # An infinite or NaN scale gives NaN weights, as in ggml; `is_finite` finds them.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = unpack(blocks[start : start + step])
    dense = out.reshape(tensor.shape)
    if tensor.column_order is not None:
        ordered = np.empty_like(dense)
        ordered[:, tensor.column_order] = dense
        dense = ordered
    return dense if tensor.row_order is None else dense[tensor.row_order]


def is_finite(tensor: QTensor) -> bool:
    """True if no weight is NaN or infinite. Quantised formats are read at their scales only."""
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, BLOCK[tensor.format][1])
    step = _SCALES_AT_ONCE // (BLOCK[tensor.format][0] if tensor.format in FLOAT_FORMATS else 1)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        if tensor.format in FLOAT_FORMATS:
            with np.errstate(invalid="ignore"):  # an infinite scale times a zero
                found = [_UNPACK[tensor.format](part)]
        else:
            found = [_half(part, at) for at in SCALE_OFFSETS[tensor.format]]
        if not all(np.isfinite(values).all() for values in found):
            return False
    return True


def _half(blocks: U8, at: int) -> F32:
    """float16 at byte `at` of each block -> [n, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def _bits(data: U8, width: int, shifts: tuple[int, ...], mask: int) -> U8:
    """Bit fields of runs of `width` bytes: a run gives all its bytes at shifts[0], then [1], …"""
    runs = data.reshape(len(data), -1, 1, width)
    fields = (runs >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)
    return fields.reshape(len(data), -1)


def _f32(blocks: U8) -> F32:
    return blocks.view("<f4")


def _f16(blocks: U8) -> F32:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: U8) -> F32:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: U8) -> F32:
    return _half(b, 0) * (_bits(b[:, 2:], 16, (0, 4), 15).astype(np.float32) - 8)


def _q4_1(b: U8) -> F32:
    return _half(b, 0) * _bits(b[:, 4:], 16, (0, 4), 15).astype(np.float32) + _half(b, 2)


def _five_bits(low: U8, high: U8) -> F32:
    """Quants of q5_0 and q5_1: 16 bytes of low nibbles, 32 high bits."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    return (_bits(low, 16, (0, 4), 15) | fifth << 4).astype(np.float32)


def _q5_0(b: U8) -> F32:
    return _half(b, 0) * (_five_bits(b[:, 6:], b[:, 2:6]) - 16)


def _q5_1(b: U8) -> F32:
    return _half(b, 0) * _five_bits(b[:, 8:], b[:, 4:8]) + _half(b, 2)


def _q8_0(b: U8) -> F32:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(b: U8) -> F32:
    return _half(b, 0) * IQ4_NL_VALUES[_bits(b[:, 2:], 16, (0, 4), 15)]


def _i8m(b: U8) -> F32:
    return _half(b, 0) * b[:, 4:].view(np.int8).astype(np.float32) + _half(b, 2)


def _e4m3_values() -> F32:
    """What the 256 codes of FP8 E4M3 stand for: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    significand = np.where(exponent > 0, 8 + mantissa, mantissa)
    positive = significand * 2.0 ** (np.maximum(exponent, 1) - 10)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def _f8(b: U8) -> F32:
    return _half(b, 0) * E4M3_VALUES[b[:, 2:]]


def _grouped(scale: F32, quants: F32, minimum: F32 | None = None) -> F32:
    """scale * quants - minimum, one scale (and minimum) for each equal group of a block."""
    groups = quants.reshape(len(quants), scale.shape[1], -1)
    out = scale[:, :, None] * groups
    if minimum is not None:
        out = out - minimum[:, :, None]
    return out.reshape(len(quants), -1)


def _q2_k(b: U8) -> F32:
    scales, quants = b[:, :16], _bits(b[:, 16:80], 32, (0, 2, 4, 6), 3)
    scale = _half(b, 80) * (scales & 15).astype(np.float32)
    minimum = _half(b, 82) * (scales >> 4).astype(np.float32)
    return _grouped(scale, quants.astype(np.float32), minimum)


def _q3_k(b: U8) -> F32:
    high = _bits(b[:, :32], 32, (0, 1, 2, 3, 4, 5, 6, 7), 1)
    low = _bits(b[:, 32:96], 32, (0, 2, 4, 6), 3)
    # Sixteen 6-bit scales: nibbles of 8 bytes, then two high bits each in 4 bytes.
    scales = _bits(b[:, 96:104], 8, (0, 4), 15) | _bits(b[:, 104:108], 4, (0, 2, 4, 6), 3) << 4
    scale = _half(b, 108) * (scales.astype(np.float32) - 32)
    return _grouped(scale, (low | high << 2).astype(np.float32) - 4)


def _scales_and_minimums(b: U8) -> tuple[F32, F32]:
    """Scales and minimums of q4_k and q5_k: d, dmin, then eight 6-bit pairs in 12 bytes."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1).astype(np.float32)
    minimum = np.concatenate([mid & 63, high >> 4 | mid >> 2 & 48], axis=1).astype(np.float32)
    return _half(b, 0) * scale, _half(b, 2) * minimum


def _q4_k(b: U8) -> F32:
    scale, minimum = _scales_and_minimums(b)
    return _grouped(scale, _bits(b[:, 16:], 32, (0, 4), 15).astype(np.float32), minimum)


def _q5_k(b: U8) -> F32:
    scale, minimum = _scales_and_minimums(b)
    high = _bits(b[:, 16:48], 32, (0, 1, 2, 3, 4, 5, 6, 7), 1)
    quants = _bits(b[:, 48:], 32, (0, 4), 15) | high << 4
    return _grouped(scale, quants.astype(np.float32), minimum)


def _q6_k(b: U8) -> F32:
    quants = _bits(b[:, :128], 64, (0, 4), 15) | _bits(b[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    scale = _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return _grouped(scale, quants.astype(np.float32) - 32)


_UNPACK: dict[str, Callable[[U8], F32]] = {
    "f32": _f32, "f16": _f16, "bf16": _bf16,
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "i4_g64": _q4_0, "i4_g128": _q4_0, "i4m_g64": _q4_1, "i4m_g128": _q4_1,
    "i8_g64": _q8_0, "i8_g128": _q8_0, "i8m_g32": _i8m, "i8m_g64": _i8m, "i8m_g128": _i8m,
    "f8_g32": _f8, "f8_g64": _f8, "f8_g128": _f8,
}  # fmt: skip
