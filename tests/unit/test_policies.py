from __future__ import annotations

import statistics

import pytest

from paceline.backends.base import StepInput
from paceline.errors import ParameterError
from paceline.policies.base import Budget, load_policy
from paceline.policies.slo import SLO, Options
from paceline.types import Delta, SamplingParams
from tests.unit.scripted_engine import Answers, Clock, finish, make_engine, make_request
from tests.unit.test_scheduler import add, make_scheduler

BASE_S, TOKEN_S = 4e-3, 0.25e-3  # what a step costs in these tests


def learned(options: Options, sizes: tuple[int, ...] = (1, 40, 7, 1, 20, 64) * 3) -> SLO:
    policy = SLO(options)
    for num_tokens in sizes:
        policy.observe(num_tokens, BASE_S + TOKEN_S * num_tokens)
    return policy


@pytest.mark.parametrize("name", ["fcfs", "priority", "slo"])
def test_unknown_options_are_errors(name: str) -> None:
    with pytest.raises(ParameterError, match="colour"):
        load_policy(f"{name}:colour=blue")


def test_unknown_policies_are_errors_that_name_the_known_ones() -> None:
    with pytest.raises(ParameterError, match="fcfs, priority, slo"):
        load_policy("lifo")


@pytest.mark.parametrize(
    "spec", ["slo:step_ms=fast", "slo:step_ms=0", "slo:floor=0", "slo:floor=nan"]
)
def test_absurd_options_are_errors(spec: str) -> None:
    with pytest.raises(ParameterError):
        load_policy(spec)


def test_orders_are_arrival_and_priority_then_arrival() -> None:
    scheduler = make_scheduler()
    a, b, c = (add(scheduler, i, 4, priority) for i, priority in enumerate((2, 0, 2)))
    assert load_policy("fcfs").order([c, b], [a], 0) == [a, b, c]
    assert load_policy("slo").order([c, b], [a], 0) == [a, b, c]
    assert load_policy("priority").order([c, b], [a], 0) == [b, a, c]


def test_slo_learns_what_fits_into_a_step() -> None:
    assert learned(Options(step_ms=24)).num_fitting() == pytest.approx(80, abs=1)


def test_slo_follows_a_cost_that_changes() -> None:
    policy = learned(Options(step_ms=24))
    for num_tokens in (1, 40, 7, 20, 64) * 30:
        policy.observe(num_tokens, BASE_S + 2 * TOKEN_S * num_tokens)
    assert policy.num_fitting() == pytest.approx(40, abs=1)


def test_slo_limits_prefill_only_next_to_decodes() -> None:
    policy = learned(Options(step_ms=24, floor=16))
    seq = add(make_scheduler(), 0, 1000)
    assert policy.quota(seq, Budget(512)) == 512
    assert policy.quota(seq, Budget(502, num_decodes=10)) == pytest.approx(70, abs=1)
    assert policy.quota(seq, Budget(442, num_decodes=10, num_prefill=60)) == pytest.approx(
        10, abs=1
    )
    assert policy.quota(seq, Budget(30, num_decodes=10)) == 30


def test_slo_gives_the_floor_without_data_and_beyond_its_bound() -> None:
    seq = add(make_scheduler(), 0, 1000)
    assert SLO(Options(floor=16)).quota(seq, Budget(500, num_decodes=3)) == 16
    assert learned(Options(step_ms=1, floor=16)).quota(seq, Budget(500, num_decodes=3)) == 16


def test_slo_with_steps_of_one_size_errs_on_the_safe_side() -> None:
    policy = learned(Options(step_ms=24), sizes=(8,) * 20)
    assert 0 < policy.num_fitting() <= 80


def test_slo_does_not_take_the_noise_of_small_steps_for_the_cost_of_a_token() -> None:
    policy = SLO(Options(step_ms=60, floor=4))
    for _ in range(40):
        policy.observe(3, 25e-3)
        policy.observe(4, 25.1e-3)  # by this, 352 tokens would fit
    assert policy.num_fitting() == 8
    policy.observe(8, 34e-3)  # what a token costs is known now
    assert 8 < policy.num_fitting() <= 16


class Times:
    """A sink that notes when each token came."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times_s: list[float] = []

    def __call__(self, delta: Delta) -> None:
        self.times_s += [self.clock.now_ns / 1e9] * len(delta.token_ids)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def decoder_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("policy", ["fcfs", "slo:step_ms=12"])
def test_long_prompts_do_not_starve_a_stream(policy: str) -> None:
    clock = Clock()
    durations: list[float] = []

    def work(step: StepInput) -> None:
        duration_s = BASE_S + TOKEN_S * len(step.tokens)
        durations.append(duration_s)
        clock.now_ns += int(duration_s * 1e9)

    engine = make_engine(
        clock=clock, on_forward=work, policy=policy, num_blocks=256, max_model_len=1400
    )
    stream, short = Times(clock), Answers()
    engine.submit(make_request("stream", params=decoder_params(300)), stream)
    waits: list[float] = []
    for i in range(300):
        if engine.stats().num_running + engine.stats().num_waiting < 5:  # four clients, 20 chunks
            engine.submit(make_request(f"long{i}", (1,) * 1280, decoder_params(1)), Answers())
        if i % 30 == 29:
            engine.submit(make_request(f"short{i}", (3,), decoder_params(2)), short)
        engine.step()
    mixed = statistics.median(durations)
    assert max(stream.gaps_s) <= 5 * mixed
    if policy != "fcfs":
        assert statistics.median(stream.gaps_s) <= 0.013
    finish(engine)
    for answer in short.values():
        assert answer.end.timings is not None
        waits.append(answer.end.timings.ttft_s)
    assert len(waits) == 10
    assert max(waits[5:]) <= 1.5 * max(waits[:5])


@pytest.mark.parametrize("policy", ["fcfs", "slo:step_ms=14"])
def test_steady_streams_do_not_starve_a_long_prompt(policy: str) -> None:
    def ttft(num_streams: int) -> float:
        clock = Clock()

        def work(step: StepInput) -> None:
            clock.now_ns += int((BASE_S + TOKEN_S * len(step.tokens)) * 1e9)

        engine = make_engine(
            clock=clock, on_forward=work, policy=policy, num_blocks=256, max_model_len=1400
        )
        for i in range(num_streams):
            engine.submit(make_request(str(i), (1, i), decoder_params(400)), Answers())
        for _ in range(10):
            engine.step()
        answers = Answers()
        engine.submit(make_request("long", (2,) * 1280, decoder_params(1)), answers)
        finish(engine)
        timings = answers["long", 0].end.timings
        assert timings is not None
        return timings.ttft_s

    assert ttft(7) <= 4 * ttft(0)
