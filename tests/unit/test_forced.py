"""Tokens that a structure forces: they cost rows instead of steps, and change nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.engine import Engine
from paceline.engine.sequence import Sequence
from paceline.types import Request, SamplingParams
from tests.unit.proposers import Eager, Oracle
from tests.unit.scripted_engine import Answers, finish, make_engine, make_request, run
from tests.unit.test_masks import Cycle, CycleState, structured


def silent() -> Any:
    """Return a patch under which no grammar tells what it forces."""
    return patch.object(CycleState, "forced", lambda self, limit: [])


def outcomes(engine: Engine, *requests: Request) -> dict[Any, Any]:
    return {key: answer.outcome() for key, answer in run(engine, *requests).items()}


def test_forced_tokens_take_no_step_of_their_own() -> None:
    request = structured("a", Cycle("abc", "w", "x", "y", "efg", "z", "ijk"), logprobs=2)
    with silent():
        plain = make_engine()
        expected = outcomes(plain, request)
    engine = make_engine()
    [answer] = run(engine, request).values()
    assert {("a", 0): answer.outcome()} == expected
    assert (plain.stats().num_steps, engine.stats().num_steps) == (7, 3)
    assert engine.stats().num_forced_tokens == 4
    assert engine.stats().speculation is None
    timings = answer.end.timings
    assert timings is not None
    assert (timings.num_forced, timings.num_drafted, timings.num_accepted) == (4, 0, 0)


def test_a_token_that_ends_the_answer_takes_no_row() -> None:
    rows = []
    engine = make_engine(on_forward=lambda step: rows.append(len(step.tokens)))
    run(engine, structured("a", Cycle("x", "y", "z")))
    assert rows == [3, 2]  # the prompt gives x, the row of x gives y, and that of y the end


def test_beside_other_streams_the_policy_bounds_what_is_forced() -> None:
    forced = structured("a", Cycle("abc", *"wxyzwxyzwxyzwxyzwxyz"))
    plain = make_request("b", (1, 2, 3), SamplingParams(temperature=0, max_tokens=40))
    rows: dict[str, list[int]] = {}
    answers = {}
    for policy in ("fcfs", "slo:step_ms=0.001,floor=3"):
        seen = rows.setdefault(policy, [])
        engine = make_engine(
            policy=policy, on_forward=lambda step, to=seen: to.append(len(step.tokens))
        )
        answers[policy] = outcomes(engine, forced, plain)
    assert answers["fcfs"] == answers["slo:step_ms=0.001,floor=3"]
    assert max(rows["fcfs"][1:]) > 20
    assert max(rows["slo:step_ms=0.001,floor=3"][1:]) == 1 + 1 + 3  # both tokens, and the floor


@pytest.mark.parametrize("num_left", range(1, 7))
def test_the_cap_ends_an_answer_inside_forced_tokens(num_left: int) -> None:
    request = structured("a", Cycle("xyz", *"wxyzwxy"), max_tokens=num_left)
    with silent():
        expected = outcomes(make_engine(), request)
    assert outcomes(make_engine(), request) == expected


grammars = st.lists(
    st.sampled_from(["w", "x", "y", "z", "defgh", "abcdefghijk"]), min_size=1, max_size=30
).map(lambda sets: Cycle(*sets))


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> Request:
    options: dict[str, Any] = {
        "max_tokens": draw(st.sampled_from([1, 3, 30])),
        "temperature": draw(st.sampled_from([0.0, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "n": draw(st.sampled_from([1, 1, 2])),
        "logprobs": draw(st.sampled_from([None, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.8])),
    }
    if draw(st.sampled_from([True, True, False])):
        return structured(request_id, draw(grammars), **options)
    return make_request(request_id, params=SamplingParams(**options))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).flatmap(
        lambda starts: st.tuples(*(requests(str(i)).map(lambda r, s=s: (s, r))
                                   for i, s in enumerate(starts)))
    ),
    st.sampled_from([5, 7, 40]),
    st.sampled_from([1, 4, 64]),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_any_schedule_gives_what_each_request_gets_alone_without(
    schedule: tuple[tuple[int, Request], ...], num_blocks: int, max_batched_tokens: int,
    drafts: bool, aborts: bool,
) -> None:  # fmt: skip
    """Tiny pools, preemption, several choices, aborts, scores of prompts, beside other drafts."""
    with silent():
        expected = {r.id: run(make_engine(), r) for _, r in schedule}

    def text(seq: Sequence) -> tuple[int, ...]:
        answer = expected[seq.request.id][seq.request.id, seq.index]
        return (*seq.request.prompt_token_ids, *answer.token_ids)

    engine = make_engine(
        num_blocks=num_blocks, max_model_len=80, max_batched_tokens=max_batched_tokens,
        prefix_cache=True, proposer=Oracle(text) if drafts else None, pace=Eager(3),
    )  # fmt: skip
    answers = Answers()
    for step in range(8):
        for start, request in schedule:
            if start == step:
                engine.submit(request, answers)
        if aborts and step == 5:
            engine.abort("0")
        engine.step()
        engine.check_integrity()
    finish(engine)
    engine.check_integrity()
    for _, request in schedule:
        for index in range(request.params.n):
            answer, alone = answers[request.id, index], expected[request.id][request.id, index]
            if answer.end.finish_reason == "abort":
                assert answer.token_ids == alone.token_ids[: len(answer.token_ids)]
            else:
                assert answer.outcome() == alone.outcome()


def test_a_grammar_that_is_wrong_about_it_costs_rows_and_changes_nothing() -> None:
    request = structured("a", Cycle(*["abcdef", "ghijkl"] * 6))
    with silent():
        expected = outcomes(make_engine(), request)
    with patch.object(CycleState, "forced", lambda self, limit: [25, 24][:limit]):
        engine = make_engine()
        assert outcomes(engine, request) == expected
    assert engine.stats().num_forced_tokens == 0


def test_a_grammar_that_fails_to_tell_is_not_believed_and_the_answer_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Panic(BaseException):
        pass

    def fail(self: CycleState, limit: int) -> list[int]:
        raise Panic

    request = structured("a", Cycle("x", "y", "z"))
    with silent():
        expected = outcomes(make_engine(), request)
    with patch.object(CycleState, "forced", fail):
        assert outcomes(make_engine(), request) == expected
    assert "cannot tell what it forces" in caplog.text


def test_beside_a_proposer_each_step_takes_what_is_forced_or_else_a_guess() -> None:
    request = structured("a", Cycle("abc", "w", "x", "defg", "hijk", "z", "mno"))
    with silent():
        [plain] = run(make_engine(), request).values()
    text = (*request.prompt_token_ids, *plain.token_ids)
    pace = Eager(8)
    engine = make_engine(proposer=Oracle(lambda seq: text), pace=pace)
    [answer] = run(engine, request).values()
    assert answer.outcome() == plain.outcome()
    stats = engine.stats()
    assert (stats.num_steps, stats.num_forced_tokens) == (3, 2)  # a, then w x d, then the rest
    assert stats.speculation is not None
    assert stats.speculation.num_drafted == stats.speculation.num_accepted == 3
    # The pace is told of forced rows as of any others.
    assert [(s["num_rows"], s["num_drafted"]) for s in pace.seen[1:]] == [(3, 0), (4, 3)]
