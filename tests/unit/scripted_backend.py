"""A Backend without a model: it stores token ids in its KV slots and scripts logits from them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.backends.base import F32, KVSpec, StepInput, StepLimits, StepOutput

Script = Callable[[list[int]], F32]  # all earlier tokens of a sequence -> logits [V]


def hashed_script(vocab_size: int, scale: float = 3.0) -> Script:
    """Return a script whose logits look random and change with any earlier token."""

    rows = (np.random.default_rng(0).normal(size=(251, vocab_size)) * scale).astype(np.float32)

    def script(context: list[int]) -> F32:
        seed = zlib.crc32(np.asarray(context, np.int32).tobytes())
        return rows[seed % 251] + rows[seed // 251 % 251]

    return script


def fixed_script(logits: Sequence[float]) -> Script:
    """Return a script that gives the same logits whatever came before."""
    row = np.asarray(logits, np.float32)
    return lambda context: row


def spelling_script(vocab_size: int, num_prompt: int, tokens: Sequence[int]) -> Script:
    """Return a script that makes greedy sampling spell `tokens`, then repeat the last one."""

    def script(context: list[int]) -> F32:
        row = np.zeros(vocab_size, np.float32)
        row[tokens[min(len(context) - num_prompt, len(tokens) - 1)]] = 10
        return row

    return script


class ScriptedBackend:
    """Checks each step against the contract; a wrong table or a stale slot changes the logits."""

    def __init__(
        self,
        script: Script,
        *,
        num_blocks: int,
        block_size: int,
        on_forward: Callable[[StepInput], None] | None = None,
    ) -> None:
        self.script = script
        self.steps: list[int] = []  # tokens of each step
        self._block_size = block_size
        self._slots = np.full((num_blocks, block_size), -1, np.int32)
        self._on_forward = on_forward
        self.is_closed = False

    def load(
        self, plan: object, weights: Mapping[str, object], *, kv: KVSpec, limits: StepLimits
    ) -> None:
        raise NotImplementedError("a scripted backend has nothing to load")

    def forward(self, step: StepInput) -> StepOutput:
        if self._on_forward is not None:
            self._on_forward(step)
        self.steps.append(len(step.tokens))
        self._check(step)
        flat = self._slots.reshape(-1)
        flat[step.slots] = step.tokens
        rows = [self.script(self._context(step, row)) for row in step.logit_rows.tolist()]
        return StepOutput(np.stack(rows) if rows else np.zeros((0, 1), np.float32))

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for a, b in zip(src, dst, strict=True):
            self._slots[b] = self._slots[a]

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        flat = self._slots.reshape(-1)
        for a, b in zip(src, dst, strict=True):
            flat[b] = flat[a]

    def read_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self._slots[list(blocks)].view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        self._slots[list(blocks)] = data.view(np.int32)

    def close(self) -> None:
        self.is_closed = True

    def _check(self, step: StepInput) -> None:
        assert len(set(step.slots.tolist())) == len(step.slots), "two rows write one slot"
        next_row = 0
        for i, (first, count, num_computed) in enumerate(step.seqs.tolist()):
            assert first == next_row
            assert count >= 1
            next_row = first + count
            positions = np.arange(num_computed, num_computed + count)
            for row in range(first, next_row):
                assert step.positions[row] == num_computed + len(self._own_rows(step, i, row)) - 1
            blocks = step.block_tables[i, positions // self._block_size]
            slots = blocks * self._block_size + positions % self._block_size
            assert (step.slots[first:next_row] == slots).all()
        assert next_row == len(step.tokens)

    def _context(self, step: StepInput, row: int) -> list[int]:
        """Read back what a row attends to: all tokens of its sequence up to its own."""
        [i] = [i for i, (f, n, _) in enumerate(step.seqs.tolist()) if f <= row < f + n]
        count, num_computed = step.seqs[i, 1:].tolist()
        num_blocks = -(-(num_computed + count) // self._block_size)
        slots = self._slots[step.block_tables[i, :num_blocks]].reshape(-1)
        own = [num_computed + j for j in self._own_rows(step, i, row)]
        context = [*slots[:num_computed].tolist(), *slots[own].tolist()]
        assert min(context) >= 0, "a slot is read before it is written"
        return context

    def _own_rows(self, step: StepInput, i: int, row: int) -> list[int]:
        """Return which rows of its own sequence a row sees, itself last."""
        own = row - int(step.seqs[i, 0])
        mask = 0 if step.tree is None else int(step.tree[row])
        return [j for j in range(own + 1) if mask == 0 or mask >> j & 1]
