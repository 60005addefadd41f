"""Floors: the least time that a machine's ceilings allow for the work that a step cannot avoid."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from msgspec import Struct

from paceline.engine.memory import kv_token_bytes
from paceline.measure.bandwidth import EMBEDDING, decode_weight_bytes
from paceline.measure.ceilings import Ceilings
from paceline.models.base import HEAD, build_plan
from paceline.plan.passes import column_orders, lower
from paceline.plan.plan import Op, Rows
from paceline.weights.checkpoint import Checkpoint
from paceline.weights.tensor import FLOAT_FORMATS

Unit = Literal["int8", "float", "attention"]
_KINDS = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "attention out",
    "gate_proj": "gate and up", "up_proj": "gate and up", "down_proj": "down",
}  # fmt: skip


class Work(Struct, frozen=True, kw_only=True):
    """What cannot be avoided: multiply-adds by kind, and bytes from memory."""

    linear_macs: int  # over quantised weights, in int8
    attention_macs: int
    num_bytes: int
    float_macs: int = 0  # linears over weights in a float format
    int8_attention_macs: int = 0  # over an int8 KV cache

    @property
    def macs(self) -> int:
        attention = self.attention_macs + self.int8_attention_macs
        return self.linear_macs + self.float_macs + attention


class AttentionCost(Struct, frozen=True, kw_only=True):
    """One layer: multiply-adds and KV bytes for each key that a query row sees."""

    key_macs: int
    key_bytes: int
    window: int  # 0: all keys
    is_int8: bool = False

    def num_visible(self, num_keys: int) -> int:
        return min(num_keys, self.window) if self.window else num_keys

    def work(self, *, num_seqs: int, num_tokens: int, context: int) -> Work:
        """Sequences that hold `context` tokens each get `num_tokens` more."""
        keys = sum(self.num_visible(context + i + 1) for i in range(num_tokens))
        held = min(context, self.window - 1) if self.window else context
        macs = num_seqs * self.key_macs * keys
        return Work(
            linear_macs=0,
            attention_macs=0 if self.is_int8 else macs,
            int8_attention_macs=macs if self.is_int8 else 0,
            num_bytes=num_seqs * self.key_bytes * (held + num_tokens),
        )


class OpCost(Struct, frozen=True, kw_only=True):
    """What one op of the lowered plan asks for. Ops without multiply-adds or weights have zeros."""

    kind: str  # of its layer: qkv, attention, attention out, gate and up, down, head; else the op
    rows: Rows
    unit: Unit
    row_macs: int = 0
    weight_bytes: int = 0
    attention: AttentionCost | None = None

    def work(self, *, num_seqs: int, num_tokens: int, context: int, num_logit_rows: int) -> Work:
        """`num_tokens` are those of a sequence, `num_logit_rows` those of the whole step."""
        if self.attention is not None:
            return self.attention.work(num_seqs=num_seqs, num_tokens=num_tokens, context=context)
        num_rows = num_logit_rows if self.rows == "logits" else num_seqs * num_tokens
        macs = num_rows * self.row_macs
        return Work(
            linear_macs=macs if self.unit == "int8" else 0,
            float_macs=macs if self.unit == "float" else 0,
            attention_macs=0,
            num_bytes=self.weight_bytes,
        )


class ModelCosts(Struct, frozen=True, kw_only=True):
    """What the lowered plan of a model asks for, a token and a row of logits."""

    token_macs: int
    logit_macs: int  # also of what follows the last attention: only these rows need it
    attention: tuple[AttentionCost, ...]
    weight_bytes: int
    is_float: bool = False  # the linears' weights are in a float format

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token, all layers."""
        return sum(layer.key_bytes for layer in self.attention)


def op_costs(checkpoint: Checkpoint, kv_dtype: str = "f16") -> tuple[OpCost, ...]:
    """Return the costs of each op that Paceline runs for `checkpoint`; no weight is read."""
    config = checkpoint.config
    formats = {name: tensor.format for name, tensor in checkpoint.tensors.items()}
    ops = lower(build_plan(config), formats, orders=column_orders(checkpoint.tensors)).ops
    return tuple(_op_cost(op, checkpoint, kv_dtype) for op in ops)


def _op_cost(op: Op, checkpoint: Checkpoint, kv_dtype: str) -> OpCost:
    rows = op.out.rows
    if op.name == "attend":
        # A key is multiplied with the query, its value with the probability.
        config = checkpoint.config
        layer = AttentionCost(
            key_macs=2 * op.attrs["heads"] * op.attrs["head_dim"],
            key_bytes=kv_token_bytes(config, kv_dtype) // config.num_layers,
            window=op.attrs["window"],
            is_int8=kv_dtype in ("int8", "k8v4", "int4"),  # nibbles become int8 codes
        )
        kind = f"attention, {layer.window:,} keys" if layer.window else "attention"
        return OpCost(kind=kind, rows=rows, unit="attention", attention=layer)
    if op.name != "linear":
        return OpCost(kind=op.name, rows=rows, unit="float")
    tensors = [checkpoint.tensors[name] for name in op.weights]
    return OpCost(
        kind=_linear_kind(op.weights[0]),
        rows=rows,
        unit="float" if tensors[0].format in FLOAT_FORMATS else "int8",
        row_macs=op.inputs[0].cols * sum(op.attrs["splits"]),
        weight_bytes=sum(tensor.num_bytes for tensor in tensors),
    )


def _linear_kind(weight: str) -> str:
    if weight in (HEAD, EMBEDDING):
        return "head"
    part = weight.split(".")[-2]
    return _KINDS.get(part, part)


def model_costs(checkpoint: Checkpoint, kv_dtype: str = "f16") -> ModelCosts:
    """Return the costs of the program that Paceline runs for `checkpoint`; no weight is read."""
    ops = op_costs(checkpoint, kv_dtype)
    macs = {"tokens": 0, "logits": 0}
    for op in ops:
        macs[op.rows] += op.row_macs
    return ModelCosts(
        token_macs=macs["tokens"],
        logit_macs=macs["logits"],
        attention=tuple(op.attention for op in ops if op.attention is not None),
        weight_bytes=decode_weight_bytes(checkpoint.config, checkpoint.tensors),
        is_float=all(op.unit == "float" for op in ops if op.row_macs),
    )


def chunk_work(
    costs: ModelCosts, *, num_seqs: int, num_tokens: int, context: int, num_logit_rows: int
) -> Work:
    """`num_seqs` sequences that hold `context` tokens get `num_tokens` more each, in one step.

    Weights are read once.
    """
    macs = num_seqs * num_tokens * costs.token_macs + num_logit_rows * costs.logit_macs
    attention_macs, int8_macs, num_bytes = 0, 0, costs.weight_bytes
    for layer, num_layers in Counter(costs.attention).items():
        work = layer.work(num_seqs=num_seqs, num_tokens=num_tokens, context=context)
        attention_macs += num_layers * work.attention_macs
        int8_macs += num_layers * work.int8_attention_macs
        num_bytes += num_layers * work.num_bytes
    return Work(
        linear_macs=0 if costs.is_float else macs,
        float_macs=macs if costs.is_float else 0,
        attention_macs=attention_macs,
        int8_attention_macs=int8_macs,
        num_bytes=num_bytes,
    )


def prefill_work(costs: ModelCosts, num_tokens: int) -> Work:
    """A prompt of `num_tokens` up to its first token: causal attention, one row of logits."""
    return chunk_work(costs, num_seqs=1, num_tokens=num_tokens, context=0, num_logit_rows=1)


def decode_work(costs: ModelCosts, *, num_streams: int, context: int) -> Work:
    """One token for each of `num_streams` that hold `context` tokens."""
    return chunk_work(
        costs, num_seqs=num_streams, num_tokens=1, context=context, num_logit_rows=num_streams
    )


def compute_s(work: Work, ceilings: Ceilings) -> float:
    """Return the seconds of the multiply-adds at the ceilings."""
    return (
        (work.linear_macs + work.int8_attention_macs) / ceilings.int8_macs_s
        + work.float_macs / ceilings.f32_macs_s
        + work.attention_macs / ceilings.attention_macs_s
    )


def memory_s(work: Work, ceilings: Ceilings) -> float:
    """Return the seconds of the reading; what fits a cache is read from there."""
    return work.num_bytes / ceilings.read_bytes_s(work.num_bytes)


def floor_s(work: Work, ceilings: Ceilings) -> float:
    """Return the seconds that `work` takes at the ceilings: compute or memory, the longer one."""
    return max(compute_s(work, ceilings), memory_s(work, ceilings))


def compute_bound_batch(
    costs: ModelCosts, ceilings: Ceilings, *, context: int, limit: int = 4096
) -> int | None:
    """Return the least batch whose decode step multiplies longer than it reads; None: none does.

    Each stream brings multiply-adds and KV bytes of its own, the weights are read for all: so the
    compute's share only grows with the batch.
    """
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        work = decode_work(costs, num_streams=middle, context=context)
        is_bound = compute_s(work, ceilings) >= memory_s(work, ceilings)
        low, high = (low, middle) if is_bound else (middle, high)
    return high if high < limit else None
