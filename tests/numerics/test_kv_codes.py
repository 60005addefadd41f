"""The int8 and fp8 KV caches: what is stored, what attention makes of it, and its error."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import _native
from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend, round_to
from paceline.plan.plan import Plan
from tests.numerics.program_cases import (
    Runner,
    Shape,
    decoder,
    f32_tensor,
    random_tokens,
    random_weights,
)

BLOCK = 32


def load(backend, tables, *, heads: int, kv_heads: int, kv_dtype: str = "int8") -> Runner:
    """Attention alone: token i has rows i of the tables q, k and v, [N, heads * dim]."""
    plan = Plan()
    q, k, v = (plan.embed(name, tables[name].shape[1]) for name in "qkv")
    x = plan.attention(
        q, k, v, layer=0, heads=heads, kv_heads=kv_heads, scale=(q.cols // heads) ** -0.5
    )
    plan.output("logits", plan.select(x))
    weights = {name: f32_tensor(table) for name, table in tables.items()}
    return Runner.load(
        backend, plan, weights, block_size=BLOCK, kv_dtype=kv_dtype, max_len=128, num_seqs=2
    )


def random_tables(*, heads: int, kv_heads: int, dim: int, rows: int = 64, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {
        name: rng.standard_normal((rows, count * dim)).astype(np.float32)
        for name, count in shapes.items()
    }


def stored(
    runner: Runner, num_tokens: int, *, kv_heads: int, dim: int, kv_dtype: str
) -> list[np.ndarray]:
    """K and V of sequence 0, [N, kv_heads, dim], out of the bytes of its blocks."""
    data = runner.backend.read_blocks(runner.tables[0])
    found: list[list[np.ndarray]] = [[], []]
    for block in data.reshape(len(data), 2, kv_heads, BLOCK * (dim + 2)):
        for part, heads in enumerate(block):
            codes = heads[:, : BLOCK * dim]
            scales = np.ascontiguousarray(heads[:, BLOCK * dim :]).view(np.float16)
            if kv_dtype == "fp8":
                codes = e4m3(codes)
                shape = (kv_heads, dim, BLOCK) if part == 0 else (kv_heads, BLOCK, dim)
                codes = codes.reshape(shape).transpose((2, 0, 1) if part == 0 else (1, 0, 2))
            elif part == 0:
                codes = codes.view(np.int8).reshape(kv_heads, dim // 2, BLOCK, 2)
                codes = codes.transpose(2, 0, 1, 3)
            else:
                codes = codes.view(np.int8).reshape(kv_heads, BLOCK // 2, dim, 2)
                codes = codes.transpose(1, 3, 0, 2)
            values = codes.reshape(BLOCK, kv_heads, dim) * scales.T[..., None].astype(np.float32)
            found[part].append(values)
    return [np.concatenate(part)[:num_tokens] for part in found]


def e4m3(bits: np.ndarray) -> np.ndarray:
    """The numbers of OCP's 8-bit format, by its definition."""
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)
    return np.where(bits & 128, -size, size).astype(np.float32)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [8, 40, 64, 128, 256])
@pytest.mark.parametrize("isa", _native.isas())
def test_the_bytes_of_a_block_are_what_the_reference_defines(isa, dim, kv_dtype):
    tables = random_tables(heads=2, kv_heads=2, dim=dim)
    tables["k"][3] = 0
    tables["k"][4, dim:] *= 1e4
    tables["v"][5] *= 1e-3
    tables["v"][6:20] *= 10.0 ** -np.arange(14)[:, None]  # down to scales that f16 holds no more
    backend = NativeBackend(2, isa=isa)
    runner = load(backend, tables, heads=2, kv_heads=2, kv_dtype=kv_dtype)
    tokens = list(range(50))
    runner.step([(0, tokens)])
    with np.errstate(invalid="ignore"):  # of scales where no token is
        found = stored(runner, 50, kv_heads=2, dim=dim, kv_dtype=kv_dtype)
    for name, values in zip("kv", found, strict=True):
        want = round_to(kv_dtype, tables[name][:50].reshape(50, 2, dim))
        np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (6, 1), (14, 2), (8, 1)])
@pytest.mark.parametrize("dim", [8, 24, 64, 128])
def test_attention_over_the_codes_equals_the_reference(heads, kv_heads, dim, kv_dtype):
    """Queries and weights are 15-bit numbers: far less than the rounding of K and V themselves."""
    tables = random_tables(heads=heads, kv_heads=kv_heads, dim=dim)
    tokens = random_tokens(np.random.default_rng(2), 100, 64)
    got, want = (
        load(backend, tables, heads=heads, kv_heads=kv_heads, kv_dtype=kv_dtype).step(
            [(0, tokens)]
        )[0]
        for backend in (NativeBackend(2), ReferenceBackend())
    )
    np.testing.assert_allclose(got, want, atol=3e-4)


def test_an_outlier_in_one_head_costs_the_other_heads_nothing():
    tables = random_tables(heads=2, kv_heads=2, dim=64)
    tokens = list(range(40))
    alone = load(NativeBackend(1), tables, heads=2, kv_heads=2).step([(0, tokens)])[0]
    for name in ("k", "v"):
        tables[name][:, 3] = 500
    beside = load(NativeBackend(1), tables, heads=2, kv_heads=2).step([(0, tokens)])[0]
    np.testing.assert_array_equal(beside[:, 64:], alone[:, 64:])
    assert not np.array_equal(beside[:, :64], alone[:, :64])


def test_the_error_is_that_of_one_step_of_codes():
    tables = random_tables(heads=4, kv_heads=2, dim=64)
    tokens = list(range(64))
    got, want = (
        load(NativeBackend(1), tables, heads=4, kv_heads=2, kv_dtype=kv_dtype).step([(0, tokens)])[
            0
        ]
        for kv_dtype in ("int8", "f32")
    )
    error = np.abs(got - want).max()
    assert 1e-4 < error < np.abs(tables["v"]).max() / 127


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_value_past_the_format_makes_nan_of_those_who_see_it_alone(name, value, kv_dtype):
    options = {"heads": 2, "kv_heads": 1, "kv_dtype": kv_dtype}
    tables = random_tables(heads=2, kv_heads=1, dim=32)
    tokens = list(range(40))
    clean = load(NativeBackend(1), tables, **options).step([(0, tokens)])[0]
    tables[name][20, 7] = value
    broken = load(NativeBackend(1), tables, **options).step([(0, tokens)])[0]
    np.testing.assert_array_equal(broken[:20], clean[:20])
    assert np.isnan(broken[20:]).any(axis=1).all()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 16), (40, 48), (64, 16), (128, 64)])
def test_every_isa_gives_the_same_bits(isa, head_dim, block_size, kv_dtype):
    shape = Shape(windows=(20, 0), heads=6, kv_heads=2, head_dim=head_dim, softcap=3.0)
    plan = decoder(shape)
    weights = random_weights(plan, shape)
    tokens = random_tokens(np.random.default_rng(9), 150, shape.vocab)
    results = []
    for name in ("scalar", isa):
        runner = Runner.load(
            NativeBackend(2, isa=name), plan, weights, block_size=block_size, kv_dtype=kv_dtype
        )
        runner.step([(0, tokens[:140])])
        results.append(runner.step([(0, tokens[140:])])[0])
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
