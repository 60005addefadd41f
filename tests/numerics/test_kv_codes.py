"""KV caches of codes: what is stored, what attention makes of it, and its error."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import _native
from paceline.backends.evening import FLOOR, NUM_POSITIONS, even_out
from paceline.backends.kv_formats import PART_DTYPES, mix_columns, round_to, round_to_nibbles
from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend, rotate
from paceline.plan.plan import KeyBias, Plan, RopeTable
from tests.numerics.program_cases import (
    Runner,
    Shape,
    decoder,
    f32_tensor,
    random_tokens,
    random_weights,
)

DTYPES = ["int8", "fp8", "k8v4", "int4"]
BLOCK = 32
DIM = 64
ROPE = RopeTable(tuple(1e6 ** (-2 * i / DIM) for i in range(DIM // 2)))


def load(
    backend,
    tables,
    *,
    heads: int,
    kv_heads: int,
    kv_dtype: str = "int8",
    key_bias: KeyBias | None = None,
    softcap: float = 0.0,
    window: int = 0,
    max_len: int = 128,
) -> Runner:
    """Attention alone: token i has rows i of the tables q, k and v, [N, heads * dim].

    `key_bias` names a table [kv_heads * dim], and its rope turns q and k.
    """
    plan = Plan()
    q, k, v = (plan.embed(name, tables[name].shape[1]) for name in "qkv")
    if key_bias is not None and key_bias.rope is not None:
        q, k = plan.rope(q, heads, key_bias.rope), plan.rope(k, kv_heads, key_bias.rope)
    x = plan.attention(
        q, k, v, layer=0, heads=heads, kv_heads=kv_heads, scale=(q.cols // heads) ** -0.5,
        softcap=softcap, key_bias=key_bias, window=window,
    )  # fmt: skip
    plan.output("logits", plan.select(x))
    weights = {name: f32_tensor(table) for name, table in tables.items()}
    return Runner.load(
        backend, plan, weights, block_size=BLOCK, kv_dtype=kv_dtype, max_len=max_len, num_seqs=2
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
    """K and V of sequence 0, [N, kv_heads, dim], out of the bytes of its blocks.

    Columns of nibbles are still mixed.
    """
    data, begin, parts = runner.backend.read_blocks(runner.tables[0]), 0, []
    for is_value, dtype in enumerate(PART_DTYPES.get(kv_dtype, (kv_dtype, kv_dtype))):
        narrow = dtype == "int4"
        num_bytes = BLOCK * (dim // 2 + 2 + 2 * -(-dim // 32) if narrow else dim + 2)
        heads = data[:, begin : begin + kv_heads * num_bytes].reshape(-1, num_bytes)
        read = {"int8": read_int8, "fp8": read_fp8, "int4": read_int4}[dtype]
        values = np.stack([read(head, dim, bool(is_value)) for head in heads])  # [.., BLOCK, dim]
        values = values.reshape(len(data), kv_heads, BLOCK, dim).transpose(0, 2, 1, 3)
        parts.append(values.reshape(-1, kv_heads, dim)[:num_tokens])
        begin += kv_heads * num_bytes
    return parts


def scales_of(head: np.ndarray, begin: int) -> np.ndarray:
    """[BLOCK, 1] from the bytes of a head in a block."""
    return head[begin : begin + 2 * BLOCK].view(np.float16).astype(np.float32)[:, None]


def read_int8(head: np.ndarray, dim: int, is_value: bool) -> np.ndarray:
    codes = head[: BLOCK * dim].view(np.int8)
    if is_value:
        codes = codes.reshape(BLOCK // 2, dim, 2).transpose(0, 2, 1)
    else:
        codes = codes.reshape(dim // 2, BLOCK, 2).transpose(1, 0, 2)
    return codes.reshape(BLOCK, dim) * scales_of(head, BLOCK * dim)


def read_fp8(head: np.ndarray, dim: int, is_value: bool) -> np.ndarray:
    codes = e4m3(head[: BLOCK * dim])
    codes = codes.reshape(BLOCK, dim) if is_value else codes.reshape(dim, BLOCK).T
    return codes * scales_of(head, BLOCK * dim)


def read_int4(head: np.ndarray, dim: int, is_value: bool) -> np.ndarray:
    half, groups = dim // 2, -(-dim // 32)
    steps, bases = head[BLOCK * (half + 2) :].reshape(2, groups, BLOCK)
    packed = head[: BLOCK * half]
    packed = packed.reshape(BLOCK, half) if is_value else packed.reshape(half, BLOCK).T
    nibbles = np.empty((BLOCK, dim), np.int32)
    for begin in range(0, dim, 32):
        part = packed[:, begin // 2 : min(begin + 32, dim) // 2]
        columns = nibbles[:, begin : begin + 32]
        if is_value:
            columns[:, : part.shape[1]], columns[:, part.shape[1] :] = part & 15, part >> 4
        else:
            columns[:, ::2], columns[:, 1::2] = part & 15, part >> 4
    wide = np.repeat(np.arange(groups), 32)[:dim]
    codes = bases.view(np.int8)[wide].T.astype(np.int32) + steps[wide].T * nibbles
    return codes.astype(np.float32) * scales_of(head, BLOCK * half)


def defined(kv_dtype: str, name: str, x: np.ndarray) -> np.ndarray:
    """What the reference says is kept of the keys or values x; columns of nibbles are mixed."""
    dtype = PART_DTYPES.get(kv_dtype, (kv_dtype, kv_dtype))["kv".index(name)]
    return round_to_nibbles(mix_columns(x)) if dtype == "int4" else round_to(dtype, x)


def e4m3(bits: np.ndarray) -> np.ndarray:
    """The numbers of OCP's 8-bit format, by its definition."""
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)
    return np.where(bits & 128, -size, size).astype(np.float32)


@pytest.mark.parametrize("kv_dtype", DTYPES)
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
        want = defined(kv_dtype, name, tables[name][:50].reshape(50, 2, dim))
        np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize("kv_dtype", DTYPES)
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
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_value_past_the_format_makes_nan_of_those_who_see_it_alone(name, value, kv_dtype):
    options = {"heads": 2, "kv_heads": 1, "kv_dtype": kv_dtype}
    tables = random_tables(heads=2, kv_heads=1, dim=32)
    tokens = list(range(40))
    clean = load(NativeBackend(1), tables, **options).step([(0, tokens)])[0]
    tables[name][20, 7] = value
    broken = load(NativeBackend(1), tables, **options).step([(0, tokens)])[0]
    np.testing.assert_array_equal(broken[:20], clean[:20])
    assert np.isnan(broken[20:]).any(axis=1).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
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


def biased_tables(*, kv_heads: int) -> dict[str, np.ndarray]:
    """Keys with biases like those of Qwen2: huge where rope turns slowly, large where it does not.

    Queries have little there, as they must if a model is to tell keys apart.
    """
    tables = random_tables(heads=2 * kv_heads, kv_heads=kv_heads, dim=DIM)
    bias = np.random.default_rng(5).standard_normal((kv_heads, DIM)).astype(np.float32)
    bias[:, 26:30] += 150
    bias[:, DIM - 3] -= 90
    bias[:, 10] += 20
    tables["k"] += bias.reshape(-1)
    tables["q"].reshape(64, -1, DIM)[..., [10, 26, 27, 28, 29, DIM - 3]] *= 0.1
    return tables | {"bias": bias.reshape(-1)}


def run_with(backend, tables, *, kv_dtype: str = "int8", **options) -> np.ndarray:
    runner = load(backend, tables, heads=4, kv_heads=2, kv_dtype=kv_dtype, **options)
    return np.concatenate([runner.step([(0, list(range(n)))])[0] for n in (50, 14)])


@pytest.mark.parametrize(
    ("kv_dtype", "least_gain"), [("int8", 5), ("fp8", 1.1), ("k8v4", 2), ("int4", 2)]
)
def test_biased_keys_lose_less_where_their_bias_is_known(kv_dtype, least_gain):
    tables = biased_tables(kv_heads=2)
    bias = KeyBias("bias", ROPE)
    exact = run_with(NativeBackend(2), tables, kv_dtype="f32", key_bias=bias)
    even = run_with(NativeBackend(2), tables, kv_dtype=kv_dtype, key_bias=bias)
    tables["bias"] = np.zeros_like(tables["bias"])
    uneven = run_with(NativeBackend(2), tables, kv_dtype=kv_dtype, key_bias=bias)
    error, without = (np.abs(got - exact).mean() for got in (even, uneven))
    assert error < without / least_gain


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_attention_over_evened_keys_equals_the_reference(kv_dtype):
    tables = biased_tables(kv_heads=2)
    got, want = (
        run_with(backend, tables, kv_dtype=kv_dtype, key_bias=KeyBias("bias", ROPE))
        for backend in (NativeBackend(2), ReferenceBackend())
    )
    np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("isa", _native.isas())
def test_the_bytes_of_evened_keys_are_what_the_reference_defines(isa, kv_dtype):
    tables = random_tables(heads=2, kv_heads=2, dim=40)
    bias = (100 * np.random.default_rng(3).standard_normal(80)).astype(np.float32)
    tables["k"] += bias
    runner = load(
        NativeBackend(2, isa=isa), tables | {"bias": bias}, heads=2, kv_heads=2,
        kv_dtype=kv_dtype, key_bias=KeyBias("bias"),
    )  # fmt: skip
    runner.step([(0, list(range(50)))])
    with np.errstate(invalid="ignore"):  # of scales where no token is
        keys, values = stored(runner, 50, kv_heads=2, dim=40, kv_dtype=kv_dtype)
    rest = tables["k"][:50] - bias
    np.testing.assert_array_equal(keys, defined(kv_dtype, "k", rest.reshape(50, 2, 40)))
    want = defined(kv_dtype, "v", tables["v"][:50].reshape(50, 2, 40))
    np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_bias_of_zero_leaves_every_bit_as_without_one(kv_dtype):
    tables = random_tables(heads=4, kv_heads=2, dim=DIM)
    zero = tables | {"bias": np.zeros(2 * DIM, np.float32)}
    still = RopeTable((0.0,) * (DIM // 2))  # turns nothing, so that both plans mean the same
    got = run_with(NativeBackend(1), zero, kv_dtype=kv_dtype, key_bias=KeyBias("bias", still))
    want = run_with(NativeBackend(1), tables, kv_dtype=kv_dtype)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
def test_wide_formats_keep_keys_as_they_are(kv_dtype):
    tables = biased_tables(kv_heads=2)
    got = run_with(NativeBackend(1), tables, kv_dtype=kv_dtype, key_bias=KeyBias("bias", ROPE))
    tables["bias"] = np.zeros_like(tables["bias"])
    want = run_with(NativeBackend(1), tables, kv_dtype=kv_dtype, key_bias=KeyBias("bias", ROPE))
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_a_softcap_bends_scores_so_it_keeps_the_bias():
    tables = biased_tables(kv_heads=2)
    options = {"key_bias": KeyBias("bias", ROPE), "softcap": 5.0}
    got = run_with(NativeBackend(1), tables, **options)
    tables["bias"] = np.zeros_like(tables["bias"])
    want = run_with(NativeBackend(1), tables, **options)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_every_isa_evens_keys_to_the_same_bits(isa, kv_dtype):
    tables = biased_tables(kv_heads=2)
    got, want = (
        run_with(
            NativeBackend(2, isa=name), tables, kv_dtype=kv_dtype, key_bias=KeyBias("bias", ROPE)
        )
        for name in (isa, "scalar")
    )
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_the_shift_is_the_mean_of_the_turned_bias_and_the_rest_is_under_the_floor():
    bias = 40 * np.random.default_rng(0).standard_normal((2, DIM)).astype(np.float32)
    even = even_out(bias, ROPE)
    positions = np.arange(NUM_POSITIONS, dtype=np.int32)
    turned = rotate(np.tile(bias.reshape(1, -1), (NUM_POSITIONS, 1)), 2, ROPE, positions)
    turned = turned.reshape(NUM_POSITIONS, 2, DIM).astype(np.float64)
    np.testing.assert_allclose(even.shift, turned.mean(axis=0), atol=1e-3)
    rest = np.ldexp(np.abs(turned - even.shift), -even.e)
    assert FLOOR / 8 < rest.max() <= FLOOR * 1.001
    np.testing.assert_array_equal(even.e[:, : DIM // 2], even.e[:, DIM // 2 :])
    assert even.e[:, 0].max() > 0  # turned fast: no shift takes it off
    assert not even.e[:, DIM // 2 - 1].any()


def test_a_bias_that_is_no_number_gives_exponents_of_zero():
    bias = np.array([[np.nan, np.inf, 1.0, 1.0]], np.float32)
    with np.errstate(invalid="ignore"):
        even = even_out(bias, RopeTable((1.0, 0.5)))
    assert not even.e.any()
