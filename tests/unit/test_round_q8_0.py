"""Rounding to q8_0 as weights are loaded."""

import numpy as np
import pytest

from paceline.errors import ModelFormatError
from paceline.weights.quantize import to_q8_0, with_q8_0
from paceline.weights.tensor import dequantize, from_floats


def test_a_weight_is_off_by_half_a_step_of_its_group_at_most():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((7, 96)) * np.exp(rng.standard_normal((7, 1)) * 3)).astype("f4")
    values[3, 32:64] = 0
    rounded = dequantize(to_q8_0(from_floats(values)))
    steps = np.abs(values).reshape(7, 3, 32).max(axis=2, keepdims=True) / 127
    errors = np.abs(rounded - values).reshape(7, 3, 32)
    assert (errors <= 0.5 * steps * 1.01 + 127 * steps * 2**-11).all()  # and the scale's own
    assert errors.max() > 0
    np.testing.assert_array_equal(rounded[3, 32:64], 0)


def test_only_what_is_named_is_rounded():
    tensors = {name: from_floats(np.ones((2, 32))) for name in "ab"}
    assert {n: t.format for n, t in with_q8_0(tensors, ["b"]).items()} == {"a": "f32", "b": "q8_0"}


def test_columns_that_make_no_groups_are_refused():
    with pytest.raises(ModelFormatError, match="33 columns cannot be rounded"):
        to_q8_0(from_floats(np.ones((2, 33))))
