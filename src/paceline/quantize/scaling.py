"""Scaling: AWQ's choices for the linears of one input (Lin 2023, with deviations).

A scale of the input's columns, mean |x| to a power, and for every group of a row how far its
largest weights are cut, are those of the least output error e (XᵀX) eᵀ for the calibration text.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from paceline.quantize.base import F32, U8, Blocks
from paceline.quantize.fold import Fold
from paceline.quantize.grid import group_width
from paceline.quantize.walk import Reader, Site
from paceline.weights.encode import MAX_WEIGHT, check_weights, encode
from paceline.weights.tensor import BLOCK, QTensor, dequantize

EXPONENTS = tuple(i / 20 for i in range(20))
# What of a group's range is left; before these stands the nearest code, with no regard to inputs.
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6)
NEAREST, _UNCUT = 0, 1
_FARTHEST = 128.0  # a scale's distance from 1: beyond it rows of v and up would leave float16
_SAMPLE_WEIGHTS = 1 << 19  # of each linear, for the choice of the exponent
_CHUNK_WEIGHTS = 1 << 21  # of which errors are found at once


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
    """Return the blocks [N, row_bytes] of `weight` [N, K], its `rows` divided, as chosen."""
    scaled = weight * choice.columns
    if rows is not None:
        scaled /= rows[:, None]
    fmt, by_row = blocks.format, blocks.by_row
    plain = encode(scaled, fmt, name=name, by_row=by_row, num_threads=num_threads)
    is_cut = choice.cuts != NEAREST
    if not is_cut.any():
        return plain
    ratios = np.array([1.0, *RATIOS], np.float32)[choice.cuts]
    data = encode(
        _cut(scaled, ratios), fmt, name=name, by_row=by_row, importance=choice.importance,
        num_threads=num_threads,
    )  # fmt: skip
    num_blocks = scaled.shape[1] // BLOCK[fmt][0]
    by_block = np.repeat(is_cut, num_blocks // is_cut.shape[1], axis=1)[..., None]
    parts = (part.reshape(len(scaled), num_blocks, -1) for part in (data, plain))
    return np.where(by_block, *parts).reshape(data.shape)


def choose(site: Site, fold: Fold | None, *, num_threads: int) -> list[Choice]:
    """Return a choice for each reader of the site.

    Their output errors, each relative to its output, together are never above those of the nearest
    codes without a scale: then those are the choice.
    """
    assert site.curvature.gram is not None
    gram = site.curvature.gram.astype(np.float32)
    scale = np.ones(len(gram), np.float32)
    if fold is not None:
        scale = _best_scale(site, fold, gram, num_threads)
    scaled_gram: F32 = (gram / scale) / scale[:, None]
    choices, ours, theirs = [], 0.0, 0.0
    for reader in site.readers:
        weight = dequantize(reader.planned.tensor.load())
        choice, error = _cut_groups(weight, reader, scale, scaled_gram, num_threads)
        plain = _encode(weight, reader, None, num_threads)
        energy = _energy(weight, gram)
        ours += error / energy
        theirs += _errors(plain - weight, gram).sum() / energy
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
    """Some rows of a reader's weights, and about their squared output."""

    reader: Reader
    weight: F32
    energy: float


def _best_scale(site: Site, fold: Fold, gram: F32, num_threads: int) -> F32:
    """Return the scale of the least error over some rows of every reader."""
    samples, limit = [], np.full(len(gram), np.inf, np.float32)
    for reader in site.readers:
        weight = dequantize(reader.planned.tensor.load())
        check_weights(weight, reader.name)
        limit = np.minimum(limit, MAX_WEIGHT / np.maximum(np.abs(weight).max(axis=0), 1e-30))
        some = _sample(weight)
        samples.append(_Sample(reader, some, _energy(some, gram)))
    sizes = fold.shared(site.mean_size())
    best, least = np.ones(len(gram), np.float32), np.inf
    for exponent in EXPONENTS:
        scale = scale_of(sizes, exponent)
        if (scale <= limit).all():
            error = _trial(samples, scale, gram, num_threads)
            if error < least:
                best, least = scale, error
    return best


def _trial(samples: list[_Sample], scale: F32, gram: F32, num_threads: int) -> float:
    """Return the relative output error of the samples, all together, with this scale."""
    importance = _relative(np.diag(gram) / scale**2)
    error = 0.0
    for sample in samples:
        scaled: F32 = sample.weight * scale
        values = _encode(scaled, sample.reader, importance, num_threads)
        off: F32 = np.divide(values - scaled, scale)
        error += float(_errors(off, gram).sum()) / sample.energy
    return error


def _cut_groups(
    weight: F32, reader: Reader, scale: F32, gram: F32, num_threads: int
) -> tuple[Choice, float]:
    """Return the choice for a matrix with this scale, and its output error; `gram` is scaled.

    In a group the cut of the least error of the group alone; in a row these, or no cut anywhere,
    whichever has the least error of the whole row.
    """
    cols = weight.shape[1]
    width = group_width(reader.blocks, cols)
    importance = _relative(np.diag(gram))
    cuts, total = [], 0.0
    step = max(1, _CHUNK_WEIGHTS // cols)
    for start in range(0, len(weight), step):
        scaled = weight[start : start + step] * scale
        offs = [_encode(scaled, reader, None, num_threads) - scaled]
        for ratio in RATIOS:
            cut = _cut(scaled, np.full((len(scaled), cols // width), ratio, np.float32))
            offs.append(_encode(cut, reader, importance, num_threads) - scaled)
        chosen = np.argmin([_group_errors(off, gram, width) for off in offs], axis=0)
        mixed = _errors(np.choose(np.repeat(chosen, width, axis=1), offs), gram)
        uncut = _errors(offs[_UNCUT], gram)
        chosen[uncut <= mixed] = _UNCUT
        cuts.append(chosen.astype(np.uint8))
        total += float(np.minimum(mixed, uncut).sum())
    return Choice(scale, importance, np.concatenate(cuts)), total


def _cut(weight: F32, ratios: F32) -> F32:
    """Return `weight` [N, K] with each group within its share `ratios` [N, groups] of its range."""
    groups = weight.reshape(*ratios.shape, -1)
    limit = np.abs(groups).max(axis=2) * ratios
    cut: F32 = np.clip(groups, -limit[..., None], limit[..., None])
    return cut.reshape(weight.shape)


def _relative(importance: F32) -> F32:
    """Return the importance of columns, the largest 1; all alike where no input is used."""
    most = importance.max()
    relative: F32 = (importance / most if most > 0 else np.ones_like(importance)).astype(np.float32)
    return relative


def _errors(off: F32, gram: F32) -> F32:
    """Return what rows of errors [N, K] do to the output: e (XᵀX) eᵀ, [N]."""
    errors: F32 = np.einsum("nk,nk->n", off @ gram, off)
    return errors


def _sample(weight: F32) -> F32:
    """Return rows spread evenly over a matrix."""
    return weight[:: max(1, weight.size // _SAMPLE_WEIGHTS)].copy()


def _energy(weight: F32, gram: F32) -> float:
    """Return about the squared output of `weight`, all tokens together; 1 where it is 0."""
    some = _sample(weight)
    return float(_errors(some, gram).sum()) * len(weight) / len(some) or 1.0


def _group_errors(off: F32, gram: F32, width: int) -> F32:
    """Return what the errors [N, K] of each group do to the output by themselves, [N, groups]."""
    parts = off.reshape(len(off), -1, width).swapaxes(0, 1)  # [groups, N, width]
    grams = np.stack([gram[i : i + width, i : i + width] for i in range(0, len(gram), width)])
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
