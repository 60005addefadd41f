"""Building a StepInput: the only place where the arrays of a step are made."""

from __future__ import annotations

import numpy as np

from paceline.backends.base import I32, U64, StepInput, StepLimits
from paceline.config import EngineConfig
from paceline.engine.scheduler import MAX_SCORED
from paceline.engine.sequence import Sequence
from paceline.engine.speculation.base import MAX_DRAFTED, Draft


def step_limits(config: EngineConfig, max_model_len: int, num_blocks: int) -> StepLimits:
    """Return the largest step that the engine of this config will ever build."""
    max_len = min(max_model_len, num_blocks * config.block_size)
    # Tokens that a structure forces take the rows of scores, which a step has none of then.
    num_drafted = 0 if config.speculate == "off" else MAX_DRAFTED
    return StepLimits(
        max_tokens=config.max_batched_tokens,
        max_logit_rows=min(
            config.max_num_seqs + num_drafted + MAX_SCORED, config.max_batched_tokens
        ),
        max_seqs=min(config.max_num_seqs, config.max_batched_tokens),
        max_blocks_per_seq=-(-max_len // config.block_size),
    )


class StepBuilder:
    """Fills buffers made once; a StepInput is views of them, valid until the next build."""

    def __init__(self, limits: StepLimits, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros(limits.max_tokens, np.int32)
        self._positions = np.zeros(limits.max_tokens, np.int32)
        self._slots = np.zeros(limits.max_tokens, np.int32)
        self._seqs = np.zeros((limits.max_seqs, 3), np.int32)
        self._tables = np.zeros((limits.max_seqs, limits.max_blocks_per_seq), np.int32)
        self._logit_rows = np.zeros(limits.max_logit_rows, np.int32)
        self._tree = np.zeros(limits.max_tokens, np.uint64)
        # Which table each row of `_tables` holds (sequence, epoch) and how much of it is written:
        # in steady decoding a row stays as it is.
        self._owners = [-1] * limits.max_seqs
        self._epochs = [-1] * limits.max_seqs
        self._num_written = [0] * limits.max_seqs

    def build(self, chunks: list[tuple[Sequence, int]]) -> tuple[StepInput, list[Sequence]]:
        """Return the step that computes n tokens of each (sequence, n), and whose logits it makes.

        Those are the sequences that are known to their last token after the step. The rows of the
        logits are theirs in order: one each, and after it one for each node of its draft, whose
        rows count in n; behind them come the rows that score prompts, `unscored` of each chunk in
        order. Precondition: chunks of one token come first.
        """
        num_single = 0
        for _, n in chunks:
            if n != 1:
                break
            num_single += 1
        finished = self._build_single([seq for seq, _ in chunks[:num_single]])
        logit_rows = list(range(num_single)) if len(finished) == num_single else [
            row for row, (seq, _) in enumerate(chunks[:num_single])
            if seq.num_computed + 1 == len(seq.token_ids)
        ]  # fmt: skip
        row = num_single
        has_tree = False
        for i, (seq, n) in enumerate(chunks[num_single:], num_single):
            num_drafted = 0
            if seq.draft is None:
                self._build_chunk(i, seq, row, n)
            else:
                num_drafted = len(seq.draft.tokens)
                self._build_draft(i, seq, row, seq.draft)
                has_tree = has_tree or not seq.draft.is_chain
            row += n
            if seq.num_computed + n - num_drafted == len(seq.token_ids):
                finished.append(seq)
                logit_rows.extend(range(row - 1 - num_drafted, row))
        for (seq, n), first in zip(chunks, self._seqs[:, 0], strict=False):
            if seq.scores is not None:
                logit_rows += [int(first) + p - seq.num_computed for p in seq.unscored(n)]
        num_seqs, num_logit_rows = len(chunks), len(logit_rows)
        self._logit_rows[:num_logit_rows] = logit_rows
        step = StepInput(
            tokens=self._tokens[:row],
            positions=self._positions[:row],
            slots=self._slots[:row],
            seqs=self._seqs[:num_seqs],
            block_tables=self._tables[:num_seqs],
            logit_rows=self._logit_rows[:num_logit_rows],
            tree=self._build_tree(chunks, row) if has_tree else None,
        )
        return step, finished

    def _build_single(self, seqs: list[Sequence]) -> list[Sequence]:
        """Fill one row for each sequence; return those that it brings to their last token."""
        tokens, positions, slots, finished = [], [], [], []
        block_size = self._block_size
        for i, seq in enumerate(seqs):
            position = seq.num_computed
            tokens.append(seq.token_ids[position])
            positions.append(position)
            slots.append(
                seq.block_table[position // block_size] * block_size + position % block_size
            )
            if position + 1 == len(seq.token_ids):
                finished.append(seq)
            self._write_table(i, seq)
        n = len(seqs)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._slots[:n] = slots
        self._seqs[:n, 0] = np.arange(n)
        self._seqs[:n, 1] = 1
        self._seqs[:n, 2] = positions
        return finished

    def _build_chunk(self, i: int, seq: Sequence, row: int, n: int) -> None:
        begin = seq.num_computed
        self._tokens[row : row + n] = seq.token_ids[begin : begin + n]
        self._positions[row : row + n] = self._place(i, seq, row, n)

    def _build_draft(self, i: int, seq: Sequence, row: int, draft: Draft) -> None:
        """Fill the row of the last known token and those of the draft's nodes."""
        n = 1 + len(draft.tokens)
        self._tokens[row] = seq.token_ids[-1]
        self._tokens[row + 1 : row + n] = draft.tokens
        positions = self._place(i, seq, row, n)
        if draft.is_chain:
            self._positions[row : row + n] = positions
        else:
            self._positions[row : row + n] = [
                positions[0] + depth for depth in (0, *draft.depths())
            ]

    def _build_tree(self, chunks: list[tuple[Sequence, int]], num_rows: int) -> U64:
        """Return the masks of all rows: 0, which is causal, but for those of trees."""
        tree = self._tree[:num_rows]
        tree[:] = 0
        for (seq, n), first in zip(chunks, self._seqs[:, 0].tolist(), strict=False):
            if seq.draft is not None and not seq.draft.is_chain:
                tree[first : first + n] = seq.draft.masks()
        return tree

    def _place(self, i: int, seq: Sequence, row: int, n: int) -> I32:
        """Give the next n rows of `seq` their slots; return where in the sequence those are."""
        begin = seq.num_computed
        self._write_table(i, seq)
        positions = np.arange(begin, begin + n, dtype=np.int32)
        self._slots[row : row + n] = (
            self._tables[i, positions // self._block_size] * self._block_size
            + positions % self._block_size
        )
        self._seqs[i] = row, n, begin
        return positions

    def _write_table(self, i: int, seq: Sequence) -> None:
        num_blocks = len(seq.block_table)
        is_owner = self._owners[i] == seq.number and self._epochs[i] == seq.table_epoch
        begin = self._num_written[i] if is_owner else 0
        if begin < num_blocks:
            self._tables[i, begin:num_blocks] = seq.block_table[begin:]
            self._owners[i], self._epochs[i] = seq.number, seq.table_epoch
            self._num_written[i] = num_blocks
