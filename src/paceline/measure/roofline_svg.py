"""The roofline as a picture: speed by intensity with the model's ops, and the cost of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from paceline.measure.charts import Panel, caption, frame, line, polyline
from paceline.measure.roofline import OpRow, Roofline, StepReport

_WIDTH, _HEIGHT = 1180, 560
_PREFILL, _DECODE, _INK, _FAINT = "#c2410c", "#1d4ed8", "#1f2937", "#9ca3af"
_NAMED_SHARE = 0.02  # of a step: smaller circles have no name beside them
_STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1f2937;font-size:12px}"
    ".title{font-size:19px;font-weight:600}.sub{font-size:13px;fill:#4b5563}"
    ".axis{font-size:11px;fill:#6b7280}.label{font-size:11px;fill:#374151}"
    ".grid{stroke:#e5e7eb;stroke-width:1}.frame{stroke:#9ca3af;fill:none}"
)


def draw(found: Roofline) -> str:
    """Return an SVG document, on a light ground."""
    machine, plural = found.table.machine, "s" if found.num_threads > 1 else ""
    where = f"{found.num_threads} thread{plural}, {machine.cpu}, {machine.isa}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="Roofline of '
        f'{escape(found.model, quote=True)}"><style>{_STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        caption(40, 36, f"{found.model} under the roofline", "title"),
        caption(40, 57, where, "sub"),
        *_roofline_panel(found),
        *_cost_panel(found),
        "</svg>",
    ]
    return "\n".join(parts)


# ---- speed by intensity ----


def _roofline_panel(found: Roofline) -> Iterator[str]:
    ceilings = found.ceilings
    points = [*_points(found.prefill), *_points(found.decode)]
    intensities = [row.macs / row.num_bytes for row in points]
    speeds = [row.macs / row.measured_s / 1e9 for row in points]
    peak = max(ceilings.int8_macs_s, ceilings.f32_macs_s) / 1e9
    panel = Panel(
        left=70, top=96, width=620, height=390,
        x_range=(min(0.5, *intensities) / 1.4, max(500.0, *intensities) * 1.6),
        y_range=(min(speeds) / 1.8, peak * 2.2),
    )  # fmt: skip
    yield caption(panel.left, 84, "multiply-adds a second, by multiply-adds a byte", "label")
    yield from frame(panel, "multiply-adds for each byte read", "GMAC/s")
    yield _roof(panel, ceilings.memory_bytes_s / 1e9, peak)
    for read in reversed(ceilings.reads):
        is_memory = read.level == "memory"
        name = f"{read.level} {read.bytes_s / 1e9:,.0f} GB/s"
        yield from _diagonal(panel, read.bytes_s / 1e9, peak, name, is_strong=is_memory)
    for name, speed in _peaks(found):
        yield from _horizontal(panel, speed / 1e9, ceilings.memory_bytes_s / 1e9, name)
    for step, color in ((found.prefill, _PREFILL), (found.decode, _DECODE)):
        yield from _ops(panel, step, color)
    yield from _legend(found, panel)


def _ops(panel: Panel, step: StepReport, color: str) -> Iterator[str]:
    """Circles, as large as their part of the step, and their names beside them, none on another."""
    total = sum(row.measured_s for row in step.ops)
    lowest = 0.0
    by_speed = sorted(_points(step), key=lambda row: -row.macs / row.measured_s)
    for row in by_speed:
        x, y = panel.x(row.macs / row.num_bytes), panel.y(row.macs / row.measured_s / 1e9)
        radius = 3.5 + 12 * math.sqrt(row.measured_s / total)
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color}" '
            f'fill-opacity="0.72" stroke="#fff"><title>{escape(_describe(row))}</title></circle>'
        )
        if row.measured_s < _NAMED_SHARE * total:
            continue
        is_left = x > panel.left + 0.75 * panel.width  # or the name would leave the panel
        side = -1 if is_left else 1
        lowest = max(y + 4, lowest + 13)
        at = x + side * (radius + 14)
        yield (
            f'<line x1="{x + side * radius:.1f}" y1="{y:.1f}" x2="{at - side * 3:.1f}" '
            f'y2="{lowest - 4:.1f}" stroke="{_FAINT}" stroke-width="0.8"/>'
        )
        yield caption(at, lowest, row.kind, "label", anchor="end" if is_left else "start")


def _peaks(found: Roofline) -> list[tuple[str, float]]:
    ceilings = found.ceilings
    peaks = [("int8", ceilings.int8_macs_s), ("f32", ceilings.f32_macs_s)]
    if ceilings.bf16_macs_s is not None:
        peaks.append(("bf16", ceilings.bf16_macs_s))
    return peaks


def _points(step: StepReport) -> list[OpRow]:
    return [row for row in step.ops if row.macs and row.num_bytes and row.measured_s > 0]


def _describe(row: OpRow) -> str:
    return (
        f"{row.kind}: {row.measured_s * 1e3:.2f} ms, floor {row.floor_s * 1e3:.2f} ms, "
        f"{row.num_ops} ops"
    )


def _roof(panel: Panel, bytes_s: float, peak: float) -> str:
    """The area that memory and the highest peak leave, tinted."""
    low, (x0, x1) = panel.y_range[0], panel.x_range
    turn = min(max(peak / bytes_s, x0), x1)
    start = max(x0, low / bytes_s)
    slope = [(start, start * bytes_s), (turn, turn * bytes_s)]
    corners = [(start, low), *slope, (x1, peak), (x1, low)]
    where = " ".join(f"{panel.x(x):.1f},{panel.y(max(y, low)):.1f}" for x, y in corners)
    return f'<polygon points="{where}" fill="#f1f5f9" fill-opacity="0.7"/>'


def _diagonal(
    panel: Panel, bytes_s: float, top: float, name: str, *, is_strong: bool
) -> Iterator[str]:
    """Speed that reading allows: bytes_s * intensity, up to the highest peak."""
    x0, x1 = panel.x_range[0], min(top / bytes_s, panel.x_range[1])
    x0 = max(x0, panel.y_range[0] / bytes_s)
    if x0 >= x1:
        return
    color, width = (_INK, 2.0) if is_strong else (_FAINT, 1.0)
    yield line(panel, (x0, x0 * bytes_s), (x1, x1 * bytes_s), color, width)
    x, y = panel.x(x0 * 1.25), panel.y(x0 * 1.25 * bytes_s)
    slope = math.degrees(
        math.atan2(panel.y(x0 * bytes_s) - panel.y(x1 * bytes_s), panel.x(x1) - panel.x(x0))
    )
    yield (
        f'<text class="axis" x="{x:.1f}" y="{y - 5:.1f}" '
        f'transform="rotate({-slope:.1f} {x:.1f} {y - 5:.1f})">{escape(name)}</text>'
    )


def _horizontal(panel: Panel, speed: float, bytes_s: float, name: str) -> Iterator[str]:
    x1 = panel.x_range[1]
    x0 = min(max(speed / bytes_s, panel.x_range[0]), x1)
    yield line(panel, (x0, speed), (x1, speed), _INK, 2.0)
    yield caption(panel.x(x0) + 10, panel.y(speed) - 6, f"{name} {speed:,.0f} GMAC/s", "axis")


def _legend(found: Roofline, panel: Panel) -> Iterator[str]:
    y = panel.top + panel.height + 56
    streams = f"{found.batch} stream{'s' if found.batch > 1 else ''}"
    entries = (
        (
            _PREFILL,
            f"prompt of {found.context}: {found.ttft.measured_s * 1e3:,.0f} ms, "
            f"{found.ttft.ratio:.1f}x the floor",
        ),
        (
            _DECODE,
            f"decode, {streams} at {found.context}: {found.tpot.measured_s * 1e3:,.1f} ms, "
            f"{found.tpot.ratio:.1f}x the floor",
        ),
    )
    for i, (color, text) in enumerate(entries):
        x = panel.left + i * 310
        yield f'<circle cx="{x + 6:.1f}" cy="{y - 4:.1f}" r="6" fill="{color}"/>'
        yield caption(x + 18, y, text, "label")


# ---- cost of a step ----


def _cost_panel(found: Roofline) -> Iterator[str]:
    costs = found.step_costs
    values = [s * 1e3 for point in costs for s in (point.measured_s, point.floor_s)]
    panel = Panel(
        left=780, top=96, width=350, height=390,
        x_range=(0.85, costs[-1].num_tokens * 1.2),
        y_range=(min(values) / 1.5, max(values) * 1.6),
    )  # fmt: skip
    yield caption(panel.left, 84, "cost of a step, by its tokens", "label")
    yield from frame(panel, "tokens in the step", "ms", xs=[p.num_tokens for p in costs])
    floor = [(point.num_tokens, point.floor_s * 1e3) for point in costs]
    measured = [(point.num_tokens, point.measured_s * 1e3) for point in costs]
    yield polyline(panel, floor, _INK, dash="5 4")
    yield polyline(panel, measured, _PREFILL)
    for n, cost in measured:
        yield (
            f'<circle cx="{panel.x(n):.1f}" cy="{panel.y(cost):.1f}" r="4" fill="{_PREFILL}">'
            f"<title>{n} tokens: {cost:.2f} ms</title></circle>"
        )
    n, cost = floor[len(floor) // 2]
    yield (
        f'<text class="axis" x="{panel.x(n) + 8:.1f}" y="{panel.y(cost) + 14:.1f}">the floor</text>'
    )
    n, cost = measured[-1]
    yield (
        f'<text class="axis" x="{panel.x(n) - 8:.1f}" y="{panel.y(cost) - 8:.1f}" '
        'text-anchor="end">measured</text>'
    )
    one = costs[0].measured_s
    yield caption(
        panel.left, panel.top + panel.height + 56,
        f"1 token {one * 1e3:.1f} ms, {costs[-1].num_tokens} tokens "
        f"{costs[-1].measured_s * 1e3:,.0f} ms",
        "label",
    )  # fmt: skip
