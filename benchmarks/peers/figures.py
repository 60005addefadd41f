"""From samples to the rows of the result, and to the table that is printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cells import Cell, Figure

OURS = "paceline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round of one engine: a value for each figure of the cell, and the share of the floor."""

    values: tuple[float, ...]
    share: float | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one engine did in one cell. `note` says why samples are missing."""

    config: Mapping[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of one engine. `ratio` above 1: Paceline is ahead of this engine.

    `spread` is the least and the greatest value; all are None where `note` says why.
    """

    cell: str
    model: str
    engine: str
    unit: str
    median: float | None
    spread: tuple[float, float] | None
    ratio: float | None
    share: float | None
    values: tuple[float, ...]
    config: Mapping[str, Any]
    note: str


def advantage(figure: Figure, ours: float | None, theirs: float | None) -> float | None:
    """Return how many times better `ours` is; None where one is missing, or is 0 (never met)."""
    if not ours or not theirs:
        return None
    return ours / theirs if figure.is_rate else theirs / ours


def rows(cell: Cell, model: str, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Return a row per figure and engine. The ratio compares medians."""
    result = []
    for idx, figure in enumerate(cell.figures):
        values = {
            name: tuple(sample.values[idx] for sample in outcome.samples)
            for name, outcome in outcomes.items()
        }
        medians = {name: statistics.median(v) if v else None for name, v in values.items()}
        for name, outcome in outcomes.items():
            shares = [sample.share for sample in outcome.samples if sample.share is not None]
            row = Row(
                cell=figure.name,
                model=model,
                engine=name,
                unit=figure.unit,
                median=medians[name],
                spread=(min(values[name]), max(values[name])) if values[name] else None,
                ratio=advantage(figure, medians.get(OURS), medians[name]),
                share=statistics.median(shares) if shares else None,
                values=values[name],
                config=outcome.config,
                note=outcome.note,
            )
            result.append(row)
    return result


def _number(value: float) -> str:
    """Return three significant digits, and no exponent: 1648, 59.4, 0.22."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def _entry(row: Row) -> str:
    if row.median is None or row.spread is None:
        return f"– ({row.note})"
    low, high = row.spread
    text = f"{_number(row.median)} ({_number(low)}–{_number(high)})"
    if row.share is not None:
        text += f", {row.share:.0%}"
    if row.engine != OURS and row.ratio is not None:
        text += f", **{row.ratio:.2f}x**"
    return text


def table(all_rows: Iterable[Row], engines: Sequence[str]) -> str:
    """Return one Markdown table a model: a line per cell, a column per engine."""
    by_model: dict[str, dict[tuple[str, str], dict[str, Row]]] = {}
    for row in all_rows:
        cells = by_model.setdefault(row.model, {})
        cells.setdefault((row.cell, row.unit), {})[row.engine] = row
    lines = []
    for model, cells in by_model.items():
        lines += [f"### {model}", "", "| cell | " + " | ".join(engines) + " |"]
        lines.append("|---" * (len(engines) + 1) + "|")
        for (cell, unit), found in cells.items():
            entries = [_entry(found[name]) if name in found else "–" for name in engines]
            lines.append(f"| {cell} [{unit}] | " + " | ".join(entries) + " |")
        lines.append("")
    return "\n".join(lines)


def configurations(all_rows: Iterable[Row]) -> str:
    """Return a line per engine, model and configuration, with the cells it was used in."""
    used: dict[str, list[str]] = {}
    for row in all_rows:
        if row.config and row.median is not None:
            options = ", ".join(f"{name}={value}" for name, value in row.config.items())
            used.setdefault(f"{row.engine}, {row.model}: {options}", []).append(row.cell)
    return "\n".join(f"- {text} ({', '.join(cells)})" for text, cells in used.items())
