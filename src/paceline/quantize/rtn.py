"""RTN, round to nearest: needs no data. `native/kernels/encode_fit.h` searches for the scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.quantize.base import F32, U8, Blocks
from paceline.weights.encode import encode

if TYPE_CHECKING:
    from paceline.quantize.recipe import Recipe
    from paceline.quantize.source import Source
    from paceline.quantize.staging import Staging


class RoundToNearest:
    """Each weight becomes the nearest code of its group's scale, that of least squared error."""

    name = "rtn"

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def rewrites(self, source: Source) -> frozenset[str]:
        """Nothing: all but matrices stays as it is."""
        return frozenset()

    def prepare(
        self, source: Source, recipe: Recipe, staging: Staging, *, num_threads: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Nothing: a tensor is rounded when its turn comes."""

    def quantize(
        self, tensor: str, weight: F32, blocks: Blocks, *, num_threads: int, first_row: int = 0
    ) -> U8:
        return encode(
            weight, blocks.format, name=tensor, by_row=blocks.by_row, num_threads=num_threads
        )
