"""Law 1 and the books over made schedules: every request answers as it does alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.engine.engine import Engine
from paceline.engine.kv_tier import KVTier
from paceline.engine.sampler import choice_seed
from paceline.errors import ParameterError
from paceline.types import Request, SamplingParams
from tests.unit.scripted_engine import VOCAB, Answers, make_engine, make_request, run

MAX_LEN = 96


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it arrives, and the one before which it is aborted."""

    request: Request
    step: int
    abort_step: int | None


@dataclass(frozen=True)
class Schedule:
    arrivals: list[Arrival]
    engine: dict[str, Any]
    has_tier: bool


class DictStore(dict[bytes, Any]):
    """A store that a tier writes to at once."""

    is_lasting = False

    def put(self, key: bytes, tokens: bytes, block: Any, *, wait_s: float = 0.0) -> bool:
        self[key] = (tokens, block.copy())
        return True

    def get(self, key: bytes, tokens: bytes) -> Any:  # type: ignore[override]
        stored, block = self[key]
        assert stored == tokens
        return block

    def touch(self, key: bytes) -> None:
        pass

    def latest(self) -> list[bytes]:
        return list(self)


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> Request:
    options: dict[str, Any] = {
        "max_tokens": draw(st.sampled_from([1, 2, 9, 40, None])),
        "seed": draw(st.integers(0, 5)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "logprobs": draw(st.sampled_from([None, 1])),
        "ignore_eos": draw(st.booleans()),
    }
    extras = [
        {},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"stop": ("ab", "q", "xyz")},
        {"min_tokens": 1, "top_p": 0.7},
        {"bad_words": ("a", "bc"), "top_k": 9},
    ]
    options |= draw(st.sampled_from(extras))
    length = draw(st.sampled_from([1, 5, 15, 16, 17, 33, 60]))
    first = draw(st.integers(1, 3))  # few first tokens: prompts often share their beginning
    fork = draw(st.sampled_from([60, 60, 3, 20, 32, 47]))  # where a prompt leaves the others
    prompt = tuple((first + i + (i >= fork)) % VOCAB for i in range(length))
    return make_request(
        request_id,
        prompt,
        SamplingParams(**options),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from(["", "", "", "another tenant"])),
        tenant=draw(st.sampled_from(["", "", "b", "c"])),
        pin=draw(st.sampled_from(["", "", "", "p", "q"])),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    arrivals = [
        Arrival(
            draw(requests(str(i))),
            draw(st.integers(0, 12)),
            draw(st.sampled_from([None, None, None, 0, 4, 15])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    engine = {
        "num_blocks": draw(st.sampled_from([6, 7, 9, 14, 40])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 8])),
        "max_batched_tokens": draw(st.sampled_from([1, 3, 16, 31, 200])),
        "policy": draw(st.sampled_from(["fcfs", "priority", "slo:step_ms=1", "slo"])),
        "prefix_cache": draw(st.sampled_from([True, True, False])),
    }
    has_tier = engine["prefix_cache"] and draw(st.booleans())
    return Schedule(sorted(arrivals, key=lambda arrival: arrival.step), engine, has_tier)


def alone(request: Request) -> list[tuple[object, ...]]:
    """Return the outcome of each choice, each from a request of its own on a roomy engine."""
    params = request.params
    assert params.seed is not None
    outcomes = []
    for index in range(params.n):
        options = {name: getattr(params, name) for name in SamplingParams.__slots__}
        single = SamplingParams(**options | {"n": 1, "seed": choice_seed(params.seed, index)})
        engine = make_engine(max_model_len=MAX_LEN, max_batched_tokens=200)
        [answer] = run(engine, make_request(request.id, request.prompt_token_ids, single)).values()
        outcomes.append(answer.outcome())
    return outcomes


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_every_choice_equals_its_run_alone_and_the_books_close(schedule: Schedule) -> None:
    check(schedule, {arrival.request.id: alone(arrival.request) for arrival in schedule.arrivals})


def submit(engine: Engine, request: Request, answers: Answers) -> None:
    """Submit `request`, without its pin where there is no room for that."""
    try:
        engine.check(request)
    except ParameterError:
        request = replace(request, pin="")
    engine.submit(request, answers)


def check(
    schedule: Schedule, expected: dict[str, list[tuple[object, ...]]], **options: Any
) -> Engine:
    """Run a schedule; every choice has the outcome expected of it, or its beginning if aborted."""
    engine, answers, aborted = play(schedule, **options)
    for arrival in schedule.arrivals:
        request = arrival.request
        for index, outcome in enumerate(expected[request.id]):
            answer = answers[request.id, index]
            if answer.end.finish_reason == "abort":
                assert request.id in aborted
                tokens = outcome[1]
                assert isinstance(tokens, tuple)
                assert answer.token_ids == tokens[: len(answer.token_ids)]
            else:
                assert answer.outcome() == outcome
    return engine


def play(schedule: Schedule, **options: Any) -> tuple[Engine, Answers, set[str]]:
    """Run a schedule to its end; return the answers, and the requests that were aborted."""
    engine = make_engine(max_model_len=MAX_LEN, **schedule.engine, **options)
    if schedule.has_tier:
        assert engine._cache is not None
        engine._cache._tier = KVTier([DictStore()], engine._backend)  # type: ignore[arg-type]
    answers = Answers()
    pending = list(schedule.arrivals)
    aborted: set[str] = set()
    step = 0
    while True:
        while pending and pending[0].step <= step:
            submit(engine, pending.pop(0).request, answers)
        for arrival in schedule.arrivals:
            if arrival.abort_step is not None and arrival.step + arrival.abort_step == step:
                engine.abort(arrival.request.id)
                aborted.add(arrival.request.id)
        did_run = engine.step()
        engine.check_integrity()
        step += 1
        assert step < 3000
        if not did_run:
            assert not engine.stats().num_waiting
            if not pending:
                break
    for name in engine.pins():
        engine.unpin(name)
    engine.step()
    engine.check_integrity()
    assert engine.stats().num_live_blocks == 0
    return engine, answers, aborted
