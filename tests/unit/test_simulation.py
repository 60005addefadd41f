"""The simulated server: the steps of the real engine, and times that follow from their costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline.engine.known_costs import Points
from paceline.explain.facts import CallFacts, ServerFacts
from paceline.explain.load import Asked, load_of
from paceline.explain.simulation import simulate
from paceline.types import SamplingParams
from tests.unit.scripted_engine import BLOCK_SIZE, Answers, make_engine, make_request

SERVER = ServerFacts(
    model="m", isa="avx2", num_threads=2, machine_threads=2, max_num_seqs=8,
    max_batched_tokens=64, max_model_len=512, block_size=BLOCK_SIZE, num_blocks=64, kv_dtype="f16",
    kv_token_bytes=1, weight_bytes=1, num_parameters=1, policy="fcfs", prefix_cache=False,
)  # fmt: skip


class Line:
    """10 ms a step and 1 ms a token; remembers the steps."""

    def __init__(self, *, python_s: float = 0.0, known: Points = ()) -> None:
        self.steps: list[tuple[int, int]] = []
        self.keys: list[float] = []
        self.python_s, self.known = python_s, known

    def seconds(self, num_decode: float, num_prefill: int, mean_keys: float | None = None) -> float:
        self.steps.append((int(num_decode), num_prefill))
        self.keys.append(mean_keys)
        return 0.010 + 0.001 * (num_decode + num_prefill)


def asked(num_prompt: int, num_output: int, *, at_s: float = 0.0, after: int | None = None,
          num_shared: int = 0) -> Asked:  # fmt: skip
    return Asked(
        num_prompt=num_prompt, num_shared=num_shared, num_output=num_output, num_steps=num_output,
        after=after, delay_s=at_s,
    )  # fmt: skip


# Prompts of one step and of several, answers of one token and of many.
LOAD = [asked(p, n) for p, n in ((40, 30), (100, 5), (3, 1), (17, 60), (64, 12), (150, 2), (9, 33))]


def engine_steps(load: list[Asked], server: ServerFacts) -> tuple[list[tuple[int, int]], int]:
    """Return (rows that decode, tokens of prompts) of each step of the engine; and preemptions."""
    engine = make_engine(
        num_blocks=server.num_blocks, max_num_seqs=server.max_num_seqs,
        max_batched_tokens=server.max_batched_tokens, policy=server.policy,
        prefix_cache=server.prefix_cache,
    )  # fmt: skip
    answers = Answers()
    for i, call in enumerate(load):
        params = SamplingParams(
            temperature=0, max_tokens=call.num_output, ignore_eos=True, n=call.num_choices
        )
        own = [i + 1] * (call.num_prompt - call.num_shared)
        prompt = (0,) * call.num_shared + tuple(own)
        engine.submit(make_request(str(i), prompt, params), answers)
    steps = []
    while engine.step():
        step = engine.last_step
        steps.append((step.num_tokens - step.num_prefill_tokens, step.num_prefill_tokens))
    return steps, engine.stats().num_preemptions


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 2},
        {"max_batched_tokens": 8},
        {"num_blocks": 10},
        {"policy": "priority"},
    ],
    ids=str,
)
def test_the_steps_are_those_of_the_engine(changes):
    server, costs = replace(SERVER, **changes), Line()
    steps, num_preemptions = engine_steps(LOAD, server)
    assert simulate(LOAD, server, costs) is not None
    assert costs.steps == steps
    assert (num_preemptions > 0) == ("num_blocks" in changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_seqs": 3}, {"num_blocks": 14}, {"max_num_seqs": 2, "prefix_cache": True}],
    ids=str,
)
def test_choices_of_a_call_take_the_steps_that_the_engine_gives_them(changes):
    server, costs = replace(SERVER, **changes), Line()
    load = [replace(one, num_choices=n) for one, n in zip(LOAD, (1, 4, 3, 2, 5, 1, 2), strict=True)]
    steps, num_preemptions = engine_steps(load, server)
    found = simulate(load, server, costs)
    assert costs.steps == steps
    assert len(found.ttft_ms) == len(load)
    assert (num_preemptions > 0) == ("num_blocks" in changes)


def test_a_call_ends_with_the_last_of_its_choices():
    found = simulate(
        [replace(asked(64, 3), num_choices=2)], replace(SERVER, max_num_seqs=1), Line()
    )
    # The second waits for two steps of the first, and has to compute the prompt again.
    assert found.tpot_ms == pytest.approx([(2 * 11 + 74 + 11 + 11) / 2])


def test_a_shared_beginning_is_computed_once_where_the_engine_does():
    load = [asked(80 + i, 4, num_shared=64) for i in range(4)]
    server = replace(SERVER, prefix_cache=True)
    costs, cold = Line(), Line()
    simulate(load, server, costs)
    assert costs.steps == engine_steps(load, server)[0]
    simulate(load, SERVER, cold)
    spared = sum(p for _, p in cold.steps) - sum(p for _, p in costs.steps)
    assert spared == 3 * 64


def test_times_are_those_of_the_steps_before_a_token():
    found = simulate([asked(64, 3), asked(64, 3)], replace(SERVER, max_num_seqs=1), Line())
    # 64 tokens take 74 ms, a row 11 ms: the second waits for 74 + 2 x 11 ms.
    assert found.ttft_ms == pytest.approx([74, 96 + 74])
    assert found.tpot_ms == pytest.approx([11, 11])
    assert found.at("ttft", 99) == pytest.approx(170)
    assert found.at("tpot", 50) == pytest.approx(11)


def test_a_call_that_comes_later_waits_for_nothing():
    found = simulate([asked(64, 3), asked(64, 3, at_s=10.0)], SERVER, Line())
    assert found.ttft_ms == pytest.approx([74, 74])


def test_who_follows_another_call_comes_when_that_one_has_ended():
    follows = [asked(64, 3), asked(64, 3, after=0, at_s=0.005)]
    slow = simulate(follows, replace(SERVER, max_batched_tokens=8), Line())
    # Eight steps of 8 tokens, for each: the second finds the server idle however slow it is.
    assert slow.ttft_ms == pytest.approx([8 * 18, 8 * 18])


def test_answers_of_one_token_have_no_tpot():
    assert simulate([asked(5, 1)], SERVER, Line()).at("tpot", 50) is None


def test_tokens_that_took_no_step_share_the_time_of_those_that_did():
    guessed = replace(asked(64, 9), num_steps=3)
    found = simulate([guessed], SERVER, Line())
    assert found.tpot_ms == pytest.approx([2 * 11 / 8])  # as a call's own is: by all its tokens


def test_a_call_that_no_memory_holds_is_not_predicted():
    assert simulate([asked(100, 2)], replace(SERVER, num_blocks=4), Line()) is None


def test_a_pool_of_any_size_is_simulated():
    huge, costs = Line(), Line()
    simulate(LOAD, replace(SERVER, num_blocks=10**12), huge)
    simulate(LOAD, replace(SERVER, num_blocks=1000), costs)
    assert huge.steps == costs.steps


def test_a_bound_on_steps_is_kept_by_the_policy_itself():
    stream, prompt = asked(8, 40), asked(200, 1, at_s=0.2)
    free, bound = Line(), Line()
    simulate([stream, prompt], SERVER, free)
    simulate([stream, prompt], replace(SERVER, policy="slo:step_ms=30"), bound)
    assert max(p for d, p in free.steps if d) == 63
    assert max(p for d, p in bound.steps if d) < 30


def beside_a_stream(costs: Line) -> int:
    """Return the most tokens of a prompt that a bound of 30 ms lets into a step of a stream."""
    stream, prompt = asked(8, 40), asked(200, 1, at_s=0.02)
    simulate([stream, prompt], replace(SERVER, policy="slo:step_ms=30"), costs)
    return max(p for d, p in costs.steps if d)


def test_a_policy_begins_with_what_the_engine_knows_of_its_steps():
    known = ((1, 0.005), (64, 0.014), (512, 0.078))  # cheaper than they turn out to be
    assert beside_a_stream(Line(known=known)) == 63
    assert beside_a_stream(Line()) < 30


def test_a_policy_learns_of_the_forward_alone():
    # A token takes 1 ms: 30 of them fit, or 20 with the 10 ms that are the engine's Python.
    assert beside_a_stream(Line(python_s=0.010)) > beside_a_stream(Line())


def test_a_call_comes_when_its_prompt_is_ready():
    costs = Line()
    ready = [replace(asked(30, 3, at_s=at_s), ready_s=0.05 - at_s) for at_s in (0.0, 0.04)]
    found = simulate(ready, SERVER, costs)
    assert costs.steps == [(0, 60), (2, 0), (2, 0)]
    assert found.ttft_ms == pytest.approx([70, 70])


def test_a_client_asks_again_when_it_has_the_answer():
    other = asked(8, 20)
    first = replace(asked(8, 2), tail_s=0.1)
    costs = Line()
    simulate([other, first, asked(8, 2, after=1)], SERVER, costs)
    # It ends after two steps; ten of the other pass until its client asks again.
    assert [i for i, (_, p) in enumerate(costs.steps) if p] == [0, 12]


def test_a_call_without_content_has_no_ttft():
    silent = replace(asked(64, 1), has_content=False)
    found = simulate([silent, asked(64, 3)], replace(SERVER, max_num_seqs=1), Line())
    assert found.ttft_ms == pytest.approx([74 + 74])
    assert found.tpot_ms == pytest.approx([11])


def test_costs_are_told_how_many_keys_a_token_attends_to():
    costs = Line()
    simulate([asked(100, 3)], SERVER, costs)
    assert costs.steps == [(0, 64), (0, 36), (1, 0), (1, 0)]
    assert costs.keys == [32.5, 64 + 18.5, 101, 102]


def call(began_at: float, wall_ms: float, **known) -> CallFacts:
    facts = {"ttft_ms": 1.0, "parts": {}, "prompt_tokens": 10, **known}
    return CallFacts(
        wall_ms=wall_ms, first_parts={}, others_prefill_ms=0.0, completion_tokens=5,
        began_at=began_at, **facts,
    )  # fmt: skip


def test_what_a_call_spends_before_and_after_the_engine_is_known_of_it():
    parts = {"receive": 1.0, "parse": 2.0, "template": 3.0, "tokenise": 4.0, "prefill": 50.0,
             "handoff": 6.0, "send": 20.0}  # fmt: skip
    (found,) = load_of([call(0, 100, parts=parts)])
    assert (found.ready_s, found.tail_s) == pytest.approx((0.010, 0.026))
    assert found.has_content
    assert not load_of([call(0, 100, ttft_ms=None)])[0].has_content


def test_what_the_prefix_cache_found_is_shared_also_by_those_that_came_too_early_for_it():
    calls = [
        call(at_s, 500, ttft_ms=200.0, prompt_tokens=60, cached_tokens=cached)
        for at_s, cached in ((0.0, 0), (0.1, 0), (0.3, 27), (0.4, 40))
    ]
    assert [asked.num_shared for asked in load_of(calls)] == [40, 27, 27, 40]
    assert [asked.num_shared for asked in load_of(calls[:2])] == [0, 0]


def test_what_the_prefix_cache_had_given_up_is_shared_only_where_all_is_found():
    known = {"prompt_tokens": 60, "repeated_tokens": 32}
    calls = [call(0, 10), call(1, 10, cached_tokens=0, **known), call(2, 10, **known)]
    assert [asked.num_shared for asked in load_of(calls, finds_all=False)] == [0, 0, 0]
    assert [asked.num_shared for asked in load_of(calls)] == [10, 32, 32]


def test_a_turn_of_a_conversation_finds_all_of_the_turns_before_it():
    """Of two conversations that take turns: a prompt repeats the one before, and has 50 more."""
    turns = [
        call(i, 100, prompt_tokens=50 * (1 + i // 2), repeated_tokens=i // 2 * 50 // 32 * 32)
        for i in range(8)
    ]
    load, costs = load_of(turns), Line()
    simulate(load, replace(SERVER, prefix_cache=True, num_blocks=256), costs)
    computed = sum(asked.num_prompt - asked.num_shared for asked in load[2:])
    # What the cache finds is to the token, so nothing that repeats is computed.
    assert sum(p for _, p in costs.steps) == 2 * 50 + computed
    assert [asked.donor for asked in load] == [None, None, 1, 2, 3, 4, 5, 6]


def test_a_call_that_begins_when_another_ends_has_waited_for_it():
    # Two clients that ask one thing after the other, and one that comes by itself.
    calls = [call(7.0, 1000), call(7.1, 400), call(7.505, 300), call(8.01, 10), call(9.0, 10)]
    load = load_of(calls[::-1])
    assert [asked.after for asked in load] == [None, None, 1, 0, None]
    assert [asked.delay_s for asked in load] == pytest.approx([0, 0.1, 0.005, 0.01, 2.0])


def test_choices_of_a_call_are_as_long_as_the_mean_one():
    (found,) = load_of(
        [replace(call(0, 1, num_choices=2, unstepped_tokens=4), completion_tokens=12)]
    )
    assert (found.num_output, found.num_steps, found.num_choices) == (6, 4, 2)


def test_tokens_that_took_no_step_are_no_steps_of_the_load():
    (found,) = load_of([call(0, 1, unstepped_tokens=3)])
    assert (found.num_output, found.num_steps) == (5, 2)
