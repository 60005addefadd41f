"""Draft lengths follow measured cost and chance, and what drafts may lose is bounded."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.engine.speculation.acceptance import Acceptance
from paceline.engine.speculation.base import Offer
from paceline.engine.speculation.goodput import Goodput
from paceline.engine.speculation.row_cost import RowCost


def machine(base: float, slope: float):
    """Return the seconds of a step of so many rows."""
    return lambda num_rows: base * (1 + slope * (num_rows - 1))


def offers_of(
    chances: list[list[float]], *, is_free: bool = True, setup_s: float = 0.0, num_left: int = 999
) -> list[Offer]:
    return [Offer(row, is_free, setup_s, num_left) for row in chances]


def lengths_of(pace: Goodput, chances: list[list[float]], num_rows: int, num_prefill: int = 0):
    return pace.lengths(offers_of(chances), num_rows, num_prefill, lambda num_seqs: 0.0)


def play(
    pace: Goodput,
    cost,
    chance: float,
    *,
    num_steps: int = 400,
    num_seqs: int = 1,
    believed: float | None = None,
    draft_s: float = 0.0,
    setup_s: float = 0.0,
    text_steps: int = 64,
    seed: int = 0,
) -> tuple[float, float]:
    """Return (tokens, seconds) of steps whose guesses are right with `chance`.

    The pace is told the chance that it is `believed` to be. A guess for each sequence costs
    `draft_s`, and the first ones for every `text_steps` steps cost `setup_s` a sequence before.
    """
    rng = random.Random(seed)
    tokens = total_s = 0.0
    is_set_up = [False] * num_seqs
    for step in range(num_steps):
        if step % text_steps == 0:
            is_set_up = [False] * num_seqs
        offers = [
            Offer(
                [chance if believed is None else believed] * 15, not draft_s,
                0.0 if is_ready else setup_s, text_steps - step % text_steps,
            )
            for is_ready in is_set_up
        ]  # fmt: skip
        lengths = pace.lengths(offers, num_seqs, 0, lambda num_seqs: draft_s)
        accepted = 0
        for length in lengths:
            for _ in range(length):
                if rng.random() >= chance:
                    break
                accepted += 1
        num_drafted = sum(lengths)
        setup = sum(offer.setup_s for offer, length in zip(offers, lengths, strict=True) if length)
        is_set_up = [a or b > 0 for a, b in zip(is_set_up, lengths, strict=True)]
        seconds = cost(num_seqs + num_drafted) * rng.uniform(0.9, 1.1)
        drafting_s = setup + draft_s * max(lengths)
        pace.observe(
            num_rows=num_seqs + num_drafted, num_drafted=num_drafted, num_accepted=accepted,
            num_prefill=0, seconds=seconds, draft_s=drafting_s, setup_s=setup, look_s=0.0,
        )  # fmt: skip
        tokens += num_seqs + accepted
        total_s += seconds + drafting_s
    return tokens, total_s


def speed_up(pace: Goodput, cost, chance: float, **options) -> float:
    tokens, seconds = play(pace, cost, chance, **options)
    num_seqs = options.get("num_seqs", 1)
    return tokens / seconds / (num_seqs / cost(num_seqs))


def test_cheap_rows_and_sure_guesses_give_long_drafts() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.1), 0.98)
    assert lengths_of(pace, [[0.98] * 15], 1, 0)[0] >= 12
    assert speed_up(pace, machine(0.05, 0.1), 0.98) > 4


def test_dear_rows_mean_no_drafts() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 1.0), 0.9)
    assert lengths_of(pace, [[0.9] * 15], 1, 0) == [0]


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
    assert sum(lengths_of(one, [[0.7] * 15], 1, 0)) >= 3
    assert sum(lengths_of(many, [[0.7] * 15] * 16, 16)) == 0


def test_the_likeliest_guesses_of_all_sequences_are_drafted() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.35), 0.6, num_seqs=2)
    lengths = lengths_of(pace, [[0.05] * 8, [0.99] * 8], 2, 0)
    assert lengths[0] == 0
    assert lengths[1] >= 2


def test_a_prompt_in_the_step_means_no_drafts() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.05), 0.95)
    assert lengths_of(pace, [[0.95] * 8], 1, 100) == [0]


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
    assert lengths_of(Goodput(), [[0.9] * 8], 1) == [0]


def test_drafts_come_back_when_they_pay_again() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 1.5), 0.9)
    assert lengths_of(pace, [[0.9] * 8], 1, 0) == [0]
    play(pace, machine(0.05, 0.1), 0.9, num_steps=1500)
    assert lengths_of(pace, [[0.9] * 8], 1, 0)[0] >= 4


def test_the_price_of_making_drafts_counts() -> None:
    """A model whose guesses cost half a step each must be right nearly always."""
    cost = machine(0.05, 0.1)
    assert speed_up(Goodput(), cost, 0.3, draft_s=0.025) > 0.98
    pace = Goodput()
    play(pace, cost, 0.3, draft_s=0.025)
    offers = offers_of([[0.3] * 8], is_free=False)
    assert pace.lengths(offers, 1, 0, lambda num_seqs: 0.025) == [0]
    assert speed_up(Goodput(), cost, 0.95, draft_s=0.01, num_steps=2000) > 1.5


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("believed", [None, 0.95])
@pytest.mark.parametrize("draft_s", [0.01, 0.03])
@pytest.mark.parametrize("setup_s", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("num_seqs", [1, 8])
def test_a_model_loses_at_most_its_fund_beside_the_credit(
    chance: float, believed: float | None, draft_s: float, setup_s: float, num_seqs: int
) -> None:
    """800 steps: one of credit, three of the fund, and nine in a thousand for ever."""
    cost = machine(0.05, 0.2)
    ratio = speed_up(
        Goodput(), cost, chance, believed=believed, draft_s=draft_s, setup_s=setup_s,
        num_seqs=num_seqs, num_steps=800,
    )  # fmt: skip
    assert ratio > 1 - (1 + 3 + 0.009 * 800) / 800 - 0.006  # and the noise of steps


@pytest.mark.parametrize("setup_s", [0.1, 0.5])
def test_a_good_hour_pays_for_a_bounded_loss_after_it(setup_s: float) -> None:
    cost, num_steps = machine(0.05, 0.1), 800
    pace = Goodput()
    assert speed_up(pace, cost, 0.95, draft_s=0.01, setup_s=0.1, num_steps=2000) > 1.5
    assert pace.fund > 20
    ratio = speed_up(pace, cost, 0.1, believed=0.95, draft_s=0.01, setup_s=setup_s,
                     num_steps=num_steps)  # fmt: skip
    assert ratio > 1 - (4 + 24 + 0.009 * num_steps) / num_steps - 0.006


def test_set_ups_are_paid_where_texts_are_long_enough_to_win_them_back() -> None:
    cost = machine(0.05, 0.1)
    options = {"draft_s": 0.01, "num_steps": 2000}
    assert speed_up(Goodput(), cost, 0.9, setup_s=0.15, text_steps=64, **options) > 1.3
    assert speed_up(Goodput(), cost, 0.9, setup_s=0.15, text_steps=4, **options) > 0.99


def test_what_drafts_won_lately_pays_for_the_next_set_up() -> None:
    pace, cost = Goodput(), machine(0.05, 0.1)
    for num_rows in (1, 4):
        pace.observe(num_rows=num_rows, num_drafted=0, num_accepted=0, num_prefill=0,
                     seconds=cost(num_rows), draft_s=0.0, setup_s=0.0, look_s=0.0)  # fmt: skip
    lengths_of(pace, [[0.9]], 1)
    # A set-up of three steps, all of the fund; three right guesses for 0.3 steps more.
    pace.observe(num_rows=4, num_drafted=3, num_accepted=3, num_prefill=0,
                 seconds=cost(4), draft_s=0.15, setup_s=0.15, look_s=0.0)  # fmt: skip
    assert pace.fund < 0.05
    assert pace.balance == pytest.approx(3.7, abs=0.05)
    assert pace.budget_s == pytest.approx(2.7 * 0.05, rel=0.05)


def test_a_set_up_for_one_sequence_of_many_has_a_share_of_the_fund() -> None:
    pace = Goodput()
    for num_rows in (1, 8):
        pace.observe(num_rows=num_rows, num_drafted=0, num_accepted=0, num_prefill=0,
                     seconds=0.1, draft_s=0.0, setup_s=0.0, look_s=0.0)  # fmt: skip
    pace.is_open(1, 0)
    alone_s = pace.budget_s
    pace.is_open(8, 0)
    assert pace.budget_s == pytest.approx(alone_s / 8, rel=0.05)
    # 0.2 s are two of three steps for one sequence, and more than its share where there are eight.
    offers = offers_of([[0.9] * 8], is_free=False, setup_s=0.2)
    assert sum(pace.lengths(offers, 1, 0, lambda num_seqs: 0.001)) > 0
    assert sum(pace.lengths(offers * 8, 8, 0, lambda num_seqs: 0.001)) == 0


def test_the_better_of_two_offers_is_the_one_that_gives_more_tokens_a_second() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.1), 0.9)
    [free], [dear] = offers_of([[0.5] * 8]), offers_of([[0.9] * 8], is_free=False)

    def better(round_s: float) -> int:
        return pace.better([free, dear], 1, lambda num_seqs: round_s)

    assert better(0.001) == 1
    assert better(0.05) == 0
    [unread] = offers_of([[0.9] * 8], is_free=False, setup_s=99.0)
    assert pace.better([free, unread], 1, lambda num_seqs: 0.001) == 0


def test_a_round_for_many_sequences_counts_once() -> None:
    """Where one guess for all costs little more than one for one, a batch drafts too."""

    def cost(num_rows: int) -> float:
        return 0.05 * (1 + 0.02 * num_rows)

    pace = Goodput()
    play(pace, cost, 0.8, num_seqs=8)
    offers = offers_of([[0.8] * 4] * 8, is_free=False)
    shared = pace.lengths(offers, 8, 0, lambda num_seqs: 0.01 * (num_seqs > 0))
    each = pace.lengths(offers, 8, 0, lambda num_seqs: 0.02 * num_seqs)
    assert sum(shared) > sum(each)


def looks(pace: Goodput, look_s: float, num_steps: int = 400) -> int:
    """Return how many of the steps, 50 ms each with nothing worth drafting, are looked at."""
    num_looks = 0
    for _ in range(num_steps):
        is_open = pace.is_open(8, 0)
        num_looks += is_open
        pace.observe(num_rows=8, num_drafted=0, num_accepted=0, num_prefill=0, seconds=0.05,
                     draft_s=0.0, setup_s=0.0, look_s=look_s if is_open else 0.0)  # fmt: skip
    return num_looks


@pytest.mark.parametrize("look_s", [0.0004, 0.002])
def test_looking_for_nothing_takes_at_most_half_a_percent_of_the_time(look_s: float) -> None:
    pace = Goodput()
    play(pace, machine(0.04, 0.03), 0.5, num_seqs=8)
    assert looks(pace, 0.0001) == 400  # a fifth of a percent
    spent_s, most_s = looks(pace, look_s) * look_s, 0.005 * 400 * 0.05
    assert most_s / 2 < spent_s <= most_s
    assert looks(pace, 1.0) >= 400 / 17 - 1  # never further apart than 16 steps without


def test_the_time_of_the_look_is_booked_with_the_draft() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.1), 0.9, num_steps=20)
    before = pace.balance
    pace.observe(num_rows=2, num_drafted=1, num_accepted=0, num_prefill=0, seconds=0.055,
                 draft_s=0.0, setup_s=0.0, look_s=0.025)  # fmt: skip
    assert pace.balance == pytest.approx(before - 0.6, abs=0.12)


def test_an_interrupted_step_is_not_the_drafts_fault() -> None:
    pace = Goodput()
    play(pace, machine(0.05, 0.1), 0.9)
    before = pace.balance
    [length] = lengths_of(pace, [[0.9] * 8], 1, 0)
    pace.observe(num_rows=1 + length, num_drafted=length, num_accepted=length,
                 num_prefill=0, seconds=30.0, draft_s=0.0, setup_s=0.0, look_s=0.0)  # fmt: skip
    assert pace.balance > before - 2
    assert lengths_of(pace, [[0.9] * 8], 1, 0)[0] >= 4


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


def test_costs_that_were_measured_before_tell_how_sizes_compare_from_the_first_step_on() -> None:
    cost = RowCost([(1, 0.010), (4, 0.012), (8, 0.030)])
    assert not cost.is_known
    cost.observe(1, 0.020)  # the same machine with Python around the step, or a busier one
    assert cost.seconds(1) == pytest.approx(0.020)
    assert cost.seconds(4) == pytest.approx(0.024)
    assert cost.seconds(8) == pytest.approx(0.060)
    assert cost.at_most(4) == pytest.approx(0.080)  # it has not run: four times one row
    cost.observe(4, 0.050)
    assert cost.seconds(4) == cost.at_most(4) == pytest.approx(0.050)


def test_a_known_cost_spares_the_first_draft_where_rows_are_too_dear() -> None:
    cost = machine(0.05, 1.0)
    known = [(n, cost(n)) for n in (1, 2, 4, 8, 16)]
    lengths = []
    for pace in (Goodput(known), Goodput()):
        pace.observe(num_rows=1, num_drafted=0, num_accepted=0, num_prefill=0, seconds=cost(1),
                     draft_s=0.0, setup_s=0.0, look_s=0.0)  # fmt: skip
        lengths += lengths_of(pace, [[0.9] * 15], 1, 0)
    assert lengths == [0, 1]


@pytest.mark.parametrize("slope", [0.3, 1.0])
def test_costs_that_are_wrong_lose_no_more_than_none(slope: float) -> None:
    known = [(n, machine(0.05, 0.01)(n)) for n in (1, 2, 4, 8, 16)]
    assert speed_up(Goodput(known), machine(0.05, slope), 0.2, believed=0.95) > 0.98


ROWS_S = {1: 0.037, 2: 0.041, 4: 0.049, 8: 0.066, 16: 0.12, 32: 0.22, 64: 0.42}  # a 1.5B, AVX-512


def closed_batch_s(pace: Goodput, chances: list[float], *, num_tokens: int, drafts: bool) -> float:
    """Return the seconds until the last of these sequences has its tokens; nobody takes a seat."""
    rng = random.Random(1)
    left = [num_tokens] * len(chances)
    total_s = 0.0
    while any(left):
        going = [i for i, n in enumerate(left) if n > 0]
        offers = offers_of([[chances[i]] * min(15, left[i]) for i in going])
        lengths = pace.lengths(offers, len(going), 0, lambda num_seqs: 0.0) if drafts else []
        accepted = 0
        for i, length in zip(going, lengths or [0] * len(going), strict=True):
            right = 0
            while right < min(length, left[i] - 1) and rng.random() < chances[i]:
                right += 1
            accepted += right
            left[i] -= 1 + right
        num_rows = len(going) + sum(lengths)
        seconds = np.interp(num_rows, list(ROWS_S), list(ROWS_S.values()))
        pace.observe(
            num_rows=num_rows, num_drafted=sum(lengths), num_accepted=accepted, num_prefill=0,
            seconds=seconds, draft_s=0.0, setup_s=0.0, look_s=0.0,
        )  # fmt: skip
        total_s += seconds
    return total_s


@pytest.mark.parametrize("num_sure", [1, 2, 4, 6, 8])
def test_a_batch_of_which_some_draft_well_ends_no_later(num_sure: int) -> None:
    chances = [0.95] * num_sure + [0.02] * (8 - num_sure)
    pace = Goodput(list(ROWS_S.items()))
    spent = [closed_batch_s(pace, chances, num_tokens=48, drafts=True) for _ in range(4)]
    plain_s = closed_batch_s(Goodput(), chances, num_tokens=48, drafts=False)
    assert 4 * plain_s / sum(spent) > 0.98


def test_two_of_whom_one_drafts_well_are_sped_up() -> None:
    pace = Goodput(list(ROWS_S.items()))
    drafting_s = closed_batch_s(pace, [0.95, 0.95], num_tokens=96, drafts=True)
    assert closed_batch_s(pace, [0.0, 0.0], num_tokens=96, drafts=False) / drafting_s > 1.5
