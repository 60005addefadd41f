"""AWQ (Lin 2023): inputs that are large keep more of their weights' precision.

Their weights are made larger before they are rounded, and the input is divided where it is made
(`fold.py`), so the result is a model like any other. `scaling.py` has the choices.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from paceline.models.base import build_plan
from paceline.quantize.base import F32, U8, Blocks, row_runs
from paceline.quantize.calibration import Calibration
from paceline.quantize.fold import Fold, divided_vector, find_folds
from paceline.quantize.scaling import EXPONENTS, RATIOS, Choice, choose, num_bytes, rounded
from paceline.quantize.walk import Reader, Site, sites
from paceline.weights.encode import encode
from paceline.weights.mapped_file import drop_pages
from paceline.weights.tensor import QTensor, dequantize

if TYPE_CHECKING:
    from paceline.quantize.recipe import Recipe
    from paceline.quantize.source import Source
    from paceline.quantize.staging import Staging


class Awq:
    """Linears are scaled, cut and rounded for `calibration`; embedding and head to the nearest."""

    name = "awq"

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._choices: dict[str, Choice] = {}  # by stored name
        self._rows: dict[str, F32] = {}  # what rows of a matrix are divided by

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "calibration": self._calibration.summary(), "exponents": list(EXPONENTS),
            "cuts": list(RATIOS),
        }  # fmt: skip

    def rewrites(self, source: Source) -> frozenset[str]:
        """Stored names of the norms and biases that can take up a scale."""
        plan = build_plan(source.checkpoint.config)
        linears = {source.canonical[name] for name in source.linears}
        vectors = {name for fold in find_folds(plan, linears).values() for name in fold.vectors}
        return frozenset(name for name, known in source.canonical.items() if known in vectors)

    def prepare(
        self, source: Source, recipe: Recipe, staging: Staging, *, num_threads: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Choose for every linear, and keep the vectors that take up scales."""
        linears = {
            source.canonical[t.tensor.name]
            for t in recipe.tensors
            if t.blocks is not None and t.tensor.name in source.linears
        }
        folds = find_folds(build_plan(source.checkpoint.config), linears)
        stored = {known: name for name, known in source.canonical.items()}
        divisors: dict[str, F32] = {}  # of vectors
        for site in sites(source, recipe, self._calibration, progress):
            fold = folds.get(site.value.id)
            self._settle(site, fold, staging, num_threads)
            if fold is None:
                continue
            columns = self._choices[site.readers[0].name].columns
            site.divide(columns)
            scale = fold.elements(columns)
            divisors |= {stored[name]: scale for name in fold.vectors}
            if fold.matrix is not None:
                self._rows[stored[fold.matrix]] = scale
        for planned in recipe.tensors:
            name = planned.tensor.name
            if planned.blocks is not None and planned.blocks.format == "f32":
                vector = dequantize(planned.tensor.load())
                if name in divisors:
                    lacking = source.norm_offset if name.endswith("norm.weight") else 0.0
                    vector = divided_vector(vector, divisors[name], lacking)
                staging.keep(name, vector.view(np.uint8))

    def _settle(self, site: Site, fold: Fold | None, staging: Staging, num_threads: int) -> None:
        """Choose for the readers, or take what was kept; the walk goes on with them rounded."""
        kept = [_kept(reader, staging) for reader in site.readers]
        choices = [choice for choice in kept if choice is not None]
        if len(choices) < len(kept):
            choices = choose(site, fold, num_threads=num_threads)
            for reader, choice in zip(site.readers, choices, strict=True):
                staging.keep(_key(reader), choice.to_bytes())
        for reader, choice in zip(site.readers, choices, strict=True):
            self._choices[reader.name] = _kept(reader, staging) or choice
            with ThreadPoolExecutor(num_threads) as threads:
                runs = row_runs(reader.planned.tensor.load())
                parts = list(threads.map(partial(self._rounded_run, reader), runs))
            site.replace(reader, np.concatenate(parts))

    def _rounded_run(self, reader: Reader, run: tuple[int, QTensor]) -> U8:
        first, rows = run
        weight = dequantize(rows)
        drop_pages(rows.data)
        return self.quantize(reader.name, weight, reader.blocks, num_threads=1, first_row=first)

    def quantize(
        self, tensor: str, weight: F32, blocks: Blocks, *, num_threads: int, first_row: int = 0
    ) -> U8:
        choice, rows = self._choices.get(tensor), self._rows.get(tensor)
        if choice is None:
            return encode(
                weight, blocks.format, name=tensor, by_row=blocks.by_row, num_threads=num_threads
            )
        part = slice(first_row, first_row + len(weight))
        return rounded(
            weight, blocks, replace(choice, cuts=choice.cuts[part]), name=tensor,
            rows=None if rows is None else rows[part], num_threads=num_threads,
        )  # fmt: skip


def _key(reader: Reader) -> str:
    return f"{reader.name}: choice"


def _kept(reader: Reader, staging: Staging) -> Choice | None:
    """Return what was chosen for a reader, its arrays mapped from the file that keeps it."""
    rows, cols = reader.planned.tensor.shape
    data = staging.kept(_key(reader), num_bytes(rows, cols, reader.blocks))
    return None if data is None else Choice.from_bytes(data, cols, rows)
