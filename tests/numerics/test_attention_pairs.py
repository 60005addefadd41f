"""Attention over a bfloat16 cache: in pairs where the CPU multiplies them, in f32 elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import _native
from paceline.backends.kv_formats import round_to
from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend
from tests.numerics.test_kv_codes import load, random_tables

TILE, SEGMENT = 64, 512  # keys between two rescalings, and with a softmax of their own
HAS_PAIRS = pytest.mark.skipif(
    "avx512bf16" not in _native.isas(), reason="this CPU does not multiply bfloat16"
)


def bf16(x: np.ndarray) -> np.ndarray:
    return round_to("bf16", x.astype(np.float32)).astype(np.float64)


def attention_in_pairs(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return what a query [dim] makes of the keys that it sees, `[first, N)` of [N, dim].

    Queries, keys, values and the probabilities of a tile are rounded to bfloat16, and nothing else;
    the kernel's exp is within 2^-18.
    Keys of NaN are not seen.
    """
    seen = np.isfinite(k[:, 0])
    scores = np.where(seen, bf16(np.where(seen[:, None], k, 0)) @ bf16(q), -np.inf)
    scores *= q.size**-0.5
    top, total, out = -np.inf, 0.0, np.zeros(q.size)
    for begin in range(0, len(k), SEGMENT):
        peak, weight, mixed = -np.inf, 0.0, np.zeros(q.size)
        for at in range(begin, min(begin + SEGMENT, len(k)), TILE):
            tile = slice(at, min(at + TILE, begin + SEGMENT, len(k)))
            if not seen[tile].any():
                continue
            peak, before = max(peak, scores[tile].max()), peak
            p = np.exp(scores[tile] - peak)
            shrink = np.exp(before - peak)
            mixed = mixed * shrink + bf16(p) @ bf16(v[tile])
            weight = weight * shrink + p.sum()
        if weight:
            top, before = max(top, peak), top
            a, b = np.exp(before - top), np.exp(peak - top)
            total, out = total * a + weight * b, out * a + mixed * b
    return out / total


def expected(tables, tokens, *, heads: int, kv_heads: int, window: int = 0) -> np.ndarray:
    q, k, v = (
        tables[name][tokens].reshape(len(tokens), count, -1)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    rows = []
    for i in range(len(tokens)):
        keys = k[: i + 1].copy()
        if window:
            keys[: max(i + 1 - window, 0)] = np.nan
        group = heads // kv_heads
        rows.append([
            attention_in_pairs(q[i, h], keys[:, h // group], v[: i + 1, h // group])
            for h in range(heads)
        ])  # fmt: skip
    return np.array(rows).reshape(len(tokens), -1)


def assert_equal_but_for_ties(got: np.ndarray, want: np.ndarray) -> None:
    """A probability on the edge between two numbers may go to the other one: in a few rows."""
    error = np.abs(got - want)
    assert np.quantile(error, 0.95) < 1e-5
    assert error.max() < 2**-8


@HAS_PAIRS
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (6, 1)])
@pytest.mark.parametrize("dim", [8, 24, 64, 128])
@pytest.mark.parametrize("window", [0, 7])
def test_pairs_round_queries_and_probabilities_and_nothing_else(heads, kv_heads, dim, window):
    tables = random_tables(heads=heads, kv_heads=kv_heads, dim=dim)
    tokens = np.random.default_rng(2).integers(0, 64, 99)
    shape = {"heads": heads, "kv_heads": kv_heads, "window": window}
    got = load(NativeBackend(2, isa="avx512bf16"), tables, kv_dtype="bf16", **shape).step(
        [(0, tokens.tolist())]
    )[0]
    want = expected(tables, tokens, **shape)
    plain = load(ReferenceBackend(), tables, kv_dtype="bf16", **shape).step([(0, tokens.tolist())])[
        0
    ]
    assert_equal_but_for_ties(got, want)
    assert np.abs(plain - want).mean() > 100 * np.abs(got - want).mean()


@HAS_PAIRS
@pytest.mark.parametrize("window", [0, 600])
def test_pairs_of_a_long_context_are_rounded_within_segments(window):
    tables = random_tables(heads=2, kv_heads=1, dim=16)
    tokens = np.random.default_rng(3).integers(0, 64, 1200)
    shape = {"heads": 2, "kv_heads": 1, "window": window}
    runner = load(
        NativeBackend(2, isa="avx512bf16"), tables, kv_dtype="bf16", max_len=1280, **shape
    )
    got = [runner.step([(0, tokens[i : i + 400].tolist())])[0] for i in range(0, 1200, 400)]
    want = expected(tables, tokens, **shape)
    assert_equal_but_for_ties(np.concatenate(got), want)


@pytest.mark.parametrize("isa", [isa for isa in _native.isas() if isa != "avx512bf16"])
@pytest.mark.parametrize("dim", [8, 64])
def test_the_other_isas_attend_in_f32(isa, dim):
    tables = random_tables(heads=6, kv_heads=2, dim=dim)
    tokens = np.random.default_rng(2).integers(0, 64, 99).tolist()
    got, want = (
        load(backend, tables, heads=6, kv_heads=2, kv_dtype="bf16").step([(0, tokens)])[0]
        for backend in (NativeBackend(2, isa=isa), ReferenceBackend())
    )
    np.testing.assert_allclose(got, want, atol=2e-6)
