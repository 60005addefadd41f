"""Footprint: the memory that a model of any size takes in each format, from its shape alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from paceline.backends.base import KVSpec
from paceline.config import KV_DTYPES, EngineConfig
from paceline.engine.memory import kv_token_bytes
from paceline.engine.step import step_limits
from paceline.models.base import EMBEDDING, HEAD, ModelConfig, build_plan, weight_shapes
from paceline.quantize.formats import Target
from paceline.weights.tensor import BLOCK

FLOATS = ("f32", "bf16")
# What `paceline quantize` is asked for; the name is what is printed.
TARGETS: dict[str, Target] = {
    "int8, 64": Target("int8", "64"), "fp8, 64": Target("fp8", "64"), "q6_k": Target("q6_k"),
    "q5_k": Target("q5_k"), "q4_k": Target("q4_k"), "int4, 32": Target("int4", "32"),
    "int4, 64": Target("int4", "64"), "int4, 128": Target("int4", "128"),
}  # fmt: skip
FORMATS = (*FLOATS, *TARGETS)
_CODE_BITS = {"f32": 32, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "q6_k": 6, "q5_k": 5,
              "q4_k": 4}  # fmt: skip
_VECTOR = "bf16"  # norms and biases stay as they are


class WeightSize(Struct, frozen=True, kw_only=True):
    """The weights of a model in one format, in bytes.

    `code_bytes` are its parameters at the format's nominal bits; `extra_bytes` are scales, and what
    keeps more bits: embedding and head beside four and five bits, norms, biases.
    """

    format: str
    code_bytes: int
    weight_bytes: int

    @property
    def extra_bytes(self) -> int:
        return self.weight_bytes - self.code_bytes

    def bits(self, num_parameters: int) -> float:
        return 8 * self.weight_bytes / num_parameters


class StepSize(Struct, frozen=True, kw_only=True):
    """What an engine holds beside weights and KV cache: buffers of a step, and tables of rope."""

    activation_bytes: int
    table_bytes: int


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the model, none of which has to exist."""
    return weight_shapes(build_plan(model), model.vocab_size)


def num_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in matrix_shapes(model).values())


def formats_of(model: ModelConfig, name: str) -> dict[str, str]:
    """Return the format that each tensor gets where the model is quantised to `name`."""
    out = {}
    for tensor, shape in matrix_shapes(model).items():
        if name == "f32" or (name in FLOATS and len(shape) == 2):
            out[tensor] = name
        elif len(shape) < 2:
            out[tensor] = _VECTOR
        else:
            target = TARGETS[name]
            is_table = tensor in (EMBEDDING, HEAD)
            blocks, _ = (target.for_embedding() if is_table else target).fit(shape[-1])
            out[tensor] = _VECTOR if blocks is None else blocks.format
    return out


def weight_size(model: ModelConfig, name: str) -> WeightSize:
    """Return what the weights take in the format `name`, one of FORMATS."""
    shapes = matrix_shapes(model)
    return WeightSize(
        format=name,
        code_bytes=_code_bytes(name, num_parameters(model)),
        weight_bytes=_num_bytes(shapes, formats_of(model, name)),
    )


def counted_size(count: int, name: str) -> WeightSize:
    """Return what `count` parameters take, all of them in the format `name`."""
    blocks = None if name in FLOATS else TARGETS[name].fit(1 << 12)[0]
    weights, block_bytes = BLOCK[name if blocks is None else blocks.format]
    return WeightSize(
        format=name, code_bytes=_code_bytes(name, count),
        weight_bytes=round(count / weights * block_bytes),
    )  # fmt: skip


def _code_bytes(name: str, count: int) -> int:
    return count * _CODE_BITS[name.partition(",")[0]] // 8


def _num_bytes(shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]) -> int:
    total = 0
    for tensor, shape in shapes.items():
        weights, block_bytes = BLOCK[formats[tensor]]
        total += math.prod(shape) // weights * block_bytes
    return total


def kv_bytes(model: ModelConfig, kv_dtype: str, *, seqs: int, context: int) -> int:
    """Return what the KV cache of `seqs` sequences of `context` tokens takes, in whole blocks."""
    block = EngineConfig().block_size
    return seqs * -(-context // block) * block * kv_token_bytes(model, kv_dtype)


def kv_sizes(model: ModelConfig, *, seqs: int, context: int) -> dict[str, int]:
    """Return the same in each KV format."""
    return {name: kv_bytes(model, name, seqs=seqs, context=context) for name in KV_DTYPES}


def step_size(model: ModelConfig, name: str, *, seqs: int, context: int) -> StepSize:
    """Return what steps of the default engine take for weights in `name`, up to `seqs` sequences.

    A decoder whose length is `context`: tables of rope are as long.
    """
    from paceline.backends.native import activation_bytes

    base = EngineConfig()
    config = EngineConfig(max_num_seqs=max(seqs, base.max_num_seqs))
    num_blocks = -(-context // base.block_size)
    limits = step_limits(config, context, num_blocks)
    kv = KVSpec(num_blocks=num_blocks, block_size=base.block_size, dtype=base.kv_dtype)
    positions = num_blocks * base.block_size
    # cos and sin of each position and frequency, in float32
    tables = sum(positions * 2 * len(rope.inv_freq) * 4 for rope in set(model.rope))
    return StepSize(
        activation_bytes=activation_bytes(
            build_plan(model), formats_of(model, name), kv=kv, limits=limits
        ),
        table_bytes=tables,
    )
