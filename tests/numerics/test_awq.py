"""AWQ: folds change no output, choices are those of the least error, and never worse than RTN's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.backends.reference import ReferenceBackend
from paceline.errors import ModelFormatError
from paceline.measure.quality import limits_for, sequence_logits
from paceline.models.base import build_plan
from paceline.plan.plan import Plan, Value
from paceline.quantize.base import Blocks
from paceline.quantize.fold import Fold, divided_vector, find_folds, scaled_matrix
from paceline.quantize.recipe import TensorRecipe
from paceline.quantize.scaling import (
    EXPONENTS,
    NEAREST,
    RATIOS,
    Choice,
    choose,
    num_bytes,
    rounded,
    scale_of,
)
from paceline.quantize.source import open_source
from paceline.quantize.walk import Reader, Site
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.encode import encode
from paceline.weights.tensor import QTensor, StoredTensor, dequantize
from tests.tiny import TinyModel, random_model, write_hf

COLUMNS = Fold(vectors=("norm",))  # a norm takes the scale up
FORMATS = ("q4_0", "q4_1", "q8_0", "i4_g64", "i4m_g128", "i8m_g32", "q5_0", "q4_k", "q6_k")


def inputs(seed: int, rows: int, cols: int, *, outliers: int = 4) -> np.ndarray:
    """Correlated inputs of which a few columns are large, as those of a language model are."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols // 4)) @ rng.standard_normal((cols // 4, cols))
    x[:, rng.choice(cols, outliers, replace=False)] *= 30
    return x.astype(np.float32)


def weights(seed: int, rows: int, cols: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * 0.05).astype(np.float32)


def site(x: np.ndarray, blocks: Blocks, *matrices: np.ndarray) -> Site:
    """Linears that read x, as a walk comes to them."""
    value, readers = Value(0, x.shape[1]), []
    for i, w in enumerate(matrices):
        stored = StoredTensor(f"w{i}", "f32", w.shape, w.reshape(-1).view(np.uint8))
        readers.append(Reader(TensorRecipe(stored, blocks), blocks, f"w{i}"))
    walk: Any = SimpleNamespace(values={0: [x]})
    return Site(walk, value, tuple(readers))


def dense(data: np.ndarray, blocks: Blocks, shape: tuple[int, ...]) -> np.ndarray:
    return dequantize(QTensor(blocks.format, shape, data))


def nearest(w: np.ndarray, blocks: Blocks) -> np.ndarray:
    return dense(encode(w, blocks.format, name="w", by_row=blocks.by_row), blocks, w.shape)


def chosen(w: np.ndarray, choice: Choice, blocks: Blocks) -> np.ndarray:
    """The weights as the undivided input meets them."""
    data = rounded(w, blocks, choice, name="w", num_threads=2)
    return dense(data, blocks, w.shape) / choice.columns


def output_error(w: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64) @ (w - q).T.astype(np.float64)) ** 2)


def logits(path: Path) -> np.ndarray:
    checkpoint, backend = open_checkpoint(path), ReferenceBackend()
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 300, 40)]
    kv, limits = limits_for(len(tokens), block_size=16)
    exact = replace(kv, dtype="f32")
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=exact, limits=limits)
    pieces = sequence_logits(backend, tokens, kv=kv, limits=limits)
    return np.concatenate([piece.copy() for piece in pieces])


def with_folds(model: TinyModel, path: Path, seed: int) -> TinyModel:
    """The model with a random scale in every place that can take one up."""
    source = open_source(path)
    plan = build_plan(source.checkpoint.config)
    linears = {source.canonical[name] for name in source.linears}
    rng = np.random.default_rng(seed)
    folds = find_folds(plan, linears)
    assert len(folds) == 4 * source.checkpoint.config.num_layers
    columns, rows = {}, {}
    for id_, fold in folds.items():
        readers = [op for op in plan.ops if any(v.id == id_ for v in op.inputs)]
        size = readers[0].inputs[0].cols
        scale = fold.shared(rng.lognormal(0, 1, size).astype(np.float32))
        columns |= {op.weights[0]: scale for op in readers}
        elements = fold.elements(scale)
        for name in fold.vectors:
            lacking = source.norm_offset if name.endswith("norm.weight") else 0.0
            model = model.with_tensor(name, divided_vector(model.tensors[name], elements, lacking))
        if fold.matrix is not None:
            rows[fold.matrix] = elements
    assert columns.keys() == linears
    for name, scale in columns.items():
        matrix = scaled_matrix(model.tensors[name], scale, rows.get(name))
        model = model.with_tensor(name, matrix)
    return model


@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [("llama", 4), ("llama", 2), ("qwen2", 2), ("qwen3", 1), ("gemma3_text", 2)],
)
def test_scales_that_are_taken_up_change_no_output(
    tmp_path: Path, family: str, kv_heads: int
) -> None:
    model = random_model(family, kv_heads=kv_heads, vocab_size=307, tie_word_embeddings=True)
    if family == "qwen2":  # a model that was not trained has biases of 0
        rng = np.random.default_rng(1)
        for name in [n for n in model.tensors if n.endswith("bias")]:
            bias = rng.standard_normal(model.tensors[name].shape).astype(np.float32)
            model = model.with_tensor(name, bias)
    plain = write_hf(model, tmp_path / "plain", fmt="f32")
    folded = write_hf(with_folds(model, plain, 2), tmp_path / "folded", fmt="f32")
    np.testing.assert_allclose(logits(folded), logits(plain), rtol=0, atol=2e-4)


def test_what_others_read_too_takes_up_no_scale() -> None:
    plan = Plan()
    x = plan.rms_norm(plan.embed("e", 32), "norm", 1e-6)
    h = plan.linear(x, "a", 32)
    up = plan.linear(x, "up", 32)
    mixed = plan.gated_act(h, up, "silu")
    plan.output("out", plan.linear(mixed, "down", 32))
    assert find_folds(plan, {"a", "up", "down"}) == {
        x.id: Fold(("norm",)), mixed.id: Fold((), matrix="up")
    }  # fmt: skip
    assert find_folds(plan, {"a", "down"}) == {}  # up stays as it is
    plan.output("up", up)
    plan.add(x, up)
    assert find_folds(plan, {"a", "up", "down"}) == {}


def test_query_heads_that_share_a_value_share_its_scale() -> None:
    fold = Fold(("bias",), matrix="v", repeat=2, width=2)
    columns = fold.shared(np.array([1, 2, 3, 4, 10, 20, 30, 40], np.float32))
    assert columns.tolist() == [2, 3, 2, 3, 20, 30, 20, 30]
    assert fold.elements(columns).tolist() == [2, 3, 20, 30]


def test_the_scale_is_the_best_of_all_exponents() -> None:
    """Found again with the inputs themselves, not their products."""
    w, x, blocks = weights(1, 12, 128), inputs(2, 200, 128), Blocks("i4_g64")
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=2)
    sizes, importance = np.abs(x).mean(axis=0), (x.astype(np.float64) ** 2).sum(axis=0)
    errors = []
    for exponent in EXPONENTS:
        scale = scale_of(sizes, exponent)
        weighed = (importance / scale**2).astype(np.float32)
        data = encode(w * scale, blocks.format, name="w", importance=weighed / weighed.max())
        errors.append(output_error(w, dense(data, blocks, w.shape) / scale, x))
    best = int(np.argmin(errors))
    assert best > 0
    np.testing.assert_allclose(choice.columns, scale_of(sizes, EXPONENTS[best]), rtol=1e-5)


def test_cuts_of_single_groups_are_the_best_of_all() -> None:
    w, x, blocks = weights(3, 40, 32), inputs(4, 100, 32, outliers=2), Blocks("q4_0")
    w[:20, 5] *= 6  # a weight far off, which a cut may bring in
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=2)
    ours = chosen(w, choice, blocks)
    for row in range(len(w)):
        one = w[row : row + 1]
        errors = []
        for cut in range(1 + len(RATIOS)):
            cuts = np.full((1, 1), cut, np.uint8)
            tried = Choice(choice.columns, choice.importance, cuts)
            errors.append(output_error(one, chosen(one, tried, blocks), x))
        assert output_error(one, ours[row : row + 1], x) <= 1.001 * min(errors)
    assert len(np.unique(choice.cuts)) > 2


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_error_is_never_above_that_of_the_nearest_codes(fmt: str, by_row: bool) -> None:
    if by_row and fmt.endswith("_k"):
        pytest.skip("a K-quant has no scale of a row")
    blocks = Blocks(fmt, by_row)
    for seed in range(3):
        w, x = weights(seed, 16, 256), inputs(seed, 300, 256, outliers=seed)
        for fold in (None, COLUMNS):
            (choice,) = choose(site(x, blocks, w), fold, num_threads=2)
            error = output_error(w, chosen(w, choice, blocks), x)
            assert error <= 1.0001 * output_error(w, nearest(w, blocks), x)


@pytest.mark.parametrize("fmt", ["q4_0", "i4_g64", "i4_g128"])
def test_large_inputs_are_served_far_better_than_by_nearest_codes(fmt: str) -> None:
    w, x, blocks = weights(5, 64, 512), inputs(6, 1000, 512, outliers=5), Blocks(fmt)
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=2)
    ours = output_error(w, chosen(w, choice, blocks), x)
    assert ours < 0.25 * output_error(w, nearest(w, blocks), x)


def test_linears_of_one_input_get_one_scale_and_are_better_together() -> None:
    x, blocks = inputs(7, 300, 128), Blocks("i4_g64")
    matrices = [weights(8, 32, 128), 10 * weights(9, 16, 128), weights(10, 8, 128)]
    choices = choose(site(x, blocks, *matrices), COLUMNS, num_threads=2)
    total = 0.0
    for w, choice in zip(matrices, choices, strict=True):
        assert (choice.columns == choices[0].columns).all()
        total += output_error(w, chosen(w, choice, blocks), x) / output_error(
            w, nearest(w, blocks), x
        )
    assert total < 0.5 * len(matrices)


def test_nothing_is_scaled_where_nothing_can_take_it_up() -> None:
    w, x, blocks = weights(11, 8, 64), inputs(12, 100, 64), Blocks("i4_g64")
    (choice,) = choose(site(x, blocks, w), None, num_threads=1)
    assert (choice.columns == 1).all()


def test_inputs_that_are_always_zero_keep_their_weights() -> None:
    w, x, blocks = weights(13, 8, 128), inputs(14, 300, 128), Blocks("i4_g64")
    x[:, 64:] = 0
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=2)
    assert (choice.columns[64:] == 1).all()
    assert (choice.columns[:64] != 1).any()
    ours, near = (
        np.square(q - w)[:, 64:].sum() for q in (chosen(w, choice, blocks), nearest(w, blocks))
    )
    assert ours < 1.001 * near
    (silent,) = choose(site(np.zeros_like(x), blocks, w), COLUMNS, num_threads=2)
    assert (silent.cuts == NEAREST).all()
    assert (chosen(w, silent, blocks) == nearest(w, blocks)).all()


def test_zero_rows_and_outliers_are_no_trouble() -> None:
    w, x, blocks = weights(21, 8, 128), inputs(22, 300, 128), Blocks("q4_0")
    w[0] = 0
    w[1, 5] = 40
    w[2, :32] = 0
    w[:, 9] = 0
    x[:, 7] *= 1000
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=2)
    q, near = chosen(w, choice, blocks), nearest(w, blocks)
    assert np.isfinite(q).all()
    assert (q[0] == 0).all()
    assert (q[2, :32] == 0).all()
    assert (q[:, 9] == 0).all()
    assert output_error(w, q, x) < output_error(w, near, x)


def test_a_matrix_of_zeros_beside_another_takes_nothing_from_it() -> None:
    w, x, blocks = weights(23, 8, 128), inputs(24, 300, 128), Blocks("i4_g64")
    (alone,) = choose(site(x, blocks, w), COLUMNS, num_threads=2)
    first, silent = choose(site(x, blocks, w, np.zeros_like(w)), COLUMNS, num_threads=2)
    assert (chosen(w, first, blocks) == chosen(w, alone, blocks)).all()
    assert (chosen(np.zeros_like(w), silent, blocks) == 0).all()


def test_weights_and_inputs_that_are_not_finite_are_refused_by_name() -> None:
    w, x, blocks = weights(15, 4, 64), inputs(16, 100, 64), Blocks("i4_g64")
    broken = w.copy()
    broken[1, 2] = np.nan
    for fold in (None, COLUMNS):
        with pytest.raises(ModelFormatError, match="tensor w1 holds NaN"):
            choose(site(x, blocks, w, broken), fold, num_threads=1)
    x[0, 0] = np.inf
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(ModelFormatError, match="inputs of w0 are not finite"),
    ):
        choose(site(x, blocks, w), COLUMNS, num_threads=1)


def test_large_weights_are_not_scaled_out_of_float16() -> None:
    w, x, blocks = weights(17, 8, 64), inputs(18, 100, 64), Blocks("i4_g64")
    w[3, int(np.abs(x).mean(axis=0).argmax())] = 60000
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=1)
    assert np.isfinite(chosen(w, choice, blocks)).all()


@pytest.mark.parametrize(
    "blocks", [Blocks("i4_g64"), Blocks("q4_k"), Blocks("i8_g128", by_row=True)], ids=str
)
def test_a_choice_is_kept_and_read_again(blocks: Blocks) -> None:
    w, x = weights(19, 6, 256), inputs(20, 100, 256)
    (choice,) = choose(site(x, blocks, w), COLUMNS, num_threads=1)
    data = choice.to_bytes()
    assert len(data) == num_bytes(6, 256, blocks)
    again = Choice.from_bytes(data, 256, 6)
    assert (chosen(w, again, blocks) == chosen(w, choice, blocks)).all()
