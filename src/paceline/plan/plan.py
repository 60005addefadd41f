"""Plan: the op program that every backend executes.

Activations are 2-D, [rows, cols]: T rows (the step's tokens) or L rows (those that need logits).
Batch structure lives in StepInput alone, so a plan never depends on the batch.
`backends/reference.py` is the definition of each op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct, field

Rows = Literal["tokens", "logits"]
EmbedIndex = Literal["token", "position", "zero"]
Activation = Literal["silu", "gelu_tanh", "gelu"]


class Value(Struct, frozen=True):
    """An activation. With `parent`: a view of columns [offset, offset + cols) of the parent."""

    id: int
    cols: int
    rows: Rows = "tokens"
    format: Literal["f32", "q8"] = "f32"
    parent: int | None = None
    offset: int = 0


class Op(Struct, frozen=True):
    """One step of the program. `weights` are canonical tensor names; `attrs` are op constants."""

    name: str
    out: Value
    inputs: tuple[Value, ...] = ()
    weights: tuple[str, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


class Plan:
    """A program in construction: each method appends one op and returns its value."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.outputs: dict[str, Value] = {}
        self._next_id = 0

    def new_value(self, cols: int, rows: Rows = "tokens", **kw: Any) -> Value:
        """Return a fresh value of this plan (passes use it; families use the op methods)."""
        self._next_id += 1
        return Value(self._next_id - 1, cols, rows, **kw)

    def _emit(
        self,
        name: str,
        cols: int,
        *inputs: Value,
        weights: Iterable[str] = (),
        rows: Rows | None = None,
        **attrs: Any,
    ) -> Value:
        out = self.new_value(cols, rows or (inputs[0].rows if inputs else "tokens"))
        self.ops.append(Op(name, out, inputs, tuple(weights), attrs))
        return out

    def embed(
        self, weight: str, cols: int, *, index: EmbedIndex = "token", rows: int | None = None
    ) -> Value:
        """Rows of `weight` [rows, cols] at the step's token ids, at its positions, or its row 0.

        `rows` None is the size of the vocabulary.
        """
        return self._emit("embed", cols, weights=(weight,), index=index, num_rows=rows)

    def linear(self, x: Value, weight: str, cols: int, bias: str | None = None) -> Value:
        """x @ weight.T + bias, weight [cols, x.cols]; of one with more rows, the first `cols`."""
        return self._emit("linear", cols, x, weights=(weight,), biases=(bias,), splits=(cols,))

    def rms_norm(self, x: Value, weight: str, eps: float, heads: int = 1) -> Value:
        """x / sqrt(mean(x²) + eps) * weight, over each of `heads` equal column groups."""
        return self._emit("rms_norm", x.cols, x, weights=(weight,), eps=eps, heads=heads)

    def layer_norm(self, x: Value, weight: str, bias: str, eps: float) -> Value:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""
        return self._emit("layer_norm", x.cols, x, weights=(weight, bias), eps=eps)

    def rope(self, x: Value, heads: int, rope: RopeTable) -> Value:
        """Rotate halves of each head's first `2 * len(inv_freq)` columns by position * inv_freq."""
        return self._emit("rope", x.cols, x, heads=heads, rope=rope)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        is_causal: bool = True,
        key_bias: KeyBias | None = None,
    ) -> Value:
        """Store k and v at the step's slots, then causal (or tree) attention over each one's KV.

        Without `is_causal` a row sees the later rows of its sequence in this step, too; then a
        sequence is whole in one step.
        `window` > 0 limits a token to the last `window` positions, itself included. `softcap` > 0
        maps a score s to softcap * tanh(s / softcap). `key_bias` is in k already, and
        a cache of 8 bits leaves out of it what is the same at most positions.
        """
        return self._emit(
            "attention", q.cols, q, k, v, layer=layer, heads=heads, kv_heads=kv_heads,
            head_dim=q.cols // heads, scale=scale, window=window, softcap=softcap,
            is_causal=is_causal,
            # A softcap bends scores, so what all keys have in common may not be left out.
            key_bias=None if softcap > 0 else key_bias,
        )  # fmt: skip

    def gated_act(self, gate: Value, up: Value, act: Activation) -> Value:
        """act(gate) * up."""
        return self._emit("gated_act", gate.cols, gate, up, act=act)

    def act(self, x: Value, act: Activation) -> Value:
        """act(x): a gated_act without a second factor."""
        return self._emit("gated_act", x.cols, x, act=act)

    def add(self, a: Value, b: Value) -> Value:
        return self._emit("add", a.cols, a, b)

    def scale(self, x: Value, factor: float) -> Value:
        return self._emit("scale", x.cols, x, factor=factor)

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._emit("softcap", x.cols, x, cap=cap)

    def select(self, x: Value) -> Value:
        """The rows of x that need logits: [T, cols] -> [L, cols]."""
        return self._emit("select", x.cols, x, rows="logits")

    def output(self, name: str, value: Value) -> None:
        self.outputs[name] = value

    def derive(self, ops: Iterable[Op], outputs: Mapping[str, Value] | None = None) -> Plan:
        """Return a plan of `ops` and these outputs (default: mine); new values continue my ids."""
        plan = Plan()
        plan.ops = list(ops)
        plan.outputs = dict(self.outputs if outputs is None else outputs)
        plan._next_id = self._next_id
        return plan


def sole_output(plan: Plan) -> Value:
    """What a forward hands out: logits, or the hidden states of a plan that ends with those."""
    (value,) = plan.outputs.values()
    return value


class RopeTable(Struct, frozen=True):
    """Rotary frequencies after scaling: angle = position * inv_freq[i]; cos, sin times `mscale`."""

    inv_freq: tuple[float, ...]
    mscale: float = 1.0


class KeyBias(Struct, frozen=True):
    """A part of every key of a layer: the bias `name`, turned by `rope` (None: by nothing)."""

    name: str
    rope: RopeTable | None = None
