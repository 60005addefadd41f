"""Single slots of the KV cache move whole, so a branch that was right becomes part of the text."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend
from tests.numerics.program_cases import Runner, Shape, decoder, random_tokens, random_weights

SHAPE = Shape(head_dim=24)
BACKENDS = {"native": lambda: NativeBackend(2), "reference": ReferenceBackend}


def load(backend, kv_dtype):
    plan = decoder(SHAPE)
    weights = random_weights(plan, SHAPE)
    return Runner.load(backend, plan, weights, kv_dtype=kv_dtype, block_size=16)


def slot(runner, seq, position):
    return runner.tables[seq][position // 16] * 16 + position % 16


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "int8", "fp8", "k8v4", "int4"])
def test_a_branch_moved_behind_the_text_serves_like_the_text(name, kv_dtype):
    """Nodes 1 and 3 of a tree are right: their slots move by one and by two, across blocks."""
    prompt = random_tokens(np.random.default_rng(5), 29, SHAPE.vocab)
    plain = load(BACKENDS[name](), kv_dtype)
    plain.step([(0, [*prompt, 7, 8, 9])])
    drafted = load(BACKENDS[name](), kv_dtype)
    drafted.step([(0, prompt)])
    # After the 7 come 1 or 8, and after the 8 come 2 or 9.
    tree = ([0, 1, 1, 2, 2], [0b1, 0b11, 0b101, 0b1101, 0b10101])
    drafted.step([(0, [7, 1, 8, 2, 9])], trees={0: tree})
    src, dst = (30 + 1, 30 + 3), (30, 31)
    drafted.backend.copy_slots(
        [slot(drafted, 0, p) for p in src], [slot(drafted, 0, p) for p in dst]
    )
    drafted.lengths[0] = 32
    want, got = plain.step([(0, [3])])[0], drafted.step([(0, [3])])[0]
    if name == "native":
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    else:
        np.testing.assert_allclose(got, want, atol=2e-5 if kv_dtype == "f32" else 3e-3)


def test_slots_outside_of_the_cache_are_refused():
    backend = load(NativeBackend(1), "f32").backend
    for slots in ([-1], [10**6]):
        with pytest.raises(ValueError, match="outside of the KV cache"):
            backend.copy_slots(slots, [0])
        with pytest.raises(ValueError, match="outside of the KV cache"):
            backend.copy_slots([0], slots)
    with pytest.raises(ValueError, match="as many sources as destinations"):
        backend.copy_slots([0, 1], [0])
