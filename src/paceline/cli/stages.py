"""Stages: what a long command does now, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Show = Callable[[str, int, int], None]  # what, done, total


class Stages(Protocol):
    """Where a command says which stage it is in, and what of it."""

    def show(self, name: str, done: int, total: int) -> None:
        """Stage `name` begins."""

    def within(self, stage: str) -> Show:
        """Return f(what, done, total) for the steps of one stage."""


class _Bar:
    def __init__(self, update: Show) -> None:
        self.show = update

    def within(self, stage: str) -> Show:
        return self.show


class Lines:
    """Says each stage once, in a line of its own, and nothing of its steps."""

    def __init__(self) -> None:
        self._said = ""

    def show(self, name: str, done: int = 0, total: int = 0) -> None:
        if name != self._said:
            print(f"paceline: {name}", file=sys.stderr, flush=True)
            self._said = name

    def within(self, stage: str) -> Show:
        return lambda what, done, total: self.show(stage)


@contextmanager
def show_stages() -> Iterator[Stages]:
    """Show a bar for as long as something is done; lines where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def update(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield _Bar(update)
