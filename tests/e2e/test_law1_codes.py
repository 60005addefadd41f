"""Law 1 within a quantised KV cache: schedules, drafts and the disk change no token, no bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engine.sequence import Sequence
from paceline.types import SamplingParams
from tests.e2e.test_law1 import (
    BLOCK_BYTES,
    Answer,
    Job,
    alone,
    engine_options,
    jobs,
    make_engine,
    run,
)
from tests.e2e.test_law1_speculation import SHAPES, drafting_engine
from tests.tiny import random_model, write_gguf
from tests.unit.proposers import Oracle

DTYPES = ["int8", "fp8", "k8v4", "int4"]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A model whose keys have huge biases, so that they are evened out before they are stored."""
    model = random_model("qwen2", seed=11)
    for layer in range(2):
        bias = 50 * np.random.default_rng(layer).standard_normal(32).astype(np.float32)
        model = model.with_tensor(f"model.layers.{layer}.self_attn.k_proj.bias", bias)
    return write_gguf(model, tmp_path_factory.mktemp("law1_codes") / "q8_0.gguf", fmt="q8_0")


def assert_same(results: list[list[Answer]], expected: list[list[Answer]]) -> None:
    """Equal answers; an aborted one is the beginning of what it gets alone."""
    for result, solo in zip(results, expected, strict=True):
        for (ids, bits, end), whole in zip(result, solo, strict=True):
            if end == "abort":
                assert (ids, bits) == (whole[0][: len(ids)], whole[1][: len(bits)])
            else:
                assert (ids, bits, end) == whole


@pytest.mark.parametrize("kv_dtype", DTYPES)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(options=engine_options, schedule=st.lists(jobs, min_size=1, max_size=7))
def test_any_schedule_gives_each_request_the_bits_it_gets_alone(path, kv_dtype, options, schedule):
    engine = make_engine(path, kv_dtype, **options)
    results = run(engine, schedule)
    engine.stop(5)
    assert_same(results, [alone(path, job, kv_dtype) for job in schedule])


@pytest.mark.parametrize("kv_dtype", DTYPES)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    options=engine_options,
    schedule=st.lists(jobs, min_size=1, max_size=6),
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 9),
)
def test_any_schedule_with_drafts_gives_the_bits_without(
    path, kv_dtype, options, schedule, shape, seed
):
    expected = [alone(path, job, kv_dtype) for job in schedule]

    def text(seq: Sequence) -> tuple[int, ...]:
        tokens = expected[int(seq.request.id)][seq.index][0]
        return (*seq.request.prompt_token_ids, *tokens)

    proposer = Oracle(text, SHAPES[shape], seed)
    engine = drafting_engine(path, proposer, 9, kv_dtype=kv_dtype, **options)
    results = run(engine, schedule)
    engine.stop(5)
    assert_same(results, expected)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_round_trip_through_the_disk_gives_the_same_bits(path, tmp_path, kv_dtype):
    """A pool of ten blocks, so that nearly all goes to disk; every other engine is a new one."""
    rng = random.Random(1)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
    families = [tuple(rng.randrange(256) for _ in range(100)) for _ in range(4)]
    schedule = [
        Job((*rng.choice(families)[: rng.randrange(20, 100)], rng.randrange(256)), params,
            arrives_at=rng.randrange(30))
        for _ in range(24)
    ]  # fmt: skip
    num_restored = num_preempted = 0
    for _ in range(4):
        engine = make_engine(
            path, kv_dtype, num_threads=2, max_batched_tokens=33, kv_memory_bytes=10 * BLOCK_BYTES,
            kv_tier=f"disk:path={tmp_path},size=64M",
        )  # fmt: skip
        engine._cache._tier._levels[-1].store.settle()
        assert run(engine, schedule) == [alone(path, job, kv_dtype) for job in schedule]
        num_restored += engine.stats().num_blocks_restored
        num_preempted += engine.stats().num_preemptions
        engine.stop(5)
        rng.shuffle(schedule)
    assert num_restored > 20
    assert num_preempted > 0
