"""What 4 bits keep of a head: columns are mixed, groups have a step and a base of their own."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.kv_formats import mix_columns, round_to, round_to_nibbles


def heads(dim: int, num: int = 50) -> np.ndarray:
    return np.random.default_rng(dim).standard_normal((num, dim)).astype(np.float32)


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 96, 128, 256])
def test_columns_that_are_mixed_twice_are_as_before(dim):
    x = heads(dim)
    np.testing.assert_allclose(mix_columns(mix_columns(x)), x, atol=2e-6)
    assert np.abs(mix_columns(x) - x).max() > 0.5


@pytest.mark.parametrize("dim", [8, 40, 64, 256])
def test_mixed_queries_and_keys_have_the_scores_they_had(dim):
    q, k = heads(dim), heads(dim)[::-1]
    np.testing.assert_allclose(mix_columns(q) @ mix_columns(k).T, q @ k.T, rtol=1e-5, atol=1e-4)


def test_every_run_of_columns_is_mixed_by_a_matrix_of_equal_signs():
    matrix = mix_columns(np.eye(24, dtype=np.float32))
    run = matrix[8:16, 8:16]
    np.testing.assert_allclose(np.abs(run), 8**-0.5, rtol=1e-6)
    assert not matrix[8:16, :8].any()
    np.testing.assert_allclose(run @ run.T, np.eye(8), atol=1e-6)


def test_a_column_far_above_the_rest_costs_the_rest_little_where_columns_are_mixed():
    x = heads(64)
    x[:, 5] = 50
    rest = np.arange(64) != 5
    mixed, plain = (np.abs(found - x)[:, rest].mean() for found in (
        round_to("int4", x), round_to_nibbles(x)))  # fmt: skip
    assert mixed < plain / 1.5


def test_a_group_away_from_zero_has_steps_of_its_own_width():
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 127  # the scale becomes 1, so that codes are values
    x[0, 32:] = np.linspace(100, 112, 32)
    rounded = round_to_nibbles(x)[0, 32:]
    np.testing.assert_allclose(rounded, x[0, 32:], atol=0.51)
    np.testing.assert_array_equal(rounded, np.rint(rounded))


@pytest.mark.parametrize("low", [-127, -120, 0, 100, 110, 126])
def test_no_code_is_beyond_those_of_int8(low):
    rng = np.random.default_rng(low + 200)
    x = rng.uniform(low, 127, (200, 32)).astype(np.float32)
    x[:, 0] = 127
    rounded = round_to_nibbles(x)
    assert np.abs(rounded).max() <= 127
    step = np.ceil((127 - x.min(axis=-1)) / 16)
    assert (np.abs(rounded - x).max(axis=-1) <= step / 2 + 0.51).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e8])
def test_a_head_with_a_value_past_the_format_is_nan_as_a_whole(value):
    x = heads(64, 2)
    x[1, 7] = value
    rounded = round_to("int4", x)
    assert np.isnan(rounded[1]).all()
    assert np.isfinite(rounded[0]).all()
