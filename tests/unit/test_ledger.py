"""The ledger: every nanosecond of a sequence is booked once, and on the right account."""

import random

import pytest
from hypothesis import given, settings
from msgspec import structs

from paceline.engine.speculation.base import Draft
from paceline.measure.ledger import MAX_BLAMED, Ledger, Part, parts_ms, top_blame
from paceline.measure.recorder import StepRecorder
from paceline.measure.step_cost import StepCost
from paceline.measure.steps import Chunk, StepLog, StepRecord
from paceline.measure.work import StepWork
from paceline.types import SamplingParams
from tests.unit.proposers import Eager, Oracle, wild_chain
from tests.unit.scripted_backend import spelling_script
from tests.unit.scripted_engine import VOCAB, Answers, Clock, finish, make_engine, make_request
from tests.unit.test_schedules import play, schedules

MS = 1_000_000
WORK = StepWork(
    macs_per_token=1, macs_per_logit_row=1, macs_per_key=1, weight_bytes=1, kv_bytes_per_token=2,
    layers_of_window=((0, 2), (9, 1)),
)  # fmt: skip


class TickingClock(Clock):
    """Moves by a prime number of ns whenever it is read, so that nothing lasts zero."""

    def __call__(self) -> int:
        self.now_ns += 7
        return self.now_ns


class StepTimes:
    """A backend's duration: `base` ms a step and `per_token` ms a token."""

    def __init__(self, clock: Clock, *, base: float, per_token: float) -> None:
        self._clock, self._base, self._per_token = clock, base, per_token

    def __call__(self, step) -> None:
        self._clock.now_ns += int((self._base + self._per_token * len(step.tokens)) * MS)


def make(*, base=1.0, per_token=1.0, clock=None, **options):
    clock = clock or Clock()
    recorder = StepRecorder()
    on_forward = StepTimes(clock, base=base, per_token=per_token)
    return make_engine(clock=clock, recorder=recorder, on_forward=on_forward, **options), clock


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def ms(ledger: Ledger, part: Part) -> float:
    return ledger.ns[part] / MS


def ledgers(answers: Answers) -> dict[str, Ledger]:
    return {request_id: answer.end.ledger for (request_id, _), answer in answers.items()}


def assert_closes(ledger: Ledger) -> None:
    assert min(ledger.ns) >= 0
    assert sum(ledger.ns) == ledger.mark_ns - ledger.begin_ns == ledger.end_ns - ledger.begin_ns


# ---- one request ----


def test_a_lone_request_is_prefill_and_decode_and_nothing_else():
    engine, _ = make(max_batched_tokens=16)
    answers = Answers()
    engine.submit(make_request("a", (1,) * 30, greedy(3)), answers)
    finish(engine)
    ledger = ledgers(answers)["a"]
    assert parts_ms(ledger.ns, sum(ledger.ns)) == {"prefill": 32.0, "decode": 4.0, "residual": 0.0}
    assert_closes(ledger)


def test_time_before_the_first_step_is_the_queues():
    engine, clock = make()
    answers = Answers()
    engine.submit(make_request("a", (1, 2), greedy(1)), answers)
    clock.now_ns += 5 * MS
    finish(engine)
    assert ms(ledgers(answers)["a"], Part.QUEUE_BUDGET) == 5.0


def test_the_time_before_submission_is_the_engines():
    engine, clock = make()
    clock.now_ns = 10 * MS
    request = structs.replace(make_request("a", (1, 2), greedy(1)), arrival_ns=7 * MS)
    answers = Answers()
    engine.submit(request, answers)
    finish(engine)
    ledger = ledgers(answers)["a"]
    assert (ledger.begin_ns, ms(ledger, Part.ENGINE)) == (7 * MS, 3.0)


def test_the_first_text_keeps_the_account_of_its_moment():
    engine, _ = make()
    answers = Answers()
    engine.submit(make_request("a", (1, 2, 3), greedy(4)), answers)
    finish(engine)
    ledger = ledgers(answers)["a"]
    assert ledger.first_text is not None
    assert sum(ledger.first_text) == ledger.first_text_ns - ledger.begin_ns == 4 * MS
    assert ledger.first_text[Part.DECODE] == 0


# ---- together ----


def test_a_stream_blames_the_prompt_that_slowed_it():
    engine, _ = make(base=4.0, per_token=1.0, max_batched_tokens=32)
    answers = Answers()
    engine.submit(make_request("stream", (1,), greedy(20)), answers)
    for _ in range(4):  # steps of one token: what one costs alone is known
        engine.step()
    engine.submit(make_request("prompt", (1,) * 31, greedy(1)), answers)
    engine.step()  # one token of the stream, 31 of the prompt: 36 ms instead of 5
    finish(engine)
    stream, prompt = ledgers(answers)["stream"], ledgers(answers)["prompt"]
    assert ms(stream, Part.DECODE_OTHERS) == pytest.approx(31.0)
    assert stream.blame == {"prompt": pytest.approx(31 * MS)}
    assert ms(prompt, Part.PREFILL) == pytest.approx(35.0)
    assert ms(prompt, Part.PREFILL_OTHERS) == pytest.approx(1.0)
    assert prompt.blame == {}  # a decode is no prefill
    assert_closes(stream)
    assert_closes(prompt)


def test_a_step_of_decodes_is_booked_once_for_all_of_them(monkeypatch):
    engine, _ = make(clock=TickingClock(), max_num_seqs=16, max_batched_tokens=64)
    booked, spend = [], Ledger.spend
    monkeypatch.setattr(
        Ledger, "spend", lambda self, part, ns: booked.append(self) or spend(self, part, ns)
    )
    for count in (1, 15):
        answers = Answers()
        for number in range(count):
            engine.submit(make_request(str(number), (1, 2), greedy(12)), answers)
        engine.step()
        engine.step()
        booked.clear()
        for _ in range(4):
            engine.step()
            engine._recorder.settle()
        own = [engine.running(str(number))[0].ledger for number in range(count)]
        assert not any(ledger in own for ledger in booked)
        assert {ledger.share.num_steps() for ledger in own} == {6}
        finish(engine)
        for ledger in ledgers(answers).values():
            assert_closes(ledger)
            assert (ledger.share, ledger.num_steps) == (None, 12)


def test_a_reader_sees_what_decoders_share_in_the_ledger_of_each():
    engine, clock = make(clock=TickingClock(), max_batched_tokens=64)
    answers = Answers()
    for name in ("a", "b"):
        engine.submit(make_request(name, (1, 2, 3), greedy(20)), answers)
    for steps in range(1, 6):
        engine.step()
        engine._recorder.settle()
        for name in ("a", "b"):
            [seq] = engine.running(name)
            seen = seq.ledger.so_far(clock.now_ns + 5)
            assert sum(seen.ns) == engine._recorder.log.since(0)[-1].end_ns - seen.begin_ns
            assert (seen.num_steps, seen.last_step, seen.share) == (steps, steps - 1, None)
    assert seq.ledger.share is not None
    engine.submit(make_request("c", (1,) * 40, greedy(2)), answers)
    finish(engine)
    for name, ledger in ledgers(answers).items():
        assert_closes(ledger)
        assert ("c" in ledger.blame) == (name != "c")


@settings(max_examples=30, deadline=None)
@given(schedules())
def test_steps_that_are_noted_first_are_booked_as_if_at_once(schedule):
    books = []
    for max_noted in (0, 1, 3, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.measure.plain_steps.MAX_NOTED", max_noted)
            if not max_noted:
                patch.setattr(StepRecorder, "_is_plain", lambda self, schedule: False)
            recorder = StepRecorder(WORK)
            _, answers, _ = play(schedule, clock=TickingClock(), recorder=recorder)
        assert recorder._plain.is_empty
        counters = recorder.counters
        ledgers_by_choice = {
            key: structs.asdict(answer.end.ledger) for key, answer in answers.items()
        }
        totals = counters.gap_s.counts, counters.num_keys, counters.kv_bytes, counters.tokens
        books.append((ledgers_by_choice, recorder.log.since(0), totals, counters.phase_ns))
    assert books[0] == books[1] == books[2] == books[3]


def test_readers_are_a_tenth_of_a_second_behind_at_most():
    engine, clock = make(base=30.0)
    engine.submit(make_request("a", (1, 2), greedy(20)), Answers())
    for _ in range(15):
        engine.step()
        assert clock.now_ns - engine._recorder.log.since(0)[-1].end_ns <= 131 * MS


def test_waiting_for_kv_memory_is_told_from_waiting_for_a_seat():
    def waits(**options):
        engine, _ = make(max_batched_tokens=16, **options)
        answers = Answers()
        engine.submit(make_request("a", (1,) * 15, greedy(14)), answers)
        engine.submit(make_request("b", (1,) * 15, greedy(2)), answers)
        finish(engine)
        b = ledgers(answers)["b"]
        assert_closes(b)
        return ms(b, Part.QUEUE_BUDGET), ms(b, Part.QUEUE_KV)

    seat, kv = waits(max_num_seqs=1)
    assert seat > 20
    assert kv == 0
    seat, kv = waits(num_blocks=2, max_model_len=32)
    assert kv > 10
    assert seat <= 17  # the step that ran when it came


def test_waiting_for_the_same_prefix_of_another_has_its_own_account():
    engine, clock = make(max_batched_tokens=256, prefix_cache=True)
    answers = Answers()
    prompt = tuple(range(40)) * 4
    engine.submit(make_request("a", prompt, greedy(2)), answers)
    clock.now_ns += 3 * MS
    engine.submit(make_request("b", (*prompt, 1), greedy(1)), answers)
    clock.now_ns += 2 * MS
    finish(engine)
    a, b = ledgers(answers)["a"], ledgers(answers)["b"]
    assert (ms(a, Part.QUEUE_BUDGET), ms(a, Part.QUEUE_PREFIX)) == (5.0, 0.0)
    assert (ms(b, Part.QUEUE_BUDGET), ms(b, Part.QUEUE_PREFIX)) == (2.0, 161.0)
    assert ms(b, Part.PREFILL) + ms(b, Part.PREFILL_OTHERS) == 3.0  # one token, beside one of a
    for ledger in (a, b):
        assert_closes(ledger)


def test_an_abort_while_waiting_for_a_prefix_leaves_the_time_there():
    engine, clock = make(max_batched_tokens=256, prefix_cache=True)
    answers = Answers()
    for name in ("a", "b"):
        engine.submit(make_request(name, tuple(range(40)) * 4, greedy(1)), answers)
    engine.step()
    clock.now_ns += 4 * MS
    engine.abort("b")
    finish(engine)
    b = ledgers(answers)["b"]
    assert ms(b, Part.QUEUE_PREFIX) == 165.0
    assert_closes(b)


def test_the_look_up_is_booked_once_a_request():
    engine, _ = make(clock=TickingClock(), prefix_cache=True)
    answers = Answers()
    for name in ("a", "b"):
        engine.submit(make_request(name, (1,) * 40, greedy(4)), answers)
        finish(engine)
    for ledger in ledgers(answers).values():
        assert ledger.ns[Part.CACHE_LOOKUP] == 7  # one tick
        assert_closes(ledger)


def test_recompute_and_the_wait_before_it_are_the_price_of_a_preemption():
    engine, _ = make(num_blocks=4, max_model_len=64, max_batched_tokens=64)
    answers = Answers()
    for name in ("a", "b"):
        engine.submit(make_request(name, (1,) * 30, greedy(20)), answers)
    finish(engine)
    a, b = ledgers(answers)["a"], ledgers(answers)["b"]
    assert a.preempted_ns == 0
    assert b.num_preemptions == 1
    assert ms(b, Part.RECOMPUTE) > 30
    assert b.preempted_ns == b.ns[Part.RECOMPUTE] + b.ns[Part.QUEUE_KV]
    assert_closes(a)
    assert_closes(b)


def test_who_loses_a_seat_waits_for_a_seat_and_not_for_memory():
    engine, _ = make(max_num_seqs=1, policy="priority")
    answers = Answers()
    engine.submit(make_request("late", (1,) * 30, greedy(20)), answers)
    for _ in range(4):
        engine.step()
    engine.submit(make_request("first", (2,) * 30, greedy(20), priority=-1), answers)
    finish(engine)
    late = ledgers(answers)["late"]
    assert late.num_preemptions == 1
    assert late.ns[Part.QUEUE_KV] == 0
    assert ms(late, Part.QUEUE_BUDGET) > 20
    assert late.preempted_ns == late.ns[Part.RECOMPUTE] + late.ns[Part.QUEUE_BUDGET]
    assert_closes(late)


def test_choices_share_the_prompts_time_and_part_afterwards():
    engine, _ = make(max_batched_tokens=16)
    answers = Answers()
    engine.submit(make_request("a", (1,) * 30, greedy(3, n=3)), answers)
    finish(engine)
    for index in range(3):
        ledger = answers["a", index].end.ledger
        assert ms(ledger, Part.PREFILL) == 32.0
        assert ledger.blame == {}  # siblings are no strangers
        assert_closes(ledger)


def test_a_choice_without_a_seat_waited_in_the_queue_before_its_prompt_only():
    engine, clock = make(max_num_seqs=2)
    answers = Answers()
    engine.submit(make_request("a", (1,) * 20, greedy(5, n=4)), answers)
    clock.now_ns += 2 * MS
    finish(engine)
    for index in range(4):
        timings = answers["a", index].end.timings
        assert timings.queue_s == pytest.approx(0.002)
        assert timings.ttft_s == pytest.approx(0.023)
        assert_closes(answers["a", index].end.ledger)


def test_a_small_step_that_stalled_says_nothing_of_what_larger_ones_would_cost_alone():
    cost = StepCost()
    cost.observe(3, 218.0)  # the first step of a server
    cost.observe(24, 58.0)
    assert cost.share(1, 24) == pytest.approx(1 / 24)  # as if no small one had been seen
    cost.observe(1, 6.0)
    assert cost.share(1, 24) == pytest.approx(6 / 58)
    cost.observe(2, 5.0)  # one row waits for the weights as long as two: no stall
    assert cost.share(1, 2) == 1.0


def test_a_choice_without_a_seat_computes_the_prompt_again_and_blames_no_preemption():
    engine, _ = make(max_num_seqs=2, prefix_cache=False)
    answers = Answers()
    engine.submit(make_request("a", (1,) * 20, greedy(5, n=4)), answers)
    finish(engine)
    for index in range(4):
        ledger = answers["a", index].end.ledger
        assert (ms(ledger, Part.RECOMPUTE) >= 20) == (index >= 2)
        assert (ledger.num_preemptions, ledger.preempted_ns) == (0, 0)
        assert_closes(ledger)


def test_choices_given_up_in_the_prompt_have_its_time():
    engine, clock = make(max_batched_tokens=16)
    answers = Answers()
    engine.submit(make_request("a", (1,) * 60, greedy(3, n=3)), answers)
    engine.step()
    engine.step()
    clock.now_ns += 3 * MS
    engine.abort("a")
    finish(engine)
    for index in range(3):
        ledger = answers["a", index].end.ledger
        assert ms(ledger, Part.PREFILL) == 34.0
        assert ms(ledger, Part.QUEUE_BUDGET) == 0
        assert_closes(ledger)


def test_a_failed_step_stays_unexplained():
    clock = Clock()

    def explode(step):
        clock.now_ns += 9 * MS
        raise RuntimeError("no luck")

    engine = make_engine(clock=clock, recorder=StepRecorder(), on_forward=explode)
    answers = Answers()
    engine.submit(make_request("a"), answers)
    clock.now_ns += 2 * MS
    engine.step()
    ledger = ledgers(answers)["a"]
    wall_ns = ledger.end_ns - ledger.begin_ns
    assert parts_ms(ledger.ns, wall_ns) == {"residual": 11.0}


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_sums_close_over_random_schedules(seed, is_drafting):
    rng = random.Random(seed)
    drafting = {"proposer": Oracle(lambda seq: (), wild_chain(8)), "pace": Eager()}
    engine, clock = make(
        **(drafting if is_drafting else {}),
        clock=TickingClock(), base=0.3, per_token=0.01, num_blocks=rng.choice((12, 64)),
        max_model_len=128, max_num_seqs=rng.choice((2, 8)), max_batched_tokens=rng.choice((8, 64)),
        policy=rng.choice(("fcfs", "priority", "slo:step_ms=1")),
    )  # fmt: skip
    answers = Answers()
    for number in range(40):
        prompt = tuple(rng.randrange(1, 48) for _ in range(rng.randrange(1, 60)))
        params = greedy(rng.randrange(1, 30), n=rng.choice((1, 1, 3)))
        request = structs.replace(
            make_request(str(number), prompt, params, priority=rng.randrange(3)),
            arrival_ns=clock() - rng.randrange(1000),
        )
        engine.submit(request, answers)
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(str(rng.randrange(number + 1)))
    finish(engine)
    reasons = {answer.end.finish_reason for answer in answers.values()}
    assert reasons == {"length", "abort"}
    for answer in answers.values():
        ledger = answer.end.ledger
        assert_closes(ledger)
        assert sum(ledger.blame.values()) <= (
            ledger.ns[Part.DECODE_OTHERS] + ledger.ns[Part.PREFILL_OTHERS]
        )
        assert ledger.preempted_ns <= sum(
            ledger.ns[part] for part in (Part.RECOMPUTE, Part.QUEUE_KV, Part.QUEUE_BUDGET)
        )


# ---- drafts ----


def test_rows_of_a_draft_are_verify_and_those_in_vain_are_blamed():
    """A step of 1 + 4 rows takes 6 ms, one of 1 row 2 ms; of four guesses the third is wrong."""
    tokens = [9, 10, 11, 12, 13, 14, 15]
    text = [1, 2, 3, 9, 10, 11, 44, 13, 14, 15]
    engine, _ = make(
        script=spelling_script(VOCAB, 3, tokens), max_batched_tokens=64, pace=Eager(4),
        proposer=Oracle(lambda seq: text if len(seq.token_ids) == 4 else ()),
    )  # fmt: skip
    answers = Answers()
    engine.submit(make_request("warm", (1,), greedy(2)), answers)  # what one row costs
    finish(engine)
    engine.submit(make_request("a", (1, 2, 3), greedy(7)), answers)
    finish(engine)
    assert answers["a", 0].token_ids == tuple(tokens)
    ledger = ledgers(answers)["a"]
    assert_closes(ledger)
    assert ms(ledger, Part.VERIFY) == pytest.approx(4.0)
    assert ledger.rejected_ns / MS == pytest.approx(2.0)
    assert ms(ledger, Part.DECODE) == pytest.approx(2.0 * 4)
    step = next(s for s in engine._recorder.log.since(0) if s.num_tokens == 5)
    assert step.tokens_by_kind()[Part.VERIFY] == 4
    counters = engine._recorder.counters
    assert (counters.tokens[Part.VERIFY], counters.tokens[Part.RECOMPUTE]) == (4, 0)
    assert counters.gap_s.count == 6 + 1


def test_making_drafts_has_its_part_and_its_phase():
    clock = Clock()

    def slow(_, ahead, length):
        clock.now_ns += 3 * MS
        return Draft([])

    engine, _ = make(clock=clock, proposer=Oracle(lambda seq: (), slow), pace=Eager())
    answers = Answers()
    engine.submit(make_request("a", (1, 2, 3), greedy(4)), answers)
    finish(engine)
    ledger = ledgers(answers)["a"]
    assert_closes(ledger)
    assert ms(ledger, Part.DRAFT) == 3.0 * 2  # the last token has no place for a guess behind it
    assert engine._recorder.counters.phase_ns["draft"] == 6 * MS


# ---- the books of the steps ----


def test_a_steps_phases_fill_it_and_its_tokens_add_up():
    engine, _ = make(clock=TickingClock(), max_batched_tokens=16)
    recorder = engine._recorder
    answers = Answers()
    for name in ("a", "b", "c"):
        engine.submit(make_request(name, (1,) * 30, greedy(5)), answers)
    finish(engine)
    steps = recorder.log.since(0)
    assert [step.number for step in steps] == list(range(engine.stats().num_steps))
    for step in steps:
        assert step.phases[0][1] == step.start_ns
        assert step.phases[-1][2] == step.end_ns
        assert all(a[2] == b[1] for a, b in zip(step.phases, step.phases[1:], strict=False))
        assert sum(chunk.num_tokens for chunk in step.chunks) == step.num_tokens
    counters = recorder.counters
    assert (counters.tokens[Part.PREFILL], counters.tokens[Part.DECODE]) == (90, 12)
    assert sum(counters.tokens) == 102
    assert counters.num_sampled == engine.stats().num_generated_tokens == 15
    assert counters.gap_s.count == 12  # the first token of an answer has no gap before it
    assert sum(counters.phase_ns.values()) == sum(s.end_ns - s.start_ns for s in steps)


def test_the_log_of_steps_is_bounded_in_steps_and_in_chunks():
    log = StepLog(max_steps=10, max_chunks=12)
    for number in range(50):
        log.add(StepRecord(number=number, end_ns=number + 1, chunks=()))
    assert [step.number for step in log.since(0)] == list(range(40, 50))
    assert [step.number for step in log.since(48)] == [48, 49]
    chunk = Chunk("a", 0, 1, 0, Part.DECODE, True)
    for number in range(50, 54):
        log.add(StepRecord(number=number, end_ns=number + 1, chunks=(chunk,) * 5))
    assert [step.number for step in log.since(0)] == [52, 53]


def test_blame_is_bounded_and_loses_nothing():
    ledger = Ledger(begin_ns=0, mark_ns=0, short_ns=0)
    for number in range(1000):
        ledger.accuse(str(number), 3)
    assert len(ledger.blame) == MAX_BLAMED + 1
    assert sum(ledger.blame.values()) == 3000
    assert sum(ns for _, ns in top_blame(ledger.blame, 4)) == 3000
    assert len(top_blame(ledger.blame, 4)) == 5
    assert top_blame({"a": 1, "b": 5}, 4) == [("b", 5), ("a", 1)]


# ---- the cost of a step ----


def test_a_shared_step_is_divided_by_what_each_would_have_cost_alone():
    cost = StepCost()
    for _ in range(20):
        cost.observe(1, 10.0)
        cost.observe(101, 60.0)
    assert cost.share(1, 101) == pytest.approx(1 / 6)
    assert cost.cost(51) == pytest.approx(35.0)
    assert cost.share(101, 101) == 1.0


def test_without_a_smaller_step_to_compare_with_a_token_is_a_token():
    cost = StepCost()
    assert cost.share(2, 8) == 0.25
    cost.observe(8, 40.0)
    assert cost.share(2, 8) == 0.25


def test_nobody_is_charged_less_than_the_share_of_the_tokens():
    cost = StepCost()
    for _ in range(20):
        cost.observe(4, 1.0)
        cost.observe(8, 100.0)
    assert cost.share(4, 8) == 0.5
    assert cost.share(1, 8) == 0.125
