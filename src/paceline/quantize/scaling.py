"""Scaling: AWQ's choices for the linears of one input (Lin 2023, with deviations).

A scale of the input's columns, mean |x| to a power, and for every group of a row how far its
largest weights are cut, are those of the least output error e (XᵀX) eᵀ for the calibration text.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.quantize.base import F32, U8, Blocks, float_rows, row_runs
from paceline.quantize.curvature import output_energy, output_errors, some_rows
from paceline.quantize.fold import Fold, scaled_matrix
from paceline.quantize.grid import group_width
from paceline.quantize.walk import Reader, Site
from paceline.weights.encode import MAX_WEIGHT, check_weights, encode
from paceline.weights.mapped_file import drop_pages
from paceline.weights.tensor import BLOCK, QTensor, dequantize

EXPONENTS = tuple(i / 20 for i in range(20))
# What of a group's range is left; before these stands the nearest code, with no regard to inputs.
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6)
NEAREST, _UNCUT = 0, 1
_LEAST_IMPORTANCE = 0.01  # of a column, relative to the median
_ROWS_WEIGHTS = 1 << 18  # of a matrix, whose cuts are tried at once
_FARTHEST = 128.0  # a scale's distance from 1: beyond it rows of v and up would leave float16


class Choice(Struct, frozen=True):
    """How a matrix [N, K] is rounded: after its columns were multiplied by `columns` [K].

    `importance` [K] is what an error of each column costs then, `cuts` [N, groups] are indices:
    NEAREST, or 1 + that of a ratio.
    """

    columns: F32
    importance: F32
    cuts: U8

    def to_bytes(self) -> U8:
        parts = (self.columns, self.importance, self.cuts)
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])

    @classmethod
    def from_bytes(cls, data: U8, num_columns: int, num_rows: int) -> Choice:
        columns, importance, cuts = np.split(data, (4 * num_columns, 8 * num_columns))
        return cls(
            columns=columns.view(np.float32), importance=importance.view(np.float32),
            cuts=cuts.reshape(num_rows, -1),
        )  # fmt: skip


def num_bytes(rows: int, cols: int, blocks: Blocks) -> int:
    """Bytes of a Choice for a matrix."""
    return 8 * cols + rows * (cols // group_width(blocks, cols))


def rounded(
    weight: F32, blocks: Blocks, choice: Choice, *, name: str, num_threads: int,
    rows: F32 | None = None,
) -> U8:  # fmt: skip
    """Return the blocks [N, row_bytes] of `weight` [N, K] as chosen, rows divided by `rows`."""
    scaled = scaled_matrix(weight, choice.columns, rows)
    fmt, by_row = blocks.format, blocks.by_row
    is_cut = choice.cuts != NEAREST
    ratios = np.array([1.0, *RATIOS], np.float32)[choice.cuts]
    data = encode(
        _cut(scaled, ratios), fmt, name=name, by_row=by_row, importance=choice.importance,
        num_threads=num_threads,
    )  # fmt: skip
    if is_cut.all():
        return data
    plain = encode(scaled, fmt, name=name, by_row=by_row, num_threads=num_threads)
    num_blocks = scaled.shape[1] // BLOCK[fmt][0]
    by_block = np.repeat(is_cut, num_blocks // is_cut.shape[1], axis=1)[..., None]
    parts = (part.reshape(len(scaled), num_blocks, -1) for part in (data, plain))
    return np.where(by_block, *parts).reshape(data.shape)


def choose(site: Site, fold: Fold | None, *, num_threads: int) -> list[Choice]:
    """Return a choice for each reader of the site.

    Their output errors, each relative to its output, together are never above those of the nearest
    codes without a scale: then those are the choice.
    """
    gram = site.curvature.gram
    scale = np.ones(len(gram), np.float32)
    if fold is not None:
        scale = _best_scale(site, fold, gram, num_threads)
    choices, ours, theirs = [], 0.0, 0.0
    for reader in site.readers:
        choice, error, base = _cut_groups(reader, scale, gram, num_threads)
        energy = output_energy(some_rows(reader.planned.tensor.load()), gram)
        ours, theirs = ours + error / energy, theirs + base / energy
        choices.append(choice)
    if ours < theirs:
        return choices
    ones = np.ones_like(scale)
    return [Choice(ones, ones, np.full_like(choice.cuts, NEAREST)) for choice in choices]


def scale_of(sizes: F32, exponent: float) -> F32:
    """Return `sizes` to a power, over their geometric mean; 1 where an input is always 0."""
    used = sizes > 0
    scale = np.ones_like(sizes)
    if used.any():
        logs = exponent * np.log(sizes[used].astype(np.float64))
        scale[used] = np.exp(logs - logs.mean())
    return np.clip(scale, 1 / _FARTHEST, _FARTHEST)


class _Sample(Struct, frozen=True):
    """Some rows of a reader's weights, and the energy of their output."""

    reader: Reader
    weight: F32
    energy: float


def _best_scale(site: Site, fold: Fold, gram: F32, num_threads: int) -> F32:
    """Return the scale of the least error over some rows of every reader."""
    samples, limit = [], np.full(len(gram), np.inf, np.float32)
    for reader in site.readers:
        tensor = reader.planned.tensor.load()
        for _, weight in float_rows(tensor):
            check_weights(weight, reader.name)
            limit = np.minimum(limit, MAX_WEIGHT / np.maximum(np.abs(weight).max(axis=0), 1e-30))
        some = some_rows(tensor)
        samples.append(_Sample(reader, some, output_energy(some, gram)))
    sizes = fold.shared(site.mean_size())
    scales = [scale_of(sizes, exponent) for exponent in EXPONENTS]
    scales = [scale for scale in scales if (scale <= limit).all()]
    if not scales:
        return np.ones(len(gram), np.float32)
    errors = [_trials(sample, scales, gram, num_threads) for sample in samples]
    return scales[int(np.argmin(np.sum(errors, axis=0)))]


def _trials(sample: _Sample, scales: list[F32], gram: F32, num_threads: int) -> F32:
    """Return the relative output error of the sample with each of the scales."""
    offs = []
    for scale in scales:
        scaled: F32 = sample.weight * scale
        importance = _relative(np.diag(gram) / scale**2)
        values = _encode(scaled, sample.reader, importance, num_threads)
        offs.append((values - scaled) / scale)
    errors = output_errors(np.concatenate(offs), gram).reshape(len(scales), -1)
    relative: F32 = errors.mean(axis=1) / sample.energy
    return relative


def _cut_groups(
    reader: Reader, scale: F32, gram: F32, num_threads: int
) -> tuple[Choice, float, float]:
    """Return the choice for a matrix with this scale, its mean row's output error, and that of RTN.

    In a group the cut of the least error of the group alone; in a row these, or no cut anywhere,
    whichever has the least error of the whole row.
    """
    rows, cols = reader.planned.tensor.shape
    width = group_width(reader.blocks, cols)
    importance = _relative(np.diag(gram) / scale**2)
    grams = _group_grams(gram, scale, width)

    step = max(1, _ROWS_WEIGHTS // cols)

    def choose_rows(run: QTensor) -> tuple[U8, float, float]:
        """Few rows at a time, which stay in the caches; XᵀX is read once for all of them."""
        offs = np.empty((3, *run.shape), np.float32)  # the best cuts, no cut, the nearest codes
        weight, chosen = dequantize(run), []
        drop_pages(run.data)
        for i in range(0, len(weight), step):
            some = weight[i : i + step]
            cut_offs, best = _cut_rows(some * scale, reader, importance, grams)
            chosen.append(best)
            offs[0, i : i + step] = np.choose(np.repeat(best, width, axis=1), cut_offs) / scale
            offs[1, i : i + step] = cut_offs[_UNCUT] / scale
            offs[2, i : i + step] = _encode(some, reader, None, 1) - some
        mixed, uncut, base = output_errors(offs.reshape(-1, cols), gram).reshape(3, -1)
        cuts = np.concatenate(chosen).astype(np.uint8)
        cuts[uncut <= mixed] = _UNCUT
        return cuts, float(np.minimum(mixed, uncut).sum()), float(base.sum())

    with ThreadPoolExecutor(num_threads) as threads:
        runs = [run for _, run in row_runs(reader.planned.tensor.load())]
        cuts, ours, theirs = zip(*threads.map(choose_rows, runs), strict=True)
    return Choice(scale, importance, np.concatenate(cuts)), sum(ours) / rows, sum(theirs) / rows


def _cut_rows(
    scaled: F32, reader: Reader, importance: F32, grams: F32
) -> tuple[list[F32], npt.NDArray[np.intp]]:
    """Return errors [N, K] of each cut of scaled rows, and each group's best [N, groups]."""
    offs = [_encode(scaled, reader, None, 1) - scaled]
    for ratio in RATIOS:
        cut = _cut(scaled, np.full((len(scaled), len(grams)), ratio, np.float32))
        offs.append(_encode(cut, reader, importance, 1) - scaled)
    return offs, np.argmin([_group_errors(off, grams) for off in offs], axis=0)


def _cut(weight: F32, ratios: F32) -> F32:
    """Return `weight` [N, K] with each group within its share `ratios` [N, groups] of its range."""
    groups = weight.reshape(*ratios.shape, -1)
    limit = np.abs(groups).max(axis=2) * ratios
    cut: F32 = np.clip(groups, -limit[..., None], limit[..., None])
    return cut.reshape(weight.shape)


def _relative(importance: F32) -> F32:
    """Return the importance of columns, the largest 1; all alike where no input is used.

    Columns that the text hardly uses count a little: else their codes would be anything.
    """
    used = importance[importance > 0]
    if not used.size:
        return np.ones(len(importance), np.float32)
    floored = np.maximum(importance, _LEAST_IMPORTANCE * np.median(used))
    relative: F32 = (floored / floored.max()).astype(np.float32)
    return relative


def _group_grams(gram: F32, scale: F32, width: int) -> F32:
    """Return each group's part of XᵀX for inputs over `scale`, [groups, width, width]."""
    groups = range(0, len(gram), width)
    parts = np.stack([gram[i : i + width, i : i + width] for i in groups])
    by_group = scale.reshape(-1, width)
    over: F32 = parts / by_group[:, None, :] / by_group[:, :, None]
    return over


def _group_errors(off: F32, grams: F32) -> F32:
    """Return what the errors [N, K] of each group do to the output by themselves, [N, groups]."""
    parts = off.reshape(len(off), len(grams), -1).swapaxes(0, 1)  # [groups, N, width]
    errors: F32 = np.einsum("gnk,gnk->ng", parts @ grams, parts)
    return errors


def _encode(weight: F32, reader: Reader, importance: F32 | None, num_threads: int) -> F32:
    """Return the values [N, K] of the nearest blocks."""
    blocks = reader.blocks
    data = encode(
        weight, blocks.format, name=reader.name, by_row=blocks.by_row, importance=importance,
        num_threads=num_threads,
    )  # fmt: skip
    return dequantize(QTensor(blocks.format, weight.shape, data))
