"""Mixed: more bits for the linears whose rounding costs most, within a budget of bytes.

What a format costs a linear is the output error of its nearest codes for a calibration text, as a
share of the output. That of all linears together is made least.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from paceline.config import parse_bytes
from paceline.errors import ParameterError
from paceline.quantize.calibration import Calibration
from paceline.quantize.curvature import output_energy, output_errors, some_rows
from paceline.quantize.formats import Target
from paceline.quantize.recipe import Recipe, TensorRecipe, tensor_recipe
from paceline.quantize.source import Source
from paceline.quantize.walk import Reader, sites
from paceline.weights.encode import encode
from paceline.weights.tensor import QTensor, dequantize

_KINDS = (("int4", "int8"), ("q4_k", "q5_k", "q6_k"))
_MOST_BITS = 32.0  # a number up to this one is bits a weight, a larger one bytes


class Budget(Struct, frozen=True):
    """Bytes that all tensors may take, or bits that a weight of the linears may, on average."""

    text: str
    num_bytes: int | None = None
    bits: float | None = None


class Option(Struct, frozen=True):
    """A format that a linear can have; `error` is that of its output, relative to it, squared."""

    target: Target
    num_bytes: int
    error: float


class Mix(Struct, frozen=True):
    """What was measured of each linear, by stored name, and the option that each gets."""

    budget: Budget
    options: Mapping[str, Sequence[Option]]
    chosen: Mapping[str, Option]
    num_weights: int  # of the linears

    @property
    def targets(self) -> dict[str, Target]:
        return {name: option.target for name, option in self.chosen.items()}

    def summary(self) -> dict[str, Any]:
        """What config.json says of it."""
        num_bytes = sum(option.num_bytes for option in self.chosen.values())
        return {
            "budget": self.budget.text, "bits": round(8 * num_bytes / self.num_weights, 3),
            "formats": {name: option.target.format for name, option in self.chosen.items()},
        }  # fmt: skip

    def errors(self) -> dict[str, dict[str, float]]:
        """Of each linear the error of every format."""
        return {
            name: {option.target.format: option.error for option in options}
            for name, options in self.options.items()
        }


def parse_budget(text: str) -> Budget:
    """Return the budget of "4.6" (bits a weight) or "400M" (bytes); raises ParameterError."""
    try:
        number = float(text)
    except ValueError:
        return Budget(text, num_bytes=parse_bytes(text))
    if not 0 < number < float("inf"):
        raise ParameterError(
            f"mixed is {text!r}: give bits a weight, such as 4.6, or bytes, such as 400M",
            param="mixed",
        )
    if number <= _MOST_BITS:
        return Budget(text, bits=number)
    return Budget(text, num_bytes=int(number))


def candidates(target: Target) -> tuple[Target, ...]:
    """Return the formats to choose from where `target` is asked for, the smallest first."""
    for kind in _KINDS:
        if target.format in kind:
            return tuple(Target(fmt, target.group, target.symmetric) for fmt in kind)
    raise ParameterError(
        f"mixed chooses between int4 and int8, or q4_k, q5_k and q6_k, and not beside "
        f"{target.format}: name one of those with --format",
        param="mixed",
    )


def mix(
    source: Source, recipe: Recipe, budget: Budget, calibration: Calibration, *, num_threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> Mix:  # fmt: skip
    """Measure the linears of `recipe` in every format, and choose within the budget.

    `recipe` is the one with the smallest of the formats throughout. Raises ParameterError where
    even that takes more than the budget, before anything is measured.
    """
    linears = {
        t.tensor.name: t
        for t in recipe.tensors
        if t.blocks is not None and t.tensor.name in source.linears
    }
    num_weights = sum(int(np.prod(t.tensor.shape)) for t in linears.values())
    least = sum(t.num_bytes for t in linears.values())
    rest = sum(t.num_bytes for t in recipe.tensors) - least
    room = _room(budget, num_weights, least, rest)
    targets = candidates(recipe.target)
    options = {}
    for site in sites(source, recipe, calibration, progress):
        gram = site.curvature.gram
        for reader in site.readers:
            planned = [
                tensor_recipe(source, reader.planned.tensor, target, recipe.embeddings)
                for target in targets
            ]
            errors = _errors(reader, planned, gram, num_threads)
            options[reader.name] = tuple(
                Option(target, one.num_bytes, error)
                for target, one, error in zip(targets, planned, errors, strict=True)
            )
    return Mix(budget, options, choose(options, room), num_weights)


def choose(options: Mapping[str, Sequence[Option]], room: int) -> dict[str, Option]:
    """Return an option for each linear: about the least sum of errors within `room` bytes.

    From the smallest on, always the step that saves most error a byte, of those that fit. Steps
    that a later one of the same linear outdoes are left out, so a linear's become ever dearer: no
    choice of as many bytes has less error, and only the last, unused bytes are not spent at best.
    """
    chosen, spent, queue = {}, 0, []
    for name, of_linear in options.items():
        hull = _hull(of_linear)
        chosen[name] = hull[0]
        spent += hull[0].num_bytes
        if len(hull) > 1:
            queue.append((-_saving(hull[0], hull[1]), name, hull))
    heapq.heapify(queue)
    while queue:
        _, name, hull = heapq.heappop(queue)
        step = hull[1].num_bytes - hull[0].num_bytes
        if spent + step > room:
            continue
        spent += step
        chosen[name] = hull[1]
        if len(hull) > 2:
            heapq.heappush(queue, (-_saving(hull[1], hull[2]), name, hull[1:]))
    return chosen


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options, by bytes, between which no mixture of others has less error."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.num_bytes, o.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _saving(hull[-2], hull[-1]) <= _saving(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _saving(before: Option, after: Option) -> float:
    """Error that a step saves for each byte."""
    return (before.error - after.error) / (after.num_bytes - before.num_bytes)


def _room(budget: Budget, num_weights: int, least: int, rest: int) -> int:
    """Return the bytes for the linears; raises ParameterError if they are fewer than `least`."""
    if budget.bits is not None:
        room = int(budget.bits * num_weights / 8)
        if room < least:
            raise ParameterError(
                f"mixed is {budget.text} bits a weight, the least possible is "
                f"{8 * least / num_weights:.3f}: raise it, or choose a larger --group",
                param="mixed",
            )
        return room
    assert budget.num_bytes is not None
    if budget.num_bytes < least + rest:
        raise ParameterError(
            f"mixed is {budget.text}, {budget.num_bytes:,} bytes; the least possible is "
            f"{least + rest:,}, of which {rest:,} are embedding, head, norms and biases: raise it, "
            "or choose --embeddings same",
            param="mixed",
        )
    return budget.num_bytes - rest


def _errors(
    reader: Reader, planned: Sequence[TensorRecipe], gram: np.ndarray, num_threads: int
) -> list[float]:
    """Return the relative output error in each format; 0 in one that the linear has already."""
    weight = some_rows(reader.planned.tensor.load())
    energy = output_energy(weight, gram)
    errors = []
    for one in planned:
        error = 0.0
        if one.blocks is not None:
            fmt = one.blocks.format
            data = encode(
                weight, fmt, name=reader.name, by_row=one.blocks.by_row, num_threads=num_threads
            )
            off = dequantize(QTensor(fmt, weight.shape, data)) - weight
            error = float(output_errors(off, gram).mean()) / energy
        errors.append(error)
    return errors
