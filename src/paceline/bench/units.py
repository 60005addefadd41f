"""Amounts as people write them: durations and what the reports print."""

from __future__ import annotations

import math
import re

from paceline.errors import ParameterError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|m|h)")
_MAX_HOURS = 1000
_MAX_DIGITS = 20


def parse_duration(text: str, what: str = "") -> float:
    """Return the seconds that "300ms", "5s", "2m" or "1h" means; errors begin with `what`."""
    begin = f"{what} is {text!r}, which" if what else repr(text)
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ParameterError(f"{begin} is no duration: write for example 300ms, 5s or 2m")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _MAX_HOURS * 3600:
        raise ParameterError(f"{begin} is longer than {_MAX_HOURS} h: write for example 5s or 2m")
    return seconds


def parse_span(text: str, what: str) -> float:
    """Return the seconds of a duration above 0."""
    seconds = parse_duration(text, what)
    if seconds == 0:
        raise ParameterError(f"{what} is {text!r}: it must be above 0, such as 300ms or 5s")
    return seconds


def parse_integer(text: str, what: str, low: int, high: int) -> int:
    """Return the integer of low..high that `text` is; `what` names the option in the error."""
    digits = text.strip()
    is_read = digits.isdecimal() and len(digits) < _MAX_DIGITS
    if not is_read or not low <= int(digits) <= high:
        raise ParameterError(
            f"{what} is {text[:_MAX_DIGITS]!r}: it must be an integer from {low} to {high}"
        )
    return int(digits)


def parse_positive(text: str, what: str) -> float:
    """Return a finite number above 0; `what` names the option in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ParameterError(f"{what} is {text!r}: it must be a number above 0")
    return value


def format_ms(seconds: float | None) -> str:
    """Return "12.3 ms" or "4.56 s"; "-" for None."""
    if seconds is None or math.isnan(seconds):
        return "-"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
