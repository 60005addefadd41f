"""Speculation changes no token, no log-probability and no end: on == off, whatever is guessed."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.sequence import Sequence
from paceline.engine.speculation.base import ROOT, Draft
from paceline.types import SamplingParams
from tests.unit.proposers import Eager, Oracle, Shape, wild_chain, wild_tree
from tests.unit.scripted_backend import fixed_script, spelling_script
from tests.unit.scripted_engine import (
    VOCAB,
    Answer,
    Answers,
    finish,
    make_engine,
    make_request,
    run,
)
from tests.unit.test_masks import Cycle, structured
from tests.unit.test_schedules import Schedule, alone, check, schedules

SHAPES: dict[str, Shape | None] = {
    "perfect": None, "tree": wild_tree(VOCAB), "chain": wild_chain(VOCAB),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(schedules(), st.sampled_from(sorted(SHAPES)), st.sampled_from([1, 3, 8]), st.integers(0, 9))
def test_any_schedule_with_drafts_equals_each_request_alone_without(
    schedule: Schedule, shape: str, most: int, seed: int
) -> None:
    expected = {arrival.request.id: alone(arrival.request) for arrival in schedule.arrivals}

    def text(seq: Sequence) -> tuple[int, ...]:
        tokens = expected[seq.request.id][seq.index][1]
        assert isinstance(tokens, tuple)
        return (*seq.request.prompt_token_ids, *tokens)

    proposer = Oracle(text, SHAPES[shape], seed)
    check(schedule, expected, proposer=proposer, pace=Eager(most))


def both(params: SamplingParams, **options: Any) -> tuple[Answer, Answer, int]:
    """Return the answers without and with perfect drafts, and the steps that those took."""
    [plain] = run(make_engine(**options), make_request(params=params)).values()
    return plain, *with_perfect_drafts(params, plain, **options)


def with_perfect_drafts(
    params: SamplingParams, plain: Answer, *, most: int = 8, **options: Any
) -> tuple[Answer, int]:
    """Return the answer with drafts of `plain` and more, and the steps that it took."""
    request = make_request(params=params)
    text = (*request.prompt_token_ids, *plain.token_ids, 7, 7, 7, 7, 7, 7, 7, 7)
    engine = make_engine(proposer=Oracle(lambda seq: text), pace=Eager(most), **options)
    [drafted] = run(engine, request).values()
    return drafted, engine.stats().num_steps


@pytest.mark.parametrize("end_at", range(1, 13))
@pytest.mark.parametrize("kind", ["end token", "stop string"])
def test_an_end_inside_a_draft_ends_the_text_there(end_at: int, kind: str) -> None:
    """SPC-01: every place of the end, cap and draft length; the drafts are right throughout."""
    tokens = [9 + i for i in range(20)]
    if kind == "end token":
        tokens[end_at - 1] = 0
    script = spelling_script(VOCAB, 3, tokens)
    stop = (chr(97 + tokens[end_at - 2]) + chr(97 + tokens[end_at - 1]),) if end_at > 1 else ("j",)
    for cap in range(1, 15):
        params = SamplingParams(
            temperature=0, max_tokens=cap, logprobs=1, stop=stop if kind == "stop string" else ()
        )
        [plain] = run(make_engine(script), make_request(params=params)).values()
        for most in range(1, 9):
            drafted = with_perfect_drafts(params, plain, script=script, most=most)[0]
            assert drafted.outcome() == plain.outcome()
        assert plain.end.finish_reason == ("stop" if end_at <= cap else "length")
        assert plain.end.usage is not None
        assert plain.end.usage.completion_tokens == min(end_at, cap)


PENALTIES = [
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "temperature": 0.9},
    {"logit_bias": {9: -100.0, 4: 3.0}},
    {"min_tokens": 20, "logit_bias": {0: 50.0}},
    {"bad_words": ("a", "bc", "def")},
]


@pytest.mark.parametrize("options", PENALTIES, ids=lambda o: next(iter(o)))
def test_penalties_and_bans_advance_along_the_draft(options: dict[str, Any]) -> None:
    """SPC-02."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, "seed": 1, **options})
    plain, drafted, num_steps = both(params)
    assert drafted.outcome() == plain.outcome()
    assert num_steps < 10 or len(plain.token_ids) < 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_grammar_advances_along_the_draft(shape: str, temperature: float) -> None:
    """SPC-02: every token keeps to the structure, which ends the answer inside a draft."""
    grammar = Cycle(*["abcdefghij", "klmnop"] * 9, "q")
    request = structured("a", grammar, temperature=temperature, seed=3)
    plain_request = make_request("b", params=SamplingParams(temperature=0, max_tokens=30))
    plain = run(make_engine(), request, plain_request)
    texts = {
        r.id: (*r.prompt_token_ids, *plain[r.id, 0].token_ids) for r in (request, plain_request)
    }
    engine = make_engine(
        proposer=Oracle(lambda seq: texts[seq.request.id], SHAPES[shape], 5), pace=Eager(4)
    )
    drafted = run(engine, request, plain_request)
    assert {key: a.outcome() for key, a in drafted.items()} == {
        key: a.outcome() for key, a in plain.items()
    }
    assert len(drafted["a", 0].token_ids) == 19
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_accepted > 5


def test_a_perfect_draft_of_k_gives_k_plus_one_tokens_a_step() -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=1 + 4 * 9, ignore_eos=True)
    plain, drafted, num_steps = both(params)
    assert drafted.token_ids == plain.token_ids
    assert num_steps == 1 + 4  # the prompt's, and four steps of 8 + 1 tokens
    timings = drafted.end.timings
    assert timings is not None
    assert (timings.num_drafted, timings.num_accepted) == (32, 32)


def test_rows_of_a_branch_that_was_right_move_behind_the_text() -> None:
    """The right branch is the second one: its K and V lie behind those of the wrong one."""

    def branches(_: object, ahead: list[int], length: int) -> Draft:
        if length < 4 or len(ahead) < 2:
            return Draft([])
        wrong = (ahead[0] + 1) % VOCAB
        return Draft([wrong, wrong, *ahead[:2]], [ROOT, 0, ROOT, 2])

    request = make_request(params=SamplingParams(temperature=0, max_tokens=22, ignore_eos=True))
    [plain] = run(make_engine(), request).values()
    text = (*request.prompt_token_ids, *plain.token_ids)
    engine = make_engine(proposer=Oracle(lambda seq: text, branches), pace=Eager())
    [answer] = run(engine, request).values()
    assert answer.outcome() == plain.outcome()  # the scripted logits depend on every token
    stats = engine.stats()
    assert stats.speculation is not None
    assert stats.speculation.num_accepted == 12
    assert stats.num_steps == 1 + 6 + 3  # the prompt, drafts of two right tokens, no room for four


def test_drafts_take_free_blocks_only_and_give_them_back() -> None:
    """Two sequences fill the pool but for one block: a draft of eight preempts nobody."""
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    requests = [make_request(name, tuple(range(1, 15)), params) for name in "ab"]
    plain = run(make_engine(num_blocks=4), *requests)
    texts = {r.id: (*r.prompt_token_ids, *plain[r.id, 0].token_ids) for r in requests}
    engine = make_engine(
        num_blocks=4, proposer=Oracle(lambda seq: texts[seq.request.id]), pace=Eager(8)
    )
    answers = Answers()
    for request in requests:
        engine.submit(request, answers)
    engine.step()
    engine.step()
    assert engine.stats().num_live_blocks == 4  # 14 + 9 tokens each
    finish(engine)
    assert engine.stats().num_preemptions == 0
    assert {key: a.outcome() for key, a in answers.items()} == {
        key: a.outcome() for key, a in plain.items()
    }


def test_logits_that_are_not_finite_behind_a_wrong_guess_harm_nobody() -> None:
    """Only the path that is taken is looked at."""
    tokens = [9, 10, 11, 12]

    def script(context: list[int]) -> Any:
        if 40 in context:
            return np.full(VOCAB, np.nan, np.float32)
        return spelling_script(VOCAB, 3, tokens)(context)

    engine = make_engine(script, proposer=Oracle(lambda seq: [40] * 20), pace=Eager())
    [answer] = run(
        engine, make_request(params=SamplingParams(temperature=0, max_tokens=4))
    ).values()
    assert list(answer.token_ids) == tokens


def test_a_proposer_that_fails_is_left_alone_and_the_texts_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: object, ahead: list[int], length: int) -> Draft:
        raise RuntimeError("no idea")

    request = make_request(params=SamplingParams(temperature=0, max_tokens=20))
    [plain] = run(make_engine(), request).values()
    engine = make_engine(proposer=Oracle(lambda seq: [1] * 99, broken), pace=Eager())
    with caplog.at_level(logging.ERROR):
        [answer] = run(engine, request).values()
    assert answer.outcome() == plain.outcome()
    assert caplog.text.count("drafting failed") == 1


def test_a_sequence_that_ended_is_released() -> None:
    tokens = [9, 10, 11, 0]  # the end token lies in the draft
    proposer = Oracle(lambda seq: [1, 2, 3, *tokens, 9])
    engine = make_engine(spelling_script(VOCAB, 3, tokens), proposer=proposer, pace=Eager())
    params = SamplingParams(temperature=0, max_tokens=20)
    run(engine, make_request("a", params=params), make_request("b", params=params))
    assert sorted(proposer.released) == [0, 1]
    assert engine._speculator is not None
    assert not engine._speculator._of


def test_requests_take_turns_on_one_engine_with_drafts_and_without() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [make_request(name, (1, 2, n), params) for n, name in enumerate("abcd")]
    plain = run(make_engine(), *requests)
    texts = {name: plain[name, 0].token_ids for name in "abcd"}
    sizes: list[int] = []
    pace = Eager(3)
    engine = make_engine(
        on_forward=lambda step: sizes.append(len(step.tokens)),
        proposer=Oracle(lambda seq: (*seq.request.prompt_token_ids, *texts[seq.request.id])),
        pace=pace,
    )
    answers = Answers()
    for request in requests:
        engine.submit(request, answers)

    def rows(num_steps: int) -> list[int]:
        """Return the rows of so many steps more."""
        for _ in range(num_steps):
            assert engine.step()
            engine.check_integrity()
        taken, sizes[:] = sizes[:], []
        return taken

    engine.limit_to({"a", "b"}, drafts=False)
    assert rows(3) == [6, 2, 2]
    assert (engine.stats().num_running, engine.stats().num_waiting, len(pace.seen)) == (2, 2, 0)
    engine.limit_to({"c", "d"}, drafts=True)
    assert rows(3) == [6, 8, 8]
    engine.limit_to({"b"}, drafts=True)
    assert rows(1) == [4]
    lengths = {name: len(answers[name, 0].token_ids) for name in "abcd"}
    assert lengths == {"a": 3, "b": 7, "c": 9, "d": 9}
    assert len(pace.seen) == 4  # steps without drafts are none of the pace's business
    engine.limit_to(set(), drafts=True)
    assert not engine.step()
    engine.limit_to(None, drafts=True)
    assert rows(1) == [16]
    finish(engine)
    assert {key: answer.outcome() for key, answer in answers.items()} == {
        key: answer.outcome() for key, answer in plain.items()
    }


def test_positions_count_drafted_and_accepted_tokens() -> None:
    tokens = [9, 10, 11, 12, 13]
    text = [1, 2, 3, 9, 10, 11, 44, 13]  # wrong at the fourth
    engine = make_engine(
        spelling_script(VOCAB, 3, tokens), proposer=Oracle(lambda seq: text), pace=Eager(3)
    )
    run(engine, make_request(params=SamplingParams(temperature=0, max_tokens=5)))
    stats = engine.stats().speculation
    assert stats is not None
    assert (stats.num_drafts, stats.num_drafted, stats.num_accepted) == (1, 3, 2)
    assert stats.drafted_at[:4] == [1, 1, 1, 0]
    assert stats.accepted_at[:4] == [1, 1, 0, 0]


def test_masks_and_depths_of_a_tree() -> None:
    draft = Draft([5, 6, 7, 8], [ROOT, 0, 0, ROOT])
    assert draft.depths() == [1, 2, 2, 1]
    assert draft.masks() == [0b1, 0b11, 0b111, 0b1011, 0b10001]
    assert draft.accept(5)
    assert draft.accept(7)
    assert not draft.accept(5)
    assert draft.path == [0, 2]


P_TARGET, P_DRAFT = (0.6, 0.3, 0.1), (0.1, 0.3, 0.6)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.85)])
def test_sampled_tokens_keep_the_targets_distribution(temperature: float, top_p: float) -> None:
    """SPC-04: a context-free target, guesses drawn from another distribution, 800 seeds."""
    num_seeds, length = 800, 4
    weights = np.asarray(P_TARGET) ** (1 / temperature)
    if top_p < 1:
        weights[2] = 0  # 0.6 and 0.3 are 0.9 already
    shares = weights / weights.sum()

    def guess(rng: Any, _: list[int], n: int) -> Draft:
        return Draft(rng.choices([1, 2, 3], P_DRAFT, k=n))

    def texts(**options: Any) -> tuple[list[tuple[int, ...]], Any]:
        logits = np.full(VOCAB, -100.0, np.float32)
        logits[1:4] = np.log(P_TARGET)
        engine = make_engine(fixed_script(logits), max_num_seqs=32, num_blocks=128, **options)
        params = [
            SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=length)
            for seed in range(num_seeds)
        ]
        requests = [make_request(str(i), params=p) for i, p in enumerate(params)]
        answers = run(engine, *requests)
        return [answers[r.id, 0].token_ids for r in requests], engine.stats().speculation

    plain, _ = texts()
    drafted, stats = texts(proposer=Oracle(lambda seq: (), guess, seed=1), pace=Eager(length))
    assert drafted == plain
    for position in range(length):
        counts = np.bincount([text[position] for text in drafted], minlength=4)[1:4]
        expected = shares * num_seeds
        seen = expected > 0
        assert counts[~seen].sum() == 0
        chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
        assert chi_square < 13.8  # p = 0.001 with two degrees of freedom
    accepted = stats.accepted_at[0] / stats.drafted_at[0]
    assert accepted == pytest.approx(float(shares @ np.asarray(P_DRAFT)), abs=0.05)
    assert stats.num_accepted <= stats.num_drafted
