"""What a request that failed had computed is not found by those after it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.backends.base import F32
from paceline.types import SamplingParams
from tests.unit.scripted_backend import hashed_script
from tests.unit.scripted_engine import Answers, make_engine, make_request, run
from tests.unit.test_prefix_cache import ONE, cached_tokens, tokens

VOCAB = 48
TRIGGER = 47  # not in `tokens`
OPTIONS = {"max_batched_tokens": 16, "prefix_cache": True}
KNOWN = tokens(36)  # two blocks and some
BAD = (*KNOWN, TRIGGER, *tokens(40, begin=5))


def script(context: list[int]) -> F32:
    """Logits that are not finite from the trigger on."""
    logits = hashed_script(VOCAB)(context)
    return logits * np.float32(np.nan) if TRIGGER in context else logits


def ended_badly(answers: Answers, request_id: str, index: int = 0) -> bool:
    return answers[request_id, index].end.finish_reason == "error"


@pytest.mark.parametrize("params", [{}, {"n": 3, "seed": 1, "temperature": 1.0}])
def test_blocks_of_a_prompt_that_overflows_are_not_kept(params):
    engine = make_engine(script, **OPTIONS)
    request = make_request("bad", BAD, SamplingParams(max_tokens=4, **params))
    for _ in range(2):
        answers = run(engine, request)
        assert ended_badly(answers, "bad")
        stats = engine.stats()
        assert (stats.num_cached_blocks, stats.num_live_blocks, stats.num_prefix_hit) == (0, 0, 0)


def test_what_others_had_computed_before_stays():
    engine = make_engine(script, **OPTIONS)
    run(engine, make_request("good", KNOWN, ONE))
    num_cached = engine.stats().num_cached_blocks
    assert ended_badly(run(engine, make_request("bad", BAD, ONE)), "bad")
    assert engine.stats().num_cached_blocks == num_cached == 3
    answers = run(engine, make_request("again", KNOWN, ONE))
    assert cached_tokens(answers, "again") == len(KNOWN) - 1


def test_a_pin_that_was_made_beside_a_bad_prompt_goes_on_to_serve():
    """A good one takes the beginning from a bad one that is still at work, and pins it."""
    engine, answers = make_engine(script, **{**OPTIONS, "max_batched_tokens": 24}), Answers()
    engine.submit(make_request("bad", (*KNOWN, *tokens(200, begin=3), TRIGGER), ONE), answers)
    while engine.stats().num_live_blocks == 0 or len(engine.running("bad")) == 0:
        engine.step()
    for _ in range(3):
        engine.step()
    engine.submit(make_request("good", KNOWN, ONE, pin="x"), answers)
    while engine.step():
        engine.check_integrity()
    assert ended_badly(answers, "bad")
    assert engine.pins() == {"x": 32}
    found = cached_tokens(run(engine, make_request("again", KNOWN, ONE)), "again")
    assert found >= 32


def test_a_stop_in_the_middle_and_preemptions_close_the_books():
    rng = random.Random(3)
    for _ in range(60):
        engine = make_engine(
            script,
            num_blocks=rng.randint(9, 14),
            max_model_len=128,
            **{**OPTIONS, "max_batched_tokens": rng.choice([8, 16, 40])},
        )
        answers = Answers()
        for i in range(rng.randint(3, 8)):
            prompt = KNOWN[: rng.randint(1, 36)]
            if is_bad := rng.random() < 0.5:
                prompt = (*prompt, TRIGGER, *tokens(rng.randint(0, 40), begin=7))
            params = SamplingParams(
                seed=i, max_tokens=rng.randint(1, 20), n=rng.randint(1, 3), ignore_eos=True,
                logit_bias={TRIGGER: -100},
            )  # fmt: skip
            name = f"{'bad' if is_bad else 'good'}{i}"
            engine.submit(make_request(name, prompt, params), answers)
            for _ in range(rng.randint(0, 4)):
                engine.step()
                engine.check_integrity()
            if rng.random() < 0.2:
                engine.abort(name)
        while engine.step():
            engine.check_integrity()
        for (name, _), answer in answers.items():
            reasons = {"error", "abort"} if name.startswith("bad") else {"length", "abort"}
            assert answer.end.finish_reason in reasons
        assert engine.stats().num_live_blocks == 0
