"""Traces: when requests arrived somewhere, and how long they were."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from paceline.bench.lengths import MAX_LENGTH
from paceline.errors import ParameterError

_MAX_SHOWN_CHARS = 120
_MAX_S = 1e12  # of a time: beyond, no clock counts from anywhere
_INPUTS = ("input_length", "input_tokens", "ContextTokens", "num_prefill_tokens")
_OUTPUTS = ("output_length", "output_tokens", "GeneratedTokens", "num_decode_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """One request of a trace; `at_s` counts from the first."""

    at_s: float
    input_tokens: int | None
    output_tokens: int | None


def read_trace(path: str) -> Sequence[Arrived]:
    """Return a trace in order of time.

    JSONL with `at_s` (seconds) or `timestamp` (milliseconds, as Mooncake's traces have it) and
    optional lengths, or CSV with `at_s` or `TIMESTAMP` (a date, as Azure's traces have it).
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")  # spreadsheets write a mark
        if path.endswith(".csv"):
            rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(text)))
        else:
            rows = [msgspec.json.decode(line) for line in text.split("\n") if line.strip()]
        items = [_arrived(row, number) for number, row in enumerate(rows, start=1)]
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise ParameterError(
            f"{path} cannot be read as a trace ({error}): lines need at_s in seconds or timestamp "
            "in milliseconds"
        ) from None
    if not items:
        raise ParameterError(f"{path} holds no request")
    start = min(item.at_s for item in items)
    items.sort(key=lambda item: item.at_s)
    return [
        Arrived(at_s=i.at_s - start, input_tokens=i.input_tokens, output_tokens=i.output_tokens)
        for i in items
    ]


def _arrived(row: Any, number: int) -> Arrived:
    """Return request `number` (from 1). Raises ValueError that names it."""
    try:
        if not isinstance(row, dict):
            raise ValueError("it is no object")
        return Arrived(
            at_s=_time(row),
            input_tokens=_count(row, _INPUTS),
            output_tokens=_count(row, _OUTPUTS),
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"request {number}: {error}") from None


def _time(row: dict[str, Any]) -> float:
    """Return the seconds of a line's time. Raises ValueError where it is no moment."""
    seconds = _seconds(row)
    if not math.isfinite(seconds) or abs(seconds) > _MAX_S:
        raise ValueError(f"a time is {seconds:g}")
    return seconds


def _seconds(row: dict[str, Any]) -> float:
    if "at_s" in row:
        return float(row["at_s"])
    if "timestamp" in row:
        return float(row["timestamp"]) / 1e3
    if "TIMESTAMP" in row:
        return datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    raise ValueError(f"a line has no time, but {', '.join(row) or 'nothing'}"[:_MAX_SHOWN_CHARS])


def _count(row: dict[str, Any], names: Sequence[str]) -> int | None:
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    if name is None:
        return None
    count = int(row[name])
    if not 0 <= count <= MAX_LENGTH:
        shown = str(row[name])[:_MAX_SHOWN_CHARS]
        raise ValueError(f"{name} is {shown}, not from 0 to {MAX_LENGTH}")
    return count
