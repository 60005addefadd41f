"""Tokenizer: text to token ids and back, from a GGUF's own data or from tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

from paceline.errors import ParameterError, TokenizerError
from paceline.text.literals import Markers
from paceline.text.reasoning import hidden_ids
from paceline.text.stream_decoder import StreamDecoder
from paceline.weights.checkpoint import GGUFTokenizerData, HFTokenizerData


class Codec(Protocol):
    """One kind of tokenizer: how ordinary text becomes ids, and the bytes behind an id."""

    strips_leading_space: bool  # decoding drops the space that encoding put before the text

    def encode(self, text: str, *, parse_special: bool, cuts: Sequence[int]) -> list[int]:
        """Return ids; a special token is matched only on demand and never across a cut."""

    def raw_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a special token its text."""


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads."""

    def __init__(
        self,
        codec: Codec,
        *,
        tokens: Sequence[str],
        special: dict[str, int],
        silent: frozenset[int] = frozenset(),
        bos_ids: tuple[int, ...] = (),
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        eos_id: int | None = None,
    ) -> None:
        self.vocab_size = len(tokens)
        self.special_tokens = special
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._codec = codec
        self._tokens = tokens
        self._special_ids = frozenset(special.values())
        self._bos_ids = bos_ids
        self._eos_ids = eos_ids
        self._shown = _Pieces(codec, len(tokens), hidden=silent)
        self._spoken = _Pieces(codec, len(tokens), hidden=silent | hidden_ids(special))

    @cached_property
    def markers(self) -> Markers:
        """Finds the special tokens' texts in what users write."""
        return Markers(self.special_tokens)

    @cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters of a prompt than this."""
        from paceline.text.vocabulary import longest

        return longest(self._tokens)

    @property
    def adds_bos(self) -> bool:
        """True where plain text is encoded with a begin token before it."""
        return bool(self._bos_ids)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        cuts: Sequence[int] = (),
    ) -> list[int]:
        """Return the ids of `text`.

        `add_special` adds the begin and end tokens that the model wants, unless the text brought
        them. `parse_special` lets "<|im_end|>" be that token and not its letters, except where a
        position of `cuts` (sorted) lies inside the marker.
        """
        if not text.isascii():
            _refuse_surrogates(text)
        ids = self._codec.encode(text, parse_special=parse_special, cuts=cuts)
        if not add_special:
            return ids
        bos, eos = list(self._bos_ids), list(self._eos_ids)
        if bos and ids[: len(bos)] != bos:
            ids = bos + ids
        if eos and ids[-len(eos) :] != eos:
            ids += eos
        return ids

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        """Return the text of `ids`; ids outside the vocabulary are "".

        `continuation`: the ids go on after other text, so a leading space is text.
        """
        pieces = self._spoken if skip_special else self._shown
        text = b"".join([pieces[token_id] for token_id in ids]).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips(continuation) else text

    def stream_decoder(
        self, skip_special: bool = True, *, continuation: bool = True
    ) -> StreamDecoder:
        """Return a decoder that takes ids one at a time.

        It decodes what a model adds to a prompt, so `continuation` (see `decode`) is the default.
        """
        pieces = self._spoken if skip_special else self._shown
        return StreamDecoder(pieces.__getitem__, strip_leading_space=self._strips(continuation))

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token, b"" for a special one unless asked for."""
        return (self._spoken if skip_special else self._shown)[token_id]

    def token_text(self, token_id: int) -> str:
        """Return one token as text, special tokens included; U+FFFD for parts of characters."""
        return self._shown[token_id].decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Return whether every id means the same to both."""
        from paceline.text.vocabulary import are_equal

        return self.special_tokens == other.special_tokens and are_equal(
            self._tokens, other._tokens
        )

    def _strips(self, continuation: bool) -> bool:
        return self._codec.strips_leading_space and not continuation


class _Pieces(dict[int, bytes]):
    """Bytes of tokens by id, worked out when first asked for."""

    def __init__(self, codec: Codec, size: int, *, hidden: frozenset[int]) -> None:
        super().__init__()
        self._codec = codec
        self._size = size
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size:
            return b""
        piece = b"" if token_id in self._hidden else self._codec.raw_bytes(token_id)
        self[token_id] = piece
        return piece


def build_tokenizer(data: GGUFTokenizerData | HFTokenizerData) -> Tokenizer:
    """Return the tokenizer of a checkpoint, or raise TokenizerError that says what it lacks."""
    if isinstance(data, HFTokenizerData):
        from paceline.text.hf_tokenizer import build_hf

        return build_hf(data)
    return _build_gguf(data)


def _build_gguf(data: GGUFTokenizerData) -> Tokenizer:
    from paceline.text.vocabulary import vocabulary_of

    vocabulary = vocabulary_of(data)
    codec: Codec
    bos_id, eos_id = data.bos_id, data.eos_id
    if data.model == "gpt2":
        from paceline.text.bpe import ByteBPE
        from paceline.text.pretokenizers import pre_tokenizer

        codec = ByteBPE(data, vocabulary)
        adds_bos = pre_tokenizer(data.pre).adds_bos
    elif data.model == "llama":
        from paceline.text.spm import SentencePiece

        codec = SentencePiece(data, vocabulary)
        bos_id = 1 if bos_id is None else bos_id
        eos_id = 2 if eos_id is None else eos_id
        adds_bos = True
    else:
        raise TokenizerError(
            f"tokenizer.ggml.model is {data.model!r}: this build reads gpt2 (byte-level BPE) and "
            "llama (SentencePiece); use the model's tokenizer.json"
        )
    for key, token_id in (("bos", bos_id), ("eos", eos_id)):
        if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.{key}_token_id is {token_id}, the vocabulary has "
                f"{len(vocabulary.tokens)} tokens: convert the model again"
            )
    if data.add_bos is not None:
        adds_bos = data.add_bos
    return Tokenizer(
        codec,
        tokens=vocabulary.tokens,
        special=vocabulary.special,
        silent=vocabulary.unused,
        bos_ids=(bos_id,) if adds_bos and bos_id is not None else (),
        eos_ids=(eos_id,) if data.add_eos and eos_id is not None else (),
        bos_id=bos_id,
        eos_id=eos_id,
    )


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: send valid Unicode"
        ) from None
