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
_LOSS = 2.0**-8  # what a scale may lose unsaid: as much as rounding to its 8 bits cost a weight

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
            codes = self.codes(part)
            if order is not None:
                codes = codes[:, order]
            scales = self.scales(part)
            lossy += self._put_scales(out[part], scales, part, block_groups)
            at = 2 if self.zeros is None else 4
            out[part, :, at:] = _bodies(codes, self.kind, width)
        if lossy:
            _log.warning(
                "%s: f16 keeps %d scales to less than 0.4 %%, since they are tiny: so are their "
                "weights, and as much off", self.where, lossy,
            )  # fmt: skip
        return out.reshape(rows, -1)

    def _put_scales(self, out: U8, scales: F32, part: slice, block_groups: I32) -> int:
        """Write scales and minimums [rows, blocks]; returns how many scales lose digits."""
        offset = np.float32({"int4": 0, "int8": 128, "fp8": 0}[self.kind])
        fields = [scales]
        if self.zeros is not None:
            fields.append((offset - self.zeros(part)) * scales)
        lossy = 0
        for i, values in enumerate(fields):
            with np.errstate(over="ignore"):
                halves = values.astype("<f2")
            if (np.isinf(halves) & np.isfinite(values)).any():
                raise UnsupportedModelError(
                    f"{self.where} has a {'minimum' if i else 'scale'} of "
                    f"{np.abs(values[np.isfinite(values)]).max():g}: at most 65504 is held, give "
                    "the model's float weights to `paceline quantize`"
                )
            if i == 0:
                with np.errstate(invalid="ignore"):
                    off = np.abs(halves.astype(np.float32) - values) > _LOSS * np.abs(values)
                lossy = int(off.sum())
            field = np.ascontiguousarray(halves[:, block_groups])[..., None]
            out[:, :, 2 * i : 2 * i + 2] = field.view(np.uint8)
        return lossy


def _is_whole(groups: I32, width: int) -> bool:
    """Whether every block of `width` columns lies in one group."""
    if len(groups) % width:
        return False
    blocks = groups.reshape(-1, width)
    return bool((blocks == blocks[:, :1]).all())


def _bodies(codes: U8, kind: Kind, width: int) -> U8:
    """The codes of the blocks [rows, blocks, bytes], as weights/tensor.py has them."""
    blocks = codes.reshape(len(codes), -1, width)
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
