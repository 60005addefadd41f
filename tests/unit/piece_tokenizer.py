"""A tokenizer that is a list of text pieces."""

from __future__ import annotations

from collections.abc import Sequence


class PieceDecoder:
    """One piece a token; special ones are shown only on demand."""

    def __init__(self, pieces: Sequence[str], hidden: frozenset[int]) -> None:
        self._pieces = pieces
        self._hidden = hidden

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._pieces[token_id]

    def flush(self) -> str:
        return ""


class PieceTokenizer:
    """`encode` takes the longest piece that fits at each place."""

    def __init__(self, pieces: Sequence[str], special: Sequence[int] = ()) -> None:
        self._pieces = list(pieces)
        self._special = frozenset(special)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {self._pieces[i]: i for i in self._special}

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        ids = []
        while text:
            fitting = [
                i for i, piece in enumerate(self._pieces) if piece and text.startswith(piece)
            ]
            if not fitting:
                text = text[1:]
                continue
            best = max(fitting, key=lambda i: len(self._pieces[i]))
            ids.append(best)
            text = text[len(self._pieces[best]) :]
        return ids

    def stream_decoder(self, skip_special: bool) -> PieceDecoder:
        return PieceDecoder(self._pieces, self._special if skip_special else frozenset())
