"""Curvature: how an error of each weight of a row, alone and with others, changes the output.

For inputs X [T, K] a row's error e costs |X e|² = e (XᵀX) eᵀ, so XᵀX says it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelFormatError
from paceline.quantize.base import F32
from paceline.weights.tensor import QTensor, dequantize

F64 = npt.NDArray[np.float64]
Order = npt.NDArray[np.intp]

DAMPING = 0.01  # of the mean square input, added to each: Frantar 2023
_SAMPLE_WEIGHTS = 1 << 19  # of a matrix, enough to tell formats and scales apart
_ROWS_AT_ONCE = 2048  # of inputs
_COLUMNS_AT_ONCE = 1024  # of XᵀX
_SMALL = 64  # triangles up to this size are inverted at once


class Curvature:
    """XᵀX [K, K] of one linear's inputs, and its factors, which linears of one input share."""

    def __init__(self, inputs: Iterable[F32], *, name: str) -> None:
        """Sum over pieces [T, K] in their order. `name` is for the error of what is not finite."""
        products = (x.T @ x for x in _joined(inputs))
        self.gram: F32 = next(products)
        for product in products:
            self.gram += product
        if not np.isfinite(self.gram).all():
            raise ModelFormatError(
                f"the inputs of {name} are not finite for the calibration text: the model's "
                "weights are broken, download or convert it again"
            )
        self._factors: dict[int, tuple[Order, F32]] = {}

    def factor(self, width: int, *, act_order: bool) -> tuple[Order, F32]:
        """Return an order of the columns, and the upper U [K, K] with UᵀU the inverse in it.

        Columns of large input come first, while most others are left to make up for their error;
        groups of `width` stay together, since they share a scale that is chosen when they begin.
        Inputs that are always 0 have damping alone: they correlate with nothing.
        """
        if width not in self._factors:
            squares = np.diag(self.gram).astype(np.float64)
            order = _by_size(squares, width) if act_order else np.arange(len(squares))
            damped = self.gram[np.ix_(order, order)].astype(np.float64)
            np.fill_diagonal(damped, squares[order] + (DAMPING * squares.mean() or 1.0))
            self._factors[width] = order, _inverse_factor(damped).astype(np.float32)
        return self._factors[width]


def _joined(pieces: Iterable[F32]) -> Iterator[F32]:
    """Yield runs of pieces as one: many rows are multiplied in the time of writing XᵀX once."""
    run: list[F32] = []
    for piece in pieces:
        run.append(piece)
        if sum(map(len, run)) >= _ROWS_AT_ONCE:
            yield np.concatenate(run)
            run = []
    if run:
        yield np.concatenate(run)


def output_errors(off: F32, gram: F32) -> F32:
    """Return what each row of errors [N, K] does to the output, squared: e (XᵀX) eᵀ, [N].

    XᵀX is symmetric: what lies left of its diagonal counts twice, and what lies right is not read.
    """
    errors = np.zeros(len(off), np.float32)
    for begin in range(0, len(gram), _COLUMNS_AT_ONCE):
        columns = slice(begin, begin + _COLUMNS_AT_ONCE)
        part = (
            2 * (off[:, :begin] @ gram[:begin, columns]) + off[:, columns] @ gram[columns, columns]
        )
        errors += np.einsum("nk,nk->n", part, off[:, columns])
    return errors


def some_rows(tensor: QTensor) -> F32:
    """Return rows spread evenly over a matrix, in floats."""
    rows, cols = tensor.shape
    data = tensor.data[:: max(1, rows * cols // _SAMPLE_WEIGHTS)]
    return dequantize(QTensor(tensor.format, (len(data), cols), data))


def output_energy(some: F32, gram: F32) -> float:
    """Return the mean squared output of rows; 1 where it is 0: errors are told relative to it."""
    return float(output_errors(some, gram).mean()) or 1.0


def _by_size(squares: F64, width: int) -> Order:
    """Groups by their mean square, columns in a group by their own, the largest first."""
    groups = squares.reshape(-1, width)
    inner = np.argsort(-groups, axis=1, kind="stable")
    outer = np.argsort(-groups.mean(axis=1), kind="stable")
    order: Order = (inner + np.arange(len(groups))[:, None] * width)[outer].reshape(-1)
    return order


def _inverse_factor(matrix: F64) -> F64:
    """The upper U with UᵀU the inverse of `matrix`, which is positive definite.

    With rows and columns reversed, matrix is L Lᵀ; U is the inverse of L, reversed back.
    """
    lower = np.asarray(np.linalg.cholesky(matrix[::-1, ::-1]), np.float64)
    _invert_lower(lower)
    return lower[::-1, ::-1]


def _invert_lower(lower: F64) -> None:
    """Invert a lower triangle in place, by halves: all but small triangles are products."""
    size = len(lower)
    if size <= _SMALL:
        lower[:] = np.tril(np.linalg.inv(lower))
        return
    half = size // 2
    first, last = lower[:half, :half], lower[half:, half:]
    _invert_lower(first)
    _invert_lower(last)
    lower[half:, :half] = -last @ (lower[half:, :half] @ first)
