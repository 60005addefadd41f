"""ByteBPE: byte-level BPE from a GGUF's tokens and merges.

Words are cut by the regex engine of `tokenizers` and merged by `native/bpe.cpp`, which reads tokens
and merges where they lie in the mapped file: see docs/architecture.md for what that saves.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Regex, pre_tokenizers

from paceline import _native
from paceline.errors import TokenizerError
from paceline.text.literals import Literals
from paceline.text.pretokenizers import pre_tokenizer
from paceline.text.vocabulary import Vocabulary, string_array
from paceline.weights.checkpoint import GGUFTokenizerData
from paceline.weights.gguf import StringArray

Words = list[tuple[str, tuple[int, int]]]  # each with where it begins and ends

# The library keeps the GIL while it cuts a text, for half a second a megabyte: cut in one piece, a
# long prompt would hold up all that others have of the process.
_PART_CHARS = 4096
_SEEN_CHARS = 16  # behind a word that is certain: more than any pattern looks ahead of one


def _byte_chars() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {
        **{chr(byte): byte for byte in plain},
        **{chr(0x100 + i): byte for i, byte in enumerate(rest)},
    }


BYTE_OF_CHAR = _byte_chars()


def byte_level_bytes(text: str) -> bytes:
    """Return the bytes a byte-level token stands for; a text outside the alphabet is UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in text])
    except KeyError:
        return text.encode("utf-8", errors="replace")


class ByteBPE:
    """Encodes with merges in rank order; decodes tokens to bytes."""

    strips_leading_space = False

    def __init__(self, data: GGUFTokenizerData, vocabulary: Vocabulary) -> None:
        if len(data.merges) == 0 or not isinstance(data.merges[0], str):
            raise TokenizerError(
                "tokenizer.ggml.merges is absent, empty or no list of strings: a BPE tokenizer "
                "needs it, convert the model again"
            )
        rule = pre_tokenizer(data.pre)
        self._vocabulary = vocabulary
        self._nfc = rule.nfc
        self._whole_words = rule.whole_words
        self._pairs = _byte_pairs(vocabulary.tokens, string_array(data.merges))
        self._cut = pre_tokenizer_of(rule.patterns)
        self._plain = Literals(vocabulary.user_defined)
        self._special = Literals({**vocabulary.user_defined, **vocabulary.special})

    def encode(self, text: str, *, parse_special: bool, cuts: Sequence[int]) -> list[int]:
        literals = self._special if parse_special else self._plain
        ids: list[int] = []
        position = 0
        for begin, end, token_id in literals.find(text, cuts):
            self._encode_ordinary(text[position:begin], ids)
            ids.append(token_id)
            position = end
        self._encode_ordinary(text[position:], ids)
        return ids

    def raw_bytes(self, token_id: int) -> bytes:
        text = self._vocabulary.tokens[token_id]
        if self._vocabulary.is_literal(token_id):
            return text.encode("utf-8", errors="replace")
        return byte_level_bytes(text)

    def _encode_ordinary(self, text: str, ids: list[int]) -> None:
        if not text:
            return
        if self._nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        for words in words_in_parts(text, self._cut.pre_tokenize_str):
            ids += self._pairs.encode_words(words, self._whole_words)


def words_in_parts(
    text: str, cut: Callable[[str], Words], *, num_chars: int = _PART_CHARS
) -> Iterator[Words]:
    """Yield the words that `cut` makes of `text`, in parts that other threads need not wait for.

    Patterns match from left to right and look at nothing before a match, so a text may be cut anew
    where a word begins. Where a part ends is no such place: its last words may go on.
    """
    begin, size = 0, num_chars
    while len(text) - begin > size:
        words = cut(text[begin : begin + size])
        count = _num_certain(words, size)
        if count:
            yield words[:count]
            begin += words[count - 1][1][1]
            size = num_chars
        else:
            size *= 2  # a word of that length
    yield cut(text[begin:])


def _num_certain(words: Words, num_chars: int) -> int:
    """Return how many of the words of a text's first characters are words of the whole text.

    A word of blanks decides nothing: how it is cut depends on what follows all of them.
    """
    for count in range(len(words), 0, -1):
        word, (_, end) = words[count - 1]
        if end + _SEEN_CHARS <= num_chars and not word[-1].isspace():
            return count
    return 0


def _byte_pairs(tokens: StringArray, merges: StringArray) -> _native.BytePairs:
    """Return the native encoder. A byte that the vocabulary lacks has no id, as with peers."""
    try:
        return _native.BytePairs(tokens.data, tokens.offsets, merges.data, merges.offsets)
    except ValueError as error:
        raise TokenizerError(
            f"tokenizer.ggml.tokens or merges: {error}: convert the model again"
        ) from None


def pre_tokenizer_of(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Cut by each pattern in turn."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    )
