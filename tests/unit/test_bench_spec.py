from __future__ import annotations

import json

import pytest

from paceline.bench.spec import Cell, Run, _count, _row, predict, run_in_turns
from paceline.bench.spec_prompts import PROMPTS
from paceline.engine.speculation.stats import SpecStats
from paceline.measure.machine import this_machine
from paceline.measure.step_table import Curve, StepKind, StepTable


def test_a_row_compares_rounds_and_counts_what_each_round_added() -> None:
    cell = Cell("edit", 1)
    text = tuple(range(11))
    cell.plain = [Run(2.0, (text,), 10, 50), Run(4.0, (text,), 10, 50)]
    cell.drafting = [Run(1.0, (text,), 4, 50), Run(1.0, (text,), 6, 50)]
    stats = SpecStats.empty()
    for depths, accepted in (([1, 2, 3], 2), ([1, 2], 0)):
        before = stats.copy()
        stats.count(depths, accepted)
        _count(cell, before, stats.copy())
    row = _row(cell)
    json.dumps(row)
    assert row["is_same_text"]
    assert row["speed_up"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert (row["plain_tokens_per_s"], row["tokens_per_s"]) == (3.75, 10.0)
    assert row["steps_saved"] == 0.5
    assert (row["num_drafts"], row["num_drafted"], row["num_accepted"]) == (2, 5, 2)
    assert row["mean_accepted_length"] == 1.0
    assert row["acceptance_by_position"] == [0.5, 0.5, 0.0]


class Counted:
    """A batch whose tokens come `stride` at a time, and that writes down whose turn it was."""

    def __init__(self, name: str, length: int, stride: int, turns: list[str]) -> None:
        self.name, self.length, self.stride, self.turns = name, length, stride, turns
        self.num_tokens, self.is_done = 0, False

    def advance(self, num_tokens: int) -> None:
        self.turns.append(self.name)
        while not self.is_done and self.num_tokens < num_tokens:
            self.num_tokens += self.stride
            self.is_done = self.num_tokens >= self.length

    def run(self) -> str:
        return self.name


def test_engines_take_turns_over_the_same_stretch_of_text() -> None:
    turns: list[str] = []
    batches = [Counted("plain", 24, 1, turns), Counted("drafting", 24, 5, turns)]
    assert run_in_turns(batches, 8) == ["plain", "drafting"]  # type: ignore[arg-type]
    # 8, then 10 for 8; 16, then 20; each goes on where it is behind.
    assert turns == ["plain", "drafting", "plain", "drafting", "plain", "drafting"]


def test_a_text_that_differs_is_told() -> None:
    cell = Cell("edit", 1)
    cell.plain, cell.drafting = [Run(1.0, ((1, 2),), 2, 9)], [Run(1.0, ((1, 3),), 2, 9)]
    assert not _row(cell)["is_same_text"]


def step_table() -> StepTable:
    """Return a table by which a token more of one sequence costs a tenth of a step."""
    kinds: tuple[tuple[StepKind, float], ...] = (
        ("prefill", 0.05), ("verify", 0.1), ("decode", 0.2),
    )  # fmt: skip
    return StepTable(
        model="m", machine=this_machine(), num_threads=1, kv_dtype="f16", block_size=16,
        curves=tuple(
            Curve(kind=kind, context=0, points=((1, 1.0), (11, 1.0 + 10 * each)))
            for kind, each in kinds
        ),
    )  # fmt: skip


def test_the_prediction_prices_the_steps_that_ran_and_those_that_were_saved() -> None:
    cell = Cell("edit", 1, num_accepted=6)
    cell.steps = {"1+0": 2, "1+3": 2}
    # Ten plain steps against two of one row and two of four rows.
    assert predict(cell, step_table()) == pytest.approx(10 / (2 + 2 * 1.3))
    cell.draft_s = 1.4
    assert predict(cell, step_table()) == pytest.approx(10 / 6)
    batch = Cell("edit", 2, num_accepted=4)
    batch.steps = {"2+2": 2}
    # Four steps of two sequences against two with a row more for each.
    assert predict(batch, step_table()) == pytest.approx(4 * 1.2 / (2 * 1.4))
    assert predict(Cell("edit", 1), step_table()) is None


@pytest.mark.parametrize("workload", PROMPTS)
def test_each_workload_has_prompts(workload: str) -> None:
    assert all(len(prompt) > 40 for prompt in PROMPTS[workload])
