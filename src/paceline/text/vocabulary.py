"""Vocabulary: the tokens of a GGUF and what kind each is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from paceline.errors import TokenizerError
from paceline.weights.checkpoint import GGUFTokenizerData
from paceline.weights.gguf import StringArray


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Turn ends that some converters left as ordinary or user-defined tokens.
_END_MARKERS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<end_of_turn>", "<start_of_turn>", "<|im_start|>",
})  # fmt: skip


class Vocabulary(Struct, frozen=True):
    """Token texts by id, decoded when asked for, and all of each kind that is not ordinary."""

    tokens: StringArray
    special: dict[str, int]  # control and unknown: matched only where special tokens are parsed
    user_defined: dict[str, int]  # always matched whole
    unused: frozenset[int]
    byte_ids: frozenset[int]
    _literal_ids: frozenset[int] = field(default=frozenset())

    def is_literal(self, token_id: int) -> bool:
        """True where the token's text is plain text, not in the vocabulary's own alphabet."""
        return token_id in self._literal_ids


def numbers(values: Sequence[float], key: str) -> npt.NDArray[np.float32]:
    """Return an array of `tokenizer.ggml.<key>`, or raise TokenizerError where it holds others."""
    try:
        return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        raise TokenizerError(
            f"tokenizer.ggml.{key} holds no numbers: convert the model again"
        ) from None


def string_array(strings: Sequence[str]) -> StringArray:
    """Return `strings` as a file holds them; those of a file are taken as they are."""
    if isinstance(strings, StringArray):
        return strings
    encoded = [text.encode() for text in strings]
    data = b"".join(len(text).to_bytes(8, "little") + text for text in encoded)
    offsets = np.cumsum([0, *(8 + len(text) for text in encoded)], dtype=np.int64)
    return StringArray(np.frombuffer(data, np.uint8), offsets)


def longest(tokens: Sequence[str]) -> int:
    """Return the characters of the longest token, 1 if there is none. Decodes few of a file's."""
    if not isinstance(tokens, StringArray):
        return max(map(len, tokens), default=1)
    num_bytes = np.diff(tokens.offsets) - 8
    num_chars = len(tokens[int(num_bytes.argmax())])  # no fewer can fit into fewer bytes
    wider = np.flatnonzero(num_bytes > num_chars).tolist()
    return max([num_chars, *(len(tokens[i]) for i in wider)])


def are_equal(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return whether both are the same strings. Those of files are compared as they lie there."""
    if not (isinstance(a, StringArray) and isinstance(b, StringArray)):
        return len(a) == len(b) and list(a) == list(b)
    lengths, others = np.diff(a.offsets), np.diff(b.offsets)
    return np.array_equal(lengths, others) and np.array_equal(
        a.data[a.offsets[0] : a.offsets[-1]], b.data[b.offsets[0] : b.offsets[-1]]
    )


def vocabulary_of(data: GGUFTokenizerData) -> Vocabulary:
    """Sort the tokens of `data` by kind. O(tokens), of which only the rare ones are decoded."""
    if len(data.tokens) == 0:
        raise TokenizerError("tokenizer.ggml.tokens is empty: convert the model again")
    if not isinstance(data.tokens[0], str):
        raise TokenizerError("tokenizer.ggml.tokens holds no strings: convert the model again")
    tokens = string_array(data.tokens)
    types = numbers(data.token_types, "token_type")
    if len(types) and len(types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens: "
            "convert the model again"
        )
    ends = {data.bos_id, data.eos_id, data.eot_id}
    special: dict[str, int] = {}
    user_defined: dict[str, int] = {}
    unused: list[int] = []
    byte_ids: list[int] = []
    rare = [(int(i), int(types[i])) for i in np.flatnonzero(types != TokenType.NORMAL)]
    marked = [(i, int(TokenType.CONTROL)) for i in ends if i is not None and 0 <= i < len(tokens)]
    for token_id, kind in (*rare, *marked):
        text = tokens[token_id]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or (
            kind == TokenType.USER_DEFINED and text in _END_MARKERS
        ):
            special[text] = token_id
        elif kind == TokenType.USER_DEFINED:
            user_defined[text] = token_id
        elif kind == TokenType.UNUSED:
            unused.append(token_id)
        elif kind == TokenType.BYTE:
            byte_ids.append(token_id)
    special.pop("", None)
    user_defined.pop("", None)
    for text in special:
        user_defined.pop(text, None)
    return Vocabulary(
        tokens=tokens,
        special=special,
        user_defined=user_defined,
        unused=frozenset(unused),
        byte_ids=frozenset(byte_ids),
        _literal_ids=frozenset((*special.values(), *user_defined.values())),
    )
