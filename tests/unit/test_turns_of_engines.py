"""Engines that share the cores: one step at a time, in turns."""

import threading
import time
from itertools import pairwise

import pytest

from paceline.config import EngineConfig
from paceline.embedding.build import open_embedder
from paceline.engine.turns import Turns
from paceline.measure.ledger import Part
from paceline.measure.recorder import StepRecorder
from paceline.weights.checkpoint import open_checkpoint
from tests.tiny import random_model, write_gguf
from tests.unit.scripted_engine import Answers, Clock, make_engine, make_request
from tests.unit.test_ledger import MS, StepTimes, assert_closes, greedy, make, ms


def wait_until(is_true):
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_finds_it_free_does_not_wait():
    turns = Turns()
    for _ in range(3):
        with turns as waited_ns:
            assert waited_ns == 0


def test_one_is_inside_at_a_time_and_who_waits_longest_is_next():
    turns = Turns()
    order: list[int] = []
    inside: list[int] = []

    def enter(number):
        with turns as waited_ns:
            assert not inside
            assert waited_ns > 0
            inside.append(number)
            order.append(number)
            inside.clear()

    with turns:
        threads = [threading.Thread(target=enter, args=(i,)) for i in range(5)]
        for num_waiting, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda n=num_waiting: len(turns._waiting) == n)
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2, 3, 4]


def test_a_turn_is_passed_on_after_an_error():
    turns = Turns()
    try:
        with turns:
            raise ValueError
    except ValueError:
        pass
    with turns as waited_ns:
        assert waited_ns == 0


def test_two_engines_step_in_turns():
    """Each step is begun while the other engine waits: neither gets two in a row."""
    turns = Turns()
    steps: list[str] = []
    engines, answers = [], Answers()

    def noted(name):
        def note(step):
            steps.append(name)
            if len(steps) > 2:  # both are under way: this one's step lasts until the other waits
                wait_until(lambda: turns._waiting or len(steps) > 50)

        return note

    for name in ("a", "b"):
        engine = make_engine(on_forward=noted(name), turns=turns)
        engine.submit(make_request(name, (1, 2), greedy(30)), answers)
        engines.append(engine)
    for engine in engines:
        engine.start()
    wait_until(lambda: len(answers) == 2 and all(a.is_finished for a in answers.copy().values()))
    for engine in engines:
        engine.stop()
    middle = steps[4:40]
    assert all(first != second for first, second in pairwise(middle))


def test_texts_are_embedded_in_turns_too(tmp_path):
    """A text of several steps leaves others a turn between two of them."""
    checkpoint = open_checkpoint(write_gguf(random_model(), tmp_path / "m.gguf"))
    turns, config = CountedTurns(), EngineConfig(num_threads=1, max_batched_tokens=16)
    embedder = open_embedder(checkpoint, config, max_len=64, pooling="mean", turns=turns)
    embedder.embed([[5] * 40])
    embedder.close()
    assert turns.num_taken == 3


class CountedTurns(Turns):
    num_taken = 0

    def __enter__(self):
        self.num_taken += 1
        return super().__enter__()


def test_what_a_turn_was_waited_for_is_a_part_of_its_own_and_the_ledger_closes():
    engine, clock = make(max_batched_tokens=64)
    answers = Answers()
    for name in ("a", "b"):
        engine.submit(make_request(name, (1, 2, 3), greedy(20)), answers)
    while True:
        engine._turn_ns = 5 * MS
        clock.now_ns += 5 * MS
        if not engine.step():
            break
    for name in ("a", "b"):
        ledger = answers[name, 0].end.ledger
        assert_closes(ledger)
        assert ms(ledger, Part.TURN) == 5.0 * ledger.num_steps == 100.0
        assert ms(ledger, Part.QUEUE_BUDGET) == 0


def test_the_next_engine_of_a_model_goes_on_with_its_totals_and_numbers():
    recorder = StepRecorder()
    for num_steps in (3, 6):
        engine = make_engine(
            recorder=recorder, on_forward=StepTimes(Clock(), base=1.0, per_token=0.0)
        )
        answers = Answers()
        engine.submit(make_request("a", (1, 2), greedy(3)), answers)
        while engine.step():
            pass
        recorder.settle()
        assert recorder.counters.num_steps == num_steps
        recorder = recorder.successor()
        assert [step.number for step in recorder.log.since(0)] == list(range(num_steps))


@pytest.mark.parametrize("num_steps", [0, 3])
def test_who_leaves_while_another_engine_has_the_turn_has_waited_for_it(num_steps):
    engine, clock = make()
    answers = Answers()
    engine.submit(make_request("a", (1,) * 10, greedy(9)), answers)
    for _ in range(num_steps):
        engine.step()
    clock.now_ns += 7 * MS
    engine._turn_ns = 5 * MS
    engine.abort("a")
    engine.step()
    ledger = answers["a", 0].end.ledger
    assert ms(ledger, Part.TURN) == 5.0
    assert ms(ledger, Part.ENGINE if num_steps else Part.QUEUE_BUDGET) == 2.0
    assert sum(ledger.ns) == ledger.end_ns - ledger.begin_ns
