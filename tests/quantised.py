"""Folders as others quantise them, packed by the published layouts: plain and slow, field by field.

`Codes` is a quantised linear; `awq`, `gptq`, `packed`, `plain_int8` and `plain_fp8` give the
tensors of one; `write_quantised` writes a whole model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.weights.tensor import E4M3_VALUES
from tests.tiny import TinyModel, write_hf

Parts = dict[str, tuple[str, np.ndarray]]  # part -> dtype of safetensors, array
NUMPY = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8", "I8": "i1",
    "F8_E4M3": "u1",
}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """codes uint [N, K], zeros [N, G], scales float32 [N, G]; column k is of group groups[k]."""

    bits: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    def weight(self) -> np.ndarray:
        """(code - zero) * scale in float32, as all of them publish it."""
        steps = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return steps * self.scales[:, self.groups]


def round_scales(scales: np.ndarray, dtype: str) -> np.ndarray:
    """float32 scales as `dtype` keeps them."""
    if dtype == "BF16":
        return (scales.astype("<f4").view("<u4") & 0xFFFF0000).view("<f4")
    return scales.astype(NUMPY[dtype]).astype(np.float32)


def quantise(
    weight: np.ndarray, bits: int = 4, group: int = 32, *, symmetric: bool = True,
    act_order: int | None = None, scales: str = "F16",
) -> Codes:  # fmt: skip
    """`weight` [N, K] rounded to the nearest; `act_order` seeds a deal of columns to groups."""
    rows, cols = weight.shape
    group = cols if group == -1 else group
    groups = np.arange(cols) // group
    if act_order is not None:
        groups = np.random.default_rng(act_order).permutation(groups)
    num_groups = int(groups.max()) + 1
    top = (1 << bits) - 1
    scale = np.empty((rows, num_groups), np.float32)
    zero = np.full((rows, num_groups), 1 << (bits - 1), np.int64)
    for g in range(num_groups):
        part = weight[:, groups == g]
        if symmetric:
            scale[:, g] = np.abs(part).max(axis=1) / (top // 2)
            continue
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scale[:, g] = (high - low) / top
        zero[:, g] = np.clip(np.rint(-low / scale[:, g]), 0, top)
    scale = round_scales(scale, scales)
    codes = np.clip(np.rint(weight / scale[:, groups]) + zero[:, groups], 0, top)
    return Codes(bits, codes.astype(np.uint32), zero, scale, groups)


def pack_fields(
    fields: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()
) -> np.ndarray:
    """32 / bits neighbours along `axis` in one int32, lowest first; `order` says which is when."""
    per_word = 32 // bits
    fields = np.moveaxis(np.asarray(fields, np.uint32), axis, -1)
    padded = np.zeros((*fields.shape[:-1], -(-fields.shape[-1] // per_word) * per_word), np.uint32)
    padded[..., : fields.shape[-1]] = fields
    words = np.zeros((*fields.shape[:-1], padded.shape[-1] // per_word), np.uint32)
    for place, which in enumerate(order or range(per_word)):
        words |= padded[..., which::per_word] << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def stored_scales(scales: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
    if dtype == "BF16":
        return dtype, (np.ascontiguousarray(scales, "<f4").view("<u4") >> 16).astype("<u2")
    return dtype, scales.astype(NUMPY[dtype])


def awq(q: Codes, scales: str = "F16") -> Parts:
    return {
        "qweight": ("I32", pack_fields(q.codes.T, 4, 1, AWQ_ORDER)),
        "qzeros": ("I32", pack_fields(q.zeros.T, 4, 1, AWQ_ORDER)),
        "scales": stored_scales(q.scales.T, scales),
    }


def gptq(q: Codes, scales: str = "F16", *, version: int = 1, g_idx: bool = True) -> Parts:
    zeros = q.zeros - 1 if version == 1 else q.zeros
    parts = {
        "qweight": ("I32", pack_fields(q.codes.T, q.bits, 0)),
        "qzeros": ("I32", pack_fields(zeros.T & ((1 << q.bits) - 1), q.bits, 1)),
        "scales": stored_scales(q.scales.T, scales),
    }
    if g_idx:
        parts["g_idx"] = ("I32", q.groups.astype(np.int32))
    return parts


def packed(
    q: Codes, scales: str = "BF16", *, zeros: str | None = None, g_idx: bool = False
) -> Parts:
    """`zeros`: None, "packed" along the rows, or "plain" as int8."""
    parts = {
        "weight_packed": ("I32", pack_fields(q.codes, q.bits, 1)),
        "weight_scale": stored_scales(q.scales, scales),
        "weight_shape": ("I64", np.array(q.codes.shape, np.int64)),
    }
    if zeros == "packed":
        parts["weight_zero_point"] = ("I32", pack_fields(q.zeros, q.bits, 0))
    elif zeros == "plain":
        parts["weight_zero_point"] = ("I8", (q.zeros - (1 << (q.bits - 1))).astype(np.int8))
    if g_idx:
        parts["weight_g_idx"] = ("I32", q.groups.astype(np.int32))
    return parts


def plain_int8(q: Codes, scales: str = "BF16", *, zeros: bool = False) -> Parts:
    parts = {
        "weight": ("I8", (q.codes.astype(np.int64) - 128).astype(np.int8)),
        "weight_scale": stored_scales(q.scales, scales),
    }
    if zeros:
        parts["weight_zero_point"] = ("I8", (q.zeros - 128).astype(np.int8))
    return parts


def e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest codes of E4M3."""
    finite = np.where(np.isnan(E4M3_VALUES), np.float32(1e9), E4M3_VALUES)
    ranked = np.argsort(finite, kind="stable")
    at = np.clip(np.searchsorted(finite[ranked], values), 1, 254)
    low, high = ranked[at - 1], ranked[at]
    nearer = values - finite[low] <= finite[high] - values
    return np.where(nearer, low, high).astype(np.uint8)


def plain_fp8(
    weight: np.ndarray, block: tuple[int, int], name: str = "weight_scale", dtype: str = "BF16"
) -> tuple[Parts, np.ndarray]:
    """(tensors, the weight that they stand for); one scale for each block of rows and columns."""
    rows, cols = weight.shape
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    scales, codes = np.empty(grid, np.float32), np.empty(weight.shape, np.uint8)
    dense = np.empty(weight.shape, np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = round_scales(np.abs(weight[at]).max(keepdims=True) / 448, dtype)[0, 0]
            codes[at] = e4m3(weight[at] / scales[i, j])
            dense[at] = E4M3_VALUES[codes[at]] * scales[i, j]
    return {"weight": ("F8_E4M3", codes), name: stored_scales(scales, dtype)}, dense


def raw_safetensors(tensors: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        end = at + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    body = b"".join(array.tobytes() for _, array in tensors.values())
    return struct.pack("<Q", len(raw)) + raw + body


def linears(model: TinyModel) -> list[str]:
    """Names, without `.weight`, of the linears of the layers."""
    return [
        name.removesuffix(".weight")
        for name, value in model.tensors.items()
        if name.startswith("model.layers.") and value.ndim == 2
    ]


def write_quantised(
    model: TinyModel, folder: Path, config: Mapping[str, Any] | None,
    parts: Callable[[str, np.ndarray], Parts], *, shards: int = 1,
    extra: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> Path:  # fmt: skip
    """Write the model with the tensors `parts(name, weight)` in the place of its linears."""
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    quantised = set(linears(model))
    for name, value in model.tensors.items():
        module = name.removesuffix(".weight")
        if module in quantised:
            made = parts(module, value)
            tensors |= {f"{module}.{part}": stored for part, stored in made.items()}
        else:
            tensors[name] = ("F32", value.astype("<f4"))
    tensors |= extra or {}
    write_hf(model, folder)
    if config is not None:
        written = {**model.config, "quantization_config": dict(config)}
        (folder / "config.json").write_text(json.dumps(written))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(raw_safetensors(tensors))
        return folder
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(tensors)}
    for shard in names:
        part = {name: tensors[name] for name in tensors if where[name] == shard}
        (folder / shard).write_bytes(raw_safetensors(part))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder
