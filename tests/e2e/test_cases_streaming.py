"""Cases STR-02 and STR-03 over HTTP; STR-04 is in test_server.py."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.live import ALPHABET, Canary, LiveServer, ServeProcess, texts
from tests.tiny import TinyTokenizer, byte_characters, successor_model, write_gguf

COMPLETIONS = "/v1/completions"


# ---- characters of several tokens ----

FAMILY = "👨‍👩‍👧‍👦"
SPOKEN = "L😀中" + FAMILY + "Z"
# A chain holds no token twice, but the family repeats bytes: it is cut where no cut is a character.
FAMILY_CUTS = (2, 1, 2, 3, 2, 1, 2, 1, 3, 3, 3, 2)


def family_pieces() -> list[str]:
    """Return the family's bytes in twelve different tokens, as byte-level BPE writes them."""
    characters = byte_characters()
    written = [characters[byte] for byte in FAMILY.encode()]
    pieces = []
    for size in FAMILY_CUTS:
        pieces.append("".join(written[:size]))
        del written[:size]
    assert not written
    assert len(set(pieces)) == len(pieces)
    return pieces


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """`serve` of a model that says "#L😀中👨‍👩‍👧‍👦Z", and the alphabet to its canary."""
    pieces = family_pieces()
    tokenizer = TinyTokenizer(words=tuple(piece for piece in pieces if len(piece) > 1))
    spoken = [
        *tokenizer.byte_ids("#L😀中"), *map(tokenizer.id, pieces), *tokenizer.byte_ids("Z"),
        tokenizer.eos_id,
    ]  # fmt: skip
    alphabet = [*tokenizer.byte_ids(ALPHABET), tokenizer.eos_id]
    brackets = [0xC3, *tokenizer.byte_ids("()"), tokenizer.eos_id]
    model = successor_model(spoken, alphabet, brackets, tokenizer=tokenizer)
    path = write_gguf(model, tmp_path_factory.mktemp("speaker") / "speaker.gguf")
    server = ServeProcess(path, "--kv-memory", "4M", "--threads", "1")
    yield server
    server.close()


def test_characters_of_many_tokens_come_whole_however_the_answer_is_cut(speaker):
    """STR-02: every max_tokens, streamed and not, next to a stream that must not notice."""
    num_tokens = 1 + 4 + 3 + len(FAMILY_CUTS) + 1
    with Canary(speaker):
        for max_tokens in range(1, num_tokens + 2):
            body = {"prompt": "#", "temperature": 0, "max_tokens": max_tokens}
            whole = speaker.complete(**body)
            text = whole["choices"][0]["text"]
            events = speaker.stream(COMPLETIONS, **body)
            assert texts(events).get(0, "") == text
            is_cut = max_tokens <= num_tokens
            assert whole["choices"][0]["finish_reason"] == ("length" if is_cut else "stop")
            assert whole["usage"]["completion_tokens"] == max_tokens
            shown = text.removesuffix("\ufffd")
            assert "\ufffd" not in shown
            assert SPOKEN.startswith(shown)
            if not is_cut:
                assert text == SPOKEN
            pieces = [c["text"] for e in events if e != "[DONE]" for c in e["choices"]]
            assert not any("\ufffd" in piece for piece in pieces[:-2])
    speaker.drain()
    speaker.survive()


def test_a_cut_inside_a_character_shows_one_mark_at_most(speaker):
    """STR-02: the text that each cut must give, by decoding the bytes so far."""
    sizes = [1] * 8 + list(FAMILY_CUTS) + [1]
    for count in range(1, len(sizes) + 1):
        data = SPOKEN.encode()[: sum(sizes[:count])]
        answer = speaker.complete("#", temperature=0, max_tokens=count)
        assert answer["choices"][0]["text"] == data.decode(errors="replace")


ILLEGAL = {
    "a lone continuation byte": (0x80, "\ufffd中" + FAMILY + "Z"),
    "a byte that is never legal": (0xFF, "\ufffd"),
    "a lead byte before ASCII": (0xC3, "\ufffd()"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_bytes_in_an_illegal_order_become_marks_and_harm_nobody(speaker, name):
    """STR-02: the bias wins once (25 against the script's 20), the penalty then takes it back."""
    byte, expected = ILLEGAL[name]
    body = {
        "prompt": "#", "temperature": 0, "logit_bias": {str(byte): 25}, "repetition_penalty": 2,
    }  # fmt: skip
    with Canary(speaker):
        for _ in range(5):
            answer = speaker.complete(**body)
            assert answer["choices"][0]["text"] == expected
            assert texts(speaker.stream(COMPLETIONS, **body))[0] == expected
    endless = speaker.complete("#", max_tokens=9, temperature=0, logit_bias={str(byte): 100})
    assert endless["choices"][0]["text"] == "\ufffd" * 9
    speaker.drain()
    speaker.survive()


# ---- stop strings ----

STOP_WORDS = ("aa", "aab", "aba", "abab", "Ġthe", "Ġthen", "Ġthee", "hello", "Ġstop", "lo")


def chain_of_eighty() -> tuple[TinyTokenizer, list[int]]:
    """Return a tokenizer and 80 distinct tokens: letters, words that overlap, emoji, CJK."""
    tokenizer = TinyTokenizer(words=STOP_WORDS)
    num_words = len(tokenizer.merges)
    characters = [[256 + i] for i in range(num_words)]
    characters += [tokenizer.byte_ids(c) for c in "😀中é"]
    letters = [c for c in range(33, 127) if chr(c) != "!"]
    random.Random(2).shuffle(letters)
    characters += [[c] for c in letters[: 80 - num_words - 4 - 3 - 2]]
    random.Random(3).shuffle(characters)
    chain = [token for character in characters for token in character]
    assert len(set(chain)) == len(chain) == 80
    return tokenizer, chain


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    tokenizer, chain = chain_of_eighty()
    model = successor_model(
        [*tokenizer.byte_ids("!"), *chain, tokenizer.eos_id], tokenizer=tokenizer
    )
    path = write_gguf(model, tmp_path_factory.mktemp("talker") / "talker.gguf")
    server = LiveServer(path, kv_memory_bytes=4 * 2**20, num_threads=1)
    yield server
    server.close()


def cut_stop(rng: random.Random, text: str) -> str:
    """Cut a stop string out of `text`, or make a decoy that only begins like it."""
    kind = rng.choice(["short", "long", "first", "last", "emoji", "decoy", "decoy"])
    if kind == "first":
        return text[0]
    if kind == "last":
        return text[-1]
    if kind == "emoji":
        return "😀"
    length = rng.randint(1, 3) if kind == "short" else rng.randint(4, 14)
    begin = rng.randrange(len(text) - length)
    piece = text[begin : begin + length]
    return piece + "\x01" if kind == "decoy" else piece


def searched(text: str, stops: list[str], include: bool) -> tuple[str, str]:
    """Return visible text and finish reason by plain search: the first stop to complete."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        return text, "length"
    end, begin = min(ends)
    return text[: end if include else begin], "stop"


def test_stop_strings_cut_where_a_plain_search_does(talker):
    """STR-03: 300 rounds of 1 to 4 stops and decoys, streamed and not."""
    base = {"prompt": "!", "temperature": 0, "max_tokens": 80}
    unstopped = talker.complete(**base)["choices"][0]
    assert unstopped["finish_reason"] == "length"
    text = unstopped["text"]
    assert "😀" in text

    def check(seed: int) -> str:
        rng = random.Random(seed)
        stops = [cut_stop(rng, text) for _ in range(rng.randint(1, 4))]
        include = rng.random() < 0.5
        expected = searched(text, stops, include)
        body = {**base, "stop": stops, "include_stop_str_in_output": include}
        whole = talker.complete(**body)["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == expected, (seed, stops)
        events = talker.stream(COMPLETIONS, **body)
        ends = [c["finish_reason"] for e in events if e != "[DONE]" for c in e["choices"]]
        assert (texts(events).get(0, ""), ends[-1]) == expected, (seed, stops)
        return expected[1]

    with ThreadPoolExecutor(4) as pool:
        reasons = list(pool.map(check, range(300)))
    assert reasons.count("length") > 20
    assert reasons.count("stop") > 150
    talker.drain()
