"""compressed-tensors, as llm-compressor writes it: W4A16, W8A16, W8A8 and FP8.

Packed: weight_packed int32 [N, K * bits / 32] of codes from 0 up, weight_scale [N, groups],
weight_zero_point alike or packed along N, weight_g_idx [K]. Plain: weight int8 or E4M3 [N, K].
weight = (code - zero) * scale. How activations were rounded is no property of the weights.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.models.base import EMBEDDING
from paceline.weights.fields import Fields
from paceline.weights.quantised.fp8 import block_shape
from paceline.weights.quantised.grouped import F32, Grouped, checked_groups, sequential
from paceline.weights.quantised.module import DAMAGED, I32, Module, all_fields_are, as_f32, unpack
from paceline.weights.quantised.plain import CHANNEL, TENSOR, block_scaled, scale_shapes

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_MIXED = "mixed-precision"  # each group has a format of its own
_STRATEGIES = ("group", "channel", "tensor", "block")
_REMEDY = "use a checkpoint in W4A16, W8A16, W8A8 or FP8, or a GGUF file"


class Scheme(Struct, frozen=True):
    """How the weights of a config group are quantised. `block` is rows and columns of a scale."""

    where: str
    targets: tuple[str, ...]
    kind: Literal["int", "float"]
    bits: int
    symmetric: bool
    block: tuple[int, int]


class Compressed(Struct, frozen=True):
    """The schemes of config.json, in its order."""

    where: str
    schemes: tuple[Scheme, ...]

    def open(self, module: Module) -> Grouped:
        scheme = self._scheme(module)
        if module.has("weight_packed"):
            return _packed(module, scheme)
        zero = None
        if not scheme.symmetric or module.has("weight_zero_point"):
            zero = "weight_zero_point"
        if scheme.kind == "float":
            return block_scaled(module, "fp8", "weight_scale", scheme.block)
        return block_scaled(module, "int8", "weight_scale", scheme.block, zero)

    def _scheme(self, module: Module) -> Scheme:
        """The first scheme that names the module, else the first for its class."""
        part = "weight_packed" if module.has("weight_packed") else "weight"
        original = module.tensor(part).name.removesuffix(f".{part}")
        kind = "Embedding" if module.name == EMBEDDING.removesuffix(".weight") else "Linear"
        for names in ({module.name, original}, {kind}):
            for scheme in self.schemes:
                if any(_matches(target, names, scheme.where) for target in scheme.targets):
                    return scheme
        raise ModelFormatError(
            f"{self.where}: no config group has {module.name} among its targets, but it is "
            f"quantised: {DAMAGED}"
        )


def read_compressed(table: Fields) -> Compressed:
    """The method from `quantization_config`; what it cannot read is refused by name."""
    _check_format(table, table.text("format", _MIXED))
    sparsity = table.table("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(
            f"{table.where}: sparse weights as {sparsity!r} are not supported: {_REMEDY}"
        )
    if table.table("transform_config").table("config_groups").values:
        raise UnsupportedModelError(
            f"{table.where}: transform_config rotates activations, which is not supported: "
            f"{_REMEDY}"
        )
    groups = table.table("config_groups")
    schemes = [_read_scheme(groups.table(name)) for name in groups.values]
    return Compressed(table.where, tuple(s for s in schemes if s is not None))


def _check_format(table: Fields, fmt: str) -> None:
    if fmt not in (*_FORMATS, _MIXED):
        raise UnsupportedModelError(
            f"{table.where}: compressed-tensors in the format {fmt!r} is not supported: "
            f"{', '.join(_FORMATS)} are: {_REMEDY}"
        )


def _read_scheme(group: Fields) -> Scheme | None:
    """None for a group without weights."""
    if group.has("format"):
        _check_format(group, group.text("format"))
    weights = group.table("weights")
    if not weights.values:
        return None
    kind, bits = weights.text("type", "int").lower(), weights.integer("num_bits", 8)
    if kind not in ("int", "float") or bits not in ((8,) if kind == "float" else (4, 8)):
        raise UnsupportedModelError(
            f"{weights.where}: {kind} weights of {bits} bits are not supported: {_REMEDY}"
        )
    if weights.values.get("dynamic"):
        raise UnsupportedModelError(f"{weights.where}: dynamic weights are not supported")
    _check_activations(group)
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise UnsupportedModelError(f"{weights.where}: FP8 with zero points is not supported")
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ModelFormatError(f"{group.where}: targets is {targets!r}: a list of names is read")
    return Scheme(
        group.where, tuple(targets), "float" if kind == "float" else "int", bits, symmetric,
        _block(weights),
    )  # fmt: skip


def _check_activations(group: Fields) -> None:
    inputs = group.table("input_activations")
    if inputs.values and inputs.integer("num_bits", 8) != 8:
        raise UnsupportedModelError(
            f"{inputs.where}: activations of {inputs.values['num_bits']} bits are not supported: "
            f"{_REMEDY}"
        )
    if group.table("output_activations").values:
        raise UnsupportedModelError(
            f"{group.where}: output_activations are not supported: {_REMEDY}"
        )


def _block(weights: Fields) -> tuple[int, int]:
    """Rows and columns that share a scale; -1: all."""
    size = weights.values.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", default).lower()
    if strategy not in _STRATEGIES:
        raise UnsupportedModelError(
            f"{weights.where}: strategy {strategy!r} is not supported: {', '.join(_STRATEGIES)} are"
        )
    if strategy == "group":
        return 1, weights.integer("group_size")
    if strategy == "block":
        block = block_shape(weights, "block_structure")
        if block is None:
            raise ModelFormatError(f"{weights.where}: block_structure is missing")
        return block
    return CHANNEL if strategy == "channel" else TENSOR


def _matches(target: str, names: set[str], where: str) -> bool:
    if not target.startswith("re:"):
        return target in names
    try:
        pattern = re.compile(target.removeprefix("re:"))
    except (re.error, RecursionError) as error:
        raise ModelFormatError(f"{where}: target {target[:80]!r} is broken: {error}") from None
    return any(pattern.match(name) for name in names)


def _packed(module: Module, scheme: Scheme) -> Grouped:
    bits, words = scheme.bits, module.matrix("weight_packed", "I32")
    rows, cols = len(words), words.shape[1] * 32 // bits
    if module.has("weight_shape"):
        shape = module.array("weight_shape", (2,), "I64", "I32").tolist()
        if shape[0] != rows or not cols - 32 // bits < shape[1] <= cols:
            raise ModelFormatError(
                f"{module.label('weight_shape')} says {shape}, weight_packed holds {[rows, cols]}: "
                f"{DAMAGED}"
            )
        cols = shape[1]
    tall, wide = scheme.block
    if scheme.kind == "float" or tall not in TENSOR + CHANNEL:
        raise UnsupportedModelError(
            f"{scheme.where}: packed weights must be int, in groups, by channel or by tensor: "
            f"{_REMEDY}"
        )
    groups = sequential(cols, wide)
    grid = (1 if tall == -1 else rows, int(groups[-1]) + 1)
    scales = np.broadcast_to(
        module.floats("weight_scale", *scale_shapes(grid)).reshape(grid), (rows, grid[1])
    )
    if module.has("weight_g_idx"):
        g_idx = module.array("weight_g_idx", (cols,), "I32")
        if (g_idx != -1).any():  # -1: made ready, not used
            groups = checked_groups(g_idx, grid[1], module.label("weight_g_idx"))
    zeros = _packed_zeros(module, scheme, grid)
    return Grouped(
        where=module.label("weight_packed"), kind="int4" if bits == 4 else "int8",
        shape=(rows, cols), groups=groups,
        codes=lambda part: unpack(words[part], bits)[:, :cols],
        scales=lambda part: as_f32(scales[part]),
        zeros=None if zeros is None else lambda part: _rows(zeros, part),
    )  # fmt: skip


def _packed_zeros(module: Module, scheme: Scheme, grid: tuple[int, int]) -> Any:
    """Zero points from 0 up as float32 [rows or 1, groups], None where all are the middle."""
    if scheme.symmetric and not module.has("weight_zero_point"):
        return None
    bits, part = scheme.bits, "weight_zero_point"
    middle = 1 << (bits - 1)
    if module.tensor(part).format == "I32":
        words: I32 = module.array(part, (-(-grid[0] * bits // 32), grid[1]), "I32")
        if all_fields_are(words, middle, bits):
            return None
        return unpack(words.T, bits)[:, : grid[0]].T.astype(np.float32)
    stored = module.shaped(part, scale_shapes(grid), "I8").reshape(grid)
    return stored.astype(np.float32) + np.float32(middle) if stored.any() else None


def _rows(values: F32, part: slice) -> F32:
    return values[part] if len(values) > 1 else values
