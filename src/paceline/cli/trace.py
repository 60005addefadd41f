"""`paceline trace`: the last steps and calls of a running server, to look at in Perfetto."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from paceline.errors import PacelineError, ParameterError

_TIMEOUT_S = 30.0


def trace(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write; `-` is stdout.")
    ] = Path("trace.json"),
    last: Annotated[float, typer.Option("--last", min=0.001, help="Seconds to look back.")] = 60.0,
) -> None:
    """Save what a server did last: every step, and every call that has ended.

    The file opens in https://ui.perfetto.dev or chrome://tracing: one row of steps with their
    phases, one row for each call with its phases and chunks. The server remembers its last 8192
    steps and 512 calls.

    **Examples**

    - `paceline trace`

    - `paceline trace http://10.0.0.5:8000 --last 10 -o slow.json`
    """
    body = fetch(f"{base_address(url)}/v1/trace?last_s={last}")
    if str(output) == "-":
        sys.stdout.buffer.write(body)
        return
    output.write_bytes(body)
    events = json.loads(body)["traceEvents"]
    num_steps = sum(event["name"].startswith("step ") for event in events)
    print(f"{output}: {num_steps} steps; open it in https://ui.perfetto.dev", file=sys.stderr)


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
