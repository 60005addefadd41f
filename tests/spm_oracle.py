"""SentencePiece models written by hand, for the `sentencepiece` library to be an oracle."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _data(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def processor(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unk_id: int,
    space_prefix: bool,
) -> Any:
    """Return a SentencePieceProcessor of these pieces (sentencepiece_model.proto), or skip."""
    library = pytest.importorskip("sentencepiece")
    pieces = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        text = token.replace(" ", "\u2581") if kind == 4 else token
        body = _data(1, text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score)
        pieces.append(_data(1, body + _number(3, 2 if i == unk_id else kind)))
    trainer = (
        _number(3, 2)  # BPE
        + _number(4, len(tokens))
        + _number(35, 1)  # byte fallback
        + _number(40, unk_id)
        + _data(45, tokens[unk_id].encode())
    )
    normalizer = _data(1, b"identity") + _number(3, space_prefix) + _number(4, 0) + _number(5, 1)
    model = b"".join(pieces) + _data(2, trainer) + _data(3, normalizer)
    loaded = library.SentencePieceProcessor()
    loaded.LoadFromSerializedProto(model)
    return loaded
