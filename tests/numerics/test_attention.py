"""Attention over the paged cache: long contexts, stale memory, moved blocks, refused steps."""

import numpy as np
import pytest

from paceline.backends.base import StepInput
from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend
from paceline.errors import BackendError
from paceline.plan import passes
from tests.numerics.program_cases import Runner, Shape, decoder, random_tokens, random_weights

SHAPE = Shape(layers=2, windows=(40, 0), head_dim=32)


@pytest.fixture(scope="module")
def model():
    plan = decoder(SHAPE)
    return plan, random_weights(plan, SHAPE)


def load(model, backend=None, **kw):
    return Runner.load(backend or NativeBackend(2), *model, **kw)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "int8", "fp8", "k8v4", "int4"])
def test_long_context_with_window_equals_the_reference(model, kv_dtype):
    tokens = random_tokens(np.random.default_rng(0), 700, SHAPE.vocab)
    got, want = (
        load(model, backend, num_seqs=1, max_len=768, kv_dtype=kv_dtype).step([(0, tokens)])[0]
        for backend in (NativeBackend(2), ReferenceBackend())
    )
    tolerance = {"f32": 2e-5, "f16": 3e-3, "int8": 2e-2, "fp8": 6e-2, "k8v4": 5e-2, "int4": 0.2}[
        kv_dtype
    ]
    np.testing.assert_allclose(got, want, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "int8", "fp8", "k8v4", "int4"])
def test_stale_nan_in_the_cache_never_reaches_a_result(model, kv_dtype):
    rng = np.random.default_rng(1)
    chunks = [
        [(0, random_tokens(rng, 70, SHAPE.vocab)), (1, random_tokens(rng, 1, SHAPE.vocab))],
        [(0, random_tokens(rng, 3, SHAPE.vocab)), (1, random_tokens(rng, 20, SHAPE.vocab))],
    ]
    tree = ([0, 1, 1], [0b1, 0b11, 0b101])
    results = []
    for poison in (False, True):
        runner = load(model, kv_dtype=kv_dtype)
        if poison:
            blocks = list(range(runner.kv.num_blocks))
            data = runner.backend.read_blocks(blocks)
            runner.backend.write_blocks(blocks, np.full_like(data, 0xFF))  # NaN, of int8 as scales
        steps = [runner.step(step) for step in chunks]
        steps.append(runner.step([(0, [1, 2, 3])], trees={0: tree}))
        results.append([step[seq] for step in steps for seq in sorted(step)])
    for clean, poisoned in zip(*results, strict=True):
        assert np.isfinite(poisoned).all()
        np.testing.assert_array_equal(clean, poisoned)


def test_copied_and_rewritten_blocks_serve_like_the_original(model):
    rng = np.random.default_rng(2)
    prompt, more = random_tokens(rng, 50, SHAPE.vocab), random_tokens(rng, 3, SHAPE.vocab)
    runner = load(model)
    runner.step([(0, prompt)])
    runner.backend.copy_blocks(runner.tables[0], runner.tables[1])
    data = runner.backend.read_blocks(runner.tables[0])
    assert data.shape == (len(runner.tables[0]), data.shape[1])
    runner.backend.write_blocks(runner.tables[2], data)
    runner.lengths[1] = runner.lengths[2] = len(prompt)
    step = runner.step([(i, more) for i in range(3)])
    np.testing.assert_array_equal(step[1], step[0])
    np.testing.assert_array_equal(step[2], step[0])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "int8", "fp8", "k8v4", "int4"])
def test_reference_moves_blocks_too(model, kv_dtype):
    runner = load(model, ReferenceBackend(), kv_dtype=kv_dtype)
    prompt = random_tokens(np.random.default_rng(3), 20, SHAPE.vocab)
    runner.step([(0, prompt)])
    runner.backend.write_blocks(runner.tables[1], runner.backend.read_blocks(runner.tables[0]))
    runner.backend.copy_blocks(runner.tables[1], runner.tables[2])
    runner.lengths[2] = len(prompt)
    step = runner.step([(0, [5]), (2, [5])])
    np.testing.assert_allclose(step[2], step[0], rtol=1e-6)


def test_folded_quantisation_gives_the_bits_of_separate_quantize_ops(model, monkeypatch):
    weights = random_weights(model[0], SHAPE, "q8_0")
    tokens = random_tokens(np.random.default_rng(4), 90, SHAPE.vocab)
    folded = load((model[0], weights)).step([(0, tokens)])[0]
    monkeypatch.setattr(passes, "_can_write_q8", lambda op: False)
    backend = NativeBackend(1)
    separate = load((model[0], weights), backend).step([(0, tokens)])[0]
    assert sum(op.name == "quantize" for op in backend.plan.ops) == 4 * SHAPE.layers + 1
    np.testing.assert_array_equal(folded.view(np.uint32), separate.view(np.uint32))


def i32(*values):
    return np.array(values, np.int32)


def good_step(table):
    slots = i32(*(table[0] * 16 + np.arange(3)))
    return {
        "tokens": i32(1, 2, 3), "positions": i32(0, 1, 2), "slots": slots, "seqs": i32([0, 3, 0]),
        "block_tables": i32(table), "logit_rows": i32(2), "tree": None,
    }  # fmt: skip


BAD_STEPS = {
    "token id of the vocabulary's size": {"tokens": i32(1, 101, 3)},
    "negative token id": {"tokens": i32(1, -1, 3)},
    "position past the rope table": {"positions": i32(0, 1, 320)},
    "slot that the block table does not say": {"slots": i32(0, 1, 10**6)},
    "block outside of the cache": {"block_tables": i32([80] * 20)},
    "context longer than the table": {"seqs": i32([0, 3, 318])},
    "negative context": {"seqs": i32([0, 3, -1])},
    "rows that no sequence covers": {"seqs": i32([0, 2, 0])},
    "sequence without rows": {"seqs": i32([0, 0, 0])},
    "logit row outside of the step": {"logit_rows": i32(3)},
    "int64 tokens": {"tokens": np.array([1, 2, 3])},
    "strided tokens": {"tokens": i32(1, 0, 2, 0, 3, 0)[::2]},
    "two-dimensional tokens": {"tokens": i32([1, 2, 3])},
    "too few positions": {"positions": i32(0, 1)},
    "too many tokens": {n: np.zeros(2000, np.int32) for n in ("tokens", "positions", "slots")},
    "too many logit rows": {"logit_rows": np.zeros(2000, np.int32)},
    "tree that sees a later row": {"tree": np.array([1, 0b111, 0b101], np.uint64)},
    "tree row that does not see itself": {"tree": np.array([1, 0b1, 0b101], np.uint64)},
    "signed tree": {"tree": np.array([1, 3, 7])},
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_step_is_refused_before_it_runs(model, name):
    runner = load(model)
    good = good_step(runner.tables[0])
    want = runner.backend.forward(StepInput(**good)).logits.copy()
    with pytest.raises(ValueError, match=r"\w"):
        runner.backend.forward(StepInput(**{**good, **BAD_STEPS[name]}))
    np.testing.assert_array_equal(runner.backend.forward(StepInput(**good)).logits, want)


def test_blocks_outside_of_the_cache_are_refused(model):
    backend = load(model).backend
    for blocks in ([-1], [10**6]):
        with pytest.raises(ValueError, match="outside of the KV cache"):
            backend.read_blocks(blocks)
        with pytest.raises(ValueError, match="outside of the KV cache"):
            backend.copy_blocks(blocks, [0])
    with pytest.raises(ValueError, match="block data"):
        backend.write_blocks([0], np.zeros((1, 3), np.uint8))


def test_step_without_logit_rows_runs(model):
    runner = load(model)
    step = good_step(runner.tables[0]) | {"logit_rows": i32()}
    assert runner.backend.forward(StepInput(**step)).logits.shape == (0, SHAPE.vocab)


def test_closed_backend_says_so_and_kept_logits_stay_readable(model):
    runner = load(model)
    logits = runner.backend.forward(StepInput(**good_step(runner.tables[0]))).logits
    want = logits.copy()
    runner.backend.close()
    np.testing.assert_array_equal(logits, want)
    with pytest.raises(BackendError, match="call load"):
        runner.backend.read_blocks([0])


def test_unsupported_head_is_named():
    plan = decoder(Shape(head_dim=12))
    with pytest.raises(BackendError, match="head_dim is 12"):
        Runner.load(NativeBackend(1), plan, random_weights(plan, Shape(head_dim=12)))
