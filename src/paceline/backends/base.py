"""What a backend is: loads one plan and runs steps of ragged tokens over a paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

if TYPE_CHECKING:
    from paceline.plan.plan import Plan
    from paceline.weights.tensor import QTensor

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]


class StepLimits(Struct, frozen=True, kw_only=True):
    """The largest step that will ever be asked for; buffers are sized by it, once."""

    max_tokens: int  # T
    max_logit_rows: int  # L
    max_seqs: int  # B
    max_blocks_per_seq: int


class KVSpec(Struct, frozen=True, kw_only=True):
    """Shape of the paged KV cache."""

    num_blocks: int
    block_size: int
    dtype: str  # "f16", "bf16", "f32", "int8", "fp8", "k8v4", "int4"


class StepInput(Struct, frozen=True):
    """One step: T tokens of B sequences, flattened; L of the rows need logits."""

    tokens: I32  # [T]
    positions: I32  # [T]
    slots: I32  # [T] where a token's K and V go: block_id * block_size + offset
    seqs: I32  # [B, 3] first row in the step, number of rows, tokens already in the KV cache
    block_tables: I32  # [B, M] block ids; entries past a sequence's end are not read
    logit_rows: I32  # [L] rows of the step that need logits
    # [T] or None: bit j of a row says that it sees row j of its own sequence in this step (bit of
    # itself included), for draft trees of up to 64 rows. None is causal.
    tree: U64 | None = None


class StepOutput(Struct, frozen=True):
    """`logits` [L, V] is a view that the next forward overwrites.

    They are hidden states, [L, hidden], where that is what the plan hands out.
    `end_ns` is when the work was done, on the clock of time.monotonic_ns, where the backend knows
    it: what follows is the caller's wait for the GIL. 0: not known.
    """

    logits: F32
    end_ns: int = 0


class Backend(Protocol):
    """A device. Methods are called from one thread at a time."""

    def load(
        self, plan: Plan, weights: Mapping[str, QTensor], *, kv: KVSpec, limits: StepLimits
    ) -> None: ...

    def forward(self, step: StepInput) -> StepOutput: ...

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole KV blocks, all layers, src[i] -> dst[i]."""

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy K and V of single tokens, all layers, src[i] -> dst[i], one after the other."""

    def read_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return [len(blocks), block_bytes]: K and V of all layers, in the backend's layout."""

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Inverse of `read_blocks`."""

    def close(self) -> None:
        """Free weights, KV cache and threads. Idempotent; `load` may follow."""
