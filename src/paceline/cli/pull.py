"""`paceline pull`: fetch a model of the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(
    name: Annotated[
        str, typer.Argument(help="A name that `paceline list` shows.", show_default=False)
    ],
    *,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms of a model that has its own.")
    ] = False,
) -> None:
    """Fetch a model, verify its checksum, and print its path.

    **Examples**

    - `paceline pull smollm2-135m`

    - `paceline pull gemma3-270m --accept-terms`
    """
    from paceline.catalog import find, resolve

    entry = find(name)
    if entry is None:
        typer.echo(resolve(name))  # a path, a hub id, or an error that lists the names
        return
    from paceline.catalog.pull import pull as fetch

    with ProgressBar(entry.name) as bar:
        path: Path = fetch(entry, accept_terms=accept_terms, progress=bar.update)
    typer.echo(path)


class ProgressBar:
    """A bar on stderr for bytes that come in; it shows only once there is progress."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._label = label
        self._is_shown = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_shown:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Move the bar to `done` of `total` bytes; another `total` than before begins anew."""
        if not self._is_shown:
            self._is_shown = True
            self._bar.add_task(self._label, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)
