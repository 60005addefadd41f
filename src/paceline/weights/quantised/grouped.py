"""Grouped: codes and scales of a linear that others quantised, as blocks of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.weights.tensor import BLOCK, QTensor

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
Kind = Literal["int4", "int8", "fp8"]

# (kind, has zero points) -> formats, by the width of their blocks
_FORMATS: dict[tuple[Kind, bool], dict[int, str]] = {
    ("int4", False): {128: "i4_g128", 64: "i4_g64", 32: "q4_0"},
    ("int4", True): {128: "i4m_g128", 64: "i4m_g64", 32: "q4_1"},
    ("int8", False): {128: "i8_g128", 64: "i8_g64", 32: "q8_0"},
    ("int8", True): {128: "i8m_g128", 64: "i8m_g64", 32: "i8m_g32"},
    ("fp8", False): {128: "f8_g128", 64: "f8_g64", 32: "f8_g32"},
}
_CHUNK_WEIGHTS = 1 << 22  # unpacked at once
_LOSS = 2.0**-8  # what a scale may lose unsaid: as much as rounding to 8 bits cost its weights

_log = logging.getLogger(__name__)


class Grouped(Struct, frozen=True, kw_only=True):
    """weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], with g = groups[k].

    The functions give a range of rows, which begins at a multiple of 8: codes uint8 [rows, K], as
    4 bits from 0 to 15, 8 bits from 0 to 255, or E4M3; scales and zeros float32 [rows, G]. Without
    `zeros` all are 8, 128, or 0 for E4M3.
    """

    where: str  # with the tensor's name: every error begins with it
    kind: Kind
    shape: tuple[int, int]
    groups: I32  # [K]
    codes: Callable[[slice], U8]
    scales: Callable[[slice], F32]
    zeros: Callable[[slice], F32] | None = None

    def tensor(self) -> QTensor:
        """The weight in the widest blocks that hold it; its bytes are made when wanted.

        Where columns of a group do not lie together (act-order) they are put together, and the
        tensor has their order.
        """
        groups, order = self.groups, None
        if (np.diff(groups) < 0).any():
            order = np.argsort(groups, kind="stable").astype(np.int32)
            groups = groups[order]
        width = next((w for w in (128, 64, 32) if _is_whole(groups, w)), None)
        if width is None:
            sizes = np.unique(np.unique(groups, return_counts=True)[1]).tolist()[:4]
            raise UnsupportedModelError(
                f"{self.where} has {len(groups)} columns in groups of "
                f"{', '.join(map(str, sizes))}: multiples of 32 are read: quantise the model again "
                "with those, or give its float weights to `paceline quantize`"
            )
        fmt = _FORMATS[self.kind, self.zeros is not None][width]
        block_groups = groups[::width]
        return QTensor(
            fmt, self.shape, lambda: self._blocks(fmt, order, block_groups), column_order=order
        )

    def _blocks(self, fmt: str, order: I32 | None, block_groups: I32) -> U8:
        rows, cols = self.shape
        width, size = BLOCK[fmt]
        out = np.empty((rows, cols // width, size), np.uint8)
        step = max(8, _CHUNK_WEIGHTS // cols // 8 * 8)
        lossy = 0
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            codes, scales, fields = self.codes(part), self.scales(part), []
            if order is not None:
                codes = codes[:, order]
            lossy += _num_lossy(scales)
            blocks = codes.reshape(len(codes), -1, width)
            if self.zeros is not None:
                top = 15 if self.kind == "int4" else 255
                minimum, flips = _minimums(scales, self.zeros(part), top)
                scales, fields = np.where(flips, -scales, scales), [minimum]
                blocks = blocks ^ np.where(flips, np.uint8(top), np.uint8(0))[:, block_groups, None]
            for i, values in enumerate([scales, *fields]):
                halves = np.ascontiguousarray(self._halves(values)[:, block_groups])
                out[part, :, 2 * i : 2 * i + 2] = halves[..., None].view(np.uint8)
            out[part, :, 2 + 2 * len(fields) :] = _bodies(blocks, self.kind)
        if lossy:
            _log.warning(
                "%s: f16 keeps %d scales to less than 0.4 %%, since they are tiny: so are their "
                "weights, and as much off", self.where, lossy,
            )  # fmt: skip
        return out.reshape(rows, -1)

    def _halves(self, values: F32) -> npt.NDArray[np.float16]:
        halves = _round(values)
        if (np.isinf(halves) & np.isfinite(values)).any():
            raise UnsupportedModelError(
                f"{self.where} has a scale or minimum of "
                f"{np.abs(values[np.isfinite(values)]).max():g}: at most 65504 is held: give the "
                "model's float weights to `paceline quantize`"
            )
        return halves


def _round(values: F32) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return values.astype("<f2")


def _num_lossy(scales: F32) -> int:
    """How many scales f16 keeps badly, because they are below its normal range."""
    with np.errstate(invalid="ignore"):
        off = np.abs(_round(scales).astype(np.float32) - scales) > _LOSS * np.abs(scales)
    return int(off.sum())


def _minimums(scales: F32, zeros: F32, top: int) -> tuple[F32, npt.NDArray[np.bool_]]:
    """(minimums, where codes are to be counted from the top), both [rows, groups].

    (code - zero) * scale = scale * code + m = -scale * (top - code) + n, with m = -zero * scale and
    n = (top - zero) * scale. Both have more digits than f16; the one that loses less is taken, and
    with 4 bits that loses nothing where zero or 15 - zero is 0, 1, 2, 4 or 8. Stored codes of 8
    bits are signed, so m and n are 128 scales further up, or down.
    """
    offset = np.float32(0 if top == 15 else 128)
    below, above = (offset - zeros) * scales, (np.float32(top) - offset - zeros) * scales
    with np.errstate(invalid="ignore"):
        loss = [np.abs(_round(m).astype(np.float32) - m) for m in (below, above)]
    flips = loss[1] < loss[0]
    return np.where(flips, above, below), flips


def _is_whole(groups: I32, width: int) -> bool:
    """Whether every block of `width` columns lies in one group."""
    if len(groups) % width:
        return False
    blocks = groups.reshape(-1, width)
    return bool((blocks == blocks[:, :1]).all())


def _bodies(blocks: U8, kind: Kind) -> U8:
    """Codes [rows, blocks, width] as weights/tensor.py has them, [rows, blocks, bytes]."""
    if kind == "fp8":
        return blocks
    if kind == "int8":
        signed: U8 = blocks ^ np.uint8(128)  # from 0..255 to a signed byte
        return signed
    runs = blocks.reshape(*blocks.shape[:2], -1, 2, 16)  # 32 codes in 16 bytes: halves, low first
    packed: U8 = runs[..., 0, :] | runs[..., 1, :] << np.uint8(4)
    return packed.reshape(*blocks.shape[:2], -1)


def sequential(cols: int, size: int) -> I32:
    """Group of each column where groups of `size` follow each other (-1: one for all)."""
    return np.arange(cols, dtype=np.int32) // np.int32(cols if size == -1 else size)


def checked_groups(g_idx: npt.NDArray[np.int32], num_groups: int, where: str) -> I32:
    """g_idx as groups; raises ModelFormatError for one that has no scale."""
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= num_groups:
        raise ModelFormatError(
            f"{where} names group {low if low < 0 else high}, there are scales for groups 0 to "
            f"{num_groups - 1}: download the checkpoint again"
        )
    return g_idx.astype(np.int32)
