"""The native program against the NumPy reference, over every option of the plan."""

import numpy as np
import pytest
from msgspec.structs import replace

from paceline import _native
from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend
from paceline.plan.passes import column_orders, lower
from paceline.weights.tensor import dequantize
from tests.numerics.program_cases import (
    Runner,
    Shape,
    decoder,
    f32_tensor,
    q8_0_tensor,
    random_tokens,
    random_weights,
)

SHAPES = {
    "llama": Shape(),
    "one kv head, many queries": Shape(heads=7, kv_heads=1, head_dim=64, hidden=96),
    "qwen2 biases": Shape(heads=6, kv_heads=3, bias=True),
    "qwen3 qk-norm": Shape(qk_norm=True, head_dim=48),
    "gemma": Shape(
        qk_norm=True, post_norm=True, act="gelu_tanh", windows=(24, 0), embed_scale=8.0,
        head_dim=256, kv_heads=1,
    ),
    "soft-capping": Shape(softcap=2.0, logit_softcap=3.0),
    "head of 72, partial rope": Shape(head_dim=72, rope_dims=24),
    "head of 8": Shape(head_dim=8),
    "odd widths": Shape(hidden=45, inter=77, vocab=33),
}  # fmt: skip


def run(backend, plan, weights, *, kv_dtype, block_size=16, seed=3, vocab=33):
    """Logits of a ragged schedule: a long prefill, a chunk beside it, mixed decodes."""
    runner = Runner.load(backend, plan, weights, kv_dtype=kv_dtype, block_size=block_size)
    rng = np.random.default_rng(seed)
    out = []
    for chunks in (
        [(0, 150), (1, 3)],
        [(1, 70), (2, 1)],
        [(0, 1), (1, 1), (2, 1), (3, 20)],
        [(3, 1), (0, 2)],
    ):
        step = runner.step([(seq, random_tokens(rng, n, vocab)) for seq, n in chunks])
        out += [step[seq] for seq, _ in chunks]
    return np.concatenate(out)


@pytest.mark.parametrize("name", SHAPES)
def test_float_program_equals_the_reference(name):
    shape = SHAPES[name]
    plan = decoder(shape)
    weights = random_weights(plan, shape)
    want = run(ReferenceBackend(), plan, weights, kv_dtype="f32")
    got = run(NativeBackend(num_threads=2), plan, weights, kv_dtype="f32")
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", [n for n in SHAPES if n != "odd widths"])
def test_quantised_program_equals_its_lowered_plan_in_the_reference(name):
    shape = SHAPES[name]
    plan = decoder(shape)
    weights = random_weights(plan, shape, "q8_0")
    lowered = lower(plan, {k: w.format for k, w in weights.items()})
    want = run(ReferenceBackend(), lowered, weights, kv_dtype="f32")
    got = run(NativeBackend(num_threads=2), plan, weights, kv_dtype="f32")
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    # A value on the edge between two quants may fall either way, and the rows that see it are off
    # by part of the quantisation's own error (2e-2 here); others agree to float rounding.
    assert error.max() < 5e-2
    assert (error < 1e-5).mean() > 0.2


def in_column_order(tensor, order):
    """The same weight in f32 or q8_0, with its columns kept in `order`."""
    dense = dequantize(tensor)[:, order]
    moved = f32_tensor(dense) if tensor.format == "f32" else q8_0_tensor(dense)
    return replace(moved, column_order=order)


def ordered_weights(plan, shape, fmt):
    """Every linear in a column order: one for all of an input's readers, as act-order has it."""
    weights = random_weights(plan, shape, fmt)
    rng = np.random.default_rng(7)
    orders = {}
    for op in plan.ops:
        if op.name == "linear":
            x = op.inputs[0]
            order = orders.setdefault(x.id, rng.permutation(x.cols).astype(np.int32))
            weights[op.weights[0]] = in_column_order(weights[op.weights[0]], order)
    return weights


@pytest.mark.parametrize("name", ["llama", "qwen2 biases", "gemma", "odd widths"])
def test_weights_in_a_column_order_multiply_the_gathered_columns(name):
    shape = SHAPES[name]
    plan = decoder(shape)
    plain, ordered = random_weights(plan, shape), ordered_weights(plan, shape, "f32")
    want = run(ReferenceBackend(), plan, plain, kv_dtype="f32")
    np.testing.assert_array_equal(run(ReferenceBackend(), plan, ordered, kv_dtype="f32"), want)
    backend = NativeBackend(num_threads=2)
    got = run(backend, plan, ordered, kv_dtype="f32")
    assert "gather" in [op.name for op in backend.plan.ops]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_quantised_weights_in_a_column_order_equal_their_lowered_plan_in_the_reference():
    shape = SHAPES["llama"]
    plan = decoder(shape)
    weights = ordered_weights(plan, shape, "q8_0")
    formats = {name: weight.format for name, weight in weights.items()}
    lowered = lower(plan, formats, orders=column_orders(weights))
    want = run(ReferenceBackend(), lowered, weights, kv_dtype="f32")
    got = run(NativeBackend(num_threads=2), plan, weights, kv_dtype="f32")
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 5e-2
    assert (error < 1e-5).mean() > 0.2


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 64], [-1, 0, 1]])
def test_a_column_order_that_does_not_fit_is_refused(order):
    place = (0, 0, 64, 3, False)
    program = _native.Program(
        num_threads=1, isa=None, limits=(1, 1, 1, 1), kv=(1, 1, 16, 1, 8, "f32"),
        bounds=(1, 16), slot_bytes=[64],
    )  # fmt: skip
    with pytest.raises(ValueError, match="column_order"):
        program.add_op("gather", place, [place], column_order=np.array(order, np.int32))


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32", "int8", "fp8", "k8v4", "int4"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_kv_dtypes_round_as_the_reference_says(kv_dtype, block_size):
    shape = Shape()
    plan = decoder(shape)
    weights = random_weights(plan, shape)
    want = run(ReferenceBackend(), plan, weights, kv_dtype=kv_dtype, block_size=block_size)
    got = run(NativeBackend(num_threads=1), plan, weights, kv_dtype=kv_dtype, block_size=block_size)
    tolerance = {
        "f32": 2e-5,
        "f16": 2e-3,
        "bf16": 2e-2,
        "int8": 2e-2,
        "fp8": 6e-2,
        "k8v4": 5e-2,
        "int4": 0.2,
    }[kv_dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("fmt", ["f32", "q8_0"])
@pytest.mark.parametrize("name", [n for n in SHAPES if n != "odd widths"])
def test_every_isa_gives_the_same_bits(name, fmt):
    shape = SHAPES[name]
    plan = decoder(shape)
    weights = random_weights(plan, shape, fmt)
    isas = [isa for isa in _native.isas() if isa != "avx512bf16"]
    want = run(NativeBackend(1, isa="scalar"), plan, weights, kv_dtype="f16")
    for isa in isas:
        backend = NativeBackend(2, isa=isa)
        got = run(backend, plan, weights, kv_dtype="f16")
        assert backend.isa == isa
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=isa)
