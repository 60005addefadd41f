"""Asking a running server, from the commands that look at one."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from paceline.errors import PacelineError, ParameterError

_TIMEOUT_S = 30.0


def base_address(url: str) -> str:
    """Return "http://host:port" of an address as `paceline bench --target` takes it."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = is_address and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ParameterError(f"{url!r} is no address: give one such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


def fetch(address: str) -> bytes:
    """Return the body at `address`. Raises PacelineError saying why it cannot be had."""
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise PacelineError(f"{address} answers {error.code}: {error.read(500)!r}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PacelineError(f"{address} does not answer: {reason}; is the server up?") from None
