from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.stream_decoder import StopMatcher
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from tests.tokenizers import bpe_data, hf_data, hf_spm_data, spm_data

TOKENIZERS = {
    "bpe": build_tokenizer(bpe_data()),
    "spm": build_tokenizer(spm_data()),
    "spm without prefix": build_tokenizer(spm_data(add_space_prefix=False)),
    "hf": build_tokenizer(hf_data(bpe_data())),
    "hf with spaces": build_tokenizer(hf_spm_data()),
}
IDS = st.lists(st.integers(-1, 1000), max_size=60)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(ids=IDS, skip=st.booleans(), continuation=st.booleans())
def test_feeds_and_flush_join_to_the_decoded_text(
    name: str, ids: list[int], skip: bool, continuation: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    decoder = tokenizer.stream_decoder(skip, continuation=continuation)
    text = "".join([decoder.feed(i) for i in ids]) + decoder.flush()
    assert text == tokenizer.decode(ids, skip_special=skip, continuation=continuation)


def _bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes((byte,))] for byte in data]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_characters_come_whole_and_once(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "a😀日👩‍👩‍👧‍👦b"
    ids = _bytes_as_ids(tokenizer, text.encode())
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.feed(i) for i in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert decoder.flush() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_cut_inside_a_character_shows_one_mark_at_the_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = _bytes_as_ids(tokenizer, "a😀日".encode())
    for length in range(len(ids) + 1):
        decoder = tokenizer.stream_decoder()
        shown = "".join(decoder.feed(i) for i in ids[:length])
        assert "\ufffd" not in shown
        assert decoder.flush() in ("", "\ufffd")


@pytest.mark.parametrize("data", [b"\x80", b"\xff", b"\xe6A", b"\xf0\x9f\x98", b"a\xc3(\xa9"])
def test_bytes_that_are_no_text_become_marks(data: bytes) -> None:
    tokenizer = TOKENIZERS["bpe"]
    decoder = tokenizer.stream_decoder()
    text = "".join(decoder.feed(i) for i in _bytes_as_ids(tokenizer, data)) + decoder.flush()
    assert text == data.decode("utf-8", errors="replace")
    assert "\ufffd" in text


def _visible(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What plain search says: the stop that completes first, of those the one that begins first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def _stops(rng: random.Random, text: str) -> tuple[str, ...]:
    """Return stops cut out of the text, and decoys that share a long beginning with it."""
    stops = set()
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(text))
        stop = text[begin : begin + rng.randint(1, 12)]
        if rng.random() < 0.4:
            stop += "\x00"
        stops.add(rng.choice([stop, stop, text[0], text[-1], "😀"]))
    return tuple(sorted(stops, key=lambda _: rng.random()))


def test_text_ends_at_the_first_stop_to_complete() -> None:
    rng = random.Random(3)
    words = ["the", " cat", " sat", "😀", "\n", "aa", "aab", "日本", " the", "!", "ab"]
    num_stopped = 0
    for round_ in range(300):
        pieces = [rng.choice(words) for _ in range(80)]
        text = "".join(pieces)
        stops = _stops(rng, text)
        include = bool(round_ % 2)
        matcher = StopMatcher(stops, include)
        shown: list[str] = []
        matched = None
        for piece in pieces:
            visible, matched = matcher.feed(piece)
            shown.append(visible)
            expected, _ = _visible(text, stops, include)
            assert expected.startswith("".join(shown))  # nothing of a stop is shown early
            if matched is not None:
                break
        if matched is None:
            shown.append(matcher.flush())
        num_stopped += matched is not None
        assert ("".join(shown), matched) == _visible(text, stops, include), (text, stops)
    assert 100 < num_stopped < 300


def test_a_failed_decoy_releases_what_it_held() -> None:
    matcher = StopMatcher(("abcX",), include=False)
    assert matcher.feed("zabc") == ("z", None)
    assert matcher.feed("ab") == ("abc", None)
    assert matcher.flush() == "ab"
    assert matcher.flush() == ""


def test_without_stops_text_passes_through() -> None:
    assert StopMatcher(()).feed("abc") == ("abc", None)


def test_a_long_stop_string_costs_no_more_memory_than_its_length():
    stop = "".join(chr(0x4E00 + i % 5000) for i in range(30_000))
    tracemalloc.start()
    try:
        matcher = StopMatcher((stop,))
        assert matcher.feed(stop[:100]) == ("", None)
        assert matcher.feed("x") == (stop[:100] + "x", None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
