"""Arrivals: when requests are sent. An open loop does not wait for answers, a closed one does."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from paceline.bench.options import SpecOptions
from paceline.bench.traces import read_trace
from paceline.bench.units import parse_positive, parse_span
from paceline.errors import ParameterError

ARRIVALS = ("poisson", "gamma:shape=K", "constant", "ramp:to=R,over=60s", "replay:file=F", "burst")

_MAX_RATE = 1_000_000.0  # requests a second: more than a client can make
_MIN_SHAPE, _MAX_SHAPE = 1e-3, 1e6  # beyond, gaps are 0 or all alike: burst, constant


class Arrivals(Protocol):
    """An open loop's times."""

    @property
    def rate(self) -> float | None:
        """Requests a second on average; None where it changes."""

    def times(self, seed: str) -> Iterator[float]:
        """Yield seconds since the start, in order; the same for the same seed."""


@dataclass(frozen=True, slots=True)
class Closed:
    """`concurrency` users, each of whom asks again when the answer is complete."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gaps with a gamma distribution: shape 1 is Poisson, less is burstier."""

    rate: float
    shape: float = 1.0

    def times(self, seed: str) -> Iterator[float]:
        rng = random.Random(f"{seed}:arrivals")
        at = 0.0
        while True:
            at += rng.gammavariate(self.shape, 1.0 / (self.rate * self.shape))
            yield at


@dataclass(frozen=True, slots=True)
class Constant:
    rate: float

    def times(self, seed: str) -> Iterator[float]:
        return (idx / self.rate for idx in itertools.count())


@dataclass(frozen=True, slots=True)
class Ramp:
    """A Poisson process whose rate goes linearly from `start` to `end` in `over_s`, then stays."""

    start: float
    end: float
    over_s: float
    rate: float | None = None

    def times(self, seed: str) -> Iterator[float]:
        rng = random.Random(f"{seed}:arrivals")
        mass = 0.0
        while True:
            mass += rng.expovariate(1.0)
            yield self._when(mass)

    def _when(self, mass: float) -> float:
        """Return the time by which `mass` arrivals are expected (the integral of the rate)."""
        slope = (self.end - self.start) / self.over_s
        whole = (self.start + self.end) / 2 * self.over_s
        if mass >= whole:
            return self.over_s + (mass - whole) / self.end
        if slope == 0:
            return mass / self.start
        return (math.sqrt(self.start**2 + 2 * slope * mass) - self.start) / slope


@dataclass(frozen=True, slots=True)
class Replay:
    """The times of a trace, `speed` times as fast."""

    at_s: tuple[float, ...]
    speed: float
    rate: float | None = None

    def times(self, seed: str) -> Iterator[float]:
        return (at / self.speed for at in self.at_s)


@dataclass(frozen=True, slots=True)
class Burst:
    """All at once, as a batch job does."""

    rate: float | None = None

    def times(self, seed: str) -> Iterator[float]:
        return itertools.repeat(0.0)


def parse_rate(text: str, what: str) -> float:
    """Return requests a second; `what` names the option in the error."""
    rate = parse_positive(text, what)
    if rate > _MAX_RATE:
        raise ParameterError(f"{what} is {text!r}: it must be at most {_MAX_RATE:,.0f} a second")
    return rate


def build_arrivals(spec: str, rate: float | None) -> Arrivals:
    """Return the arrivals of `spec` at `rate` requests a second. Raises ParameterError."""
    options = SpecOptions(spec)
    arrivals = _build(options, rate)
    options.close()
    return arrivals


def _build(options: SpecOptions, rate: float | None) -> Arrivals:
    if options.name == "replay":
        trace = read_trace(options.required("file", "FILE"))
        return Replay(tuple(item.at_s for item in trace), options.number("speed", 1.0))
    if options.name == "burst":
        return Burst()
    if options.name not in ("poisson", "gamma", "constant", "ramp"):
        raise ParameterError(
            f"no arrival is called {options.name!r}: choose one of {', '.join(ARRIVALS)}"
        )
    if rate is None:
        raise ParameterError(f"--arrival {options.name} needs --rate, in requests a second")
    if options.name == "ramp":
        end = parse_rate(options.required("to", "RATE"), "to")
        over_s = parse_span(options.text("over", "60s") or "60s", "over")
        return Ramp(rate, end, over_s)
    if options.name == "constant":
        return Constant(rate)
    shape = options.number("shape", 0.5) if options.name == "gamma" else 1.0
    if not _MIN_SHAPE <= shape <= _MAX_SHAPE:
        raise ParameterError(
            f"shape is {shape:g}: it must be from {_MIN_SHAPE:g} to {_MAX_SHAPE:g}"
        )
    return Gamma(rate, shape)
