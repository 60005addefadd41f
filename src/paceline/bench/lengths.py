"""Lengths: distributions of token counts, by spec."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import ParameterError

Length = Callable[[random.Random], int]
MAX_LENGTH = 10_000_000  # tokens
CHARS_PER_TOKEN = 4.5  # of English prose, in the tokenizers in use


class Percentiles(NamedTuple):
    """Measured quantiles of a positive quantity at 10, 50, 90 and 99 %."""

    p10: float
    p50: float
    p90: float
    p99: float


# Characters and messages of conversations in a public chat log.
CHAT_PROMPT_CHARS = Percentiles(44, 599, 3183, 10723)
CHAT_REPLY_CHARS = Percentiles(34, 562, 2219, 3800)
CHAT_TURNS = Percentiles(2, 6, 14, 26)


def parse_length(spec: str) -> Length:
    """Return the distribution of `spec`: "512", "64-512" (uniform) or "lognormal:400:0.8".

    The last has the median 400 and the shape 0.8 (the deviation of the logarithm).
    """
    text = spec.strip().lower()
    try:
        if text.startswith("lognormal:"):
            median, sigma = (float(part) for part in text.split(":")[1:])
            if 1 <= median <= MAX_LENGTH and 0 <= sigma <= 4:
                return lambda rng: min(
                    MAX_LENGTH, max(1, round(median * math.exp(rng.gauss(0.0, sigma))))
                )
        elif "-" in text:
            low, high = (int(part) for part in text.split("-"))
            if 1 <= low <= high <= MAX_LENGTH:
                return lambda rng: rng.randint(low, high)
        elif 1 <= int(text) <= MAX_LENGTH:
            fixed = int(text)
            return lambda rng: fixed
    except ValueError:
        pass
    raise ParameterError(
        f"{spec[:60]!r} is no length of 1 to {MAX_LENGTH}: write 512, 64-512 (uniform) or "
        "lognormal:400:0.8 (median, shape)"
    )


def from_percentiles(
    measured: Percentiles, *, scale: float = 1.0, low: int = 1, high: int
) -> Length:
    """Return lengths whose quantiles are `measured * scale`, within low..high.

    Between the given quantiles the logarithm is interpolated; below 10 % and above 99 % the
    neighbouring slope goes on, for a tail of 1 % of the requests.
    """
    logs = [math.log(value) for value in measured]

    def draw(rng: random.Random) -> int:
        drawn = scale * math.exp(_interpolate(rng.random(), logs))
        return round(min(high, max(low, drawn)))

    return draw


def _interpolate(u: float, logs: Sequence[float]) -> float:
    levels = (0.1, 0.5, 0.9, 0.99)
    idx = next((i for i in range(1, len(levels) - 1) if u <= levels[i]), len(levels) - 1)
    share = (u - levels[idx - 1]) / (levels[idx] - levels[idx - 1])
    return logs[idx - 1] + share * (logs[idx] - logs[idx - 1])
