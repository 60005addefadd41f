"""Draft lengths follow measured cost and chance, and what drafts may lose is bounded."""

from __future__ import annotations

import random

import pytest

from paceline.engine.speculation.acceptance import Acceptance
from paceline.engine.speculation.goodput import Goodput
from paceline.engine.speculation.row_cost import RowCost


def machine(base: float, slope: float):
    """Return the seconds of a step of so many rows."""
    return lambda num_rows: base * (1 + slope * (num_rows - 1))


def play(
    pace: Goodput,
    cost,
    chance: float,
    *,
    num_steps: int = 400,
    num_seqs: int = 1,
    believed: float | None = None,
    draft_s: float = 0.0,
    seed: int = 0,
) -> tuple[float, float]:
    """Return (tokens, seconds) of steps whose guesses are right with `chance`.

    The pace is told the chance that it is `believed` to be.
    """
    rng = random.Random(seed)
    tokens = total_s = 0.0
    for _ in range(num_steps):
        chances = [[chance if believed is None else believed] * 15] * num_seqs
        lengths = pace.lengths(chances, num_seqs, 0)
        accepted = 0
        for length in lengths:
            for _ in range(length):
                if rng.random() >= chance:
                    break
                accepted += 1
        depth, num_drafted = max(lengths), sum(lengths)
        seconds = cost(num_seqs + num_drafted) * rng.uniform(0.9, 1.1)
        pace.observe(
            num_rows=num_seqs + num_drafted, num_drafted=num_drafted, depth=depth,
            num_accepted=accepted, num_prefill=0, seconds=seconds, draft_s=draft_s * depth,
        )  # fmt: skip
        tokens += num_seqs + accepted
        total_s += seconds + draft_s * depth
    return tokens, total_s


def speed_up(pace: Goodput, cost, chance: float, **options) -> float:
    tokens, seconds = play(pace, cost, chance, **options)
    num_seqs = options.get("num_seqs", 1)
    return tokens / seconds / (num_seqs / cost(num_seqs))


def test_cheap_rows_and_sure_guesses_give_long_drafts() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.1), 0.98)
    assert pace.lengths([[0.98] * 15], 1, 0)[0] >= 12
    assert speed_up(pace, machine(0.05, 0.1), 0.98) > 4


def test_dear_rows_mean_no_drafts() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 1.0), 0.9)
    assert pace.lengths([[0.9] * 15], 1, 0) == [0]


def test_the_length_is_near_the_best_fixed_one() -> None:
    cost = machine(0.05, 0.15)
    best = max(
        sum(0.8**i for i in range(length + 1)) / (cost(1 + length) / cost(1))
        for length in range(16)
    )
    pace = Goodput()
    play(pace, cost, 0.8)
    assert speed_up(pace, cost, 0.8, num_steps=4000) > 0.93 * best


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("slope", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("believed", [None, 0.95])
@pytest.mark.parametrize("num_seqs", [1, 8])
def test_it_loses_at_most_its_credit_whatever_is_believed(
    chance: float, slope: float, believed: float | None, num_seqs: int
) -> None:
    """400 steps: one of credit, half a percent for ever, and what the noise of steps may add."""
    ratio = speed_up(Goodput(), machine(0.05, slope), chance, believed=believed, num_seqs=num_seqs)
    assert ratio > 0.98


def test_a_large_batch_drafts_less_than_one_stream() -> None:
    def cost(num_rows: int) -> float:  # bound by memory up to 8 rows, by compute from there on
        return 0.05 * max(1.0, num_rows / 8)

    one, many = Goodput(), Goodput()
    play(one, cost, 0.7)
    play(many, cost, 0.7, num_seqs=16)
    assert sum(one.lengths([[0.7] * 15], 1, 0)) >= 3
    assert sum(many.lengths([[0.7] * 15] * 16, 16, 0)) == 0


def test_the_likeliest_guesses_of_all_sequences_are_drafted() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.35), 0.6, num_seqs=2)
    lengths = pace.lengths([[0.05] * 8, [0.99] * 8], 2, 0)
    assert lengths[0] == 0
    assert lengths[1] >= 2


def test_a_prompt_in_the_step_means_no_drafts() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.05), 0.95)
    assert pace.lengths([[0.95] * 8], 1, 100) == [0]


def test_nobody_is_asked_for_drafts_that_could_not_pay() -> None:
    """Not even right guesses pay where a row costs more than a step; now and then one is tried."""
    pace = Goodput()
    play(pace, machine(0.05, 1.3), 0.99)
    num_open = 0
    for _ in range(300):
        num_open += pace.is_open(1, 0)
        play(pace, machine(0.05, 1.3), 0.99, num_steps=1)
    assert 0 < num_open < 60
    cheap = Goodput()
    play(cheap, machine(0.05, 0.2), 0.0)
    assert cheap.is_open(1, 0)
    assert not cheap.is_open(513, 512)


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert Goodput().lengths([[0.9] * 8], 1, 0) == [0]


def test_drafts_come_back_when_they_pay_again() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 1.5), 0.9)
    assert pace.lengths([[0.9] * 8], 1, 0) == [0]
    play(pace, machine(0.05, 0.1), 0.9, num_steps=1500)
    assert pace.lengths([[0.9] * 8], 1, 0)[0] >= 4


def test_the_price_of_making_drafts_counts() -> None:
    """A model whose guesses cost half a step each must be right nearly always."""
    cost = machine(0.05, 0.1)
    assert speed_up(Goodput(), cost, 0.3, draft_s=0.025) > 0.98
    pace = Goodput()
    play(pace, cost, 0.3, draft_s=0.025)
    assert pace.lengths([[0.3] * 8], 1, 0) == [0]
    assert speed_up(Goodput(), cost, 0.95, draft_s=0.01, num_steps=2000) > 1.5


def test_an_interrupted_step_is_not_the_drafts_fault() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.1), 0.9)
    before = pace.balance
    [length] = pace.lengths([[0.9] * 8], 1, 0)
    pace.observe(num_rows=1 + length, num_drafted=length, depth=length, num_accepted=length,
                 num_prefill=0, seconds=30.0, draft_s=0.0)  # fmt: skip
    assert pace.balance > before - 2
    assert pace.lengths([[0.9] * 8], 1, 0)[0] >= 4


def test_costs_between_measured_sizes_lie_on_the_line_between_them() -> None:
    cost = RowCost()
    for _ in range(50):
        cost.observe(1, 0.010)
        cost.observe(5, 0.018)
    assert cost.seconds(3) == pytest.approx(0.014, rel=0.02)
    assert cost.seconds(9) > cost.seconds(5)


def test_a_row_that_begins_a_tile_does_not_make_all_rows_after_it_look_dear() -> None:
    cost = RowCost()
    for _ in range(50):
        for num_rows, seconds in ((1, 0.010), (4, 0.013), (5, 0.018)):
            cost.observe(num_rows, seconds)
    assert cost.seconds(8) == pytest.approx(0.018 + 3 * 0.002, rel=0.03)


def test_a_slower_machine_is_slower_at_every_size() -> None:
    cost = RowCost()
    for _ in range(50):
        cost.observe(1, 0.010)
        cost.observe(8, 0.020)
    for _ in range(50):
        cost.observe(1, 0.015)
    assert cost.seconds(1) == pytest.approx(0.015, rel=0.02)
    assert cost.seconds(8) > 0.023


def test_acceptance_leans_on_the_fallback_and_forgets() -> None:
    acceptance = Acceptance(2, lambda kind: (0.2, 0.8)[kind], forget=0.9)
    assert acceptance.chance(0) == pytest.approx(0.2)
    for _ in range(30):
        acceptance.observe(0, True)
    assert acceptance.chance(0) > 0.75
    assert acceptance.chance(1) == pytest.approx(0.8)
    for _ in range(30):
        acceptance.observe(0, False)
    assert acceptance.chance(0) < 0.15
