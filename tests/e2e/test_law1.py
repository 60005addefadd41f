"""Law 1: whatever else runs, a request gets the tokens and logprob bits that it gets alone."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.completion import ChoiceBuilder
from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.engine.engine import Engine
from paceline.structured.grammar import GrammarState
from paceline.structured.grammars import Grammars
from paceline.types import Delta, Request, SamplingParams, Structured
from tests.tiny import random_model, write_gguf

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # K and V, layers, KV heads, head size, f32, tokens
FORMATS = ("f32", "q4_0", "q8_0")
MAX_STEPS = 5000
STRUCTURES = (
    Structured(regex=r"(yes|no), [a-z]{1,4} and so on[.!]+"),
    Structured(choice=("certainly not", "certainly", "perhaps")),
    Structured(json_schema={
        "type": "object", "properties": {"ok": {"type": "boolean"}, "id": {"type": "integer"}},
        "required": ["ok", "id"], "additionalProperties": False,
    }),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A request with its place in a schedule: the steps at which it comes and is aborted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives_at: int = 0
    aborted_after: int | None = None
    salt: str = ""


Answer = tuple[tuple[int, ...], tuple[bytes, ...], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("law1")


@cache
def model_path(folder: Path, fmt: str) -> Path:
    return write_gguf(random_model("llama", seed=11), folder / f"{fmt}.gguf", fmt=fmt)


_grammars_of: WeakKeyDictionary[Engine, Grammars] = WeakKeyDictionary()


def make_engine(path: Path, kv_dtype: str = "f32", **options) -> Engine:
    options = {"kv_memory_bytes": 400 * BLOCK_BYTES, **options}
    # As many blocks: K and V of a head are 16 codes and a scale each, not 16 floats. 16 nibbles
    # have a step and a base too.
    head_bytes = {"int8": 36, "fp8": 36, "k8v4": 30, "int4": 24}.get(kv_dtype, 128)
    options["kv_memory_bytes"] = options["kv_memory_bytes"] * head_bytes // 128
    loaded = load_model(str(path), EngineConfig(kv_dtype=kv_dtype, **options))
    _grammars_of[loaded.engine] = loaded.grammars
    return loaded.engine


def answers_of(builders: list[ChoiceBuilder]) -> list[Answer]:
    """Return tokens, the bits of their logprobs, and the end of each choice."""
    answers = []
    for builder in builders:
        choice = builder.choice()
        bits = tuple(
            struct.pack(f"<d{2 * len(item.top)}d", item.logprob, *(x for t in item.top for x in t))
            for item in choice.logprobs
        )
        answers.append((choice.token_ids, bits, choice.finish_reason))
    return answers


def run(engine: Engine, jobs: list[Job]) -> list[list[Answer]]:
    """Run a schedule to its end; the books close after it."""
    builders = [[ChoiceBuilder(i, True) for i in range(job.params.n)] for job in jobs]

    def sink(number: int, delta: Delta) -> None:
        builders[number][delta.index].add(delta)

    for step in range(MAX_STEPS):
        for number, job in enumerate(jobs):
            if job.arrives_at == step:
                structured = job.params.structured
                request = Request(
                    id=str(number), prompt_token_ids=job.prompt, params=job.params,
                    arrival_ns=step, cache_salt=job.salt,
                    grammar=structured and _grammars_of[engine].compile(structured),
                )  # fmt: skip
                engine.submit(request, lambda delta, number=number: sink(number, delta))
            if job.aborted_after is not None and job.arrives_at + job.aborted_after == step:
                engine.abort(str(number))
        did_work = engine.step()
        engine.check_integrity()
        if not did_work and all(job.arrives_at <= step for job in jobs):
            break
    else:
        raise AssertionError("the schedule does not end")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_live_blocks) == (0, 0, 0)
    return [answers_of(row) for row in builders]


_alone: dict[tuple[Path, str, str], list[Answer]] = {}
_solo_engines: dict[tuple[Path, str], Engine] = {}


def alone(path: Path, job: Job, kv_dtype: str = "f32") -> list[Answer]:
    """Return what the job gets with the engine to itself: one thread, whole prompts, no cache.

    Tokens that its structure forces take a step each.
    """
    job = replace(job, arrives_at=0, aborted_after=None, salt="")
    key = (path, kv_dtype, repr(job))
    if key not in _alone:
        model = (path, kv_dtype)
        if model not in _solo_engines:
            _solo_engines[model] = make_engine(
                path, kv_dtype, num_threads=1, max_batched_tokens=256, prefix_cache=False
            )
        with patch.object(GrammarState, "forced", lambda self, limit: []):
            _alone[key] = run(_solo_engines[model], [job])[0]
    return _alone[key]


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    seed=st.integers(0, 5),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([0, 2]),
    ignore_eos=st.just(True),
    structured=st.sampled_from([None, None, None, *STRUCTURES]),
)
# Prompts of two families, cut anywhere and ended by some tokens of their own: they share beginnings
# of any length, and are of other tokens at any place.
prompts = st.builds(
    lambda family, cut, tail: (tuple((family + 3 * i) % 256 for i in range(cut)) + tail)[:70],
    family=st.sampled_from([7, 7, 7, 100]),
    cut=st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 65, 70]),
    tail=st.lists(st.integers(0, 255), min_size=1, max_size=20).map(tuple) | st.just((5,)),
)
jobs = st.builds(
    Job,
    prompt=prompts,
    params=params,
    salt=st.sampled_from(["", "", "", "another tenant"]),
    arrives_at=st.integers(0, 25),
    aborted_after=st.none() | st.none() | st.integers(0, 20),
)
engine_options = st.fixed_dictionaries(
    {
        "num_threads": st.sampled_from([1, 2]),
        "max_batched_tokens": st.sampled_from([4, 7, 16, 33, 128]),
        "max_num_seqs": st.sampled_from([1, 3, 4]),
        "policy": st.sampled_from(["fcfs", "priority", "slo:step_ms=0.01,floor=1"]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        # A job can need 6 blocks a choice: the small pools force preemption.
        "kv_memory_bytes": st.sampled_from([8, 11, 20, 200]).map(lambda n: n * BLOCK_BYTES),
    }
)


@pytest.mark.parametrize("fmt", FORMATS)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(options=engine_options, schedule=st.lists(jobs, min_size=1, max_size=7))
def test_any_schedule_gives_each_request_the_bits_it_gets_alone(folder, fmt, options, schedule):
    path = model_path(folder, fmt)
    engine = make_engine(path, **options)
    results = run(engine, schedule)
    engine.stop(5)
    for job, result in zip(schedule, results, strict=True):
        for (ids, bits, end), (solo_ids, solo_bits, solo_end) in zip(
            result, alone(path, job), strict=True
        ):
            if end == "abort":
                assert job.aborted_after is not None
                assert ids == solo_ids[: len(ids)]
                assert bits == solo_bits[: len(bits)]
            else:
                assert (ids, bits, end) == (solo_ids, solo_bits, solo_end)


GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)


def test_a_hit_of_any_length_gives_the_bits_of_a_miss(folder):
    path = model_path(folder, "q4_0")
    known = tuple(range(70))
    engine = make_engine(path, num_threads=2)
    run(engine, [Job(known, GREEDY)])
    for cut in range(71):
        tail = (200, cut) if cut < 70 else ()
        job = Job((*known[:cut], *tail), GREEDY)
        before = engine.stats().num_prefix_hit
        assert run(engine, [job]) == [alone(path, job)], cut
        assert engine.stats().num_prefix_hit - before >= min(cut, 69)
    engine.stop(5)


def test_the_next_turn_of_a_conversation_hits_on_the_answer(folder):
    path = model_path(folder, "q8_0")
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=4, logprobs=1, ignore_eos=True)
    engine = make_engine(path, num_threads=2, max_batched_tokens=33)
    prompt = tuple(range(20))
    for _ in range(4):
        job = Job(prompt, params)
        before = engine.stats().num_prefix_hit
        [[answer]] = run(engine, [job])
        assert [answer] == alone(path, job)
        if len(prompt) > 20:  # all but the last token of the answer, which was never computed
            assert engine.stats().num_prefix_hit - before >= len(prompt) - 4
        prompt = (*prompt, *answer[0], 1, 2, 3)
    engine.stop(5)


@pytest.mark.parametrize("spec", [
    "disk:path={},size=64M",
    "host:size=8M",
    f"host:size={20 * BLOCK_BYTES}+disk:path={{}},size=64M",
])  # fmt: skip
def test_a_round_trip_through_a_tier_gives_the_same_bits(folder, tmp_path, spec):
    """A pool of ten blocks, so that nearly all goes to the tier; every other engine is a new one.

    With both tiers most of it goes on from memory to disk, and comes back from either.
    """
    path = model_path(folder, "q8_0")
    rng = random.Random(1)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
    families = [tuple(rng.randrange(256) for _ in range(100)) for _ in range(4)]
    jobs = [
        Job((*rng.choice(families)[: rng.randrange(20, 100)], rng.randrange(256)), params,
            arrives_at=rng.randrange(30))
        for _ in range(24)
    ]  # fmt: skip
    num_restored, used = 0, set()
    for _ in range(4):
        engine = make_engine(
            path, num_threads=2, max_batched_tokens=33, kv_memory_bytes=10 * BLOCK_BYTES,
            kv_tier=spec.format(tmp_path),
        )  # fmt: skip
        if "disk" in spec:
            engine._cache._tier._levels[-1].store.settle()
        for _ in range(2):
            assert run(engine, jobs) == [alone(path, job) for job in jobs]
        num_restored += engine.stats().num_blocks_restored
        levels = engine._cache._tier._levels
        used |= {type(level.store) for level in levels if level.restore_s}
        engine.stop(5)
        rng.shuffle(jobs)
    assert num_restored > 50
    assert len(used) == spec.count("size")  # every store gave blocks back


def test_another_format_of_the_same_model_restores_nothing(folder, tmp_path):
    job = Job(tuple(range(70)), GREEDY)
    for kv_dtype in ("f32", "f16", "bf16", "int8", "fp8", "k8v4", "int4"):
        engine = load_model(
            str(model_path(folder, "q8_0")),
            EngineConfig(kv_dtype=kv_dtype, kv_tier=f"disk:path={tmp_path},size=64M",
                         kv_memory_bytes=40 * BLOCK_BYTES),
        ).engine  # fmt: skip
        engine._cache._tier._levels[-1].store.settle()
        run(engine, [job])
        assert engine.stats().num_prefix_hit == 0
        engine.stop(5)


@pytest.mark.parametrize("structure", STRUCTURES, ids=["regex", "choice", "schema"])
def test_forced_tokens_save_steps_and_give_the_same_bits(folder, structure):
    path = model_path(folder, "q4_0")
    params = SamplingParams(
        max_tokens=40, temperature=1, seed=3, logprobs=3, structured=structure, n=2
    )
    schedule = [Job(tuple(range(i, i + 20)), params, arrives_at=i) for i in range(3)]
    engine = make_engine(path, num_threads=2, kv_memory_bytes=9 * BLOCK_BYTES)
    assert run(engine, schedule) == [alone(path, job) for job in schedule]
    assert engine.stats().num_forced_tokens > 20
    engine.stop(5)


def test_a_tiny_pool_preempts_and_still_gives_the_same_bits(folder):
    path = model_path(folder, "q4_0")
    schedule = [
        Job(prompt=tuple(range(i, i + 40)), params=SamplingParams(
            max_tokens=30, temperature=0.8, seed=i, logprobs=3, ignore_eos=True), arrives_at=i)
        for i in range(4)
    ]  # fmt: skip
    engine = make_engine(
        path, num_threads=2, max_batched_tokens=16, kv_memory_bytes=9 * BLOCK_BYTES
    )
    results = run(engine, schedule)
    assert engine.stats().num_preemptions > 0
    assert results == [alone(path, job) for job in schedule]
    engine.stop(5)


def test_every_chunk_size_gives_the_same_bits(folder):
    path = model_path(folder, "q8_0")
    job = Job(
        prompt=tuple(range(100)),
        params=SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True),
    )
    for budget in (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 99, 100):
        engine = make_engine(path, num_threads=2, max_batched_tokens=budget, max_num_seqs=1)
        assert run(engine, [job]) == [alone(path, job)], budget
        engine.stop(5)
