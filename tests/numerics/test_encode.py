"""Encoders: no worse than the gguf package's, exact on the grid, the same bits everywhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline import _native
from paceline.errors import ModelFormatError
from paceline.weights.encode import ENCODED_FORMATS, encode
from paceline.weights.tensor import BLOCK, F8_FORMATS, QTensor, dequantize, is_finite

F32 = npt.NDArray[np.float32]
FORMATS = sorted(ENCODED_FORMATS)
K_QUANTS = ("q4_k", "q5_k", "q6_k")
FLAT = [fmt for fmt in FORMATS if fmt not in K_QUANTS]
# Codes that a group's range is stretched over: half a step is the most that rounding alone costs.
STEPS = {"q4_k": 15, "q5_k": 31, "q6_k": 63}


def weights(rows: int = 12, cols: int = 768, seed: int = 0) -> F32:
    """Most rows as a trained model's, some with a few large outliers, some with an offset."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, cols)) * 0.02
    w[1::3] *= np.where(rng.random((len(w[1::3]), cols)) < 0.01, 30, 1)
    w[2::3] += 0.05
    return w.astype(np.float32)


def rounded(w: F32, fmt: str, **options: object) -> F32:
    return dequantize(QTensor(fmt, w.shape, encode(w, fmt, name="w", **options)))  # type: ignore[arg-type]


def block_errors(w: F32, other: F32, size: int) -> npt.NDArray[np.float64]:
    off = (w.astype(np.float64) - other).reshape(len(w), -1, size)
    return np.asarray((off**2).sum(axis=2))


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_no_block_is_further_off_than_the_gguf_packages(fmt: str) -> None:
    gguf = pytest.importorskip("gguf")
    w, kind = weights(), gguf.GGMLQuantizationType[fmt.upper()]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind).reshape(w.shape)
    ours, their = block_errors(w, rounded(w, fmt), 32), block_errors(w, theirs, 32)
    assert (ours <= their * (1 + 1e-5)).all()
    assert ours.sum() < 0.99 * their.sum()


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_k_quants_stay_within_what_their_bits_allow(fmt: str) -> None:
    """Rounding costs at most half a step; scales and minimums of 6 and 8 bits another quarter.

    The mean is a uniform error's: a step / sqrt(12), with a tenth more for the scales.
    """
    w = weights()
    size = 16 if fmt == "q6_k" else 32
    groups = w.reshape(len(w), -1, size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    if fmt == "q6_k":  # no minimum: the range is symmetric, one code longer below
        step = 2 * np.maximum(-low, high) / (STEPS[fmt] + 1)
    else:
        step = (np.maximum(high, 0) - np.minimum(low, 0)) / STEPS[fmt]
    top = step.reshape(len(w), -1, 256 // size).max(axis=2).repeat(256 // size, axis=1)
    error = np.sqrt(block_errors(w, rounded(w, fmt), size) / size)
    coarse = top / (63 if size == 32 else 127)  # a scale's own step, met by the largest code
    assert (error <= 0.5 * step + 0.5 * coarse * STEPS[fmt] / 2 + 1e-7).all()
    assert error.mean() <= 1.1 * (step / np.sqrt(12)).mean()


@pytest.mark.parametrize("fmt", FLAT)
def test_weights_on_the_grid_are_found_again_exactly(fmt: str) -> None:
    once = rounded(weights(), fmt)
    again = rounded(once, fmt)
    if fmt in ("i8m_g32", "i8m_g64", "i8m_g128"):  # the float16 minimum may move by its own step
        assert np.abs(again - once).max() <= 2.0**-11 * np.abs(once).max()
        return
    np.testing.assert_array_equal(again, once)


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_a_second_k_quant_adds_a_small_part_of_the_firsts_error(fmt: str) -> None:
    w = weights()
    once = rounded(w, fmt)
    first, second = np.square(once - w).sum(), np.square(rounded(once, fmt) - once).sum()
    assert second <= 0.05 * first


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_outliers_and_tiny_weights_stay_finite_and_near(fmt: str) -> None:
    w = weights(6)
    w[0] = 0
    w[1, ::2] = 0
    w[2] = 0.25  # constant
    w[3] *= 1e-4
    w[4, 5] = 60000
    w[5] = np.float32(1e-30)
    data = QTensor(fmt, w.shape, encode(w, fmt, name="w"))
    assert is_finite(data)
    got = dequantize(data)
    np.testing.assert_array_equal(got[0], 0)
    assert np.abs(got[2] - 0.25).max() < 0.25 / 120
    assert np.abs(got[4, 5] - 60000) < 60000 / 12
    relative = np.linalg.norm(got[3] - w[3]) / np.linalg.norm(w[3])
    assert relative < 0.2
    assert np.abs(got[5]).max() < 1e-6


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", [isa for isa in _native.isas() if isa != "scalar"])
def test_every_isa_and_number_of_threads_writes_the_same_bytes(isa: str, fmt: str) -> None:
    w, ones = weights(33), np.ones(768, np.float32)
    expected = encode(w, fmt, name="w")
    got = np.empty_like(expected)
    for name in (isa, "scalar"):
        _native.encode(name, fmt, w, ones, False, got)
        assert np.array_equal(got, expected)
    assert np.array_equal(encode(w, fmt, name="w", num_threads=3), expected)
    assert np.array_equal(encode(w[7:20], fmt, name="w"), expected[7:20])


@pytest.mark.parametrize("fmt", FLAT)
def test_one_scale_a_row_is_the_same_in_all_its_blocks(fmt: str) -> None:
    w = weights()
    data = encode(w, fmt, name="w", by_row=True)
    size = BLOCK[fmt][1]
    scales = data.reshape(len(w), -1, size)[:, :, : 4 if "m" in fmt or fmt.endswith("_1") else 2]
    assert (scales == scales[:, :1]).all()
    off = np.square(dequantize(QTensor(fmt, w.shape, data)) - w).sum()
    assert np.square(rounded(w, fmt) - w).sum() <= off < np.square(w).sum() * 0.2


@pytest.mark.parametrize("fmt", K_QUANTS)
def test_k_quants_cannot_share_one_scale_a_row(fmt: str) -> None:
    with pytest.raises(ValueError, match="with one scale a row"):
        encode(weights(), fmt, name="w", by_row=True)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_k", "q6_k", "i4m_g128"])
def test_important_columns_get_a_smaller_error(fmt: str) -> None:
    w, importance = weights(), np.ones(768, np.float32)
    importance[::8] = 50
    even = np.square(rounded(w, fmt) - w)
    led = np.square(rounded(w, fmt, importance=importance) - w)
    assert led[:, ::8].sum() < 0.97 * even[:, ::8].sum()


def test_fp8_takes_the_nearest_value_ties_to_even() -> None:
    torch = pytest.importorskip("torch")
    w = (np.random.default_rng(0).standard_normal((64, 128)) * 40).astype(np.float32)
    w[:, 0] = 448  # so that the scale is 1
    w[:, 1:9] = [2**-6, 2**-9, 2**-10, 3 * 2**-10, 17, 19, 2**-7, -0.0]
    w = np.clip(w, -448, 448)
    data = encode(w, "f8_g128", name="w")
    expected = torch.from_numpy(w).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(data[:, 2:], expected)


def test_fp8_is_within_half_a_step_of_its_three_bits() -> None:
    w = weights()
    for fmt in F8_FORMATS:
        got = rounded(w, fmt)
        largest = np.abs(w).reshape(len(w), -1, BLOCK[fmt][0]).max(axis=2).repeat(BLOCK[fmt][0], 1)
        assert (np.abs(got - w) <= np.abs(w) * 2**-4 * 1.01 + largest * 2**-18 * 1.01).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "NaN"), (np.inf, "infinity"), (1e5, "a weight of 100000")],
)
def test_what_float16_scales_cannot_hold_is_refused_by_the_tensors_name(
    value: float, message: str
) -> None:
    w = weights()
    w[3, 700] = value
    with pytest.raises(ModelFormatError, match=f"tensor blk.7.ffn_up.weight holds {message}"):
        encode(w, "q4_k", name="blk.7.ffn_up.weight")


def test_columns_that_make_no_blocks_are_refused_by_the_tensors_name() -> None:
    with pytest.raises(ModelFormatError, match="tensor w has 96 columns, no multiple of 64"):
        encode(weights(2, 96), "i4_g64", name="w")
