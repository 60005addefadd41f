from __future__ import annotations

import json

import pytest

from paceline.bench.spec import Cell, Run, _count, _row
from paceline.bench.spec_prompts import PROMPTS
from paceline.engine.speculation.stats import SpecStats


def test_a_row_compares_rounds_and_counts_what_each_round_added() -> None:
    cell = Cell("edit", 1)
    text = tuple(range(11))
    cell.plain = [Run(2.0, (text,), 10), Run(4.0, (text,), 10)]
    cell.drafting = [Run(1.0, (text,), 4), Run(1.0, (text,), 6)]
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


def test_a_text_that_differs_is_told() -> None:
    cell = Cell("edit", 1)
    cell.plain, cell.drafting = [Run(1.0, ((1, 2),), 2)], [Run(1.0, ((1, 3),), 2)]
    assert not _row(cell)["is_same_text"]


@pytest.mark.parametrize("workload", PROMPTS)
def test_each_workload_has_prompts(workload: str) -> None:
    assert all(len(prompt) > 40 for prompt in PROMPTS[workload])
