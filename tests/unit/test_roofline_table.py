"""What `paceline roofline` says of the cost of steps."""

from types import SimpleNamespace

import pytest

from paceline.cli.roofline_table import _step_advice
from paceline.measure.step_table import Curve, StepTable
from tests.unit.test_explain import MACHINE


def advised(*verify: tuple[int, float], one: float = 0.01) -> str:
    prefill = Curve(kind="prefill", context=0, points=((1, one), (101, 11 * one)))
    checked = Curve(kind="verify", context=0, points=verify)
    table = StepTable(
        model="m", machine=MACHINE, num_threads=2, kv_dtype="f16", block_size=16,
        curves=(prefill, checked),
    )  # fmt: skip
    return _step_advice(SimpleNamespace(table=table))


def test_drafts_are_cheap_as_far_as_half_a_step_more_goes():
    said = advised((1, 0.01), (8, 0.017))
    assert said.startswith("A step of 6 tokens with all logits costs 1.5 times one of 1 token")
    assert said.endswith("In 50 ms a prompt gets on by 41 tokens.")


@pytest.mark.parametrize("first_s", [0.01, 0.016])
def test_where_a_second_token_costs_too_much_drafts_do_not_pay(first_s):
    said = advised((1, first_s), (2, 0.02))
    assert "A step of 2 tokens with all logits costs 2.0 times one of 1 token" in said
    assert "drafts do not pay here" in said
    assert "cheap" not in said


def test_a_prompt_that_fits_no_token_into_a_step_is_told_so():
    assert advised((1, 0.1), (8, 0.1), one=0.1).endswith("No token of a prompt fits into 50 ms.")
