"""RowCost: the seconds of a step by its number of rows, learnt from the steps that ran."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

_LEARN = 0.05  # how much of a deviation a size that ran often takes over
_LEARN_LEVEL = 0.1  # and the level common to all
_NUM_NEW = 6  # measurements before a size moves the level
_MAX_DEVIATION = 2.0  # a step that was interrupted says nothing about its rows
_PRIOR_SLOPE = 0.1  # of a step's cost, a further row, before it was measured
_MAX_ROWS = 256


class RowCost:
    """Costs of step sizes of up to 256 rows, relative to each other, times a level common to all.

    The level follows what changes every step alike (longer contexts, a busy machine), so a size
    that did not run for a while keeps its place among the others.

    `known` sizes were measured elsewhere, without the Python around a step. Until they run they
    tell how sizes compare, once a first step has told the level; they bound nothing.
    """

    def __init__(self, known: Sequence[tuple[int, float]] = ()) -> None:
        self._level = 0.0
        self._shape: dict[int, float] = dict(known)
        self._num_measured: dict[int, int] = {}
        self._sizes = sorted(self._shape)  # rising, as those that were measured
        self._measured: list[int] = []

    @property
    def is_known(self) -> bool:
        return self._level > 0

    def observe(self, num_rows: int, seconds: float) -> None:
        if seconds <= 0 or num_rows > _MAX_ROWS:
            return
        if not self._level:
            self._level = seconds / self._shape.get(num_rows, seconds)
            self._add(num_rows, seconds / self._level)
            return
        if num_rows not in self._num_measured:
            most = self.at_most(num_rows)
            self._add(num_rows, min(seconds, most) / self._level)
            return
        deviation = seconds / self.seconds(num_rows)
        deviation = min(max(deviation, 1 / _MAX_DEVIATION), _MAX_DEVIATION)
        self._num_measured[num_rows] += 1
        count = self._num_measured[num_rows]
        self._shape[num_rows] *= deviation ** max(1 / count, _LEARN)
        if count > _NUM_NEW:
            self._level *= deviation**_LEARN_LEVEL

    def at_most(self, num_rows: int) -> float:
        """Return `seconds` where they were measured, else a bound: rows get no dearer.

        A step of twice the rows takes at most twice as long. Precondition: `is_known`.
        """
        if num_rows in self._num_measured or num_rows < self._measured[0]:
            return self.seconds(num_rows)
        low = self._measured[bisect(self._measured, num_rows) - 1]
        return self.seconds(low) * num_rows / low

    def seconds(self, num_rows: int) -> float:
        """Return what a step of so many rows is expected to take. Precondition: `is_known`.

        A size that did not run lies on the line between its neighbours, or a usual slope away.
        """
        sizes, shape = self._sizes, self._shape
        relative = shape.get(num_rows)
        if relative is None:
            above = bisect(sizes, num_rows)
            if above == 0:
                relative = shape[sizes[0]] / (1 + _PRIOR_SLOPE * (sizes[0] - num_rows))
            elif above == len(sizes):
                relative = shape[sizes[-1]] + self._slope() * (num_rows - sizes[-1])
            else:
                low, high = sizes[above - 1], sizes[above]
                part = (num_rows - low) / (high - low)
                relative = shape[low] + (shape[high] - shape[low]) * part
        return self._level * relative

    def _slope(self) -> float:
        """Return what a row more than ever before costs: as those did on average, or the usual.

        On average: kernels work in tiles, so the row that begins one is dearer than the next ones.
        """
        first, last = self._sizes[0], self._sizes[-1]
        usual = _PRIOR_SLOPE * self._shape[last]
        if first == last:
            return usual
        return max((self._shape[last] - self._shape[first]) / (last - first), usual / last)

    def _add(self, num_rows: int, relative: float) -> None:
        self._shape[num_rows] = relative
        self._num_measured[num_rows] = 1
        self._sizes = sorted(self._shape)
        self._measured = sorted(self._num_measured)
