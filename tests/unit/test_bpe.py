"""The native merges of byte-level BPE against their definition, and files that try to break it."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native
from paceline.errors import TokenizerError
from paceline.text.bpe import BYTE_OF_CHAR, pre_tokenizer_of, words_in_parts
from paceline.text.pretokenizers import PRE_TOKENIZERS
from paceline.text.tokenizer import build_tokenizer
from paceline.text.vocabulary import longest, string_array
from paceline.weights.gguf import StringArray
from tests.tokenizers import bpe_data

CHARS = "a é"  # few, so that random merges apply; one or two bytes each, some not printable
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
ALPHABET = [CHAR_OF_BYTE[byte] for byte in sorted(set(CHARS.encode()))]
PIECE = st.text(ALPHABET, min_size=1, max_size=3)
TOKENS = st.lists(st.sampled_from([*ALPHABET, "", "日"]) | PIECE, min_size=1, max_size=30)
MERGES = st.lists(
    st.builds("{} {}".format, PIECE, PIECE) | st.text([*ALPHABET, " "], max_size=5), max_size=30
)


def byte_pairs(tokens: Sequence[str], merges: Sequence[str]) -> _native.BytePairs:
    held = string_array(tokens), string_array(merges)
    return _native.BytePairs(*(part for array in held for part in (array.data, array.offsets)))


def ids_of(pairs: _native.BytePairs, *words: str, whole: bool = False) -> list[int]:
    ids: list[int] = pairs.encode_words([(word, None) for word in words], whole)
    return ids


def defined(word: str, tokens: Sequence[str], merges: Sequence[str]) -> list[int]:
    """Return the ids of a word by the definition: the lowest rank, leftmost, again and again."""
    ids = {text: i for i, text in enumerate(tokens)}
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    parts = [CHAR_OF_BYTE[byte] for byte in word.encode()]
    while True:
        pairs = [f"{left} {right}" for left, right in itertools.pairwise(parts)]
        if not (found := [(ranks[pair], i) for i, pair in enumerate(pairs) if pair in ranks]):
            return [ids[part] for part in parts if part in ids]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=300, deadline=None)
@given(TOKENS, MERGES, st.lists(st.text(CHARS, max_size=60), max_size=4))
def test_merges_join_the_lowest_rank_leftmost_first(
    tokens: list[str], merges: list[str], words: list[str]
) -> None:
    tokens = tokens + [merge.replace(" ", "") for merge in merges[::2]]
    expected = [token_id for word in words for token_id in defined(word, tokens, merges)]
    assert ids_of(byte_pairs(tokens, merges), *words) == expected


def test_texts_that_only_merges_have_join_further_and_leave_no_id() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    twos = [f"{left} {right}" for left in letters for right in letters]
    tokens, merges = [*letters, "abcd", "abcdef"], [*twos, "ab cd", "abcd ef"]
    pairs = byte_pairs(tokens, merges)
    for word in ("ab", "abc", "abcd", "abcde", "abcdef", letters, letters * 3):
        assert ids_of(pairs, word) == defined(word, tokens, merges), word
    assert ids_of(pairs, "ab", "abcd") == [26]


def test_of_equal_pairs_the_leftmost_joins_first() -> None:
    pairs = byte_pairs(["a", "aa", "aaaa"], ["a a", "aa aa"])
    assert ids_of(pairs, "aaa", "a" * 7) == [1, 0, 2, 1, 0]


def test_a_whole_word_that_is_a_token_is_not_merged() -> None:
    pairs = byte_pairs(["a", "b", "ab", "aba"], ["b a", "a ba"])
    assert ids_of(pairs, "ab", "aba", "abab", whole=True) == [2, 3, *ids_of(pairs, "abab")]
    assert ids_of(pairs, "ab") == [0, 1]


def test_of_equal_tokens_the_last_is_used() -> None:
    assert ids_of(byte_pairs(["a", "b", "ab", "a", "ab"], ["a b"]), "ab", "a") == [4, 3]


def test_of_equal_merges_the_last_rank_counts() -> None:
    tokens = ["a", "b", "c", "ab", "bc"]
    assert ids_of(byte_pairs(tokens, ["a b", "b c", "a b"]), "abc") == [0, 4]


def test_every_byte_has_its_character() -> None:
    pairs = byte_pairs([CHAR_OF_BYTE[byte] for byte in range(256)], ["none"])
    text = "".join(map(chr, range(0x80))) + "\x80\xad\xff\u07ff\uffff\U0010ffff日😀"
    assert ids_of(pairs, text) == list(text.encode())


def test_bytes_that_are_no_text_match_nothing() -> None:
    strings = [b"a", b"\xc1\xa1", b"\xff", b"\xc3", b"b", b"ab"]  # the second: "a" written long
    data = b"".join(len(text).to_bytes(8, "little") + text for text in strings)
    offsets = np.cumsum([0, *(8 + len(text) for text in strings)], dtype=np.int64)
    merges = string_array(["a b"])
    tokens = np.frombuffer(data, np.uint8)
    pairs = _native.BytePairs(tokens, offsets, merges.data, merges.offsets)
    assert ids_of(pairs, "ab", "a\ufffdb", "\xff") == [5, 0, 4]


def test_the_arrays_are_kept_while_they_are_read_and_never_copied() -> None:
    arrays = [part for held in (string_array(["a", "aa"]), string_array(["a a"]))
              for part in (held.data, held.offsets)]  # fmt: skip
    for i, array in enumerate(arrays):  # a copy would be gone when the call returns
        with pytest.raises(TypeError):
            _native.BytePairs(*arrays[:i], array.repeat(2)[::2], *arrays[i + 1 :])
    pairs = _native.BytePairs(*arrays)
    kept = [weakref.ref(array) for array in arrays]
    del array, arrays
    gc.collect()
    assert all(ref() is not None for ref in kept)
    assert ids_of(pairs, "aa") == [1]
    del pairs
    assert all(ref() is None for ref in kept)


@pytest.mark.parametrize("offsets", [[0, 100], [-8, 9], [0, 4], [5, 2], [2**62, -(2**62)], []])
def test_strings_outside_of_their_data_are_refused(offsets: list[int]) -> None:
    broken = StringArray(np.zeros(9, np.uint8), np.array(offsets, np.int64))
    good = string_array(["a"])
    for tokens, merges in ((broken, good), (good, broken)):
        with pytest.raises(ValueError, match="offsets"):
            _native.BytePairs(tokens.data, tokens.offsets, merges.data, merges.offsets)


def test_more_merges_than_any_model_has_are_refused_before_memory_is_taken() -> None:
    many = np.zeros(2**26 + 2, np.int64)  # pages of zeros, which nothing touches
    merges = StringArray(string_array(["a b"]).data, many)
    many[1] = len(merges.data)
    with pytest.raises(TokenizerError, match=r"merges.*more than 67108864 strings.*convert"):
        build_tokenizer(bpe_data(merges=merges))


def test_words_that_are_no_text_are_a_type_error() -> None:
    pairs = byte_pairs(["a"], ["a a"])
    for words in ([("a",)], ["a"], [(1, 2)], [(b"a", None)]):
        with pytest.raises(TypeError):
            pairs.encode_words(words, False)
    with pytest.raises(UnicodeEncodeError):
        ids_of(pairs, "\ud800")


def test_a_huge_word_is_merged_while_other_threads_run() -> None:
    chain = ["a" * 2**k for k in range(16)]
    pairs = byte_pairs(chain, [f"{text} {text}" for text in chain[:-1]])
    word = "a" * 300_000
    # 300,000 in binary, the greatest powers first; 2 ** 15 is the longest token.
    expected = [15] * (300_000 // 2**15)
    expected += [k for k in reversed(range(15)) if 300_000 >> k & 1]
    assert ids_of(pairs, word) == expected
    assert lets_others_run(lambda: ids_of(pairs, word))


def test_building_lets_other_threads_run() -> None:
    tokens = string_array([f"t{i}" for i in range(100_000)])
    merges = string_array([f"t{i} t{i + 1}" for i in range(100_000)])
    arguments = (tokens.data, tokens.offsets, merges.data, merges.offsets)
    assert lets_others_run(lambda: _native.BytePairs(*arguments))


def lets_others_run(call: Callable[[], object]) -> bool:
    """True where another thread ran during one of a few calls; Python itself never switches."""
    count = 0
    is_over = threading.Event()

    def run() -> None:
        nonlocal count
        while not is_over.is_set():
            count += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        for _ in range(20):
            before = count
            call()
            if count > before:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()


@given(st.lists(st.text(max_size=8), min_size=1))
def test_the_longest_token_is_found_without_decoding_all(tokens: list[str]) -> None:
    held = string_array(tokens)
    assert list(held) == tokens
    assert longest(held) == longest(tokens) == max(map(len, tokens))


# What patterns treat differently, alone and beside each other.
SNIPPETS = [
    "a", "B", "é", "中", "文", "1", "12", "123", "٣", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL",
    "'", "x's", "!", "...", "(", ")", "|", ",", "。", "—", "👍", "e\u0301", "ǅ", "ʰ", "_", "`", "+",
    "<=", "\u00a0", "\u3000", "the ", "HELLOworld", "```", "۔", "1234567",
]  # fmt: skip


@pytest.mark.parametrize("patterns", sorted({rule.patterns for rule in PRE_TOKENIZERS.values()}))
def test_a_text_is_cut_in_parts_as_it_is_in_one(patterns: tuple[str, ...]) -> None:
    cut = pre_tokenizer_of(patterns).pre_tokenize_str
    rng = random.Random(0)
    for _ in range(40):
        some = rng.sample(SNIPPETS, rng.choice((3, 6, len(SNIPPETS))))
        text = "".join(rng.choices(some, k=rng.choice((50, 300))))
        parts = list(words_in_parts(text, cut, num_chars=rng.choice((20, 33, 100))))
        assert [word for part in parts for word, _ in part] == [word for word, _ in cut(text)]


def test_no_part_of_a_long_text_is_long_unless_a_word_is() -> None:
    cut = pre_tokenizer_of(PRE_TOKENIZERS["qwen2"].patterns).pre_tokenize_str
    asked: list[int] = []

    def noted(text: str) -> list[tuple[str, tuple[int, int]]]:
        asked.append(len(text))
        return cut(text)

    text = "one of many words\n" * 500
    parts = list(words_in_parts(text, noted, num_chars=100))
    assert len(parts) > len(text) / 100
    assert max(asked) == 100
    asked.clear()
    assert [len(part) for part in words_in_parts("a" * 1000, noted, num_chars=100)] == [1]
    assert asked == [100, 200, 400, 800, 1000]
