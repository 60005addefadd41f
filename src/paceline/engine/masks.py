"""Masks: which tokens each row may choose, worked out while the model computes its logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

log = logging.getLogger(__name__)
U32 = npt.NDArray[np.uint32]


class GrammarState(Protocol):
    """How far an answer has come in its structure (`paceline.structured.grammar`)."""

    def fill(self, mask: U32, /) -> None: ...

    def forced(self, limit: int, /) -> list[int]: ...

    def commit(self, token_id: int, /) -> bool: ...


class Masks:
    """Bits [L, W] beside the logits [L, V] of a step: bit i % 32 of word i / 32 stands for token i.

    Row l says what the l-th row of logits may choose; the rows of sequences without a grammar are
    not written. The grammars are asked on a thread of their own, one step at a time.
    """

    def __init__(self, *, vocab_size: int, max_rows: int) -> None:
        self._shape = (max_rows, -(-vocab_size // 32))
        self._bits: U32 | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def begin(self, seqs: Seq[Sequence], rows: Seq[int]) -> None:
        """Start on the masks of `seqs`, whose `rows` of logits are computed next."""
        pairs = zip(rows, seqs, strict=True)
        wanted = [(row, seq.grammar) for row, seq in pairs if seq.grammar is not None]
        self._pending = None  # of a step that failed
        if not wanted:
            return
        if self._bits is None or self._thread is None:
            self._bits = np.zeros(self._shape, np.uint32)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._pending = self._thread.submit(_fill, wanted, self._bits)

    def wait(self, seqs: Seq[Sequence], rows: Seq[int]) -> tuple[U32 | None, list[int]]:
        """Return the bits of the step that was begun last, and whose row binds each of `seqs`.

        `rows` are their rows of logits; -1 stands for no row. (None, []) if nothing is bound.
        """
        if self._pending is None:
            return None, []
        self._pending.result()
        self._pending = None
        bound = [
            row if seq.grammar is not None else -1 for seq, row in zip(seqs, rows, strict=True)
        ]
        return self._bits, bound

    def is_dead_end(self, grammar: GrammarState) -> bool:
        """Return whether `grammar` failed or allows nothing, by itself. It is asked anew."""
        bits = np.zeros(self._shape[1], np.uint32)
        try:
            grammar.fill(bits)
        except BaseException:  # as in `_fill`, which has logged it
            return True
        return not bits.any()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def _fill(wanted: Seq[tuple[int, GrammarState]], bits: U32) -> None:
    for row, grammar in wanted:
        try:
            grammar.fill(bits[row])
        except BaseException:  # a panic of native code is no Exception, and harms its own row only
            log.exception("a mask failed: its answer ends")
            bits[row] = 0
