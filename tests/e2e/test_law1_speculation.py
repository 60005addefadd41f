"""Law 1 with drafts: the tokens and logprob bits of each request alone, without speculation."""

from __future__ import annotations

import json
import logging
import random
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.sequence import Sequence
from paceline.engine.speculation.shadows import Shadows
from paceline.plan.plan import sole_output
from paceline.types import SamplingParams, Structured
from tests.e2e.test_law1 import (
    BLOCK_BYTES,
    FORMATS,
    STRUCTURES,
    Answer,
    Job,
    alone,
    engine_options,
    jobs,
    make_engine,
    model_path,
    prompts,
    run,
)
from tests.e2e.test_quantize import run as quantize
from tests.tiny import TinyTokenizer, random_model, write_gguf
from tests.unit.proposers import Oracle, Shape, eager_pace, wild_chain, wild_tree

SHAPES: dict[str, Shape | None] = {
    "perfect": None, "tree": wild_tree(256), "chain": wild_chain(256),
}  # fmt: skip


KV_SHARE = "paceline.engine.speculation.draft_load._KV_SHARE"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("law1")


@cache
def draft_path(folder: Path, kind: str) -> Path:
    """Return a draft model: the tested one in another format, nonsense, or of other tokens."""
    if kind == "near":
        return model_path(folder, "q4_0")
    tokenizer = TinyTokenizer(words=("Ġthe", "in")) if kind == "other tokens" else TinyTokenizer()
    model = random_model("qwen2", seed=5, tokenizer=tokenizer)
    return write_gguf(model, folder / f"draft {kind}.gguf", fmt="q8_0")


def drafting_engine(path: Path, proposer: Oracle | None, most: int, **options) -> Engine:
    """Return an engine that drafts as much as it may; without a proposer by n-gram look-up."""
    load = "paceline.engine.speculation.load.load_proposer"
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace(most)):
        if proposer is None:
            return make_engine(path, speculate="ngram", **options)
        with patch(load, lambda speculation, draft_model: proposer):
            return make_engine(path, speculate="ngram", **options)


@pytest.mark.parametrize("fmt", FORMATS)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    options=engine_options,
    schedule=st.lists(jobs, min_size=1, max_size=6),
    shape=st.sampled_from(["ngram", *sorted(SHAPES)]),
    most=st.sampled_from([1, 4, 9]),
    seed=st.integers(0, 9),
)
def test_any_schedule_with_drafts_gives_the_bits_without(
    folder, fmt, options, schedule, shape, most, seed
):
    path = model_path(folder, fmt)
    expected = [alone(path, job) for job in schedule]

    def text(seq: Sequence) -> tuple[int, ...]:
        tokens = expected[int(seq.request.id)][seq.index][0]
        return (*seq.request.prompt_token_ids, *tokens)

    proposer = None if shape == "ngram" else Oracle(text, SHAPES[shape], seed)
    engine = drafting_engine(path, proposer, most, **options)
    results = run(engine, schedule)
    engine.stop(5)
    compare(results, expected)


def compare(results: list[list[Answer]], expected: list[list[Answer]]) -> None:
    """Each choice has the bits expected of it, or the beginning of them if it was aborted."""
    for result, solo in zip(results, expected, strict=True):
        for (ids, bits, end), (solo_ids, solo_bits, solo_end) in zip(result, solo, strict=True):
            if end == "abort":
                assert (ids, bits) == (solo_ids[: len(ids)], solo_bits[: len(bits)])
            else:
                assert (ids, bits, end) == (solo_ids, solo_bits, solo_end)


@pytest.mark.parametrize("kind", ["near", "nonsense", "other tokens"])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    options=engine_options,
    schedule=st.lists(jobs, min_size=1, max_size=6),
    name=st.sampled_from(["draft", "draft+ngram"]),
    most=st.sampled_from([1, 3, 9]),
    window=st.sampled_from([10, 40, 256]),
    vocab=st.sampled_from(["30", "200", "all"]),
)
def test_any_schedule_with_a_draft_model_gives_the_bits_without(
    folder, kind, options, schedule, name, most, window, vocab
):
    """Half of the memory is the draft model's: pools are as tiny as without, and so is its own."""
    path = model_path(folder, "q8_0")
    expected = [alone(path, job) for job in schedule]
    options = {**options, "kv_memory_bytes": 2 * options["kv_memory_bytes"]}
    spec = f"{name}:model={draft_path(folder, kind)},max={most},window={window},vocab={vocab}"
    with (
        patch("paceline.engine.speculation.speculator.Goodput", eager_pace(most)),
        patch(KV_SHARE, 0.5),
    ):
        engine = make_engine(path, speculate=spec, **options)
    results = run(engine, schedule)
    shadows = shadows_of(engine)
    shadows.check_integrity()
    assert not shadows.num_live_blocks
    engine.stop(5)
    compare(results, expected)


# Each has several choices and penalties, most have a structure.
busy_jobs = st.builds(
    Job,
    prompt=prompts,
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(5, 24),
        temperature=st.sampled_from([0.0, 1.0]),
        top_p=st.sampled_from([1.0, 0.9]),
        repetition_penalty=st.sampled_from([1.2, 0.9]),
        presence_penalty=st.sampled_from([0.6, -0.6]),
        frequency_penalty=st.sampled_from([0.4, -0.4]),
        seed=st.integers(0, 5),
        n=st.sampled_from([2, 3]),
        logprobs=st.just(2),
        min_tokens=st.sampled_from([0, 5]),
        structured=st.sampled_from([None, *STRUCTURES]),
    ),
    arrives_at=st.integers(0, 12),
    aborted_after=st.none() | st.integers(2, 20),
)


@pytest.mark.parametrize("name", ["off", "ngram", "draft", "draft+ngram"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schedule=st.lists(busy_jobs, min_size=3, max_size=5),
    num_blocks=st.sampled_from([8, 11]),
    most=st.sampled_from([2, 9]),
    budget=st.sampled_from([7, 33]),
    vocab=st.sampled_from([130, "all"]),
)
def test_all_of_it_at_once_gives_the_bits_of_none(
    folder, name, schedule, num_blocks, most, budget, vocab
):
    """Prefix cache, host tier, drafts, choices, penalties, structures, aborts, in a tiny pool."""
    path = model_path(folder, "q8_0")
    expected = [alone(path, job) for job in schedule]
    is_paid = name.startswith("draft")
    spec = f"{name}:model={draft_path(folder, 'near')},window=40,vocab={vocab}" if is_paid else name
    with (
        patch("paceline.engine.speculation.speculator.Goodput", eager_pace(most)),
        patch(KV_SHARE, 0.5),
    ):
        engine = make_engine(
            path, speculate=spec, num_threads=2, max_num_seqs=4, max_batched_tokens=budget,
            kv_memory_bytes=num_blocks * (1 + is_paid) * BLOCK_BYTES,
            kv_tier=f"host:size={8 * BLOCK_BYTES}",
        )  # fmt: skip
    compare(run(engine, schedule), expected)
    engine.stop(5)


@pytest.mark.parametrize("name", ["ngram", "draft", "draft+ngram"])
def test_a_hundred_prompts_keep_to_a_schema_that_closes_early(folder, name, caplog):
    """SPC-02: nothing that is drafted after the last brace comes."""
    path = model_path(folder, "q8_0")
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 20, 300]}},
        "required": ["ok", "n"], "additionalProperties": False,
    }  # fmt: skip
    rng = random.Random(2)
    schedule = [
        Job(
            tuple(rng.randrange(256) for _ in range(rng.randrange(3, 40))),
            SamplingParams(
                max_tokens=100, temperature=0, logprobs=1,
                structured=Structured(json_schema=schema), frequency_penalty=rng.choice([0, -2]),
            ),
            arrives_at=i // 4,
        )
        for i in range(100)
    ]  # fmt: skip
    expected = [alone(path, job) for job in schedule]
    is_paid = name.startswith("draft")
    spec = f"{name}:model={draft_path(folder, 'near')}" if is_paid else name
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace(8)):
        engine = make_engine(path, speculate=spec, num_threads=2)
    results = run(engine, schedule)
    stats = engine.stats().speculation
    engine.stop(5)
    assert results == expected
    for [(tokens, _, end)] in results:
        assert end == "stop"
        assert json.loads(engine._maker.tokenizer.decode(list(tokens))).keys() == {"ok", "n"}
    assert stats.num_drafted > 100
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("widths", [(0, 40), (40, 0), (8, 40)], ids=["draft", "target", "both"])
def test_heads_padded_to_other_sizes_draft_for_each_other(folder, widths):
    """LOD-05 (c): no id beyond the tokenizer is proposed or chosen."""
    num_tokens = len(TinyTokenizer().tokens)
    target, draft = (
        write_gguf(random_model("llama", seed=3, vocab_size=num_tokens + width),
                   folder / f"padded by {width}.gguf", fmt="q8_0")
        for width in widths
    )  # fmt: skip
    schedule = [
        Job(tuple(range(i, i + 20)), SamplingParams(
            max_tokens=30, temperature=1.5, seed=i, logprobs=1, ignore_eos=True))
        for i in range(4)
    ]  # fmt: skip
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace(4)):
        engine = make_engine(target, speculate=f"draft:model={draft}", num_threads=2)
    assert run(engine, schedule) == [alone(target, job) for job in schedule]
    stats = engine.stats().speculation
    engine.stop(5)
    assert stats.num_drafted > 20


def test_a_draft_model_from_paceline_quantize_gives_the_bits_without(folder):
    """A folder in other bits than the model that it drafts for, and with a short head."""
    path = model_path(folder, "q8_0")
    done = quantize(path, "--format", "int4", "--embeddings", "keep", "-o", folder / "int4")
    assert done.returncode == 0, done.stderr
    schedule = [
        Job(tuple(range(i, i + 20)), SamplingParams(
            max_tokens=30, temperature=i % 2, seed=i, logprobs=1, ignore_eos=True))
        for i in range(4)
    ]  # fmt: skip
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace(4)):
        engine = make_engine(path, speculate=f"draft:model={folder / 'int4'},vocab=200")
    assert run(engine, schedule) == [alone(path, job) for job in schedule]
    stats = engine.stats().speculation
    engine.stop(5)
    assert stats.num_accepted > 10


@pytest.mark.parametrize("vocab", [1, 70, "all"])
def test_no_id_beyond_the_drafts_vocab_is_computed_or_proposed(folder, vocab):
    path = model_path(folder, "q8_0")
    schedule = [
        Job(tuple(range(i, i + 20)), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        for i in range(4)
    ]
    spec = f"draft:model={draft_path(folder, 'near')},vocab={vocab}"
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace(4)):
        engine = make_engine(path, speculate=spec, num_threads=2)
    num_ids = len(TinyTokenizer().tokens) if vocab == "all" else vocab
    assert sole_output(shadows_of(engine)._backend.plan).cols == num_ids
    guessed = record_guesses(engine)
    assert run(engine, schedule) == [alone(path, job) for job in schedule]
    engine.stop(5)
    assert len(guessed) > 20
    assert max(guessed) < num_ids
    assert vocab != "all" or max(guessed) > 70


def record_guesses(engine: Engine) -> list[int]:
    """Return a list that fills with the tokens of every draft."""
    guessed: list[int] = []
    model = engine._speculator._proposer
    propose = model.propose

    def recording(wanted):
        drafts = propose(wanted)
        guessed.extend(token for draft in drafts for token in draft.tokens)
        return drafts

    model.propose = recording
    return guessed


def shadows_of(engine: Engine) -> Shadows:
    assert engine._speculator is not None
    proposer = engine._speculator._proposer
    assert proposer is not None, "drafting failed"
    return getattr(proposer, "_paid", proposer)._shadows


def test_trees_beside_prompts_in_a_tiny_pool_are_accepted_and_change_nothing(folder):
    """All at once: trees, preemption, several sequences, sampling with penalties."""
    path = model_path(folder, "q4_0")
    schedule = [
        Job(prompt=tuple(range(i, i + 40)), params=SamplingParams(
            max_tokens=30, temperature=0.8, seed=i, logprobs=3, ignore_eos=True,
            repetition_penalty=1.2), arrives_at=i)
        for i in range(4)
    ]  # fmt: skip
    expected = [alone(path, job) for job in schedule]
    proposer = Oracle(
        lambda seq: (*seq.request.prompt_token_ids, *expected[int(seq.request.id)][0][0]),
        wild_tree(256),
    )
    engine = drafting_engine(
        path, proposer, 9, num_threads=2, max_batched_tokens=24, kv_memory_bytes=9 * BLOCK_BYTES
    )
    assert run(engine, schedule) == expected
    stats = engine.stats()
    engine.stop(5)
    assert stats.num_preemptions > 0
    assert stats.speculation is not None
    assert stats.speculation.num_accepted > 20


def test_a_small_pace_of_its_own_accord_changes_nothing_either(folder):
    """The real pace, which drafts when it pays on this machine."""
    path = model_path(folder, "q8_0")
    job = Job(prompt=(1, 2, 3, 4) * 10, params=SamplingParams(
        max_tokens=60, temperature=0, logprobs=2, ignore_eos=True))  # fmt: skip
    engine = make_engine(path, speculate="ngram:max=6")
    assert run(engine, [job]) == [alone(path, job)]
    engine.stop(5)


def test_speculation_is_off_unless_asked_for():
    assert EngineConfig().speculate == "off"
