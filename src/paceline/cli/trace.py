"""`paceline trace`: the last steps and calls of a running server, to look at in Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import ApiKey, ServedModel
from paceline.errors import ParameterError


def trace(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write; `-` is stdout.")
    ] = Path("trace.json"),
    last: Annotated[float, typer.Option("--last", min=0.001, help="Seconds to look back.")] = 60.0,
    model: ServedModel = "",
    api_key: ApiKey = None,
) -> None:
    """Save what a server did last: every step, and every call that has ended.

    The file opens in https://ui.perfetto.dev or chrome://tracing: one row of steps with their
    phases, one row for each call with its phases and chunks. The server remembers its last 8192
    steps and 512 calls.

    **Examples**

    - `paceline trace`

    - `paceline trace http://10.0.0.5:8000 --last 10 -o slow.json`

    - `paceline trace pod.example.com:8000 --api-key @keyfile`
    """
    from paceline.cli.bench_values import check_output, read_headers
    from paceline.explain.sources import read_trace
    from paceline.remote import base_address, fetch_trace

    if str(output) != "-":
        check_output("--output", output)
    address = base_address(url)
    body = fetch_trace(address, last, read_headers(api_key, []), model=model)
    events = read_trace(body, address)["traceEvents"]
    if str(output) == "-":
        sys.stdout.buffer.write(body)
        return
    try:
        output.write_bytes(body)
    except OSError as error:
        raise ParameterError(
            f"--output {output} cannot be written: {error.strerror}; name a file elsewhere"
        ) from None
    num_steps = sum(event.get("name", "").startswith("step ") for event in events)
    print(f"{output}: {num_steps} steps; open it in https://ui.perfetto.dev", file=sys.stderr)
