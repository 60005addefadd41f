"""What is measured: the cells of the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["prefill", "decode", "server", "burst", "start"]
_SLACK = 16  # tokens by which a prompt is shortened, at most, to fit into a context


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a cell, and its row in the table."""

    name: str
    unit: str
    is_rate: bool  # higher is better


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A load. `num_prompt` tokens go in, a stream; `num_tokens` of each stream are timed."""

    name: str
    kind: Kind
    figures: tuple[Figure, ...]
    num_prompt: int
    num_streams: int = 1
    num_tokens: int = 1

    @property
    def keeps_streams(self) -> bool:
        """A round goes on where the last one ended: the context is dear, and hardly grows."""
        return self.kind == "decode" and self.num_prompt >= 1000

    def context(self, rounds: int) -> int:
        """Return how many tokens a stream may come to hold in `rounds` rounds."""
        num_rounds = rounds if self.keeps_streams else 1
        return self.num_prompt + (self.num_tokens + 2) * num_rounds

    def mean_context(self, round_idx: int) -> float:
        """Return the tokens that a stream holds in the middle of the round's timed part."""
        before = round_idx * (self.num_tokens + 1) if self.keeps_streams else 0
        return self.num_prompt + 1 + before + self.num_tokens / 2


def _cell(name: str, kind: Kind, unit: str, *, num_prompt: int, **load: int) -> Cell:
    figure = Figure(name=name, unit=unit, is_rate=unit.endswith("/s"))
    return Cell(name=name, kind=kind, figures=(figure,), num_prompt=num_prompt, **load)


CELLS = (
    *(_cell(f"prefill-{n}", "prefill", "tok/s", num_prompt=n) for n in (512, 2048, 8192)),
    _cell("decode-1", "decode", "tok/s", num_prompt=32, num_tokens=64),
    *(
        _cell(f"decode-1@{n}", "decode", "tok/s", num_prompt=n, num_tokens=32)
        for n in (2000, 4000)
    ),
    *(
        _cell(f"decode-{n}", "decode", "tok/s", num_prompt=32, num_tokens=32, num_streams=n)
        for n in (8, 32)
    ),
    _cell("server", "server", "req/s", num_prompt=330, num_tokens=64, num_streams=32),
    Cell(
        name="long-prompt",
        kind="burst",
        figures=(
            Figure(name="long-prompt gap", unit="ms", is_rate=False),
            Figure(name="long-prompt TTFT", unit="s", is_rate=False),
        ),
        num_prompt=4000,
        num_tokens=8,
        num_streams=4,
    ),
    _cell("start", "start", "s", num_prompt=2),
)  # fmt: skip
QUICK = ("prefill-512", "decode-1", "decode-8", "start")


def fit(cell: Cell, *, max_context: int, rounds: int) -> Cell | None:
    """Return `cell` with its prompt shortened a little if it must be, None if it cannot fit."""
    excess = max(0, cell.context(rounds) - max_context)
    if excess > _SLACK:
        return None
    return replace(cell, num_prompt=cell.num_prompt - excess)


def trial(cell: Cell) -> Cell:
    """Return a short form of `cell`, by which configurations of an engine are compared."""
    return replace(
        cell, num_prompt=min(cell.num_prompt, 1024), num_tokens=min(cell.num_tokens, 16)
    )  # fmt: skip
