"""HFCodec: a tokenizer.json as it is, run by `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from paceline.errors import TokenizerError
from paceline.text.bpe import byte_level_bytes
from paceline.text.literals import Literals
from paceline.text.spm import SPACE
from paceline.text.tokenizer import Tokenizer
from paceline.weights.checkpoint import HFTokenizerData

# The library keeps the GIL while it encodes a text, half a second and more for a megabyte, and lets
# it go for batches alone: so a text that long is a batch of one.
_LONG_CHARS = 2048


class HFCodec:
    """Encodes with the library; decodes from the token texts, so that streams see whole bytes."""

    def __init__(self, backend: tokenizers.Tokenizer, spec: Mapping[str, Any]) -> None:
        added = backend.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.tokens = [backend.id_to_token(i) or "" for i in range(size)]
        self._backend = backend
        self._plain = _twin(backend)
        self._plain.encode_special_tokens = True  # as the letters that they are
        self._added_ids = frozenset(added)
        self._literals = Literals(self.special)
        self._trims_right = frozenset(i for i, token in added.items() if token.rstrip)
        steps = _decoder_steps(spec)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._inner_prefix = next(  # WordPiece: what marks a token that begins no word
            (step.get("prefix", "##") for step in steps if step["type"] == "WordPiece"), None
        )
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "WordPiece"}:
            raise TokenizerError(
                f"tokenizer.json has the decoder {sorted(kinds)}: this build decodes byte-level "
                "BPE, SentencePiece and WordPiece tokenizers"
            )
        self.strips_leading_space = self._inner_prefix is not None or any(
            (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )

    def encode(self, text: str, *, parse_special: bool, cuts: Sequence[int]) -> list[int]:
        if not parse_special or not cuts:
            return self._encode(text, parse_special=parse_special)
        # The library cannot be told to leave one marker alone: take the others out first.
        ids: list[int] = []
        position = 0
        for begin, end, token_id in self._literals.find(text, cuts):
            if begin > position:
                ids += self._encode(text[position:begin], parse_special=False)
            ids.append(token_id)
            position = end
            if token_id in self._trims_right:
                position += len(text[end:]) - len(text[end:].lstrip())
        if position < len(text):
            ids += self._encode(text[position:], parse_special=False)
        return ids

    def raw_bytes(self, token_id: int) -> bytes:
        text = self.tokens[token_id]
        if token_id in self._added_ids:
            return text.encode("utf-8", errors="replace")
        if self._byte_level:
            return byte_level_bytes(text)
        if self._inner_prefix is not None:
            is_inner = text.startswith(self._inner_prefix)
            return (text.removeprefix(self._inner_prefix) if is_inner else f" {text}").encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes((int(text[3:5], 16),))
        return text.replace(SPACE, " ").encode("utf-8", errors="replace")

    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and behind a text."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
        raise TokenizerError("tokenizer.json has a post-processor that changes the text's own ids")

    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        backend = self._backend if parse_special else self._plain
        if len(text) < _LONG_CHARS:
            return backend.encode(text, add_special_tokens=False).ids
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def _twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer with the same ids and the same vocabulary in memory, set by itself.

    To read markers as text is a setting of the whole object. Switched to and fro it needs a lock,
    and a short text would wait for the long one of somebody else.
    """
    twin = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[token_id] for token_id in sorted(added)])
    assert twin.get_added_tokens_decoder().keys() == added.keys()
    return twin


def build_hf(data: HFTokenizerData) -> Tokenizer:
    """Return the Tokenizer of a tokenizer.json and its config."""
    try:
        spec = json.loads(data.json)
        backend = tokenizers.Tokenizer.from_str(data.json.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception on what it cannot read
        raise TokenizerError(
            f"tokenizer.json cannot be read ({error}): fetch the model again"
        ) from None
    backend.no_padding()
    backend.no_truncation()
    codec = HFCodec(backend, spec)
    before, behind = codec.added_around()
    bos = _token_text(data.config.get("bos_token"))
    eos = _token_text(data.config.get("eos_token"))
    bos_id = backend.token_to_id(bos) if bos else None
    eos_id = backend.token_to_id(eos) if eos else None
    if bos_id is not None and not before and data.config.get("add_bos_token") is True:
        before = (bos_id,)
    if eos_id is not None and not behind and data.config.get("add_eos_token") is True:
        behind = (eos_id,)
    return Tokenizer(
        codec,
        tokens=codec.tokens,
        special=codec.special,
        bos_ids=before,
        eos_ids=behind,
        bos_id=bos_id,
        eos_id=eos_id,
    )


def _token_text(value: object) -> str | None:
    """Return the text of a token in tokenizer_config.json: a string or {"content": ...}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _decoder_steps(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    decoder = spec.get("decoder") or {}
    if decoder.get("type") == "Sequence":
        return list(decoder.get("decoders", []))
    return [decoder] if decoder else []
