"""The floor of a cell: the least time that the machine's own ceilings allow for its work."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.memory import kv_token_bytes
from paceline.measure.bandwidth import decode_weight_bytes
from paceline.models.base import build_plan
from paceline.plan.passes import lower
from paceline.weights.checkpoint import Checkpoint

KV_DTYPE = "f16"  # what every engine here keeps, or could


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What all threads together reach; `bf16_macs_s` is None where the CPU has no bf16 dot."""

    int8_macs_s: float
    bf16_macs_s: float | None
    f32_macs_s: float
    read_bytes_s: float

    @property
    def attention_macs_s(self) -> float:
        return self.f32_macs_s if self.bf16_macs_s is None else self.bf16_macs_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a cell cannot avoid: multiply-adds by kind, and bytes from memory."""

    linear_macs: int
    attention_macs: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """One layer: multiply-adds and KV bytes for each key that a query row sees."""

    key_macs: int
    key_bytes: int
    window: int  # 0: all keys

    def num_visible(self, num_keys: int) -> int:
        return min(num_keys, self.window) if self.window else num_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What the lowered plan of a model asks for, a token and a row of logits."""

    token_macs: int
    logit_macs: int  # also of what follows the last attention: only these rows need it
    attention: tuple[AttentionCost, ...]
    weight_bytes: int


def model_costs(checkpoint: Checkpoint) -> ModelCosts:
    """Return the costs of the program that Paceline runs for `checkpoint`; no weight is read."""
    config = checkpoint.config
    formats = {name: tensor.format for name, tensor in checkpoint.tensors.items()}
    macs = {"tokens": 0, "logits": 0}
    attention = []
    key_bytes = kv_token_bytes(config, KV_DTYPE) // config.num_layers
    for op in lower(build_plan(config), formats).ops:
        if op.name == "linear":
            macs[op.out.rows] += op.inputs[0].cols * sum(op.attrs["splits"])
        elif op.name == "attend":
            # A key is multiplied with the query, its value with the probability.
            key_macs = 2 * op.attrs["heads"] * op.attrs["head_dim"]
            cost = AttentionCost(
                key_macs=key_macs, key_bytes=key_bytes, window=op.attrs["window"]
            )  # fmt: skip
            attention.append(cost)
    return ModelCosts(
        token_macs=macs["tokens"],
        logit_macs=macs["logits"],
        attention=tuple(attention),
        weight_bytes=decode_weight_bytes(config, checkpoint.tensors),
    )


def prefill_work(costs: ModelCosts, num_tokens: int) -> Work:
    """A prompt of `num_tokens` up to its first token: causal attention, one row of logits."""
    attention_macs = num_bytes = 0
    for layer in costs.attention:
        keys = sum(layer.num_visible(position + 1) for position in range(num_tokens))
        attention_macs += layer.key_macs * keys
        num_bytes += layer.key_bytes * num_tokens
    return Work(
        linear_macs=costs.token_macs * num_tokens + costs.logit_macs,
        attention_macs=attention_macs,
        num_bytes=costs.weight_bytes + num_bytes,
    )


def decode_work(costs: ModelCosts, *, num_streams: int, context: int) -> Work:
    """One token for each of `num_streams` that hold `context` tokens: weights are read once."""
    visible = [layer.num_visible(context + 1) for layer in costs.attention]
    layers = list(zip(costs.attention, visible, strict=True))
    return Work(
        linear_macs=num_streams * (costs.token_macs + costs.logit_macs),
        attention_macs=num_streams * sum(layer.key_macs * keys for layer, keys in layers),
        num_bytes=costs.weight_bytes
        + num_streams * sum(layer.key_bytes * keys for layer, keys in layers),
    )


def floor_s(work: Work, ceilings: Ceilings) -> float:
    """Return the seconds that `work` takes at the ceilings: compute or memory, the longer one."""
    compute_s = (
        work.linear_macs / ceilings.int8_macs_s + work.attention_macs / ceilings.attention_macs_s
    )
    return max(compute_s, work.num_bytes / ceilings.read_bytes_s)
