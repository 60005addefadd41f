"""StepTable: costs of steps between and beyond what was measured."""

from __future__ import annotations

import pytest

from paceline.measure.machine import Machine
from paceline.measure.step_table import Curve, StepTable, shapes_of

PREFILL = ((1, 0.010), (2, 0.012), (8, 0.018), (512, 0.600))


@pytest.fixture
def table() -> StepTable:
    return StepTable(
        model="m",
        machine=Machine(cpu="c", num_cores=1, quota=None, isa="avx2", version="0"),
        num_threads=1,
        kv_dtype="f16",
        block_size=16,
        curves=(
            Curve(kind="prefill", context=0, points=PREFILL),
            Curve(kind="prefill", context=1000, points=tuple((n, 2 * s) for n, s in PREFILL)),
            Curve(kind="verify", context=0, points=((1, 0.010), (32, 0.041))),
            Curve(kind="decode", context=0, points=((1, 0.010),)),
        ),
    )


def test_measured_sizes_cost_what_was_measured(table):
    assert [table.seconds(n) for n, _ in PREFILL] == pytest.approx([s for _, s in PREFILL])


def test_costs_between_sizes_and_contexts_lie_on_lines(table):
    assert table.seconds(5) == pytest.approx(0.015)
    assert table.seconds(5, 500) == pytest.approx(0.015 * 1.5)
    assert table.seconds(2, kind="verify") == pytest.approx(0.011)


def test_costs_beyond_what_was_measured_go_straight_on(table):
    assert table.seconds(1016) == pytest.approx(0.6 + 0.582)
    assert table.seconds(1, 2000) == pytest.approx(0.030)
    assert table.seconds(33, kind="verify") == pytest.approx(0.042)


def test_a_curve_of_one_point_is_flat(table):
    assert table.seconds(7, 100, kind="decode") == 0.010


def test_a_context_never_makes_a_step_cheaper(table):
    noisy = StepTable(
        model="m", machine=table.machine, num_threads=1, kv_dtype="f16", block_size=16,
        curves=(
            Curve(kind="prefill", context=0, points=((1, 0.010),)),
            Curve(kind="prefill", context=1000, points=((1, 0.009),)),
        ),
    )  # fmt: skip
    assert noisy.seconds(1, 5000) == 0.010


def test_the_tokens_within_a_time_are_the_most_that_keep_to_it(table):
    for seconds in (0.010, 0.0121, 0.05, 0.6, 1.0):
        n = table.tokens_within(seconds)
        assert table.seconds(n) <= seconds < table.seconds(n + 1)
    assert table.tokens_within(0.001) == 0


def test_a_prompt_costs_its_chunks_each_at_its_own_context(table):
    whole = table.prefill_s(1200, chunk=512)
    expected = table.seconds(512) + table.seconds(512, 512) + table.seconds(176, 1024)
    assert whole == pytest.approx(expected)
    assert table.prefill_s(0, chunk=512) == 0.0


def test_the_shapes_of_a_kind_need_the_logits_that_it_uses():
    verify, prefill, decode = (dict(shapes_of(k, 0))[8] for k in ("verify", "prefill", "decode"))
    assert (verify.num_seqs, verify.num_tokens, verify.num_logit_rows) == (1, 8, 8)
    assert (prefill.num_seqs, prefill.num_tokens, prefill.num_logit_rows) == (1, 8, 1)
    assert (decode.num_seqs, decode.num_tokens, decode.num_logit_rows) == (8, 1, 8)


def test_fewer_sizes_are_measured_with_a_context():
    assert [n for n, _ in shapes_of("prefill", 1024)] == [1, 8, 64, 512]
    assert [n for n, _ in shapes_of("decode", 1024)] == [1, 8, 32]
