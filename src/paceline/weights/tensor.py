"""QTensor: a weight in the bytes of its source format, and what those bytes mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# format -> (weights in a block, bytes of a block)
BLOCK: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2),
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq4_nl": (32, 18),
}  # fmt: skip
FLOAT_FORMATS = frozenset({"f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class QTensor:
    """A weight of `shape` [N, K] (or [N] for vectors); `data` is uint8 [N, row_bytes] (or [row_bytes])."""

    format: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)
