"""RTN, round to nearest: needs no data. `native/kernels/encode_fit.h` searches for the scales."""

from __future__ import annotations

from paceline.quantize.base import F32, U8, Blocks
from paceline.weights.encode import encode


class RoundToNearest:
    """Each weight becomes the nearest code of its group's scale, that of least squared error."""

    name = "rtn"
    needs_whole_matrix = False

    def quantize(self, tensor: str, weight: F32, blocks: Blocks, *, num_threads: int) -> U8:
        return encode(
            weight, blocks.format, name=tensor, by_row=blocks.by_row, num_threads=num_threads
        )
