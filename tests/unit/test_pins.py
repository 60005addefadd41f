"""Pins: beginnings of prompts that nothing evicts, and that keep nobody from an answer."""

from __future__ import annotations

import pytest

from paceline.errors import ParameterError
from tests.unit.scripted_engine import BLOCK_SIZE, make_engine, make_request
from tests.unit.test_prefix_cache import GREEDY, ONE, Cached, cached_tokens, tokens

PROMPT = tokens(40)  # two blocks and a half
OTHERS = [tokens(90, begin=begin) for begin in (7, 13, 17, 23)]  # six blocks each


def crowded(**options: int) -> Cached:
    """An engine in whose pool two of the others have no room beside each other."""
    return Cached(num_blocks=10, **options)


def push_out(cached: Cached) -> None:
    for other in OTHERS:
        cached.run(make_request("o", other, ONE))


def test_a_pinned_prompt_outlives_what_would_push_it_out() -> None:
    cached = crowded()
    cached.run(make_request("p", PROMPT, ONE))
    push_out(cached)
    assert cached_tokens(cached.run(make_request("a", PROMPT, ONE))) == 0
    push_out(cached)
    cached.run(make_request("p", PROMPT, ONE, pin="x"))
    assert cached.engine.pins() == {"x": 32}
    push_out(cached)
    assert cached_tokens(cached.run(make_request("a", PROMPT, GREEDY))) == 32
    cached.engine.unpin("x")
    push_out(cached)
    assert cached.engine.pins() == {}
    assert cached_tokens(cached.run(make_request("a", PROMPT, ONE))) == 0


def test_pins_give_way_to_a_prompt_that_would_not_fit_beside_them() -> None:
    cached = crowded()
    cached.run(make_request("p", PROMPT, ONE, pin="old"))
    cached.run(make_request("q", tokens(20, begin=11), ONE, pin="new"))
    assert cached.engine.pins() == {"old": 32, "new": 16}
    cached.run(make_request("a", tokens(130, begin=29), ONE))  # nine of ten blocks
    assert cached.engine.pins() == {"new": 16}
    cached.run(make_request("b", tokens(150, begin=31), ONE))
    assert cached.engine.pins() == {}


def test_pins_give_way_to_an_answer_that_would_not_fit_beside_them() -> None:
    cached = crowded()
    cached.run(make_request("p", PROMPT, ONE, pin="x"))
    long = cached.run(make_request("a", tokens(90, begin=29), GREEDY_TO_THE_END))
    assert len(long["a", 0].token_ids) == 10 * BLOCK_SIZE - 90
    assert cached.engine.pins() == {}


GREEDY_TO_THE_END = type(GREEDY)(temperature=0, max_tokens=None, ignore_eos=True)


def test_pins_stay_while_others_can_wait() -> None:
    cached = crowded(max_num_seqs=4)
    cached.run(make_request("p", PROMPT, ONE, pin="x"))
    for i, other in enumerate(OTHERS):
        cached.submit(make_request(f"o{i}", other, GREEDY))
    while cached.engine.stats().num_running or cached.engine.stats().num_waiting:
        cached.step()
    assert cached.engine.pins() == {"x": 32}


def test_half_of_the_cache_can_be_pinned_and_no_more() -> None:
    cached = crowded()
    cached.run(make_request("p", PROMPT, ONE, pin="x"))
    with pytest.raises(ParameterError, match="hold 32 tokens, and 64 more are beyond 80") as caught:
        cached.submit(make_request("q", tokens(70, begin=11), ONE, pin="y"))
    assert caught.value.param == "pin"
    cached.run(make_request("q", tokens(50, begin=11), ONE, pin="y"))
    assert cached.engine.pins() == {"x": 32, "y": 48}


def test_two_pins_at_once_hold_no_more_than_half() -> None:
    cached = crowded(max_num_seqs=4)
    cached.submit(
        make_request("p", tokens(50), ONE, pin="x"),
        make_request("q", tokens(50, begin=11), ONE, pin="y"),
    )
    while not cached.engine.pins().keys() >= {"x", "y"}:
        cached.step()
    assert sum(cached.engine.pins().values()) == 5 * BLOCK_SIZE


def test_a_beginning_that_pins_share_counts_once_against_the_half() -> None:
    cached = crowded()
    cached.run(make_request("p", tokens(50), ONE, pin="x"))  # three of the five blocks
    for num, name in ((70, "y"), (85, "z")):  # one block more each
        cached.run(make_request("q", tokens(num), ONE, pin=name))
    assert cached.engine.pins() == {"x": 48, "y": 64, "z": 80}
    assert cached.engine.weigh_pin(tokens(100), "", {"x", "z"}) == (80, 16)
    assert cached.engine.weigh_pin(tokens(100), "", {"x"}) == (48, 48)
    assert cached.engine.weigh_pin((47, *tokens(99)), "", {"x", "z"}) == (80, 96)
    assert cached.engine.weigh_pin(tokens(100), "salted", {"x", "z"}) == (80, 96)
    with pytest.raises(ParameterError, match="hold 80 tokens, and 16 more are beyond 80"):
        cached.submit(make_request("q", tokens(100), ONE, pin="w"))
    cached.engine.unpin("z")
    cached.run(make_request("o", (1,), ONE))
    assert cached.engine.weigh_pin(tokens(100), "", {"x", "y", "z"}) == (64, 32)


def test_an_aborted_prompt_is_not_pinned() -> None:
    cached = crowded(max_batched_tokens=16)
    cached.submit(make_request("p", PROMPT, ONE, pin="x"))
    cached.step()
    cached.engine.abort("p")
    cached.step()
    assert cached.engine.pins() == {}


def test_without_a_cache_there_is_nothing_to_pin_in() -> None:
    engine = make_engine(prefix_cache=False)
    with pytest.raises(ParameterError, match="--no-prefix-cache"):
        engine.check(make_request("p", PROMPT, ONE, pin="x"))
    engine.unpin("x")
    assert engine.pins() == {}
