"""Structured answers in the engine, by grammars that tests can read."""

from __future__ import annotations

import logging
import threading
from itertools import takewhile

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.errors import PacelineError, ParameterError
from paceline.measure.ledger import Part
from paceline.measure.recorder import StepRecorder
from paceline.types import SamplingParams, Structured
from tests.unit.scripted_engine import (
    LETTERS,
    VOCAB,
    Answers,
    finish,
    make_engine,
    make_request,
    run,
)

STRUCTURED = Structured(regex="as the grammar of the test says")


class Cycle:
    """A grammar: at place i only the letters of `sets[i]`, and nothing follows the last place."""

    def __init__(self, *sets: str, log: list[str] | None = None) -> None:
        self.sets = [[i for i in range(VOCAB) if LETTERS._pieces[i] in letters] for letters in sets]
        self.log = log

    def start(self, *, may_end_early: bool) -> CycleState:
        return CycleState(self)


class CycleState:
    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._place = 0

    def fill(self, mask: np.ndarray) -> None:
        if self._cycle.log is not None:
            self._cycle.log.append(threading.current_thread().name)
        mask[:] = 0
        for i in self._cycle.sets[self._place]:
            mask[i // 32] |= np.uint32(1 << i % 32)

    def forced(self, limit: int) -> list[int]:
        ahead = takewhile(lambda ids: len(ids) == 1, self._cycle.sets[self._place : -1])
        return [ids[0] for ids in ahead][:limit]

    def commit(self, token_id: int) -> bool:
        if token_id not in self._cycle.sets[self._place]:
            raise PacelineError(f"token {token_id} may not come here")
        self._place += 1
        return self._place == len(self._cycle.sets)


def structured(request_id: str, grammar: Cycle, **params):
    params = {"temperature": 0, "max_tokens": 40, "structured": STRUCTURED, **params}
    return replace(make_request(request_id, params=SamplingParams(**params)), grammar=grammar)


def test_an_answer_keeps_to_its_grammar_and_stops_where_nothing_may_follow():
    answers = run(make_engine(), structured("a", Cycle("xyz", "bcd", "q")))
    answer = answers["a", 0]
    assert len(answer.text) == 3
    assert (answer.text[0] in "xyz", answer.text[1] in "bcd", answer.text[2]) == (True, True, "q")
    assert (answer.end.finish_reason, answer.end.stop_reason) == ("stop", None)
    assert answer.end.usage.completion_tokens == 3


def test_a_grammar_binds_sampled_choices_too_and_each_has_its_own_state():
    request = structured("a", Cycle("xyz", "bcdefg", "hijk"), temperature=1, n=6, seed=1)
    answers = run(make_engine(max_num_seqs=4), request)
    texts = [answers["a", i].text for i in range(6)]
    assert all(t[0] in "xyz" and t[1] in "bcdefg" and t[2] in "hijk" for t in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("num_blocks", [64, 5])
def test_a_grammar_gives_the_same_tokens_in_any_batch_and_after_preemption(num_blocks):
    grammar = Cycle(*["abcdefghij", "klmnop"] * 18)
    plain = make_request("plain", params=SamplingParams(temperature=0, max_tokens=30))
    alone = {r.id: run(make_engine(), r) for r in (structured("a", grammar), plain)}
    engine = make_engine(num_blocks=num_blocks)
    other = structured("b", grammar, logit_bias={3: 5.0})
    together = run(engine, structured("a", grammar), plain, other)
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 5)
    for key in ("a", "plain"):
        assert together[key, 0].token_ids == alone[key][key, 0].token_ids


def test_masks_are_made_on_another_thread_while_the_model_runs():
    log: list[str] = []
    filled = threading.Event()

    class Slow(Cycle):
        def start(self, *, may_end_early):
            state = super().start(may_end_early=may_end_early)
            fill = state.fill
            state.fill = lambda mask: (fill(mask), filled.set())[0]
            return state

    seen = []

    def during_forward(step):
        seen.append(filled.wait(5))
        filled.clear()

    engine = make_engine(on_forward=during_forward)
    run(engine, structured("a", Slow("ab", "cd", log=log)))
    assert seen == [True, True]
    assert all(name.startswith("masks") for name in log)
    engine.stop()


def test_a_grammar_that_fails_ends_its_own_request_only():
    def fail(token_id):
        raise PacelineError("it is too complex")

    class Broken(Cycle):
        def start(self, *, may_end_early):
            state = super().start(may_end_early=may_end_early)
            state.commit = fail
            return state

    plain = make_request("plain", params=SamplingParams(temperature=0, max_tokens=5))
    alone = run(make_engine(), plain)["plain", 0]
    answers = run(make_engine(), structured("a", Broken("ab")), plain)
    assert answers["a", 0].end.finish_reason == "error"
    assert "it is too complex" in answers["a", 0].end.error
    assert answers["plain", 0].token_ids == alone.token_ids


def test_a_grammar_that_asks_for_too_much_is_told_from_one_that_fails(caplog):
    def refuse(token_id):
        raise ParameterError("it is too complex", param="structured")

    class Demanding(Cycle):
        def start(self, *, may_end_early):
            state = super().start(may_end_early=may_end_early)
            state.commit = refuse
            return state

    end = run(make_engine(), structured("a", Demanding("ab")))["a", 0].end
    assert (end.finish_reason, end.error, end.error_param) == (
        "error", "it is too complex", "structured"
    )  # fmt: skip
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_mask_that_fails_ends_its_own_request_only(caplog):
    class Panic(BaseException):
        pass

    class Broken(Cycle):
        def start(self, *, may_end_early):
            state = super().start(may_end_early=may_end_early)
            state.fill = fail
            return state

    def fail(mask):
        raise Panic

    good = structured("good", Cycle("ab", "cd"))
    alone = run(make_engine(), good)["good", 0]
    answers = run(make_engine(), structured("a", Broken("ab"), bad_words=("c",)), good)
    assert answers["a", 0].end.finish_reason == "error"
    assert answers["a", 0].end.error_param is None  # not the request's doing, bad words or not
    assert answers["good", 0].token_ids == alone.token_ids
    assert "a mask failed" in caplog.text


def test_a_step_that_fails_leaves_no_mask_behind(caplog):
    fails = iter([True])

    def fail_once(step):
        if next(fails, False):
            raise RuntimeError("no luck")

    plain = make_request("plain", params=SamplingParams(temperature=0, max_tokens=5))
    alone = run(make_engine(), plain)["plain", 0]
    engine = make_engine(on_forward=fail_once)
    assert run(engine, structured("a", Cycle("ab")))["a", 0].end.finish_reason == "error"
    assert run(engine, plain)["plain", 0].token_ids == alone.token_ids


def test_logit_bias_cannot_lift_what_the_grammar_forbids():
    bias = {LETTERS._pieces.index("b"): 100.0}
    assert run(make_engine(), structured("a", Cycle("xy"), logit_bias=bias))["a", 0].text in "xy"


def test_forbidding_all_that_the_grammar_allows_is_an_error_that_says_so():
    ids = Cycle("x").sets[0]
    bias = dict.fromkeys(ids, -100.0)
    answers = run(make_engine(), structured("a", Cycle("x"), logit_bias=bias))
    assert answers["a", 0].text == "x"  # a bias is no ban
    banned = run(make_engine(), structured("a", Cycle("x"), bad_words=["x"]))
    assert "structured" in (banned["a", 0].end.error or "structured")


def test_a_structure_without_its_grammar_is_refused():
    params = SamplingParams(structured=STRUCTURED)
    with pytest.raises(ParameterError, match="structured is given, but no grammar") as caught:
        make_engine().submit(make_request(params=params), Answers())
    assert caught.value.param == "structured"


def test_the_wait_for_masks_is_the_grammars_part_of_the_ledger():
    ticks = iter(range(1, 10**6))
    engine = make_engine(recorder=StepRecorder(), clock=lambda: next(ticks) * 1_000_000)
    answers = Answers()
    engine.submit(structured("a", Cycle("ab", "cd")), answers)
    engine.submit(make_request("plain"), plain := Answers())
    finish(engine)
    ledger = answers["a", 0].end.ledger
    assert ledger.ns[Part.GRAMMAR] > 0
    assert sum(ledger.ns) == ledger.mark_ns - ledger.begin_ns
    assert plain["plain", 0].end.ledger.ns[Part.GRAMMAR] > 0  # it waited in the same steps
    assert engine._recorder.counters.phase_ns["grammar"] > 0


@pytest.mark.parametrize(
    "fields",
    [{}, {"regex": "a", "grammar": "b"}, {"json_object": True, "regex": "a"}, {"choice": ("",)},
     {"regex": 5}, {"choice": "abc"}],
)  # fmt: skip
def test_a_structure_is_exactly_one_thing(fields):
    with pytest.raises(ParameterError):
        Structured(**fields)
