"""Parts of charts: a log-log panel with its frame, lines and texts, as pieces of SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from msgspec import Struct


class Panel(Struct, frozen=True, kw_only=True):
    """A log-log chart's place on the picture, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        return self.left + self.width * _share(value, self.x_range)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - _share(value, self.y_range))


def frame(panel: Panel, x_name: str, y_name: str, xs: Sequence[float] = ()) -> Iterator[str]:
    """Yield the panel's border, grid and names; `xs` are its upright lines instead of round ones.

    The document gives the classes grid, frame and axis their colours.
    """
    bottom, right = panel.top + panel.height, panel.left + panel.width
    for value in xs or _ticks(panel.x_range):
        x = panel.x(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{panel.top}" y2="{bottom}"/>'
        yield caption(x, bottom + 16, _number(value), "axis", anchor="middle")
    for value in _ticks(panel.y_range):
        y = panel.y(value)
        yield f'<line class="grid" x1="{panel.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield caption(panel.left - 8, y + 4, _number(value), "axis", anchor="end")
    yield (
        f'<rect class="frame" x="{panel.left}" y="{panel.top}" width="{panel.width}" '
        f'height="{panel.height}"/>'
    )
    yield caption((panel.left + right) / 2, bottom + 34, x_name, "axis", anchor="middle")
    yield caption(panel.left - 8, panel.top - 6, y_name, "axis", anchor="end")


def polyline(
    panel: Panel, points: Iterable[tuple[float, float]], color: str, dash: str = ""
) -> str:
    """Return a line through `points`; `color` is any paint."""
    where = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{where}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'


def line(
    panel: Panel, a: tuple[float, float], b: tuple[float, float], color: str, width: float
) -> str:
    """Return a straight line from `a` to `b`, both in the panel's values."""
    return (
        f'<line x1="{panel.x(a[0]):.1f}" y1="{panel.y(a[1]):.1f}" x2="{panel.x(b[0]):.1f}" '
        f'y2="{panel.y(b[1]):.1f}" stroke="{color}" stroke-width="{width}"/>'
    )


def caption(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """Return text at a place of the picture; `kind` is its class."""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{escape(words)}</text>'


def _ticks(limits: tuple[float, float]) -> list[float]:
    """Return the powers of ten within, or with few of them also their doubles and fives."""
    low, high = limits
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in found if low <= tick <= high]


def _share(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return math.log(value / low) / math.log(high / low)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
