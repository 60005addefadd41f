"""linear, embed and quantize of every weight format and ISA against dequantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from paceline import _native
from paceline.weights.repack import PackedTensor, pack_tensor
from paceline.weights.tensor import BLOCK, F8_FORMATS, FLOAT_FORMATS, SCALE_OFFSETS, QTensor
from tests import own_formats

quants = pytest.importorskip("gguf.quants")
gguf = pytest.importorskip("gguf")

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
ISAS = _native.isas()
FORMATS = sorted(BLOCK)
SIZES = (32, 96, 160, 256, 288, 576, 896, 1408, 1536, 4544, 4864, 10944)


@dataclass(frozen=True)
class Case:
    """A random weight: packed, and dequantised by the gguf package."""

    packed: PackedTensor
    weights: F32  # [N, K]

    def linear(
        self,
        isa: str,
        x: F32,
        *,
        num_threads: int = 1,
        bias: F32 | None = None,
        quantizes: bool = True,
    ) -> F32:
        p = self.packed
        segment = (p.format, p.data, p.rows, p.k, bias)
        return np.asarray(
            _native.linear(isa, x, [segment], num_threads=num_threads, quantizes=quantizes)
        )


def random_tensor(fmt: str, rows: int, k: int) -> QTensor:
    """Every bit of the blocks is random, but the scales: finite and small."""
    rng = np.random.default_rng(rows * 7919 + k)
    if fmt in FLOAT_FORMATS - F8_FORMATS:
        x = rng.standard_normal((rows, k)).astype(np.float32)
        if fmt == "bf16":
            data = (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = x.astype({"f32": np.float32, "f16": np.float16}[fmt]).view(np.uint8)
        return QTensor(fmt, (rows, k), data)
    weights, size = BLOCK[fmt]
    blocks = rng.integers(0, 256, (rows, k // weights, size), dtype=np.uint8)
    if fmt in F8_FORMATS:
        blocks[blocks & 0x7F == 0x7F] = 0  # NaN
    for at in SCALE_OFFSETS[fmt]:
        scale = (rng.standard_normal((rows, k // weights, 1)) * 0.01).astype(np.float16)
        blocks[:, :, at : at + 2] = scale.view(np.uint8)
    return QTensor(fmt, (rows, k), blocks.reshape(rows, -1))


@cache
def case(fmt: str, rows: int = 33, k: int = 768) -> Case:
    tensor = random_tensor(fmt, rows, k)
    if own_formats.is_own(fmt):
        return Case(pack_tensor(tensor), own_formats.decode(tensor))
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    return Case(pack_tensor(tensor), quants.dequantize(tensor.data, kind).reshape(rows, k))


def activations(rows: int, k: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def q8_values(rows: U8, k: int) -> npt.NDArray[np.float64]:
    """What q8 rows stand for. [T, K]"""
    groups = -(-k // 32)
    q = rows[:, : groups * 32].view(np.int8).reshape(-1, groups, 32).astype(np.float64)
    scale = np.ascontiguousarray(rows[:, groups * 32 : groups * 36]).view(np.float32)
    return (q * scale[:, :, None].astype(np.float64)).reshape(len(rows), -1)[:, :k]


def as_read(fmt: str, x: F32) -> npt.NDArray[np.float64]:
    """The activations that the kernel multiplies."""
    if fmt in FLOAT_FORMATS:
        return x.astype(np.float64)
    return q8_values(np.asarray(_native.quantize_rows("scalar", x)), x.shape[1])


def assert_close(fmt: str, got: F32, x: F32, weights: F32, isa: str = "scalar") -> None:
    read = as_read(fmt, x)
    exact = read @ weights.astype(np.float64).T
    size = np.abs(read) @ np.abs(weights.astype(np.float64)).T
    tolerance = 1e-2 if (isa, fmt) == ("avx512bf16", "bf16") else 1e-5
    assert (np.abs(got - exact) <= tolerance * size + 1e-30).all()


def comparable(isa: str, fmt: str) -> bool:
    """avx512bf16 rounds activations to bf16 for bf16 weights: the documented exception."""
    return not (isa == "avx512bf16" and fmt == "bf16")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_linear_equals_the_product_with_dequantised_weights(isa: str, fmt: str) -> None:
    for k in SIZES:
        if k % BLOCK[fmt][0]:
            continue
        x = activations(5, k)
        c = case(fmt, 33, k)
        assert_close(fmt, c.linear(isa, x), x, c.weights, isa)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_every_isa_gives_the_bits_of_scalar(isa: str, fmt: str) -> None:
    if not comparable(isa, fmt):
        pytest.skip("avx512bf16 rounds activations to bf16")
    for rows in (1, 15, 16, 17, 33):
        for tokens in (1, 2, 7, 9):
            x = activations(tokens, 768, seed=rows)
            c = case(fmt, rows)
            assert np.array_equal(c.linear(isa, x), c.linear("scalar", x)), (rows, tokens)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_same_bits_in_any_batch_and_any_number_of_threads(isa: str, fmt: str) -> None:
    x = activations(40, 512)
    c = case(fmt, 33, 512)
    alone = np.concatenate([c.linear(isa, x[t : t + 1]) for t in range(40)])
    for tokens in (2, 3, 4, 5, 8, 13, 40):
        for threads in (1, 2):
            assert np.array_equal(c.linear(isa, x[:tokens], num_threads=threads), alone[:tokens])


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt not in FLOAT_FORMATS])
@pytest.mark.parametrize("isa", ISAS)
def test_f32_activations_meet_exactly_the_dequantised_weights(isa: str, fmt: str) -> None:
    x, c = activations(9, 768), case(fmt, 33, 768)
    got = c.linear(isa, x, num_threads=2, quantizes=False)
    floats = pack_tensor(QTensor("f32", c.weights.shape, c.weights.view(np.uint8)))
    assert np.array_equal(got, Case(floats, c.weights).linear("scalar", x))
    assert np.array_equal(got[4:5], c.linear(isa, x[4:5], quantizes=False))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_beyond_one_cache_block_have_the_same_bits(isa: str) -> None:
    x = activations(70, 8960)  # blocks of rows are at most 224 KiB of activations
    c = case("q4_1", 17, 8960)
    assert np.array_equal(
        c.linear(isa, x, num_threads=2)[[0, 19, 69]], c.linear(isa, x[[0, 19, 69]])
    )
    assert_close("q4_1", c.linear(isa, x), x, c.weights)


@pytest.mark.parametrize("tokens", [3, 13])  # one panel at a time, and two where the ISA has that
@pytest.mark.parametrize("isa", ISAS)
def test_segments_of_different_formats_follow_one_another(isa: str, tokens: int) -> None:
    x = activations(tokens, 512)
    cases = [case("q5_0", 33, 512), case("q4_k", 16, 512), case("q6_k", 7, 512)]
    parts = [(c.packed.format, c.packed.data, c.packed.rows, c.packed.k, None) for c in cases]
    merged = np.asarray(_native.linear(isa, x, parts, num_threads=2))
    assert np.array_equal(merged, np.concatenate([c.linear(isa, x) for c in cases], axis=1))


@pytest.mark.parametrize("isa", ISAS)
def test_bias_is_added_before_the_residual(isa: str) -> None:
    x, bias = activations(3, 256), activations(1, 33)[0]
    residual = activations(3, 33, seed=1)
    c = case("q8_0", 33, 256)
    plain = c.linear(isa, x)
    assert np.array_equal(c.linear(isa, x, bias=bias), plain + bias)
    segment = ("q8_0", c.packed.data, 33, 256, bias)
    assert np.array_equal(_native.linear(isa, x, [segment], residual), (plain + bias) + residual)


@pytest.mark.parametrize("fmt", sorted(FLOAT_FORMATS - F8_FORMATS))
@pytest.mark.parametrize("isa", ISAS)
def test_float_weights_take_any_number_of_columns(isa: str, fmt: str) -> None:
    for k in (1, 7, 33):
        x, c = activations(5, k), case(fmt, 17, k)
        assert_close(fmt, c.linear(isa, x), x, c.weights, isa)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_embed_equals_dequantize(isa: str, fmt: str) -> None:
    c = case(fmt)
    p, ids = c.packed, np.array([32, 0, 17, 15, 16], np.int32)
    got = np.asarray(_native.embed(isa, fmt, p.data, p.rows, p.k, ids))
    assert np.array_equal(got, c.weights[ids])
    scaled = np.asarray(_native.embed(isa, fmt, p.data, p.rows, p.k, ids, 1.5))
    assert np.array_equal(scaled, c.weights[ids] * np.float32(1.5))


def extreme(name: str, k: int) -> F32:
    x = activations(2, k)
    if name == "zeros":
        x[:] = 0
    elif name == "one huge value":
        x[0, k // 2] = 1e30
    elif name == "denormals":
        x *= np.float32(1e-40)
    return x


@pytest.mark.parametrize("name", ["zeros", "one huge value", "denormals"])
@pytest.mark.parametrize("isa", ISAS)
def test_extreme_inputs_stay_finite_and_right(isa: str, name: str) -> None:
    x = extreme(name, 768)
    for fmt in FORMATS:
        c = case(fmt)
        got = c.linear(isa, x)
        assert np.isfinite(got).all()
        if name != "denormals":
            assert_close(fmt, got, x, c.weights, isa)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_is_not_finite_becomes_nan_and_leaves_its_neighbours_alone(
    isa: str, bad: float
) -> None:
    x = activations(3, 768)
    spoiled = x.copy()
    spoiled[1, 5] = bad
    for fmt in set(FORMATS) - FLOAT_FORMATS:
        got, clean = case(fmt).linear(isa, spoiled), case(fmt).linear(isa, x)
        assert np.isnan(got[1]).all()
        assert np.array_equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
def test_quantised_rows_are_within_half_a_step_and_carry_their_sums(isa: str) -> None:
    for k in (32, 33, 96, 896, 1040):
        x = activations(4, k)
        x[1, 32:64] = 0
        rows = np.asarray(_native.quantize_rows(isa, x))
        groups = -(-k // 32)
        scale = np.ascontiguousarray(rows[:, groups * 32 : groups * 36]).view(np.float32)
        step = np.repeat(scale, 32, axis=1)[:, :k]
        assert (np.abs(q8_values(rows, k) - x) <= step * 0.5001).all()
        q = rows[:, : groups * 32].view(np.int8).astype(np.int32)
        halves = np.ascontiguousarray(rows[:, groups * 40 : groups * 44]).view(np.int16)
        assert np.array_equal(halves, q.reshape(4, -1, 16).sum(axis=2))
        sums = np.ascontiguousarray(rows[:, groups * 36 : groups * 40]).view(np.float32)
        whole = q.reshape(4, -1, 32).sum(axis=2).astype(np.float32)
        assert np.array_equal(sums, scale * whole)
        assert np.array_equal(rows, _native.quantize_rows("scalar", x))
