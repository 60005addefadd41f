"""The HTML report: one file with its data, styles and scripts inside, readable offline."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.bench.program import Result


def write_html(path: Path, result: Result) -> None:
    """Write the report of a result. Raises ParameterError where the file cannot be written."""
    try:
        path.write_text(render_html(result), encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"--html {path} cannot be written: {error.strerror}") from None


def render_html(result: Result) -> str:
    own = files("paceline.bench").joinpath("report")
    uplot = files("paceline.vendor").joinpath("uplot")
    parts = {
        "/*UPLOT_CSS*/": uplot.joinpath("uPlot.min.css").read_text(encoding="utf-8"),
        "/*CSS*/": own.joinpath("report.css").read_text(encoding="utf-8"),
        "/*UPLOT_JS*/": uplot.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8"),
        "/*JS*/": own.joinpath("report.js").read_text(encoding="utf-8"),
        "/*DATA*/": _embed({"result": result.document, "plots": result.plots}),
    }
    page = own.joinpath("report.html").read_text(encoding="utf-8")
    for mark, text in parts.items():
        head, found, tail = page.partition(mark)
        assert found, mark
        page = head + text + tail
    return page


def _embed(data: Any) -> str:
    """Return JSON that can stand inside a script element: no `</script>` can end it."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
