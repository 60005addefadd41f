"""Verification: where the tokens after a draft's root come from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence


def follow(seqs: Seq[Sequence], rows: Seq[int], ids: Seq[int]) -> list[tuple[Sequence, int]]:
    """Return the sequences whose chosen token a draft foresaw, each with the logit row after it.

    `rows` are those that `ids` came from. As tokens are chosen one by one as without drafts, with
    the state and the random number of their position, every text is the one without drafts.
    """
    going = []
    for seq, row, token_id in zip(seqs, rows, ids, strict=True):
        draft = seq.draft
        if draft is not None:
            end = draft.end
            if draft.accept(token_id):
                if draft.is_forced:
                    seq.num_forced += 1
                else:
                    seq.num_accepted += 1
                going.append((seq, row + draft.end - end))
    return going


def root_rows(seqs: Seq[Sequence]) -> list[int]:
    """Return the logit row of each sequence's last known token; those of its draft follow it."""
    rows, row = [], 0
    for seq in seqs:
        rows.append(row)
        row += 1 if seq.draft is None else 1 + len(seq.draft.tokens)
    return rows
