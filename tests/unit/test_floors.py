"""Floors: work counted from a plan, and the time that planted ceilings allow for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.measure.ceilings import Ceilings, ReadSpeed
from paceline.measure.floors import (
    AttentionCost,
    ModelCosts,
    Work,
    chunk_work,
    compute_bound_batch,
    compute_s,
    decode_work,
    floor_s,
    memory_s,
    model_costs,
    op_costs,
    prefill_work,
)
from paceline.weights.checkpoint import open_checkpoint
from tests.tiny import random_model, write_gguf


def ceilings(
    *, int8_macs_s: float, bf16_macs_s: float | None, f32_macs_s: float, bytes_s: float
) -> Ceilings:
    """Ceilings of a machine without caches."""
    return Ceilings(
        num_threads=1,
        int8_macs_s=int8_macs_s,
        bf16_macs_s=bf16_macs_s,
        f32_macs_s=f32_macs_s,
        reads=(ReadSpeed(level="memory", capacity=1, bytes_s=bytes_s),),
    )


CEILINGS = ceilings(int8_macs_s=1000.0, bf16_macs_s=None, f32_macs_s=100.0, bytes_s=50.0)
COSTS = ModelCosts(
    token_macs=100,
    logit_macs=10,
    attention=(
        AttentionCost(key_macs=2, key_bytes=3, window=0),
        AttentionCost(key_macs=2, key_bytes=3, window=4),
    ),
    weight_bytes=500,
)


def test_a_prompt_pays_all_layers_for_each_token_and_the_head_once():
    work = prefill_work(COSTS, 6)
    # Keys seen by tokens 1 … 6: 21 without a window, 1 + 2 + 3 + 4 + 4 + 4 = 18 with one of 4.
    assert work == Work(
        linear_macs=6 * 100 + 10, attention_macs=2 * 21 + 2 * 18, num_bytes=500 + 6 * (3 + 3)
    )


def test_a_decode_step_reads_weights_once_and_each_streams_visible_keys():
    work = decode_work(COSTS, num_streams=8, context=9)
    assert work == Work(
        linear_macs=8 * 110, attention_macs=8 * (2 * 10 + 2 * 4), num_bytes=500 + 8 * (30 + 12)
    )


def test_attention_over_an_int8_cache_is_held_against_the_int8_peak(tmp_path):
    checkpoint = open_checkpoint(write_gguf(random_model("llama"), tmp_path / "m.gguf", fmt="q8_0"))
    wide, codes = (model_costs(checkpoint, kv_dtype) for kv_dtype in ("f16", "int8"))
    model = checkpoint.config
    assert codes.kv_bytes == 2 * model.num_layers * model.num_kv_heads * (model.head_dim + 2)
    few, many = (decode_work(costs, num_streams=1, context=9) for costs in (codes, wide))
    assert (few.attention_macs, few.int8_attention_macs) == (0, many.attention_macs)
    assert few.macs == many.macs
    assert compute_s(few, CEILINGS) == pytest.approx(few.macs / 1000)


def test_the_floor_is_the_longer_of_compute_and_memory():
    compute_bound = Work(linear_macs=1000, attention_macs=50, num_bytes=10)
    assert floor_s(compute_bound, CEILINGS) == pytest.approx(1.0 + 0.5)
    memory_bound = Work(linear_macs=1000, attention_macs=50, num_bytes=200)
    assert floor_s(memory_bound, CEILINGS) == pytest.approx(4.0)


def test_attention_is_held_against_bf16_where_the_cpu_has_it():
    work = Work(linear_macs=0, attention_macs=100, num_bytes=0)
    with_bf16 = ceilings(int8_macs_s=1e3, bf16_macs_s=400.0, f32_macs_s=100.0, bytes_s=50.0)
    assert floor_s(work, with_bf16) == pytest.approx(0.25)
    assert floor_s(work, CEILINGS) == pytest.approx(1.0)


def test_a_models_costs_follow_from_its_plan(tmp_path: Path):
    model = random_model(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, inner=128)
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "tiny.gguf"))
    costs = model_costs(checkpoint)
    vocab = model.config["vocab_size"]
    qkv, out, mlp = 64 * (64 + 32 + 32), 64 * 64, 3 * 64 * 128
    # After the last attention only the rows that need logits go on.
    assert costs.token_macs == 2 * qkv + out + mlp
    assert costs.logit_macs == out + mlp + vocab * 64
    layer = AttentionCost(key_macs=2 * 4 * 16, key_bytes=2 * 2 * 16 * 2, window=0)
    assert costs.attention == (layer, layer)
    stored = sum(t.num_bytes for t in checkpoint.tensors.values())
    assert costs.weight_bytes == stored - vocab * 64 * 4  # the embedding is read by row


def test_a_tied_head_is_read_whole(tmp_path: Path):
    model = random_model(tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "tied.gguf"))
    stored = sum(t.num_bytes for t in checkpoint.tensors.values())
    assert model_costs(checkpoint).weight_bytes == stored


def test_a_working_set_that_fits_a_cache_is_read_from_there():
    reads = (
        ReadSpeed(level="L2", capacity=100, bytes_s=50.0),
        ReadSpeed(level="memory", capacity=1000, bytes_s=10.0),
    )
    cached = Ceilings(
        num_threads=1, int8_macs_s=1e9, bf16_macs_s=None, f32_macs_s=1e9, reads=reads
    )  # fmt: skip
    assert floor_s(Work(linear_macs=0, attention_macs=0, num_bytes=100), cached) == 2.0
    assert floor_s(Work(linear_macs=0, attention_macs=0, num_bytes=101), cached) == 10.1
    assert floor_s(Work(linear_macs=0, attention_macs=0, num_bytes=5000), cached) == 500.0


def test_float_weights_are_held_against_the_float_peak():
    work = Work(linear_macs=0, float_macs=100, attention_macs=0, num_bytes=1)
    assert compute_s(work, CEILINGS) == pytest.approx(1.0)


def test_a_chunk_after_a_context_sees_it_and_reads_it_once():
    work = chunk_work(COSTS, num_seqs=2, num_tokens=3, context=5, num_logit_rows=2)
    # Keys: 6 + 7 + 8 without a window, 4 + 4 + 4 with one of 4; of each sequence.
    assert work.attention_macs == 2 * (2 * 21 + 2 * 12)
    assert work.linear_macs == 6 * 100 + 2 * 10
    # 5 + 3 keys, and the 3 of the window before the chunk with it.
    assert work.num_bytes == 500 + 2 * (3 * 8 + 3 * 6)


def test_decoding_turns_compute_bound_at_the_first_batch_that_multiplies_longer():
    batch = compute_bound_batch(COSTS, CEILINGS, context=0)
    assert batch is not None
    before, at = (decode_work(COSTS, num_streams=n, context=0) for n in (batch - 1, batch))
    assert compute_s(before, CEILINGS) < memory_s(before, CEILINGS)
    assert compute_s(at, CEILINGS) >= memory_s(at, CEILINGS)


def test_decoding_whose_kv_outgrows_its_arithmetic_is_never_compute_bound():
    assert compute_bound_batch(COSTS, CEILINGS, context=10_000) is None


@pytest.mark.parametrize("tied", [True, False])
def test_the_ops_of_a_model_add_up_to_its_costs(tmp_path: Path, tied: bool):
    model = random_model("llama", tie_word_embeddings=tied)
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "m.gguf"))
    ops, costs = op_costs(checkpoint), model_costs(checkpoint)
    works = [op.work(num_seqs=2, num_tokens=3, context=4, num_logit_rows=2) for op in ops]
    whole = chunk_work(costs, num_seqs=2, num_tokens=3, context=4, num_logit_rows=2)
    assert sum(work.macs for work in works) == whole.macs
    # All bytes but the vectors of the norms, and of the embedding, which no linear reads.
    assert 0 < whole.num_bytes - sum(work.num_bytes for work in works) < 0.02 * whole.num_bytes
    kinds = {op.kind for op in ops}
    assert {"qkv", "attention", "attention out", "gate and up", "down", "head"} <= kinds


def test_attention_in_a_window_is_a_kind_of_its_own(tmp_path: Path):
    model = random_model("gemma3_text", layers=6, sliding_window=8, sliding_window_pattern=3)
    ops = op_costs(open_checkpoint(write_gguf(model, tmp_path / "m.gguf")))
    kinds = [op.kind for op in ops if op.unit == "attention"]
    assert kinds == 2 * [*2 * ["attention, 8 keys"], "attention"]
