"""The page at `/`: static files of the package, under a policy that lets nothing else in."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

from paceline.server.errors import ApiError

# Scripts, styles and data come from this server alone, and no other site may frame the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_UPLOT = ("uPlot.iife.min.js", "uPlot.min.css")


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its files under `/page/`."""
    page = Page()
    for path, endpoint in (("/", page.index), ("/page/{name}", page.file)):
        app.add_api_route(path, endpoint, response_model=None, include_in_schema=False)


class Page:
    """The files of the page, read when the first of them is asked for."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    async def index(self) -> Response:
        return self._answer("index.html")

    async def file(self, name: str) -> Response:
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        if not self._files:
            self._files = read_files()
        content = self._files.get(name)
        if content is None:
            raise ApiError(404, f"the page has no file {name!r}")
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(content, media_type=kind, headers=_HEADERS)


def read_files() -> dict[str, bytes]:
    """Return the content of each file that the page consists of, by name."""
    own = files("paceline.server.page").joinpath("static")
    uplot = files("paceline.vendor").joinpath("uplot")
    found = {file.name: file.read_bytes() for file in own.iterdir()}
    return found | {name: uplot.joinpath(name).read_bytes() for name in _UPLOT}
