"""Element-wise kernels one at a time against the reference, and by equality between ISAs."""

import numpy as np
import pytest

from paceline import _native
from paceline.backends import reference
from paceline.weights.repack import pack_tensor
from paceline.weights.tensor import QTensor

ISAS = _native.isas()
ROWS = 5
WIDTHS = [1, 7, 16, 33, 100, 576, 2049, 4100]


def run_op(isa, name, inputs, threads=1, **attrs):
    """Run one op natively: inputs come in as embeddings, the output leaves through a select."""
    rows, cols = len(inputs[0]), [x.shape[1] for x in inputs]
    strides = [-(-c * 4 // 64) * 64 for c in cols]
    out = (len(inputs), 0, strides[0], cols[0], False)
    last = (len(inputs) + 1, 0, cols[0] * 4, cols[0], False)
    program = _native.Program(
        num_threads=threads, isa=isa, limits=(rows, rows, 1, 1), kv=(1, 1, 16, 1, 8, "f32"),
        bounds=(rows, 16), slot_bytes=[rows * s for s in (*strides, strides[0], cols[0] * 4)],
    )  # fmt: skip
    places = [(i, 0, strides[i], cols[i], False) for i in range(len(inputs))]
    for place, x in zip(places, inputs, strict=True):
        packed = pack_tensor(QTensor("f32", x.shape, x.view(np.uint8)))
        panel_bytes = _native.packed_panel_bytes("f32", x.shape[1])
        weights = [(packed.data, panel_bytes, rows, x.shape[1], "f32", None)]
        program.add_op("embed", place, [], weights=weights)
    program.add_op(name, out, places, **attrs)
    program.add_op("select", last, [out], logit_rows=True)
    program.set_output(last)
    index = np.arange(rows, dtype=np.int32)
    seqs = np.array([[0, rows, 0]], np.int32)
    return program.forward(index, index, index, seqs, np.zeros((1, 1), np.int32), index).copy()


def inputs(width, count, scale=3.0, seed=0):
    rng = np.random.default_rng(seed + width)
    return [(scale * rng.standard_normal((ROWS, width))).astype(np.float32) for _ in range(count)]


def norm_case(width):
    x, residual = inputs(width, 2)
    weight = np.random.default_rng(1).standard_normal(width).astype(np.float32)
    want = reference.rms_norm(x, weight, 1e-5) + residual
    return "rms_norm", [x, residual], {"norms": [weight], "eps": 1e-5}, want


def layer_norm_case(width):
    (x,) = inputs(width, 1)
    x += 5  # a mean that must go
    rng = np.random.default_rng(1)
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    want = reference.layer_norm(x, weight, bias, 1e-5)
    return "layer_norm", [x], {"norms": [weight, bias], "eps": 1e-5}, want


def gate_case(act, *, is_gated=True):
    def case(width):
        gate, up = inputs(width, 2)
        wide, other = gate.astype(np.float64), up.astype(np.float64) if is_gated else 1.0
        if act == 0:
            want = wide / (1 + np.exp(-wide)) * other
        elif act == 1:
            inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
            want = 0.5 * wide * (1 + np.tanh(inner)) * other
        else:
            want = reference.gelu(wide) * other
        return "gated_act", [gate, up] if is_gated else [gate], {"act": act}, want

    return case


def add_case(width):
    a, b = inputs(width, 2)
    return "add", [a, b], {}, a + b


def scale_case(width):
    (x,) = inputs(width, 1)
    return "scale", [x], {"scale": 0.3}, x * np.float32(0.3)


def softcap_case(width):
    (x,) = inputs(width, 1, scale=20.0)
    return "softcap", [x], {"softcap": 30.0}, 30 * np.tanh(x.astype(np.float64) / 30)


def gather_case(width):
    (x,) = inputs(width, 1)
    order = np.random.default_rng(width).permutation(width).astype(np.int32)
    return "gather", [x], {"column_order": order}, x[:, order]


CASES = {
    "rms_norm": norm_case,
    "layer_norm": layer_norm_case,
    "silu": gate_case(0),
    "gelu_tanh": gate_case(1),
    "gelu": gate_case(2),
    "gelu alone": gate_case(2, is_gated=False),
    "add": add_case,
    "scale": scale_case,
    "softcap": softcap_case,
    "gather": gather_case,
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_op_equals_its_definition_on_every_isa(name, width):
    op, args, attrs, want = CASES[name](width)
    scalar = run_op("scalar", op, args, **attrs)
    np.testing.assert_allclose(scalar, want, rtol=3e-6, atol=1e-5 if name == "softcap" else 3e-6)
    for isa in ISAS:
        got = run_op(isa, op, args, threads=2, **attrs)
        np.testing.assert_array_equal(got.view(np.uint32), scalar.view(np.uint32), err_msg=isa)


def test_norm_works_on_column_groups():
    (x,) = inputs(96, 1)
    weight = np.linspace(0.5, 2, 24, dtype=np.float32)
    got = run_op("scalar", "rms_norm", [x], norms=[weight], eps=1e-6, heads=4)
    np.testing.assert_allclose(got, reference.rms_norm(x, weight, 1e-6, heads=4), rtol=2e-6)


@pytest.mark.parametrize("act", [0, 1, 2])
def test_activations_keep_extreme_values_finite(act):
    gate = np.array([[-1e30, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e18]], np.float32)
    got = run_op(None, "gated_act", [gate, np.ones_like(gate)], act=act)[0]
    np.testing.assert_allclose(got[:2], 0, atol=1e-8)
    np.testing.assert_array_equal(got[3:], gate[0, 3:])


def test_nan_goes_through():
    x = np.full((1, 20), np.nan, np.float32)
    one = np.ones(20, np.float32)
    for isa in ISAS:
        assert np.isnan(run_op(isa, "rms_norm", [x], norms=[one], eps=1e-6)).all()
        assert np.isnan(run_op(isa, "layer_norm", [x], norms=[one, one], eps=1e-6)).all()
        for act in range(3):
            assert np.isnan(run_op(isa, "gated_act", [x, x], act=act)).all()
        assert np.isnan(run_op(isa, "softcap", [x], softcap=1.0)).all()
