"""Recorder: whom the engine tells what it does (`measure/recorder.py` keeps ledgers of it)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paceline.engine.scheduler import Schedule
    from paceline.engine.sequence import Sequence
    from paceline.measure.ledger import Ledger


class Recorder(Protocol):
    """What the engine tells about itself. All but `open` is called by the engine's thread.

    A step is `turned` where others' steps kept it waiting, `ran`, then any `fork`, `masked`,
    `sampled`, any `verified`, `first_text` and `close`, then `committed`.
    """

    def open(self, begin_ns: int, now_ns: int) -> Ledger | None:
        """Return the ledger of a request that is queued now; `begin_ns` is its arrival."""

    def turned(self, now_ns: int, turn_ns: int) -> None:
        """The engine has its turn, and has waited for it for so long."""

    def ran(self, schedule: Schedule, *, scheduled_ns: int, built_ns: int, work_ns: int,
            forward_ns: int) -> None:  # fmt: skip
        """The step's chunks are computed. Precondition: `num_computed` does not count them yet."""

    def masked(self, now_ns: int) -> None:
        """The step's masks are there: what its rows of logits may choose."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` goes on from the prompt that `parent` has computed."""

    def sampled(self, seqs: Seq[Sequence], now_ns: int) -> None:
        """Each of `seqs` has its next token."""

    def verified(self, seqs: Seq[Sequence], begin_ns: int, now_ns: int) -> None:
        """Each of `seqs` has one more, chosen since `begin_ns`: a draft foresaw the one before."""

    def first_text(self, seq: Sequence, now_ns: int) -> None:
        """The first visible text of `seq` is made."""

    def close(self, seq: Sequence, now_ns: int) -> None:
        """`seq` has ended; of a failed one the time since the last booking stays unexplained."""

    def committed(self, now_ns: int) -> None:
        """The step is over: its tokens are with their readers."""


class NoRecorder:
    """Keeps nothing."""

    def open(self, begin_ns: int, now_ns: int) -> None:
        return None

    def turned(self, now_ns: int, turn_ns: int) -> None:
        pass

    def ran(self, schedule: Schedule, *, scheduled_ns: int, built_ns: int, work_ns: int,
            forward_ns: int) -> None:  # fmt: skip
        pass

    def fork(self, parent: Sequence, child: Sequence) -> None:
        pass

    def masked(self, now_ns: int) -> None:
        pass

    def sampled(self, seqs: Seq[Sequence], now_ns: int) -> None:
        pass

    def verified(self, seqs: Seq[Sequence], begin_ns: int, now_ns: int) -> None:
        pass

    def first_text(self, seq: Sequence, now_ns: int) -> None:
        pass

    def close(self, seq: Sequence, now_ns: int) -> None:
        pass

    def committed(self, now_ns: int) -> None:
        pass
