"""SentencePiece BPE (`tokenizer.ggml.model` "llama"): merges by score, bytes for what is left.

Kudo and Richardson 2018, the bpe model. Spaces become U+2581; the pair whose joined text has the
best score is merged first; a character without a piece becomes its UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.errors import TokenizerError
from paceline.text.literals import Literals
from paceline.text.merging import NO_MERGE, merge
from paceline.text.vocabulary import Vocabulary, numbers
from paceline.weights.checkpoint import GGUFTokenizerData

SPACE = "\u2581"
MAX_CACHED_WORDS = 50_000
MAX_CACHED_WORD_LEN = 64
_MAX_EXCEPTIONS = 64


class SentencePiece:
    """Encodes with merges in score order; decodes pieces to bytes."""

    def __init__(self, data: GGUFTokenizerData, vocabulary: Vocabulary) -> None:
        tokens = list(vocabulary.tokens)
        if len(data.scores) != len(tokens):
            raise TokenizerError(
                f"tokenizer.ggml.scores has {len(data.scores)} entries for {len(tokens)} tokens: "
                "a SentencePiece tokenizer needs one each, convert the model again"
            )
        self.strips_leading_space = data.add_space_prefix is not False
        self._tokens = tokens
        self._literal = vocabulary.is_literal
        self._scores: list[float] = numbers(data.scores, "scores").tolist()
        self._unused = vocabulary.unused
        self._unk_id = 0 if data.unk_id is None else data.unk_id
        self._byte_of = {i: _byte_value(tokens[i]) for i in vocabulary.byte_ids}
        self._id_of_byte = {value: i for i, value in self._byte_of.items()}
        self._ids = _pieces(tokens, vocabulary)
        user_defined = {t.replace(" ", SPACE): i for t, i in vocabulary.user_defined.items()}
        special = {t.replace(" ", SPACE): i for t, i in vocabulary.special.items()}
        self._user_defined = Literals(user_defined)
        self._special = Literals(special)
        self._boundary = _word_boundary(tokens)
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, *, parse_special: bool, cuts: Sequence[int]) -> list[int]:
        text = text.replace(" ", SPACE)
        ids: list[int] = []
        position = 0
        for begin, end, token_id in self._special.find(text, cuts) if parse_special else ():
            self._encode_segment(text[position:begin], ids)
            ids.append(token_id)
            position = end
        self._encode_segment(text[position:], ids)
        return ids

    def raw_bytes(self, token_id: int) -> bytes:
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return bytes((byte,))
        text = self._tokens[token_id]
        if not self._literal(token_id):
            text = text.replace(SPACE, " ")
        return text.encode("utf-8", errors="replace")

    def _encode_segment(self, text: str, ids: list[int]) -> None:
        """Append the ids of text between special tokens, which begins like the start of a text."""
        if not text:
            return
        if self.strips_leading_space:
            text = SPACE + text
        position = 0
        for begin, end, token_id in self._user_defined.find(text):
            self._encode_ordinary(text[position:begin], ids)
            ids.append(token_id)
            position = end
        self._encode_ordinary(text[position:], ids)

    def _encode_ordinary(self, text: str, ids: list[int]) -> None:
        words = self._words
        for word in self._boundary.split(text) if self._boundary else (text,):
            known = words.get(word)
            ids += self._encode_word(word) if known is None else known

    def _encode_word(self, word: str) -> list[int]:
        parents: dict[str, tuple[str, str]] = {}

        def rank(left: str, right: str) -> float:
            joined = left + right
            token_id = self._ids.get(joined)
            if token_id is None:
                return NO_MERGE
            if token_id in self._unused:
                parents[joined] = (left, right)
            return -self._scores[token_id]

        ids: list[int] = []
        for piece in merge(list(word), rank):
            self._append(piece, ids, parents)
        if len(word) <= MAX_CACHED_WORD_LEN:
            if len(self._words) >= MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def _append(self, piece: str, ids: list[int], parents: dict[str, tuple[str, str]]) -> None:
        token_id = self._ids.get(piece)
        if token_id is not None and piece not in parents:
            ids.append(token_id)
        elif piece in parents:  # an unused piece serves merging only: it is taken apart again
            for part in parents[piece]:
                self._append(part, ids, parents)
        else:
            for byte in piece.encode("utf-8"):
                ids.append(self._id_of_byte.get(byte, self._unk_id))


def _pieces(tokens: Sequence[str], vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the texts that merging may produce: not special tokens, not bytes."""
    pieces = dict(zip(tokens, range(len(tokens)), strict=True))
    for text in vocabulary.special:
        del pieces[text]
    for byte_id in vocabulary.byte_ids:
        pieces.pop(tokens[byte_id], None)
    return pieces


def _byte_value(text: str) -> int:
    """Return 10 for "<0x0A>"."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
    if not found:
        raise TokenizerError(
            f"byte token {text!r} is not of the form <0x0A>: convert the model again"
        )
    return int(found[1], 16)


def _word_boundary(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Where text may be cut without changing a merge: before a space that no piece spans.

    Gemma has one piece with a space inside (">▁</"), Llama 2 none; there the cut is left out. None
    where pieces with inner spaces are many.
    """
    inner = re.compile(f"([^{SPACE}\0]){SPACE}([^\0]?)").findall("\0".join(tokens))
    exceptions = {re.escape(before) + SPACE + re.escape(after) for before, after in inner}
    if len(exceptions) > _MAX_EXCEPTIONS:
        return None
    unless = "".join(f"(?<!{e[: e.index(SPACE)]})" if e.endswith(SPACE) else "" for e in exceptions)
    spans = [e for e in exceptions if not e.endswith(SPACE)]
    guard = "".join(f"(?!(?<={e[: e.index(SPACE)]}){e[e.index(SPACE) :]})" for e in spans)
    return re.compile(f"(?<=[^{SPACE}]){unless}(?={SPACE}){guard}")
