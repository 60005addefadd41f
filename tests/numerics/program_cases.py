"""Tiny random decoders and ragged schedules for the tests of whole programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.backends.base import Backend, KVSpec, StepInput, StepLimits
from paceline.plan.plan import KeyBias, Plan, RopeTable
from paceline.weights.tensor import QTensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder with every option of the plan that a family may use."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 64
    inter: int = 96
    vocab: int = 101
    windows: tuple[int, ...] = (0, 0)
    softcap: float = 0.0
    logit_softcap: float = 0.0
    qk_norm: bool = False
    bias: bool = False
    post_norm: bool = False
    act: str = "silu"
    embed_scale: float = 1.0
    rope_dims: int | None = None


def decoder(shape: Shape) -> Plan:
    plan, eps = Plan(), 1e-5
    dims = shape.rope_dims or shape.head_dim
    rope = RopeTable(tuple(10000.0 ** (-2 * i / dims) for i in range(dims // 2)))
    x = plan.embed("embed", shape.hidden)
    if shape.embed_scale != 1.0:
        x = plan.scale(x, shape.embed_scale)
    for i in range(shape.layers):

        def project(h, name, cols, i=i):
            bias = f"{i}.{name}.bias" if shape.bias else None
            return plan.linear(h, f"{i}.{name}", cols, bias)

        h = plan.rms_norm(x, f"{i}.norm1", eps)
        q = project(h, "q", shape.heads * shape.head_dim)
        k = project(h, "k", shape.kv_heads * shape.head_dim)
        v = project(h, "v", shape.kv_heads * shape.head_dim)
        if shape.qk_norm:
            q = plan.rms_norm(q, f"{i}.q_norm", eps, heads=shape.heads)
            k = plan.rms_norm(k, f"{i}.k_norm", eps, heads=shape.kv_heads)
        q, k = plan.rope(q, shape.heads, rope), plan.rope(k, shape.kv_heads, rope)
        h = plan.attention(
            q,
            k,
            v,
            layer=i,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            scale=shape.head_dim**-0.5,
            window=shape.windows[i % len(shape.windows)],
            softcap=shape.softcap,
            key_bias=KeyBias(f"{i}.k.bias", rope) if shape.bias and not shape.qk_norm else None,
        )
        h = plan.linear(h, f"{i}.o", shape.hidden)
        x = plan.add(x, plan.rms_norm(h, f"{i}.post1", eps) if shape.post_norm else h)
        h = plan.rms_norm(x, f"{i}.norm2", eps)
        gate = plan.linear(h, f"{i}.gate", shape.inter)
        up = plan.linear(h, f"{i}.up", shape.inter)
        h = plan.linear(plan.gated_act(gate, up, shape.act), f"{i}.down", shape.hidden)
        x = plan.add(x, plan.rms_norm(h, f"{i}.post2", eps) if shape.post_norm else h)
    x = plan.select(plan.rms_norm(x, "norm", eps))
    x = plan.linear(x, "head", shape.vocab)
    if shape.logit_softcap:
        x = plan.softcap(x, shape.logit_softcap)
    plan.output("logits", x)
    return plan


def f32_tensor(values: np.ndarray) -> QTensor:
    values = np.ascontiguousarray(values, np.float32)
    rows = values.reshape(values.shape[0], -1) if values.ndim == 2 else values
    return QTensor("f32", values.shape, rows.view(np.uint8))


def q8_0_tensor(values: np.ndarray) -> QTensor:
    n, k = values.shape
    groups = values.reshape(n, k // 32, 32)
    scale = (np.abs(groups).max(axis=2) / 127).astype(np.float16)
    quants = np.rint(groups / scale[..., None].astype(np.float32)).astype(np.int8)
    blocks = np.concatenate([scale[..., None].view(np.uint8), quants.view(np.uint8)], axis=2)
    return QTensor("q8_0", (n, k), np.ascontiguousarray(blocks.reshape(n, -1)))


def random_weights(plan: Plan, shape: Shape, fmt: str = "f32", seed: int = 0) -> dict[str, QTensor]:
    rng = np.random.default_rng(seed)
    weights: dict[str, QTensor] = {}
    make = {"f32": f32_tensor, "q8_0": q8_0_tensor}[fmt]
    for op in plan.ops:
        if op.name == "rms_norm":
            cols = op.out.cols // op.attrs["heads"]
            weights[op.weights[0]] = f32_tensor(1 + 0.1 * rng.standard_normal(cols))
        elif op.name in ("linear", "embed"):
            rows, k = (
                (shape.vocab, op.out.cols)
                if op.name == "embed"
                else (op.out.cols, op.inputs[0].cols)
            )
            weights[op.weights[0]] = make(
                (rng.standard_normal((rows, k)) * k**-0.5).astype(np.float32)
            )
            for bias in op.attrs.get("biases", ()):
                if bias:
                    weights[bias] = f32_tensor(0.1 * rng.standard_normal(op.out.cols))
    return weights


@dataclass
class Runner:
    """Feeds sequences to a backend in chunks, each with its own scattered KV blocks."""

    backend: Backend
    kv: KVSpec
    max_blocks: int
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        backend: Backend,
        plan: Plan,
        weights: Mapping[str, QTensor],
        *,
        num_seqs: int = 4,
        max_len: int = 320,
        block_size: int = 16,
        kv_dtype: str = "f16",
        max_tokens: int = 1024,
        seed: int = 0,
    ) -> Runner:
        per_seq = -(-max_len // block_size)
        kv = KVSpec(num_blocks=per_seq * num_seqs, block_size=block_size, dtype=kv_dtype)
        limits = StepLimits(
            max_tokens=max_tokens,
            max_logit_rows=max_tokens,
            max_seqs=num_seqs,
            max_blocks_per_seq=per_seq,
        )
        backend.load(plan, weights, kv=kv, limits=limits)
        runner = cls(backend, kv, per_seq)
        blocks = np.random.default_rng(seed).permutation(kv.num_blocks).reshape(num_seqs, per_seq)
        runner.tables = {i: [int(b) for b in row] for i, row in enumerate(blocks)}
        return runner

    def step(
        self,
        chunks: Iterable[tuple[int, list[int]]],
        trees: Mapping[int, tuple[list[int], list[int]]] | None = None,
    ) -> dict[int, np.ndarray]:
        """Run one step; returns the logits of each sequence's rows.

        `chunks` are (sequence, next tokens). `trees` give a sequence's chunk (positions relative to
        its context, ancestor masks) and do not lengthen it.
        """
        chunks, trees = list(chunks), trees or {}
        tokens, positions, slots, seqs, tables, masks = [], [], [], [], [], []
        for seq, new in chunks:
            ctx, table = self.lengths.get(seq, 0), self.tables[seq]
            size = self.kv.block_size
            depth, mask = trees.get(seq, (list(range(len(new))), [0] * len(new)))
            seqs.append((len(tokens), len(new), ctx))
            tables.append(table)
            tokens += new
            positions += [ctx + d for d in depth]
            slots += [table[i // size] * size + i % size for i in range(ctx, ctx + len(new))]
            masks += mask
            if seq not in trees:
                self.lengths[seq] = ctx + len(new)

        def i32(x):
            return np.array(x, np.int32)

        logits = self.backend.forward(
            StepInput(
                i32(tokens),
                i32(positions),
                i32(slots),
                i32(seqs),
                i32(tables),
                np.arange(len(tokens), dtype=np.int32),
                np.array(masks, np.uint64) if trees else None,
            )
        ).logits
        return {
            seq: logits[first : first + n].copy()
            for (seq, _), (first, n, _) in zip(chunks, seqs, strict=True)
        }

    def restart(self, seq: int) -> None:
        self.lengths[seq] = 0


def random_tokens(rng: np.random.Generator, n: int, vocab: int) -> list[int]:
    return [int(t) for t in rng.integers(0, vocab, n)]
