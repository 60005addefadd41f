"""Method: how float weights become the blocks of a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.weights.mapped_file import drop_pages
from paceline.weights.tensor import QTensor, dequantize

if TYPE_CHECKING:
    from paceline.quantize.recipe import Recipe
    from paceline.quantize.source import Source
    from paceline.quantize.staging import Staging

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_CHUNK_WEIGHTS = 1 << 21  # of a matrix at once: 8 MiB as floats


class Blocks(Struct, frozen=True):
    """A format of `weights/tensor.py`; with `by_row` all blocks of a row share one scale."""

    format: str
    by_row: bool = False


class Method(Protocol):
    """A way to choose codes and scales. One that calibrates is built with what it measured."""

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """What its bits depend on beside weights and formats; config.json tells of it."""
        ...

    def rewrites(self, source: Source) -> frozenset[str]:
        """Return the stored names of vectors that it changes, and keeps as f32 in `prepare`."""
        ...

    def prepare(
        self, source: Source, recipe: Recipe, staging: Staging, *, num_threads: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Put into `staging` what must be made out of turn; `progress` counts its bytes."""
        ...

    def quantize(
        self, tensor: str, weight: F32, blocks: Blocks, *, num_threads: int, first_row: int = 0
    ) -> U8:
        """Return the blocks [N, row_bytes] of `weight` [N, K], rows of `tensor` from that on."""
        ...


class RowsInOrder:
    """Rows of mapped `data` in another order, copied when they are asked for: all, or a run."""

    def __init__(self, data: U8, order: npt.NDArray[np.int32]) -> None:
        self._data = data
        self._order = order

    def __call__(self) -> U8:
        return self._data[self._order]

    def run(self, start: int, stop: int) -> U8:
        order = self._order[start:stop]
        rows: U8 = self._data[order]
        drop_pages(self._data[order.min() : order.max() + 1])
        return rows


def row_runs(tensor: QTensor) -> Iterator[tuple[int, QTensor]]:
    """Yield runs of a matrix's rows as they are stored, each after its first row."""
    rows, cols = tensor.shape
    step = max(1, _CHUNK_WEIGHTS // cols)
    for start in range(0, rows, step):
        if isinstance(tensor.stored, RowsInOrder):
            data = tensor.stored.run(start, start + step)
        else:
            data = tensor.data[start : start + step]
        yield start, QTensor(tensor.format, (len(data), cols), data)


def float_rows(tensor: QTensor) -> Iterator[tuple[int, F32]]:
    """Yield the same in floats."""
    for start, run in row_runs(tensor):
        yield start, dequantize(run)
        drop_pages(run.data)
