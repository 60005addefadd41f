"""Asking a running server, from the commands that look at one."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from urllib.parse import urlencode, urlsplit

import msgspec

from paceline.errors import PacelineError, ParameterError

_TIMEOUT_S = 30.0
_MAX_ERROR_BYTES = 4096
_REMEDIES = {
    401: "give the server's key with --api-key",
    403: "give a key that may ask with --api-key",
    404: "only a Paceline server that keeps a ledger has it",
}


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


def fetch_trace(base: str, last_s: float, headers: Mapping[str, str]) -> bytes:
    """Return what the server at `base` tells of its last `last_s` seconds."""
    return fetch(f"{base}/v1/trace?{urlencode({'last_s': last_s})}", headers)


def fetch(address: str, headers: Mapping[str, str]) -> bytes:
    """Return the body at `address`. Raises PacelineError saying why it cannot be had."""
    try:
        request = urllib.request.Request(address)
        for name, value in headers.items():
            # A server that sends us elsewhere does not send our key there.
            request.add_unredirected_header(name, value)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise PacelineError(f"{address} answers {error.code}{_reason(error)}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PacelineError(f"{address} does not answer: {reason}; is the server up?") from None


def _reason(error: urllib.error.HTTPError) -> str:
    """Return ": message; remedy" of a refusal, as far as it has them."""
    from paceline.bench.answer import error_text

    try:
        said = error_text(msgspec.json.decode(error.read(_MAX_ERROR_BYTES)))
    except (msgspec.DecodeError, OSError, HTTPException):
        said = None
    told = [text for text in (said or error.reason, _REMEDIES.get(error.code)) if text]
    return f": {'; '.join(told)}" if told else ""
