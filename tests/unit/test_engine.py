from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import F32, StepInput
from paceline.engine.engine import Engine
from paceline.engine.sampler import choice_seed
from paceline.errors import PacelineError, ParameterError, PromptTooLongError
from paceline.types import Delta, SamplingParams
from tests.unit.piece_tokenizer import PieceTokenizer
from tests.unit.scripted_backend import fixed_script, hashed_script, spelling_script
from tests.unit.scripted_engine import (
    BLOCK_SIZE,
    VOCAB,
    Answers,
    Clock,
    finish,
    make_engine,
    make_request,
    run,
)

ANY_TEXT = PieceTokenizer([*"<XYab>", "<end>", "<turn>"], special=[6, 7])


def greedy(max_tokens: int | None = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def test_penalties_count_output_and_only_repetition_counts_the_prompt() -> None:
    expected = {
        "none": ("XXXXXX", {}),
        "presence": ("XYXXXX", {"presence_penalty": 1.5}),
        "frequency": ("XXXYXY", {"frequency_penalty": 0.4}),
        "repetition": ("YXXXXX", {"repetition_penalty": 2.0}),
    }
    x = 1
    requests = [
        make_request(name, (x,) * 5, greedy(6, **options))
        for name, (_, options) in expected.items()
    ]
    script = fixed_script([-1, 5, 4, -2, -3, -1, -9, -9])
    alone = [run(make_engine(script, tokenizer=ANY_TEXT, eos_ids=()), r) for r in requests]
    together = run(make_engine(script, tokenizer=ANY_TEXT, eos_ids=()), *requests)
    for request, answers in zip(requests, alone, strict=True):
        assert answers[request.id, 0].text == expected[request.id][0]
        assert together[request.id, 0].text == expected[request.id][0]


def test_penalties_survive_a_preemption() -> None:
    script = fixed_script([-1, 5, 4, -2, -3, -1, -9, -9])
    # 14 + 6 tokens each: two of the three fit three blocks until they grow.
    options = {"presence_penalty": 1.5, "frequency_penalty": 0.4}
    requests = [make_request(str(i), (1,) * 14, greedy(6, **options)) for i in range(3)]
    engine = make_engine(script, tokenizer=ANY_TEXT, eos_ids=(), num_blocks=3)
    answers = run(engine, *requests)
    assert engine.stats().num_preemptions > 0
    alone = run(make_engine(script, tokenizer=ANY_TEXT, eos_ids=()), requests[0])
    assert {a.text for a in answers.values()} == {alone["0", 0].text}


def end_token_engine() -> Engine:
    """Spells "ab", then the second of two end tokens, then "X" for ever."""
    script = spelling_script(8, 1, [3, 4, 7, 1])
    return make_engine(script, tokenizer=ANY_TEXT, eos_ids=(6, 7))


def test_any_end_token_of_the_model_ends_the_text() -> None:
    answer = run(end_token_engine(), make_request("a", (0,), greedy(20)))["a", 0]
    assert (answer.text, answer.end.finish_reason) == ("ab", "stop")
    assert answer.token_ids == (3, 4, 7)
    shown = run(end_token_engine(), make_request("a", (0,), greedy(20, skip_special_tokens=False)))
    assert shown["a", 0].text == "ab"


def test_min_tokens_holds_all_end_tokens_back() -> None:
    answer = run(end_token_engine(), make_request("a", (0,), greedy(9, min_tokens=8)))["a", 0]
    assert len(answer.token_ids) >= 8
    assert not {6, 7} & set(answer.token_ids[:7])


def test_ignore_eos_runs_to_max_tokens() -> None:
    answer = run(end_token_engine(), make_request("a", (0,), greedy(20, ignore_eos=True)))["a", 0]
    assert (answer.end.finish_reason, len(answer.token_ids)) == ("length", 20)
    assert answer.text == "ab" + "X" * 17


@pytest.mark.parametrize("is_hidden", [True, False])
def test_the_marker_works_as_a_stop_string(is_hidden: bool) -> None:
    params = greedy(20, ignore_eos=True, skip_special_tokens=is_hidden, stop=("<turn>",))
    answer = run(end_token_engine(), make_request("a", (0,), params))["a", 0]
    assert (answer.text, answer.end.finish_reason, answer.end.stop_reason) == (
        "ab",
        "stop",
        "<turn>",
    )


def test_bad_words_are_never_spelled_though_their_beginning_may_be() -> None:
    script = spelling_script(8, 1, [3, 4, 3, 4, 3])
    params = greedy(5, bad_words=("ab",))
    answer = run(
        make_engine(script, tokenizer=ANY_TEXT, eos_ids=()), make_request("a", (0,), params)
    )
    assert "ab" not in answer["a", 0].text
    assert answer["a", 0].text.startswith("a")


def test_bad_words_are_tokenised_once_for_all_choices() -> None:
    texts: list[str] = []

    class Counting(PieceTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            texts.append(text)
            return super().encode(text, add_special)

    tokenizer = Counting([*"<XYab>", "<end>", "<turn>"], special=[6, 7])
    engine = make_engine(spelling_script(8, 1, [3, 4, 1]), tokenizer=tokenizer, eos_ids=())
    run(engine, make_request("a", (0,), greedy(2, n=5, bad_words=("ab", "X"))))
    assert texts == ["ab", " ab", "X", " X"]


def test_stop_strings_cut_the_text_where_a_plain_search_does() -> None:
    plain = run(make_engine(), make_request("a", (1, 2), greedy(60, ignore_eos=True)))["a", 0].text
    rng = np.random.default_rng(0)
    engine = make_engine()
    for round_ in range(60):
        cuts = [sorted(rng.integers(0, len(plain) + 1, 2)) for _ in range(rng.integers(1, 4))]
        stops = tuple({plain[a:b] for a, b in cuts if a < b} | {plain[cuts[0][0] :][:9] + "?"})
        include = bool(round_ % 2)
        params = greedy(60, ignore_eos=True, stop=stops, include_stop_str_in_output=include)
        answer = run(engine, make_request("a", (1, 2), params))["a", 0]
        ends = [(plain.find(s) + len(s), plain.find(s), s) for s in stops if s in plain]
        if ends:
            end, begin, stop = min(ends)
            assert answer.text == (plain[:end] if include else plain[:begin])
            assert (answer.end.finish_reason, answer.end.stop_reason) == ("stop", stop)
        else:
            assert (answer.text, answer.end.finish_reason) == (plain, "length")


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    for max_tokens in (None, 1, 32, 10**9):
        request = make_request("a", (1,) * 31, greedy(max_tokens))
        answer = run(make_engine(max_model_len=32), request)["a", 0]
        assert (len(answer.token_ids), answer.end.finish_reason) == (1, "length")
        assert answer.end.usage is not None
        assert answer.end.usage.prompt_tokens == 31


@pytest.mark.parametrize("num_prompt", [32, 33, 160])
def test_a_prompt_without_room_for_a_token_is_refused_with_all_sizes(num_prompt: int) -> None:
    engine = make_engine(max_model_len=32)
    with pytest.raises(PromptTooLongError, match=rf"32 tokens.*{num_prompt} and 7 more.*31"):
        engine.submit(make_request("a", (1,) * num_prompt, greedy(7)), Answers())
    assert not engine.step()


def test_without_max_tokens_an_answer_ends_at_the_context_end() -> None:
    request = make_request("a", (1,) * 5, greedy(None, ignore_eos=True))
    answer = run(make_engine(max_model_len=40), request)["a", 0]
    assert (len(answer.token_ids), answer.end.finish_reason) == (35, "length")


def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    engine = make_engine(num_blocks=16, max_model_len=1024)
    answers = Answers()
    with pytest.raises(PromptTooLongError, match=r"holds 256 tokens.*has 600.*context is 1024"):
        engine.submit(make_request("big", (1,) * 600), answers)
    for i in range(10):
        engine.submit(make_request(str(i), (1, i)), answers)
    finish(engine)
    assert all(answer.is_finished for answer in answers.values())
    assert len(answers) == 10


def test_an_answer_that_outgrows_the_pool_ends_with_length() -> None:
    engine = make_engine(num_blocks=16, max_model_len=1024)
    request = make_request("a", (1,) * 200, greedy(500, ignore_eos=True))
    answers = run(engine, request, make_request("b", (5,) * 20))
    assert len(answers["a", 0].token_ids) == 56
    assert answers["a", 0].end.finish_reason == "length"
    assert answers["b", 0].is_finished


def test_choices_that_fit_one_at_a_time_all_come() -> None:
    params = SamplingParams(seed=1, n=4, max_tokens=60, ignore_eos=True)
    engine = make_engine(num_blocks=8, max_model_len=128)
    answers = run(engine, make_request("a", tuple(range(60)[:40]), params))
    assert [len(answers["a", i].token_ids) for i in range(4)] == [60] * 4
    assert engine.stats().num_preemptions > 0


def test_a_choice_equals_the_single_request_with_its_seed() -> None:
    prompt = tuple(range(1, 40))
    params: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.95, "logprobs": 3}
    several = SamplingParams(seed=11, n=3, **params)
    answers = run(make_engine(), make_request("a", prompt, several))
    assert len({answers["a", i].text for i in range(3)}) == 3
    for i in range(3):
        single = SamplingParams(seed=choice_seed(11, i), **params)
        alone = run(make_engine(), make_request("a", prompt, single))
        assert answers["a", i].outcome() == alone["a", 0].outcome()


def test_choices_compute_their_prompt_once() -> None:
    tokens: list[int] = []
    engine = make_engine(on_forward=lambda step: tokens.append(len(step.tokens)))
    params = SamplingParams(seed=1, n=4, max_tokens=3, ignore_eos=True)
    run(engine, make_request("a", (1,) * 40, params))
    assert tokens == [40, 4, 4]


def test_requests_without_a_seed_differ_and_repeat_with_the_engine_seed() -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [make_request(str(i), (1, 2), params) for i in range(3)]

    def texts(seed: int) -> list[str]:
        return [answer.text for answer in run(make_engine(seed=seed), *requests).values()]

    assert len(set(texts(0))) == 3
    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


def test_neighbours_with_any_options_change_nothing() -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 2.0},
        {"temperature": 0},
        {"seed": 3, "top_k": 5, "min_p": 0.01},
        {"seed": 4, "logit_bias": {3: 5.0}, "logprobs": 2},
        {"seed": 5, "stop": ("a", "bc"), "presence_penalty": 1.0},
        {"temperature": 0, "bad_words": ("ab",), "min_tokens": 4},
        {"seed": 7, "typical_p": 0.7, "max_tokens": 3},
        {"seed": 8, "top_p": 0.8, "n": 2, "max_tokens": 9},
    ]
    requests = [
        make_request(str(i), (1, 2, 3), SamplingParams(**{"max_tokens": 15, **o}))
        for i, o in enumerate(options)
    ]
    alone = {
        key: answer.outcome() for r in requests for key, answer in run(make_engine(), r).items()
    }
    rng = np.random.default_rng(1)
    for _ in range(15):
        order = [requests[i] for i in rng.permutation(len(requests))]
        together = run(make_engine(max_num_seqs=int(rng.integers(2, 9))), *order)
        assert {key: answer.outcome() for key, answer in together.items()} == alone


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    hashed = hashed_script(VOCAB)

    def script(context: list[int]) -> F32:
        return np.full(VOCAB, np.nan, np.float32) if 13 in context[:2] else hashed(context)

    good = [make_request(str(i), (1, i)) for i in range(4)]
    expected = {key: a.outcome() for key, a in run(make_engine(hashed), *good).items()}
    engine = make_engine(script)
    bad = make_request("bad", (1, 13), SamplingParams(n=2, max_tokens=9))
    answers = run(engine, *good[:2], bad, *good[2:])
    for index in range(2):
        end = answers.pop(("bad", index)).end
        assert end.finish_reason == "error"
        assert "not finite" in (end.error or "")
    assert {key: answer.outcome() for key, answer in answers.items()} == expected


def test_forbidding_every_token_is_an_error_of_that_request() -> None:
    pieces = [*"<XYab>", "<end>", "<turn>"]
    engine = make_engine(fixed_script([1.0] * 8), tokenizer=ANY_TEXT, eos_ids=())
    bad = make_request("bad", (1,), greedy(bad_words=tuple(pieces)))
    answers = run(engine, bad, make_request("good", (1,)))
    assert "forbidden" in (answers["bad", 0].end.error or "")
    assert answers["bad", 0].end.error_param == "bad_words"
    assert answers["good", 0].end.finish_reason == "length"


def test_a_failing_forward_fails_the_sequences_of_its_step_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail_on_13(step: StepInput) -> None:
        if 13 in step.tokens:
            raise RuntimeError("device lost")

    engine = make_engine(on_forward=fail_on_13, max_batched_tokens=16)
    long = make_request("queued", (1,) * 30)
    answers = run(engine, make_request("bad", (13,) * 16), long)
    assert answers["bad", 0].end.finish_reason == "error"
    assert "device lost" in (answers["bad", 0].end.error or "")
    assert answers["queued", 0].end.finish_reason in ("stop", "length")
    assert len(caplog.records) == 1
    assert run(engine, make_request("after"))["after", 0].end.finish_reason in ("stop", "length")


def test_a_sink_that_raises_ends_its_request_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    answers = Answers()

    def broken(delta: object) -> None:
        raise RuntimeError("loop is closed")

    engine.submit(make_request("broken", params=SamplingParams(n=3, max_tokens=50)), broken)
    engine.submit(make_request("good"), answers)
    finish(engine)
    assert answers["good", 0].is_finished
    assert len(caplog.records) == 1


def test_an_abort_ends_every_choice_once_before_the_next_step() -> None:
    engine = make_engine(max_batched_tokens=16)
    answers = Answers()
    params = SamplingParams(n=4, seed=1, max_tokens=200, ignore_eos=True)
    for steps in (0, 1, 2, 3, 9):  # queued, inside the prompt, and while decoding
        engine.submit(make_request(str(steps), (1,) * 40, params), answers)
        for _ in range(steps):
            engine.step()
        engine.abort(str(steps))
        engine.abort(str(steps))
        engine.abort("unknown")
        assert not engine.step()
        engine.check_integrity()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert [answers[str(steps), i].end.finish_reason for i in range(4)] == ["abort"] * 4


def test_aborted_requests_leave_the_others_as_they_were() -> None:
    engine = make_engine(num_blocks=24, max_num_seqs=4)
    rng = np.random.default_rng(2)
    canary = run(make_engine(), make_request("c", (5, 6)))["c", 0].outcome()
    answers = Answers()
    params = SamplingParams(max_tokens=100, n=2, ignore_eos=True)
    live: list[str] = []
    for i in range(100):
        if i % 10 == 0:
            engine.submit(make_request(f"canary{i}", (5, 6)), answers)
        engine.submit(make_request(str(i), (1,) * int(rng.integers(1, 90)), params), Answers())
        live.append(str(i))
        for _ in range(rng.integers(0, 3)):
            engine.step()
        if len(live) > 3:
            engine.abort(live.pop(int(rng.integers(len(live)))))
        engine.check_integrity()
    for request_id in live:
        engine.abort(request_id)
    finish(engine)
    assert [answer.outcome() for answer in answers.values()] == [canary] * 10


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ((), {}, "prompt"),
        ((VOCAB,), {}, "prompt"),
        ((-1,), {}, "prompt"),
        ((1,), {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ((1,), {"stop_token_ids": (1, VOCAB + 5)}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(
    prompt: tuple[int, ...], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        make_engine().check(make_request("a", prompt, greedy(**options)))
    assert caught.value.param == param


def test_an_id_in_use_is_refused_until_its_request_ends() -> None:
    engine = make_engine()
    engine.submit(make_request("a"), Answers())
    with pytest.raises(ParameterError, match="running"):
        engine.submit(make_request("a"), Answers())
    finish(engine)
    assert run(engine, make_request("a"))["a", 0].is_finished


def test_the_thread_serves_many_submitters_and_stops_with_nothing_left() -> None:
    engine = make_engine()
    engine.start()
    done = threading.Semaphore(0)
    answers = Answers()

    def sink(delta: Delta) -> None:
        answers(delta)
        if delta.finish_reason:
            done.release()

    def submit(worker: int) -> None:
        for i in range(5):
            engine.submit(make_request(f"{worker}.{i}", (1, worker, i)), sink)

    threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        assert done.acquire(timeout=10)
    endless = SamplingParams(max_tokens=10**6, ignore_eos=True)
    engine.submit(make_request("endless", params=endless), sink)
    assert not engine._backend.is_closed
    engine.stop()
    assert engine._backend.is_closed  # its memory is free
    engine.stop()
    engine.check_integrity()
    assert answers["endless", 0].end.finish_reason in ("abort", "length")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    with pytest.raises(PacelineError, match="stopped"):
        engine.submit(make_request("late"), sink)


def test_a_bug_between_steps_fails_the_requests_and_the_thread_lives(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    done = threading.Event()
    answers = Answers()

    def sink(delta: Delta) -> None:
        answers(delta)
        if delta.finish_reason:
            done.set()

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler.policy, "order", lambda *args: 1 / 0)
        engine.start()
        engine.submit(make_request("a"), sink)
        assert done.wait(10)
    assert answers["a", 0].end.finish_reason == "error"
    done.clear()
    engine.submit(make_request("b"), sink)
    assert done.wait(10)
    assert answers["b", 0].end.finish_reason in ("stop", "length")
    engine.stop()


def test_timings_and_step_stats_are_those_of_the_clock() -> None:
    clock = Clock()

    def tick(step: StepInput) -> None:
        clock.now_ns += 1_000_000 * len(step.tokens)

    engine = make_engine(clock=clock, on_forward=tick, max_batched_tokens=16)
    answers = Answers()
    engine.submit(make_request("a", (1,) * 30, greedy(3, ignore_eos=True)), answers)
    clock.now_ns += 5_000_000
    engine.step()
    assert engine.last_step.num_prefill_tokens == engine.last_step.num_tokens == 16
    assert engine.last_step.forward_s == pytest.approx(0.016)
    finish(engine)
    assert (engine.last_step.num_tokens, engine.last_step.num_prefill_tokens) == (1, 0)
    timings = answers["a", 0].end.timings
    assert timings is not None
    assert timings.queue_s == pytest.approx(0.005)
    assert timings.ttft_s == pytest.approx(0.035)
    assert timings.tpot_s == pytest.approx(0.001)
    assert timings.e2e_s == pytest.approx(0.037)
    assert BLOCK_SIZE * engine.stats().num_blocks == 1024
