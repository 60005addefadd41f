"""CORS: which other sites' pages may call this server. None, unless it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline.errors import ParameterError

ANY = "*"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-fA-F:]+\](:\d{1,5})?")
_DEFAULT_PORT = re.compile(r"^(http(?=:.*:80$)|https(?=:.*:443$))(.*):\d+$")
_EXPOSED = ("retry-after", "server-timing", "x-request-id")


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Return `origins` as browsers send them, or raise ParameterError for one that is none.

    A browser writes host names small and leaves out the port that the scheme has anyway.
    """
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ParameterError(
                f"the origin {origin!r} is none: write it as browsers send it, like "
                "https://example.org or http://localhost:3000, or * for every site",
                param="cors_origin",
            )
    return tuple(_DEFAULT_PORT.sub(r"\1\2", origin.lower()) for origin in origins)


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call `app`: outermost, since a preflight brings no key.

    Cookies are never allowed: a key in a header is the only way to be somebody here.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=list(_EXPOSED),
        )  # fmt: skip
