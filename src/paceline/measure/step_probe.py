"""StepProbe: times steps of a chosen shape on a loaded model, without an engine around them."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from paceline.backends.base import StepInput

if TYPE_CHECKING:
    from paceline.backends.native import NativeBackend
    from paceline.engine.build import LoadedModel

_FILL = 0x30  # of KV bytes: as any format an ordinary number, and a page that was written
_MIN_TRIES, _MAX_TRIES = 3, 15
_SECONDS = 0.15  # of one shape, about


class StepShape(Struct, frozen=True, kw_only=True):
    """Sequences that hold `context` tokens each get `num_tokens` more; `num_logit_rows` in all."""

    num_seqs: int = 1
    num_tokens: int = 1
    context: int = 0
    num_logit_rows: int = 1


class StepProbe:
    """Precondition: the model runs on the native backend and its engine has nothing to do.

    What the KV cache holds is lost.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._backend: NativeBackend = loaded.backend  # type: ignore[assignment]
        self._block_size = loaded.config.block_size
        self._num_blocks = loaded.kv.num_blocks
        self._block_bytes = loaded.kv.block_bytes
        self._max_len = loaded.engine.max_model_len
        self._max_seqs = loaded.config.max_num_seqs
        self._max_tokens = loaded.config.max_batched_tokens
        self._vocab_size = loaded.checkpoint.config.vocab_size
        self._num_filled = 0

    def fits(self, shape: StepShape) -> bool:
        """Whether the model was loaded with room for such a step."""
        return (
            shape.num_seqs * self._blocks_of(shape) <= self._num_blocks
            and shape.context + shape.num_tokens <= self._max_len
            and shape.num_seqs * shape.num_tokens <= self._max_tokens
            and max(shape.num_seqs, shape.num_logit_rows) <= self._max_seqs
        )

    def seconds(self, shape: StepShape, *, tries: int | None = None) -> float:
        """Return the median seconds of the shape's forward, after one that does not count."""
        step = self._step(shape)
        first_s = self._time(step)
        if tries is None:
            tries = min(max(int(_SECONDS / first_s), _MIN_TRIES), _MAX_TRIES)
        return statistics.median(self._time(step) for _ in range(tries))

    def op_seconds(self, shape: StepShape) -> list[float]:
        """Return the median seconds of each op of the backend's plan, in one forward."""
        step = self._step(shape)
        self._time(step)
        backend = self._backend
        backend.set_profiling(True)
        rounds = []
        try:
            before = backend.op_seconds()
            for _ in range(2 * _MIN_TRIES - 1):
                self._time(step)
                after = backend.op_seconds()
                rounds.append([b - a for a, b in zip(before, after, strict=True)])
                before = after
        finally:
            backend.set_profiling(False)
        return [statistics.median(spent) for spent in zip(*rounds, strict=True)]

    def _time(self, step: StepInput) -> float:
        begin_ns = time.monotonic_ns()
        return (self._backend.forward(step).end_ns - begin_ns) / 1e9

    def _blocks_of(self, shape: StepShape) -> int:
        return -(-(shape.context + shape.num_tokens) // self._block_size)

    def _step(self, shape: StepShape) -> StepInput:
        n, num_seqs, size = shape.num_tokens, shape.num_seqs, self._block_size
        per_seq = self._blocks_of(shape)
        tables = np.arange(num_seqs * per_seq, dtype=np.int32).reshape(num_seqs, per_seq)
        self._fill(num_seqs * per_seq)
        positions = np.arange(shape.context, shape.context + n, dtype=np.int32)
        slots = tables[:, positions // size] * size + positions % size  # [B, n]
        first_rows = np.arange(num_seqs, dtype=np.int32) * n
        ids = np.random.default_rng(0).integers(0, self._vocab_size, num_seqs * n)
        # The last rows: of a prompt one, of decodes and of a draft all.
        logit_rows = np.arange(num_seqs * n, dtype=np.int32)[-shape.num_logit_rows :]
        return StepInput(
            tokens=ids.astype(np.int32),
            positions=np.tile(positions, num_seqs),
            slots=np.ascontiguousarray(slots, np.int32).reshape(-1),
            seqs=np.stack(
                [first_rows, np.full_like(first_rows, n), np.full_like(first_rows, shape.context)],
                axis=1,
            ),
            block_tables=tables,
            logit_rows=logit_rows,
        )

    def _fill(self, num_blocks: int) -> None:
        """Write the first blocks once: what was never written reads as one page, from the cache."""
        if num_blocks > self._num_filled:
            data = np.full((1, self._block_bytes), _FILL, np.uint8)
            for block in range(self._num_filled, num_blocks):
                self._backend.write_blocks([block], data)
            self._num_filled = num_blocks
