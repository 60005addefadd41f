"""A price list as a picture: what a candidate takes and how fast it is, over what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from paceline.measure.charts import Panel, caption, frame, polyline
from paceline.price.report import Row, decode_speed, held_bytes, kl_of

_WIDTH, _HEIGHT = 1180, 600
_LEAST_KL = 1e-6  # below, a point stands at the edge: no text shows such a difference
_LINE = 15  # between two names
# Beside a dark page the picture is dark. The hues of KV formats can be told apart on both.
_COLORS = {"f16": "#2563eb", "bf16": "#0891b2", "f32": "#7c3aed", "int8": "#ea580c",
           "fp8": "#db2777", "k8v4": "#ca8a04", "int4": "#0d9488"}  # fmt: skip
_OTHER = "#65a30d"
_STYLE = (
    "svg{--ground:#ffffff;--ink:#1f2937;--soft:#4b5563;--grid:#e5e7eb;--edge:#9ca3af}"
    "@media (prefers-color-scheme:dark){"
    "svg{--ground:#111827;--ink:#f3f4f6;--soft:#d1d5db;--grid:#374151;--edge:#6b7280}}"
    "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink);font-size:12px}"
    ".ground{fill:var(--ground)}.title{font-size:19px;font-weight:600}"
    ".sub{font-size:13px;fill:var(--soft)}.axis{font-size:11px;fill:var(--soft)}"
    ".label{font-size:11px}.best{font-size:11px;font-weight:600}"
    ".grid{stroke:var(--grid);stroke-width:1}.frame{stroke:var(--edge);fill:none}"
    "circle{stroke:var(--ground)}.lead{stroke:var(--edge);stroke-width:0.8}"
)


def draw(document: dict[str, Any]) -> str:
    """Return an SVG document that needs no other file; light, and dark where the reader's page is.

    Precondition: some candidates have a KL, a memory and a speed.
    """
    rows = [row for row in document["candidates"] if kl_of(row) is not None]
    machine = document["machine"]
    where = f"{machine['cpu']}, {machine['isa']}, {document['num_threads']} threads"
    title = f"The price of {document['model']} in fewer bytes"
    memory, speed = document["fronts"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{_STYLE}</style>',
        f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>',
        caption(40, 36, title, "title"),
        caption(40, 57, where, "sub"),
        *_panel(rows, 80, memory, lambda row: held_bytes(row) / 1e6, "MB"),
        *_panel(rows, 660, speed, lambda row: decode_speed(row) or 0, "tok/s"),
        *_legend(rows),
        "</svg>",
    ]
    return "\n".join(parts)


def _panel(
    rows: Sequence[Row], left: float, front: dict[str, Any], value: Callable[[Row], float],
    unit: str,
) -> Iterator[str]:  # fmt: skip
    """Yield one chart: KL upwards, a line through the points of the front."""
    points = [(value(row), max(kl_of(row) or 0.0, _LEAST_KL), row) for row in rows if value(row)]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    panel = Panel(
        left=left, top=104, width=440, height=390,
        x_range=(min(xs) / 1.15, max(xs) * 1.45), y_range=(min(ys) / 2, max(ys) * 2.5),
    )  # fmt: skip
    yield caption(left, 84, f"{front['axes'][1]}, by {front['axes'][0]}", "label")
    yield from frame(panel, f"{front['axes'][0]}, {unit}", "nats")
    best = sorted((x, y) for x, y, row in points if row["name"] in front["members"])
    yield polyline(panel, best, "var(--edge)", dash="5 4")
    lowest = 0.0
    for x, y, row in sorted(points, key=lambda point: -point[1]):
        is_best = row["name"] in front["members"]
        lowest = max(panel.y(y) + 4, lowest + _LINE)
        yield from _point(panel, x, y, row, is_best=is_best, name_y=lowest, unit=unit)


def _point(
    panel: Panel, x: float, y: float, row: Row, *, is_best: bool, name_y: float, unit: str
) -> Iterator[str]:
    at_x, at_y = panel.x(x), panel.y(y)
    color = _COLORS.get(row["kv_dtype"], _OTHER)
    radius, strength = (6.5, 1.0) if is_best else (4.5, 0.55)
    told = f"{row['name']}: {x:,.1f} {unit}, KL {y:.2g}"
    is_left = at_x > panel.left + 0.72 * panel.width  # or the name would leave the panel
    side = -1 if is_left else 1
    name_x = at_x + side * (radius + 12)
    yield (
        f'<line class="lead" x1="{at_x:.1f}" y1="{at_y:.1f}" x2="{name_x - side * 3:.1f}" '
        f'y2="{name_y - 4:.1f}"/>'
    )
    yield (
        f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius}" fill="{color}" '
        f'fill-opacity="{strength}"><title>{escape(told)}</title></circle>'
    )
    yield caption(
        name_x, name_y, _short(row["weights"]), "best" if is_best else "label",
        anchor="end" if is_left else "start",
    )  # fmt: skip


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    y = 560.0
    for i, kv_dtype in enumerate(dict.fromkeys(row["kv_dtype"] for row in rows)):
        x = 80 + i * 120
        color = _COLORS.get(kv_dtype, _OTHER)
        yield f'<circle cx="{x + 6}" cy="{y - 4}" r="6" fill="{color}"/>'
        yield caption(x + 18, y, f"KV in {kv_dtype}", "label")
    yield caption(660, y, "large and dashed: no other candidate is as good on both axes", "label")


def _short(name: str) -> str:
    """The last part of a path, and other names as they are; at most 28 characters."""
    shown = name.rsplit("/", 1)[-1] if name.count("/") > 1 else name
    return shown if len(shown) <= 28 else f"{shown[:27]}…"
