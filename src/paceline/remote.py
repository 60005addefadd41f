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


def fetch_trace(base: str, last_s: float, headers: Mapping[str, str], *, model: str = "") -> bytes:
    """Return what the server at `base` tells of a model's last `last_s` seconds; "": its first."""
    asked = {"last_s": last_s, **({"model": model} if model else {})}
    return send(
        f"{base}/v1/trace?{urlencode(asked)}",
        headers,
        missing="only a Paceline server that keeps a ledger has it",
    )


def fetch_models(base: str, headers: Mapping[str, str]) -> bytes:
    """Return what the server at `base` says of its models."""
    return send(f"{base}/v1/models", headers)


def send(
    address: str,
    headers: Mapping[str, str],
    *,
    body: object = None,
    method: str | None = None,
    timeout_s: float = _TIMEOUT_S,
    missing: str = "",
) -> bytes:
    """Return what `address` answers; a `body` is sent as JSON, by POST unless `method` says else.

    `missing` is what to say of a 404, besides the server's words. Raises PacelineError saying why
    there is no answer.
    """
    data = None if body is None else msgspec.json.encode(body)
    try:
        request = urllib.request.Request(address, data, method=method)
        if data is not None:
            request.add_header("content-type", "application/json")
        for name, value in headers.items():
            # A server that sends us elsewhere does not send our key there.
            request.add_unredirected_header(name, value)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise PacelineError(
                f"{address} answers {error.code}{_reason(error, missing)}"
            ) from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PacelineError(f"{address} does not answer: {reason}; is the server up?") from None


def _reason(error: urllib.error.HTTPError, missing: str) -> str:
    """Return ": message; remedy" of a refusal, as far as it has them."""
    from paceline.bench.answer import error_text

    try:
        said = error_text(msgspec.json.decode(error.read(_MAX_ERROR_BYTES)))
    except (msgspec.DecodeError, OSError, HTTPException):
        said = None
    remedy = missing if error.code == 404 else _REMEDIES.get(error.code)
    told = [text for text in (said or error.reason, remedy) if text]
    return f": {'; '.join(told)}" if told else ""
