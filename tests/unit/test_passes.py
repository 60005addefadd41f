"""Each pass does its rewrite, and only where it may; the lowered plan still means the same."""

from collections import Counter

import numpy as np
import pytest

from paceline.backends.base import KVSpec, StepInput, StepLimits
from paceline.backends.reference import ReferenceBackend
from paceline.errors import UnsupportedModelError
from paceline.plan import passes
from paceline.plan.arena import assign_slots, last_uses, root_id
from paceline.plan.plan import Plan, RopeTable
from paceline.weights.tensor import QTensor

ROPE = RopeTable((1.0, 0.5))
F32 = {f"w{i}": "f32" for i in range(12)}
Q8 = dict.fromkeys(F32, "q8_0")


def names(plan):
    return [op.name for op in plan.ops]


def layer(plan, x, *, qk_norm=False, rope=True):
    """One attention and a linear; 2 query heads of 4, 1 KV head."""
    h = plan.rms_norm(x, "n0", 1e-5)
    q, k, v = plan.linear(h, "w0", 8), plan.linear(h, "w1", 4), plan.linear(h, "w2", 4)
    if qk_norm:
        q, k = plan.rms_norm(q, "n1", 1e-5, heads=2), plan.rms_norm(k, "n2", 1e-5)
    if rope:
        q, k = plan.rope(q, 2, ROPE), plan.rope(k, 1, ROPE)
    return plan.attention(q, k, v, layer=0, heads=2, kv_heads=1, scale=0.5)


def decoder(**kw):
    plan = Plan()
    x = plan.scale(plan.embed("w9", 32), 2.0)
    x = plan.add(x, plan.linear(layer(plan, x, **kw), "w3", 32))
    h = plan.rms_norm(x, "n3", 1e-5)
    h = plan.gated_act(plan.linear(h, "w4", 64), plan.linear(h, "w5", 64), "silu")
    x = plan.add(plan.rms_norm(plan.linear(h, "w6", 32), "n4", 1e-5), x)
    plan.output("logits", plan.linear(plan.select(plan.rms_norm(x, "n5", 1e-5)), "w7", 11))
    return plan


def test_merge_makes_views_of_one_output():
    plan = passes.merge_linears(decoder(), F32)
    qkv = next(op for op in plan.ops if op.name == "linear")
    assert qkv.weights == ("w0", "w1", "w2")
    assert qkv.attrs["splits"] == (8, 4, 4)
    attention = plan.ops[names(plan).index("attention")]
    v = attention.inputs[2]
    assert (v.parent, v.offset, v.cols) == (qkv.out.id, 12, 4)


def test_linears_of_one_input_and_one_column_order_share_a_gather_and_are_merged():
    order, other = np.arange(32, dtype=np.int32)[::-1].copy(), np.arange(32, dtype=np.int32)
    orders = {"w0": order, "w1": order, "w2": other, "w6": np.arange(64, dtype=np.int32)}
    plan = passes.merge_linears(passes.gather_columns(decoder(), orders), F32)
    gathers = [op for op in plan.ops if op.name == "gather"]
    assert len(gathers) == 3
    merged = {op.weights: op for op in plan.ops if op.name == "linear"}
    assert merged["w0", "w1"].inputs == (gathers[0].out,)
    assert merged["w0", "w1"].attrs["order"] == order.tobytes()
    assert merged[("w2",)].inputs == (gathers[1].out,)
    assert "order" not in merged["w4", "w5"].attrs


def test_merge_keeps_float_and_quantised_weights_apart():
    plan = passes.merge_linears(decoder(), {**F32, "w1": "q8_0"})
    merged = [op.weights for op in plan.ops if op.name == "linear"]
    assert ("w0", "w2") in merged
    assert ("w1",) in merged


def test_merge_takes_at_most_three():
    plan = Plan()
    x = plan.embed("w9", 8)
    for i in range(5):
        plan.output(str(i), plan.linear(x, f"w{i}", 2))
    merged = passes.merge_linears(plan, F32)
    assert [len(op.weights) for op in merged.ops if op.name == "linear"] == [3, 2]
    assert merged.outputs["4"].offset == 2


def test_split_fuses_norms_and_rope_into_rope_store():
    plan = passes.split_attention(decoder(qk_norm=True))
    store = plan.ops[names(plan).index("rope_store")]
    assert store.attrs["norms"] == ("n1", "n2")
    assert store.attrs["rope"] == ROPE
    assert "rope" not in names(plan)
    assert "attention" not in names(plan)
    assert names(plan).index("attend") == names(plan).index("rope_store") + 1


def test_split_without_rope_leaves_it_out():
    plan = passes.split_attention(decoder(rope=False))
    assert plan.ops[names(plan).index("rope_store")].attrs["rope"] is None


def test_split_leaves_a_norm_over_the_whole_row_alone():
    plan = Plan()
    x = plan.embed("w9", 8)
    q = plan.rope(plan.rms_norm(x, "n0", 1e-5), 2, ROPE)  # one group, two heads
    k = plan.rope(plan.linear(x, "w1", 4), 1, ROPE)
    out = plan.attention(q, k, plan.linear(x, "w2", 4), layer=0, heads=2, kv_heads=1, scale=1.0)
    plan.output("logits", plan.select(out))
    split = passes.split_attention(plan)
    assert "rms_norm" in names(split)
    assert split.ops[names(split).index("rope_store")].attrs["norms"] == (None, None)


def test_split_refuses_different_ropes():
    plan = Plan()
    x = plan.embed("w9", 8)
    q, k = plan.rope(x, 2, ROPE), plan.rope(plan.linear(x, "w1", 4), 1, RopeTable((1.0, 0.25)))
    plan.attention(q, k, plan.linear(x, "w2", 4), layer=0, heads=2, kv_heads=1, scale=1.0)
    with pytest.raises(UnsupportedModelError, match="layer 0 rotates"):
        passes.split_attention(plan)


def test_residual_is_folded_from_either_side_and_into_norms():
    plan = passes.fold_residual(decoder())
    assert "add" not in names(plan)
    assert Counter(op.name for op in plan.ops if len(op.inputs) == 2) == Counter(
        linear=1, rms_norm=1, gated_act=1
    )


def test_residual_is_not_folded_where_the_branch_is_read_twice():
    plan = Plan()
    x = plan.embed("w9", 8)
    y = plan.linear(x, "w0", 8)
    plan.output("logits", plan.add(plan.add(x, y), y))
    folded = passes.fold_residual(plan)
    assert names(folded).count("add") == 2


def test_embed_takes_the_scale():
    plan = passes.fold_embed_scale(decoder())
    assert "scale" not in names(plan)
    assert plan.ops[0].attrs["scale"] == 2.0


def test_quantisation_is_folded_where_all_readers_want_it():
    plan = passes.lower(decoder(), {**Q8, "w9": "q8_0"})
    by_weight = {op.weights[0]: op for op in plan.ops if op.weights}
    assert by_weight["n0"].out.format == "q8"
    assert by_weight["w6"].inputs[0].format == "q8"
    # Heads of 4 are no whole groups, so attend cannot write q8 and a quantize stands between.
    assert names(plan).count("quantize") == 1
    assert all(op.inputs[0].format == "q8" for op in plan.ops if op.name == "linear")


def test_float_weights_need_no_quantize():
    plan = passes.lower(decoder(), F32)
    assert "quantize" not in names(plan)
    assert all(op.out.format == "f32" for op in plan.ops)


def test_value_with_a_float_reader_stays_float():
    plan = Plan()
    x = plan.embed("w9", 32)
    h = plan.rms_norm(x, "n0", 1e-5)
    plan.output("logits", plan.add(h, plan.linear(h, "w0", 32)))
    quantized = passes.insert_quantize(plan, Q8)
    assert names(quantized) == ["embed", "rms_norm", "quantize", "linear", "add"]


def test_rows_are_selected_right_after_the_last_attention():
    plan = passes.lower(decoder(), F32)
    last = max(i for i, name in enumerate(names(plan)) if name == "attend")
    assert names(plan)[last + 1 : last + 3] == ["select", "select"]  # attention's output, residual
    assert all(op.out.rows == "logits" for op in plan.ops[last + 1 :])


def test_selection_stays_where_an_output_needs_all_rows():
    plan = passes.split_attention(decoder())
    plan.output("hidden", plan.ops[-3].out)
    assert names(passes.select_early(plan)) == names(plan)


def random_weights(plan):
    rng = np.random.default_rng(0)
    weights = {}
    for op in plan.ops:
        if op.name == "rms_norm":
            shape = (op.out.cols // op.attrs["heads"],)
        elif op.name in ("linear", "embed"):
            shape = (13, op.out.cols) if op.name == "embed" else (op.out.cols, op.inputs[0].cols)
        else:
            continue
        values = rng.standard_normal(shape).astype(np.float32)
        weights[op.weights[0]] = QTensor("f32", shape, values.view(np.uint8))
    return weights


@pytest.mark.parametrize("qk_norm", [False, True])
def test_lowered_plan_computes_the_same(qk_norm):
    plan = decoder(qk_norm=qk_norm)
    weights = random_weights(plan)
    lowered = passes.lower(plan, {name: "f32" for name in weights})
    expected = logits_of(plan, weights)
    np.testing.assert_allclose(logits_of(lowered, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_shortened_head_makes_the_logits_of_the_first_ids(softcap):
    plan = decoder()
    if softcap:
        plan.output("logits", plan.softcap(plan.outputs["logits"], softcap))
    weights = random_weights(plan)
    expected = logits_of(plan, weights)
    short = passes.shorten_head(plan, 7)
    for program in (short, passes.lower(short, {name: "f32" for name in weights})):
        assert program.outputs["logits"].cols == 7
        logits = logits_of(program, weights)
        np.testing.assert_allclose(logits, expected[:, :7], rtol=1e-5, atol=1e-5)
    assert plan.outputs["logits"].cols == 11


def logits_of(plan, weights):
    """Two rows of logits of a step of five tokens."""
    step = StepInput(
        np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32),
        np.array([[0, 5, 0]], np.int32), np.zeros((1, 1), np.int32), np.array([2, 4], np.int32),
    )  # fmt: skip
    backend = ReferenceBackend()
    limits = StepLimits(max_tokens=8, max_logit_rows=8, max_seqs=1, max_blocks_per_seq=1)
    backend.load(plan, weights, kv=KVSpec(num_blocks=1, block_size=16, dtype="f32"), limits=limits)
    return backend.forward(step).logits


def test_slots_are_reused_but_never_shared_by_live_values():
    plan = passes.lower(decoder(qk_norm=True), Q8)
    arena = assign_slots(plan, lambda value: value.cols * 4)
    last = last_uses(plan)
    born = {op.out.id: i for i, op in enumerate(plan.ops)}
    for a, b in ((a, b) for a in born for b in born if a < b):
        if arena.slot_of[a] == arena.slot_of[b]:
            assert last[a] < born[b] or last[b] < born[a], (a, b)
    for op in plan.ops:
        assert all(arena.slot_bytes[arena.slot_of[root_id(v)]] >= v.cols * 4 for v in op.inputs)
    assert len(arena.slot_bytes) < len(plan.ops) / 2
