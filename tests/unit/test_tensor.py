"""Formats against the `gguf` package, an independent implementation."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.weights.tensor import (
    BLOCK,
    F8_FORMATS,
    FLOAT_FORMATS,
    SCALE_OFFSETS,
    QTensor,
    dequantize,
    from_floats,
    is_finite,
)
from tests import own_formats
from tests.tiny import random_blocks

gguf = pytest.importorskip("gguf")


def oracle(tensor: QTensor) -> np.ndarray:
    if own_formats.is_own(tensor.format):
        return own_formats.decode(tensor)
    kind = gguf.GGMLQuantizationType[tensor.format.upper()]
    return gguf.quants.dequantize(np.ascontiguousarray(tensor.data), kind).reshape(tensor.shape)


@pytest.mark.parametrize("fmt", sorted(BLOCK))
def test_every_format_dequantizes_to_the_oracles_bits(fmt: str) -> None:
    rng = np.random.default_rng(7)
    for shape in [(1, 256), (3, 512), (257, 1024)]:
        tensor = random_blocks(rng, fmt, shape)
        got = dequantize(tensor)
        assert got.dtype == np.float32
        assert got.shape == shape
        np.testing.assert_array_equal(got, oracle(tensor))
        assert np.ptp(got) > 0


@pytest.mark.parametrize("fmt", sorted(SCALE_OFFSETS))
def test_arbitrary_bytes_dequantize_like_the_oracle_with_nan_and_inf(fmt: str) -> None:
    rng = np.random.default_rng(11)
    weights, size = BLOCK[fmt]
    data = rng.integers(0, 256, (64, 4 * size), dtype=np.uint8)
    tensor = QTensor(fmt, (64, 4 * weights), data)
    with np.errstate(all="ignore"):
        expected = oracle(tensor)
    np.testing.assert_array_equal(dequantize(tensor), expected)


def test_a_vector_and_a_strided_view_dequantize() -> None:
    values = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(dequantize(from_floats(values)), values)
    tensor = random_blocks(np.random.default_rng(0), "q4_0", (8, 64))
    every_other = QTensor("q4_0", (4, 64), tensor.data[::2])
    np.testing.assert_array_equal(dequantize(every_other), dequantize(tensor)[::2])


def test_more_blocks_than_one_pass_are_all_unpacked() -> None:
    tensor = random_blocks(np.random.default_rng(3), "q8_0", (4500, 32 * 32))
    np.testing.assert_array_equal(dequantize(tensor)[-3:], oracle(tensor)[-3:])


def test_a_row_order_moves_rows_of_the_weight_and_no_bytes() -> None:
    tensor = random_blocks(np.random.default_rng(5), "q6_k", (6, 512))
    order = np.array([5, 0, 3, 1, 2, 4], np.int32)
    moved = replace(tensor, row_order=order)
    assert moved.data is tensor.data
    np.testing.assert_array_equal(dequantize(moved), dequantize(tensor)[order])


@pytest.mark.parametrize("fmt", sorted(BLOCK))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_weight_or_scale_that_is_not_finite_is_found(fmt: str, bad: float) -> None:
    tensor = random_blocks(np.random.default_rng(1), fmt, (4, 512))
    assert is_finite(tensor)
    width = {"f32": "<f4", "f16": "<f2", "bf16": "<f4"}.get(fmt, "<f2")
    raw = np.array([bad], width).view(np.uint8)
    raw = raw[2:] if fmt == "bf16" else raw
    for at in SCALE_OFFSETS.get(fmt, (0,)):
        data = tensor.data.copy()
        at_end = data.shape[1] - BLOCK[fmt][1] + at
        data[2, at_end : at_end + len(raw)] = raw
        assert not is_finite(QTensor(fmt, tensor.shape, data))


def test_plain_floats_have_no_scales() -> None:
    assert set(SCALE_OFFSETS) == set(BLOCK) - (FLOAT_FORMATS - F8_FORMATS)


def test_the_nan_of_fp8_is_found() -> None:
    tensor = random_blocks(np.random.default_rng(1), "f8_g64", (2, 128))
    data = tensor.data.copy()
    data[1, 40] = 0xFF
    assert is_finite(tensor)
    assert not is_finite(QTensor("f8_g64", tensor.shape, data))
