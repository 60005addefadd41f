"""GPTQ on single matrices: against its definition, brute force, and rounding to the nearest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.errors import ModelFormatError
from paceline.quantize.base import Blocks
from paceline.quantize.curvature import DAMPING, Curvature, output_errors
from paceline.quantize.gptq import gptq
from paceline.quantize.grid import GRIDS, fit, group_width, pack
from paceline.weights.encode import encode
from paceline.weights.tensor import BLOCK, QTensor, dequantize

FORMATS = sorted(GRIDS)


def correlated(seed: int, rows: int, cols: int, rank: int | None = None) -> np.ndarray:
    """Inputs with few large columns that move together, as those of a language model do."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((rank or cols // 4, cols)) * rng.lognormal(0, 1, cols)
    noise = 0.1 * rng.standard_normal((rows, cols))
    return (rng.standard_normal((rows, len(mix))) @ mix + noise).astype(np.float32)


def weights(seed: int, rows: int, cols: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * 0.05).astype(np.float32)


def curvature(x: np.ndarray) -> Curvature:
    return Curvature([x], name="w")


def dense(data: np.ndarray, blocks: Blocks, shape: tuple[int, ...]) -> np.ndarray:
    return dequantize(QTensor(blocks.format, shape, data))


def rounded(w: np.ndarray, x: np.ndarray, blocks: Blocks, *, act_order: bool = True) -> np.ndarray:
    data = gptq(w, curvature(x), blocks, name="w", act_order=act_order, num_threads=2)
    return dense(data, blocks, w.shape)


def nearest(w: np.ndarray, blocks: Blocks) -> np.ndarray:
    data = encode(w, blocks.format, name="w", by_row=blocks.by_row)
    return dense(data, blocks, w.shape)


def output_error(w: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64) @ (w - q).T.astype(np.float64)))


def damped(x: np.ndarray) -> np.ndarray:
    gram = x.T.astype(np.float64) @ x
    return gram + DAMPING * np.diag(gram).mean() * np.eye(len(gram))


def by_definition(w: np.ndarray, x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Optimal brain quantisation in the order of columns, by solving for the rest at each step."""
    h, grid = damped(x), GRIDS[blocks.format]
    width = group_width(blocks, w.shape[1])
    now, q = w.astype(np.float64), np.zeros(w.shape)
    for j in range(w.shape[1]):
        if j % width == 0:
            cost = [1 / np.linalg.inv(h[i:, i:])[0, 0] for i in range(j, j + width)]
            part = now[:, j : j + width].astype(np.float32)
            importance = (np.array(cost) / max(cost)).astype(np.float32)
            d, m = fit(part, blocks, importance, name="w", num_threads=1)
        q[:, j] = d * grid.nearest(now[:, j].astype(np.float32), d, m) + m
        done, rest = slice(0, j + 1), slice(j + 1, None)
        if j + 1 < w.shape[1]:  # the rest that makes (w - q) h (w - q)ᵀ least
            off = (w - q)[:, done] @ h[done, rest]
            now[:, rest] = w[:, rest] + np.linalg.solve(h[rest, rest], off.T).T
    return q.astype(np.float32)


@pytest.mark.parametrize("size", [32, 64, 96, 160, 416])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_factor_is_an_upper_triangle_whose_square_is_the_inverse(
    size: int, act_order: bool
) -> None:
    x = correlated(1, 2 * size, size)
    seen = curvature(x)
    order, upper = seen.factor(32, act_order=act_order)
    squares = np.diag(seen.gram)
    inverse = np.linalg.inv(seen.gram.astype(np.float64) + DAMPING * squares.mean() * np.eye(size))
    inverse = inverse[np.ix_(order, order)]
    exact = x.T.astype(np.float64) @ x
    np.testing.assert_allclose(seen.gram, exact, rtol=0, atol=1e-6 * squares.max())
    np.testing.assert_allclose(upper.T @ upper, inverse, rtol=0, atol=1e-5 * np.abs(inverse).max())
    assert (np.tril(upper, -1) == 0).all()
    assert sorted(order) == list(range(size))


def test_act_order_puts_large_inputs_first_and_keeps_groups_together() -> None:
    x = correlated(2, 300, 128)
    order, _ = curvature(x).factor(32, act_order=True)
    squares = (x.astype(np.float64) ** 2).sum(axis=0)
    groups = order.reshape(-1, 32)
    assert (groups // 32 == groups[:, :1] // 32).all()
    assert (np.diff(squares[groups], axis=1) <= 0).all()
    assert (np.diff(squares[groups].mean(axis=1)) <= 0).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_is_the_encoders_layout(fmt: str) -> None:
    width = BLOCK[fmt][0]
    w, blocks = weights(3, 5, 3 * width), Blocks(fmt)
    data = encode(w, fmt, name="w")
    parts = [
        fit(w[:, g : g + width], blocks, np.ones(width, np.float32), name="w", num_threads=1)
        for g in range(0, 3 * width, width)
    ]
    d, m = (np.stack(field, axis=1) for field in zip(*parts, strict=True))
    spread = (np.repeat(field, width, axis=1) for field in (d, m))
    codes = GRIDS[fmt].nearest(w, *spread).astype(np.int8)
    assert (pack(codes, d, m, blocks) == data).all()


@pytest.mark.parametrize(
    "blocks",
    [Blocks("q4_0"), Blocks("i4m_g64"), Blocks("i4_g64", by_row=True), Blocks("i8m_g32")],
    ids=str,
)
def test_it_is_optimal_brain_quantisation_in_a_fixed_order(blocks: Blocks) -> None:
    """More than one lazy run of 128 columns, and a remainder."""
    w, x = weights(4, 6, 192), correlated(5, 400, 192)
    ours, theirs = rounded(w, x, blocks, act_order=False), by_definition(w, x, blocks)
    assert (np.abs(ours - theirs) < 1e-5).mean() > 0.97  # a tie may fall either way
    assert output_error(w, ours, x) == pytest.approx(output_error(w, theirs, x), rel=0.01)


def test_three_columns_come_near_the_best_of_all_codes() -> None:
    """16³ choices for the three inputs that are there; nearest codes are further from the best."""
    rng = np.random.default_rng(6)
    x = np.zeros((64, 32), np.float32)
    x[:, :3] = rng.standard_normal((64, 1)) + 0.2 * rng.standard_normal((64, 3))
    w = np.zeros((40, 32), np.float32)
    w[:, :3] = rng.standard_normal((40, 3))
    w[:, 3] = 3  # gives every row the scale's largest weight, so that codes stay within range
    blocks = Blocks("q4_0")
    data = gptq(w, curvature(x), blocks, name="w")
    ours = dense(data, blocks, w.shape)
    d = data[:, :2].copy().view(np.float16).astype(np.float32)
    choices = np.array(list(itertools.product(range(-8, 8), repeat=3)), np.float32)
    errors = np.zeros(3)
    for row in range(len(w)):
        best = min(((x[:, :3] @ (w[row, :3] - d[row] * choices).T) ** 2).sum(axis=0))
        near = d[row] * np.rint(w[row, :3] / d[row])
        errors += [((x[:, :3] @ (w[row, :3] - q)) ** 2).sum() for q in (ours[row, :3], near)] + [
            best
        ]
    assert errors[2] <= errors[0] < 1.6 * errors[2]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_outputs_are_nearer_than_with_nearest_codes(
    fmt: str, act_order: bool, by_row: bool
) -> None:
    cols = 384
    w, x, blocks = weights(7, 24, cols), correlated(8, 600, cols), Blocks(fmt, by_row)
    ours = output_error(w, rounded(w, x, blocks, act_order=act_order), x)
    assert ours < 0.8 * output_error(w, nearest(w, blocks), x)


def test_inputs_that_do_not_correlate_get_the_nearest_codes() -> None:
    w, x, blocks = weights(9, 8, 128), np.eye(128, dtype=np.float32), Blocks("i4m_g64")
    assert (rounded(w, x, blocks) == nearest(w, blocks)).all()


def test_inputs_that_are_always_zero_leave_the_others_as_they_are() -> None:
    w, x = weights(10, 8, 128), correlated(11, 300, 128)
    x[:, 64:] = 0
    blocks = Blocks("i4_g64")
    both, alone = rounded(w, x, blocks), rounded(w[:, :64].copy(), x[:, :64].copy(), blocks)
    assert (both[:, 64:] == nearest(w, blocks)[:, 64:]).all()
    assert output_error(w, both, x) == pytest.approx(
        output_error(w[:, :64], alone, x[:, :64]), rel=0.2
    )
    silent = rounded(w, np.zeros_like(x), blocks)
    assert (silent == nearest(w, blocks)).all()


def test_zero_rows_and_outliers_are_no_trouble() -> None:
    w, x, blocks = weights(12, 8, 128), correlated(13, 300, 128), Blocks("q4_0")
    w[0] = 0
    w[1, 5] = 40
    w[2, :32] = 0
    x[:, 7] *= 1000
    q = rounded(w, x, blocks)
    assert np.isfinite(q).all()
    assert (q[0] == 0).all()
    for row in range(1, 8):
        near = output_error(w[row], nearest(w, blocks)[row], x)
        assert output_error(w[row], q[row], x) < near


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_matrix_of_zeros_stays_zero(fmt: str) -> None:
    x, blocks = correlated(18, 300, 128), Blocks(fmt)
    assert (rounded(np.zeros((8, 128), np.float32), x, blocks) == 0).all()


def test_the_bits_are_the_same_again_and_with_any_number_of_threads() -> None:
    w, x, blocks = weights(14, 8, 256), correlated(15, 300, 256), Blocks("i4_g128")
    first = gptq(w, curvature(x), blocks, name="w", num_threads=1)
    assert (first == gptq(w, curvature(x), blocks, name="w", num_threads=3)).all()


def test_weights_and_inputs_that_are_not_finite_are_refused_by_name() -> None:
    w, x = weights(16, 4, 64), correlated(17, 100, 64)
    w[1, 2] = np.nan
    with pytest.raises(ModelFormatError, match=r"tensor layer\.w holds NaN"):
        gptq(w, curvature(x), Blocks("i4_g64"), name="layer.w")
    x[0, 0] = np.inf
    with pytest.raises(ModelFormatError, match=r"inputs of layer\.w are not finite"):
        Curvature([x], name="layer.w")


@pytest.mark.parametrize("columns", [96, 1024, 2272])
def test_output_errors_are_those_of_the_outputs(columns: int) -> None:
    """Pieces of inputs and columns of XᵀX that are multiplied apart, whole or not."""
    rng = np.random.default_rng(columns)
    pieces = [rng.normal(size=(rows, columns)).astype(np.float32) for rows in (700, 1, 1400, 900)]
    off = rng.normal(size=(5, columns)).astype(np.float32)
    gram = Curvature(pieces, name="w").gram
    outputs = np.concatenate(pieces).astype(np.float64) @ off.T.astype(np.float64)
    found = output_errors(off, gram)
    np.testing.assert_allclose(found, (outputs**2).sum(axis=0), rtol=2e-5)
