"""Embedder: token ids of texts in, unit vectors out; many texts a step, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from msgspec import Struct

from paceline.backends.base import F32, I32, Backend, KVSpec, StepInput, StepLimits
from paceline.embedding.pooling import Pooling
from paceline.errors import BackendError

BLOCK_SIZE = 16
MAX_TEXTS = 64  # of one step


class Shape(Struct, frozen=True, kw_only=True):
    """What bounds the steps of an embedder."""

    dim: int  # of a vector
    max_len: int  # tokens of a text
    step_tokens: int  # of all texts of a step
    is_causal: bool  # else a text is never split over steps

    def limits(self) -> StepLimits:
        return StepLimits(
            max_tokens=self.step_tokens,
            max_logit_rows=self.step_tokens,
            max_seqs=MAX_TEXTS,
            max_blocks_per_seq=-(-self.max_len // BLOCK_SIZE),
        )

    def kv(self, dtype: str) -> KVSpec:
        """Return the cache for the largest step, or for the longest text alone."""
        shared = -(-self.step_tokens // BLOCK_SIZE) + MAX_TEXTS
        num_blocks = max(shared, -(-self.max_len // BLOCK_SIZE))
        return KVSpec(num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype)


class Embedder:
    """Runs a loaded backend whose plan hands out hidden states. One thread at a time.

    A text's vector has the same bits whatever texts share its steps (law 1), and length 1. `turns`
    are entered around each step.
    """

    def __init__(
        self,
        backend: Backend,
        shape: Shape,
        pooling: Pooling,
        turns: AbstractContextManager[int] | None = None,
    ) -> None:
        self.shape = shape
        self._turns = nullcontext(0) if turns is None else turns
        self.pooling = pooling
        self._backend = backend
        self._table_width = shape.limits().max_blocks_per_seq

    def embed(self, texts: Sequence[Sequence[int]]) -> F32:
        """Return the vectors [n, dim] of n texts, as few steps as they fit into."""
        vectors = np.empty((len(texts), self.shape.dim), np.float32)
        for begin, end in self._batches([len(text) for text in texts]):
            vectors[begin:end] = self.embed_batch(texts[begin:end])
        return vectors

    def fits(self, lengths: Sequence[int]) -> bool:
        """Say whether texts of these lengths make one batch: a step, or a long text alone."""
        return len(lengths) == 1 or (
            len(lengths) <= MAX_TEXTS and sum(lengths) <= self.shape.step_tokens
        )

    def embed_batch(self, texts: Sequence[Sequence[int]]) -> F32:
        """Return the vectors of texts that fit. Raises BackendError where they are not finite."""
        sums = np.zeros((len(texts), self.shape.dim))  # the mean's direction is the sum's
        for begin in range(0, max(map(len, texts)), self.shape.step_tokens):
            step, spans = self._step(texts, begin)
            with self._turns:
                hidden = self._backend.forward(step).logits
            for total, (first, last) in zip(sums, spans, strict=True):
                total += hidden[first:last].sum(axis=0, dtype=np.float64)
        lengths = np.sqrt([(total * total).sum() for total in sums])
        if not np.isfinite(lengths).all() or not lengths.all():
            raise BackendError(
                "the model computed no finite vector: its weights hold NaN or infinity; "
                "download or convert it again"
            )
        return (sums / lengths[:, None]).astype(np.float32)

    def close(self) -> None:
        self._backend.close()

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        begin = 0
        for end in range(1, len(lengths) + 1):
            if end == len(lengths) or not self.fits(lengths[begin : end + 1]):
                yield begin, end
                begin = end

    def _step(
        self, texts: Sequence[Sequence[int]], begin: int
    ) -> tuple[StepInput, list[tuple[int, int]]]:
        """Return the step of each text's tokens from `begin` on, and its rows of the output."""
        tokens: list[int] = []
        wanted: list[int] = []
        spans: list[tuple[int, int]] = []
        positions, slots, seqs = [], [], []
        tables = np.zeros((len(texts), self._table_width), np.int32)
        next_block = 0
        for i, text in enumerate(texts):
            part = text[begin : begin + self.shape.step_tokens]
            num_blocks = -(-len(text) // BLOCK_SIZE)
            tables[i, :num_blocks] = np.arange(next_block, next_block + num_blocks)
            own = np.arange(begin, begin + len(part), dtype=np.int32)
            positions.append(own)
            slots.append(next_block * BLOCK_SIZE + own)
            seqs.append((len(tokens), len(part), begin))
            rows = self._rows(len(tokens), begin, len(part), len(text))
            spans.append((len(wanted), len(wanted) + len(rows)))
            wanted += rows
            tokens += part
            next_block += num_blocks
        step = StepInput(
            tokens=_i32(tokens),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            seqs=_i32(seqs),
            block_tables=tables,
            logit_rows=_i32(wanted),
        )
        return step, spans

    def _rows(self, first: int, begin: int, num: int, length: int) -> range:
        """Return the rows of the step that a text's vector is made of."""
        if self.pooling == "mean":
            return range(first, first + num)
        if self.pooling == "last":
            return range(first + num - 1, first + num) if begin + num == length else range(0)
        return range(first, first + 1) if begin == 0 else range(0)


def _i32(values: Sequence[object]) -> I32:
    return np.array(values, np.int32)
