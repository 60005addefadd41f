"""Building a StepInput: the only place where the arrays of a step are made."""

from __future__ import annotations

import numpy as np

from paceline.backends.base import StepInput, StepLimits
from paceline.config import EngineConfig
from paceline.engine.sequence import Sequence


def step_limits(config: EngineConfig, max_model_len: int, num_blocks: int) -> StepLimits:
    """Return the largest step that the engine of this config will ever build."""
    max_len = min(max_model_len, num_blocks * config.block_size)
    return StepLimits(
        max_tokens=config.max_batched_tokens,
        max_logit_rows=min(config.max_num_seqs, config.max_batched_tokens),
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
        # Which table each row of `_tables` holds (sequence, epoch) and how much of it is written:
        # in steady decoding a row stays as it is.
        self._owners = [-1] * limits.max_seqs
        self._epochs = [-1] * limits.max_seqs
        self._num_written = [0] * limits.max_seqs

    def build(self, chunks: list[tuple[Sequence, int]]) -> tuple[StepInput, list[Sequence]]:
        """Return the step that computes n tokens of each (sequence, n), and whose logits it makes.

        Row l of the logits belongs to the l-th sequence returned: those that are known to their
        last token after the step. Precondition: chunks of one token come first.
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
        for i, (seq, n) in enumerate(chunks[num_single:], num_single):
            self._build_chunk(i, seq, row, n)
            row += n
            if seq.num_computed + n == len(seq.token_ids):
                finished.append(seq)
                logit_rows.append(row - 1)
        num_seqs, num_logit_rows = len(chunks), len(logit_rows)
        self._logit_rows[:num_logit_rows] = logit_rows
        step = StepInput(
            tokens=self._tokens[:row],
            positions=self._positions[:row],
            slots=self._slots[:row],
            seqs=self._seqs[:num_seqs],
            block_tables=self._tables[:num_seqs],
            logit_rows=self._logit_rows[:num_logit_rows],
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
        begin, end = seq.num_computed, seq.num_computed + n
        self._write_table(i, seq)
        positions = np.arange(begin, end, dtype=np.int32)
        self._tokens[row : row + n] = seq.token_ids[begin:end]
        self._positions[row : row + n] = positions
        self._slots[row : row + n] = (
            self._tables[i, positions // self._block_size] * self._block_size
            + positions % self._block_size
        )
        self._seqs[i] = row, n, begin

    def _write_table(self, i: int, seq: Sequence) -> None:
        num_blocks = len(seq.block_table)
        is_owner = self._owners[i] == seq.number and self._epochs[i] == seq.table_epoch
        begin = self._num_written[i] if is_owner else 0
        if begin < num_blocks:
            self._tables[i, begin:num_blocks] = seq.block_table[begin:]
            self._owners[i], self._epochs[i] = seq.number, seq.table_epoch
            self._num_written[i] = num_blocks
