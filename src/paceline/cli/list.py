"""`paceline list`: the models of the catalogue, and which of them are on this disk."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def list_models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Show the models that have a name, their size, licence, and which are on this disk.

    **Examples**

    - `paceline list`

    - `paceline list --json | jq '.[].name'`
    """
    from paceline.catalog import ENTRIES, installed

    paths = {entry.name: str(path) for entry, path in installed()}
    if as_json:
        rows = [
            {
                "name": entry.name,
                "description": entry.description,
                "license": entry.license,
                "bytes": entry.size,
                "path": paths.get(entry.name),
            }
            for entry in ENTRIES
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("name", "size", "licence", "here"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=True)
    table.add_column("what")
    for entry in ENTRIES:
        here = "yes" if entry.name in paths else ""
        size = f"{entry.size / 1e6:.0f} MB"
        table.add_row(entry.name, size, entry.license, here, entry.description)
    Console().print(table)
