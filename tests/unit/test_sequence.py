from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.sequence import Sequence
from paceline.text.stream_decoder import StopMatcher
from paceline.types import Request, SamplingParams
from tests.unit.piece_tokenizer import PieceTokenizer

PIECES = PieceTokenizer(["<end>", "a", "b", "c", "ab", "bca"], special=[0])


class CountingSampler:
    def __init__(self) -> None:
        self.committed: list[int] = []

    def commit(self, token_id: int) -> None:
        self.committed.append(token_id)


class HoldingDecoder:
    """Shows a token's text one token late."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, token_id: int) -> str:
        text, self.held = self.held, "abc"[token_id]
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def make_sequence(max_len: int = 100, *, decoder: Any = None, **params: Any) -> Sequence:
    sampling = SamplingParams(**params)
    request = Request(id="r", prompt_token_ids=(1, 2), params=sampling)
    return Sequence(
        request=request,
        index=0,
        number=0,
        token_ids=[1, 2],
        max_len=max_len,
        sampler=CountingSampler(),
        decoder=decoder or PIECES.stream_decoder(sampling.skip_special_tokens),
        matcher=StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        if sampling.stop
        else None,
        ends=({} if sampling.ignore_eos else {0: None}) | {i: i for i in sampling.stop_token_ids},
        arrival_ns=1_000_000_000,
    )


def feed(seq: Sequence, *tokens: int) -> list[str]:
    texts = []
    for i, token in enumerate(tokens):
        assert seq.finish_reason is None
        texts.append(seq.append_token(token, 2_000_000_000 + i * 500_000_000))
    return texts


def test_an_end_token_ends_without_showing_its_text() -> None:
    seq = make_sequence(skip_special_tokens=False)
    assert feed(seq, 1, 0) == ["a", ""]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", None)
    assert seq.usage().completion_tokens == 2


def test_a_stop_token_is_named_as_the_reason() -> None:
    seq = make_sequence(stop_token_ids=(3,))
    assert feed(seq, 1, 3) == ["a", ""]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 3)


def test_ignore_eos_shows_the_marker_only_on_demand() -> None:
    assert feed(make_sequence(ignore_eos=True), 1, 0, 2) == ["a", "", "b"]
    shown = make_sequence(ignore_eos=True, skip_special_tokens=False)
    assert feed(shown, 1, 0, 2) == ["a", "<end>", "b"]


def test_the_marker_as_a_stop_string_works() -> None:
    seq = make_sequence(ignore_eos=True, skip_special_tokens=False, stop=("<end>",))
    assert feed(seq, 1, 0) == ["a", ""]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "<end>")


def test_a_stop_string_over_two_tokens_is_never_shown() -> None:
    seq = make_sequence(stop=("bcaa",))
    assert feed(seq, 1, 5, 1) == ["a", "", ""]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "bcaa")


def test_text_held_for_a_stop_string_comes_out_when_it_fails() -> None:
    seq = make_sequence(stop=("bcaa",))
    assert feed(seq, 1, 5, 3) == ["a", "", "bcac"]
    assert seq.finish_reason is None


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    seq = make_sequence(max_len=4, stop=("bcax",))
    assert feed(seq, 1, 5) == ["a", "bca"]
    assert seq.finish_reason == "length"
    seq = make_sequence(stop=("bcax",))
    assert feed(seq, 1, 5, 0) == ["a", "", "bca"]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", None)


def test_a_stop_string_completed_by_the_flush_is_a_stop() -> None:
    seq = make_sequence(max_len=4, stop=("bc",), decoder=HoldingDecoder())
    assert feed(seq, 1, 2) == ["", ""]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "bc")


def test_stop_strings_count_from_min_tokens_on() -> None:
    seq = make_sequence(stop=("b",), min_tokens=3)
    assert feed(seq, 2, 2, 2) == ["b", "b", ""]
    assert seq.finish_reason == "stop"


def test_a_stop_string_may_stay_in_the_text() -> None:
    seq = make_sequence(stop=("ca",), include_stop_str_in_output=True)
    assert "".join(feed(seq, 1, 5)) == "abca"


def test_every_token_reaches_the_sampler_state() -> None:
    seq = make_sequence()
    feed(seq, 1, 2, 0)
    assert isinstance(seq.sampler, CountingSampler)
    assert seq.sampler.committed == [1, 2, 0]


def test_times_are_those_of_the_choice() -> None:
    seq = make_sequence(max_len=5)
    seq.scheduled_ns = 1_250_000_000
    feed(seq, 1, 2, 3)
    timings = seq.timings(3_100_000_000)
    assert timings.queue_s == pytest.approx(0.25)
    assert timings.ttft_s == pytest.approx(1.0)
    assert timings.tpot_s == pytest.approx(0.5)
    assert timings.e2e_s == pytest.approx(2.1)


def test_one_token_has_no_time_per_token() -> None:
    seq = make_sequence(max_len=3)
    feed(seq, 1)
    assert seq.timings(3_000_000_000).tpot_s is None
