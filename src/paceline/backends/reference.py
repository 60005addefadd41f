"""The definition of every op, in float32 NumPy: slow, short; other backends are tested by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.backends.base import F32, I32, KVSpec, StepInput, StepLimits, StepOutput
from paceline.backends.evening import Evening, evening
from paceline.backends.kv_formats import PART_DTYPES, round_to
from paceline.errors import BackendError
from paceline.plan.arena import last_uses, root_id
from paceline.plan.plan import Op, Plan, RopeTable, Value, sole_output
from paceline.weights.tensor import QTensor, dequantize

ROPE_STRIDE = 64  # positions between two angles that are not reached by a product
Q8_GROUP = 32


def quantize_dequantize(x: F32) -> F32:
    """x as a q8 row holds it: int8 quants with one scale, max|x| / 127, per group of 32 columns."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // Q8_GROUP) * Q8_GROUP), np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(rows, -1, Q8_GROUP)
    amax = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    quants = np.rint(groups * inverse)
    dense: F32 = (quants * (amax / np.float32(127))).reshape(rows, -1)
    return dense[:, :cols]


def rope_table(rope: RopeTable, num_positions: int) -> F32:
    """cos and sin of every position, [num_positions, 2, len(inv_freq)], from float64 angles.

    e^(i(a + b)θ) = e^(iaθ) · e^(ibθ): one product a position, five times quicker than cos and sin,
    and a model's whole context is in the way of its first token.
    """
    freq = np.asarray(rope.inv_freq, np.float64)
    coarse = np.exp(1j * np.arange(0, num_positions, ROPE_STRIDE)[:, None] * freq) * rope.mscale
    fine = np.exp(1j * np.arange(ROPE_STRIDE)[:, None] * freq)
    turns = (coarse[:, None] * fine).reshape(-1, len(freq))[:num_positions]
    table = np.empty((num_positions, 2, len(freq)), np.float32)
    table[:, 0], table[:, 1] = turns.real, turns.imag
    return table


def rms_norm(x: F32, weight: F32, eps: float, heads: int = 1) -> F32:
    """x / sqrt(mean(x²) + eps) * weight over each of `heads` column groups."""
    groups = x.reshape(len(x), heads, x.shape[1] // heads)
    mean = (groups * groups).mean(axis=2, keepdims=True, dtype=np.float32)
    y: F32 = groups / np.sqrt(mean + np.float32(eps)) * weight
    return y.reshape(x.shape)


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    """(x - mean) / sqrt(variance + eps) * weight + bias over each row."""
    centred = x - x.mean(axis=1, keepdims=True, dtype=np.float32)
    variance = (centred * centred).mean(axis=1, keepdims=True, dtype=np.float32)
    y: F32 = centred / np.sqrt(variance + np.float32(eps)) * weight + bias
    return y


def gelu(x: F32) -> F32:
    """x * (1 + erf(x / sqrt 2)) / 2, with the error function of float64."""
    y: F32 = (x * (0.5 + 0.5 * _erf(x * np.float32(np.sqrt(0.5))))).astype(np.float32)
    return y


_erf = np.vectorize(math.erf, otypes=[np.float64])


def rotate(x: F32, heads: int, rope: RopeTable, positions: I32) -> F32:
    """Rotate the two halves of each head's first 2·len(inv_freq) columns by the row's position."""
    half = len(rope.inv_freq)
    table = rope_table(rope, int(positions.max(initial=0)) + 1)[positions]  # [T, 2, half]
    cos, sin = table[:, None, 0], table[:, None, 1]
    y = x.reshape(len(x), heads, -1).copy()
    a, b = y[..., :half].copy(), y[..., half : 2 * half].copy()
    y[..., :half] = a * cos - b * sin
    y[..., half : 2 * half] = b * cos + a * sin
    return y.reshape(x.shape)


def visible_keys(
    step: StepInput, seq: int, window: int, *, is_causal: bool = True
) -> npt.NDArray[np.bool_]:
    """[n, ctx + n]: whether row i of the sequence sees key j of its KV.

    Keys are the context, then the step's rows. A tree mask of 0 means causal. The window counts the
    keys a row sees, not the cache's slots, so a draft-tree node sees what the same token would see
    in a chain. Without `is_causal` a row sees all.
    """
    first, n, ctx = (int(x) for x in step.seqs[seq])
    if not is_causal:
        return np.ones((n, ctx + n), np.bool_)
    own = np.tri(n, dtype=np.bool_)
    if step.tree is not None:
        masks = step.tree[first : first + n]
        for i in np.flatnonzero(masks):
            own[i] = [j < 64 and bool(int(masks[i]) >> j & 1) for j in range(n)]
    seen = np.concatenate([np.ones((n, ctx), np.bool_), own], axis=1)
    if window > 0:
        rank = np.cumsum(seen, axis=1)
        seen &= rank > seen.sum(axis=1, keepdims=True) - window
    return seen


class LayerKV(Struct):
    """K and V of one layer, [num_slots, kv_heads, head_dim]: values of the KV dtype, in float32."""

    k: F32
    v: F32


class _Run:
    """What ops read besides their inputs: the step, the weights, the KV cache."""

    def __init__(self, backend: ReferenceBackend, step: StepInput) -> None:
        self.step = step
        self.backend = backend

    def weight(self, name: str) -> F32:
        return self.backend.weight(name)

    def store(self, k: F32, v: F32, op: Op) -> None:
        kv, dtype = self.backend.layers[op.attrs["layer"]], self.backend.kv.dtype
        key_dtype, value_dtype = PART_DTYPES.get(dtype, (dtype, dtype))
        shape = (len(k), op.attrs["kv_heads"], op.attrs["head_dim"])
        even = self.backend.evening[op.attrs["layer"]]
        k = k.reshape(shape)
        if even is None:
            kv.k[self.step.slots] = round_to(key_dtype, k)
        else:
            rounded = round_to(key_dtype, np.ldexp(k - even.shift, -even.e))
            kv.k[self.step.slots] = np.ldexp(rounded, even.e) + even.shift
        kv.v[self.step.slots] = round_to(value_dtype, v.reshape(shape))

    def attend(self, q: F32, op: Op) -> F32:
        """softmax(scale · q kᵀ, softcapped and masked) v, for every row and query head."""
        a, step = op.attrs, self.step
        kv, block = self.backend.layers[a["layer"]], self.backend.kv.block_size
        heads, groups, dim = a["heads"], a["kv_heads"], a["head_dim"]
        out = np.zeros((len(q), heads, dim), np.float32)
        queries = q.reshape(len(q), groups, heads // groups, dim)
        for seq, (first, n, ctx) in enumerate(step.seqs.tolist()):
            index = np.arange(ctx + n)
            slots = step.block_tables[seq, index // block] * block + index % block
            seen = visible_keys(step, seq, a["window"], is_causal=a["is_causal"])
            rows = slice(first, first + n)
            for g in range(groups):
                k, v = kv.k[slots, g], kv.v[slots, g]  # [N, D]
                q_heads = queries[rows, g].swapaxes(0, 1)  # [H / G, n, D]
                scores = (q_heads @ k.T) * np.float32(a["scale"])
                if a["softcap"] > 0:
                    cap = np.float32(a["softcap"])
                    scores = np.tanh(scores / cap) * cap
                scores = np.where(seen, scores, np.float32(-np.inf))
                p = np.exp(scores - scores.max(axis=2, keepdims=True))
                p /= p.sum(axis=2, keepdims=True)
                head = g * (heads // groups)
                out[rows, head : head + heads // groups] = (p @ v).swapaxes(0, 1)
        return out.reshape(len(q), -1)


def _embed(run: _Run, op: Op) -> F32:
    step = run.step
    index = {"token": step.tokens, "position": step.positions, "zero": np.zeros_like(step.tokens)}
    rows: F32 = run.weight(op.weights[0])[index[op.attrs["index"]]]
    scaled: F32 = rows * np.float32(op.attrs.get("scale", 1.0))
    return scaled


def _linear(run: _Run, op: Op, x: F32, residual: F32 | None = None) -> F32:
    parts = []
    columns = _columns(op) if "order" in op.attrs else slice(None)
    segments = zip(op.weights, op.attrs["biases"], op.attrs["splits"], strict=True)
    for name, bias, num_rows in segments:  # of a head that is cut short the first rows
        y = x @ run.weight(name)[:num_rows, columns].T
        parts.append(y if bias is None else y + run.weight(bias)[:num_rows])
    y = np.concatenate(parts, axis=1)
    return y if residual is None else y + residual


def _columns(op: Op) -> I32:
    """The column order of a gather, or of a linear that reads what one made."""
    return np.frombuffer(op.attrs["order"], np.int32)


def _rms_norm(run: _Run, op: Op, x: F32, residual: F32 | None = None) -> F32:
    y = rms_norm(x, run.weight(op.weights[0]), op.attrs["eps"], op.attrs["heads"])
    return y if residual is None else y + residual


def _layer_norm(run: _Run, op: Op, x: F32) -> F32:
    weight, bias = map(run.weight, op.weights)
    return layer_norm(x, weight, bias, op.attrs["eps"])


def _rope(run: _Run, op: Op, x: F32) -> F32:
    return rotate(x, op.attrs["heads"], op.attrs["rope"], run.step.positions)


def _attention(run: _Run, op: Op, q: F32, k: F32, v: F32) -> F32:
    run.store(k, v, op)
    return run.attend(q, op)


def _rope_store(run: _Run, op: Op, q: F32, k: F32, v: F32) -> F32:
    """q and k normed (where `norms` says so) and rotated; k and v stored; returns q."""
    a = op.attrs
    done = []
    for x, heads, norm in ((q, a["heads"], a["norms"][0]), (k, a["kv_heads"], a["norms"][1])):
        if norm is not None:
            x = rms_norm(x, run.weight(norm), a["eps"], heads)
        if a["rope"] is not None:
            x = rotate(x, heads, a["rope"], run.step.positions)
        done.append(x)
    run.store(done[1], v, op)
    return done[0]


def _gated_act(run: _Run, op: Op, gate: F32, up: F32 | None = None) -> F32:
    y: F32
    if op.attrs["act"] == "silu":
        with np.errstate(over="ignore"):
            y = gate / (1 + np.exp(-gate))
    elif op.attrs["act"] == "gelu":
        y = gelu(gate)
    else:
        inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
        y = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return y if up is None else y * up


_OPS: dict[str, Callable[..., F32]] = {
    "embed": _embed,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "attention": _attention,
    "rope_store": _rope_store,
    "attend": lambda run, op, q: run.attend(q, op),
    "quantize": lambda run, op, x: x,  # its output is q8: rounded like every q8 value
    "gated_act": _gated_act,
    "add": lambda run, op, a, b: a + b,
    "scale": lambda run, op, x: x * np.float32(op.attrs["factor"]),
    "softcap": lambda run, op, x: np.tanh(x / op.attrs["cap"]) * np.float32(op.attrs["cap"]),
    "select": lambda run, op, x: x[run.step.logit_rows],
    "gather": lambda run, op, x: x[:, _columns(op)],
}  # fmt: skip


def _apply(run: _Run, op: Op, *inputs: F32) -> F32:
    return _OPS[op.name](run, op, *inputs).astype(np.float32, copy=False)


class ReferenceBackend:
    """Runs a family's plan or a lowered one. A q8 value is held as the float32 it stands for."""

    def load(
        self, plan: Plan, weights: Mapping[str, QTensor], *, kv: KVSpec, limits: StepLimits
    ) -> None:
        unknown = {op.name for op in plan.ops} - _OPS.keys()
        if unknown:
            raise BackendError(f"the reference backend has no op {', '.join(sorted(unknown))}")
        self.plan, self.kv, self.limits = plan, kv, limits
        self._source = weights
        self._dense: dict[str, F32] = {}
        self._last = last_uses(plan)
        self.layers: dict[int, LayerKV] = {}
        self.evening: dict[int, Evening | None] = {}  # of each layer's keys
        for op in plan.ops:
            if op.name in ("attention", "rope_store"):
                shape = (kv.num_blocks * kv.block_size, op.attrs["kv_heads"], op.attrs["head_dim"])
                layer = op.attrs["layer"]
                self.layers[layer] = LayerKV(
                    np.zeros(shape, np.float32), np.zeros(shape, np.float32)
                )
                self.evening[layer] = evening(op, weights, kv.dtype)

    def weight(self, name: str) -> F32:
        """The weight in float32, dequantised at first use and kept."""
        if name not in self._dense:
            self._dense[name] = dequantize(self._source[name])
        return self._dense[name]

    def drop_weights(self) -> None:
        """Give back the memory of dequantised weights; the next use dequantises again."""
        self._dense.clear()

    def run_op(self, op: Op, step: StepInput, *inputs: F32) -> F32:
        """Return the value of one op of the plan, for those who go through it by themselves."""
        return _apply(_Run(self, step), op, *inputs)

    def forward(self, step: StepInput) -> StepOutput:
        values = self.run(step)
        return StepOutput(values[sole_output(self.plan).id])

    def run(self, step: StepInput, *, keep: bool = False) -> dict[int, F32]:
        """Return the values alive after the step; with `keep` all of them, by value id."""
        run = _Run(self, step)
        values: dict[int, F32] = {}

        def read(value: Value) -> F32:
            if value.parent is None:
                return values[value.id]
            return values[value.parent][:, value.offset : value.offset + value.cols]

        for index, op in enumerate(self.plan.ops):
            out = _apply(run, op, *(read(v) for v in op.inputs))
            values[op.out.id] = quantize_dequantize(out) if op.out.format == "q8" else out
            if not keep:
                for value in (op.out, *op.inputs):
                    if self._last[root_id(value)] <= index:
                        values.pop(root_id(value), None)
        for value in self.plan.outputs.values():
            values[value.id] = read(value)
        return values

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for kv in self.layers.values():
            for array in (kv.k, kv.v):
                blocks = self._blocks(array)
                blocks[list(dst)] = blocks[list(src)]

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for kv in self.layers.values():
            for array in (kv.k, kv.v):
                for a, b in zip(src, dst, strict=True):
                    array[b] = array[a]

    def read_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        parts = [
            self._blocks(array)[list(blocks)].reshape(len(blocks), -1)
            for kv in self.layers.values()
            for array in (kv.k, kv.v)
        ]
        return np.ascontiguousarray(np.concatenate(parts, axis=1)).view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        values, begin = np.ascontiguousarray(data).view(np.float32), 0
        for kv in self.layers.values():
            for array in (kv.k, kv.v):
                target = self._blocks(array)
                size = target[0].size
                part = values[:, begin : begin + size]
                target[list(blocks)] = part.reshape(len(blocks), *target.shape[1:])
                begin += size

    def close(self) -> None:
        self._source, self._dense, self.layers = {}, {}, {}

    def _blocks(self, array: F32) -> F32:
        """[num_slots, G, D] seen as [num_blocks, block_size, G, D]."""
        return array.reshape(self.kv.num_blocks, self.kv.block_size, *array.shape[1:])
