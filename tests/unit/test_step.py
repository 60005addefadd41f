from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.config import EngineConfig
from paceline.engine.sampler import unscored
from paceline.engine.scheduler import MAX_SCORED
from paceline.engine.sequence import Sequence
from paceline.engine.speculation.base import MAX_DRAFTED, ROOT, Draft
from paceline.engine.speculation.verify import root_rows
from paceline.engine.step import StepBuilder, step_limits
from tests.unit.test_scheduler import add, make_scheduler

CONFIG = EngineConfig(block_size=16, max_num_seqs=6, max_batched_tokens=128)


def make_sequence(number: int, num_tokens: int, num_computed: int, blocks: list[int]) -> Sequence:
    seq = add(make_scheduler(), number, num_tokens)
    seq.num_computed = num_computed
    seq.block_table = blocks
    return seq


def test_limits_are_those_of_the_config_and_the_pool() -> None:
    limits = step_limits(CONFIG, max_model_len=1000, num_blocks=10)
    assert (limits.max_tokens, limits.max_seqs, limits.max_logit_rows) == (128, 6, 128)
    assert limits.max_blocks_per_seq == 10
    assert step_limits(CONFIG, max_model_len=33, num_blocks=10).max_blocks_per_seq == 3


def test_a_mixed_step_is_laid_out_row_after_row() -> None:
    a = make_sequence(0, 18, 17, [4, 9])
    b = make_sequence(1, 40, 14, [2, 7, 5])
    builder = StepBuilder(step_limits(CONFIG, 64, 10), 16)
    step, ready = builder.build([(a, 1), (b, 4)])
    assert step.tokens.tolist() == [17, 14, 15, 16, 17]
    assert step.positions.tolist() == [17, 14, 15, 16, 17]
    assert step.slots.tolist() == [145, 46, 47, 112, 113]
    assert step.seqs.tolist() == [[0, 1, 17], [1, 4, 14]]
    assert step.block_tables[0, :2].tolist() == [4, 9]
    assert step.block_tables[1, :3].tolist() == [2, 7, 5]
    assert step.logit_rows.tolist() == [0]
    assert ready == [a]


def test_the_last_row_of_a_prompt_asks_for_logits() -> None:
    a, b = make_sequence(0, 20, 3, [1, 2]), make_sequence(1, 3, 1, [3])
    step, ready = StepBuilder(step_limits(CONFIG, 64, 10), 16).build([(b, 1), (a, 17)])
    assert step.logit_rows.tolist() == [17]
    assert ready == [a]


changes = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["append", "swap", "preempt"])), max_size=12
)


@settings(max_examples=40)
@given(changes)
def test_a_table_is_whole_after_any_change(uses: list[tuple[int, str]]) -> None:
    seqs = [make_sequence(i, 8, 7, [i]) for i in range(4)]
    builder = StepBuilder(step_limits(CONFIG, 160, 100), 16)
    for step_number, (i, use) in enumerate(uses):
        seq = seqs[i]
        if use == "append" and len(seq.block_table) < 10:
            seq.block_table.append(50 + step_number)
        elif use == "swap":
            seq.block_table[-1] = 70 + step_number
            seq.table_epoch += 1
        elif use == "preempt":
            seq.block_table[:] = [80 + step_number]
            seq.table_epoch += 1
        order = seqs[i:] + seqs[: i % 2]
        step, _ = builder.build([(s, 1) for s in order])
        for row, s in enumerate(order):
            assert step.block_tables[row, : len(s.block_table)].tolist() == s.block_table


def test_arrays_are_what_the_backend_wants() -> None:
    a = make_sequence(0, 18, 0, [4, 9])
    step, _ = StepBuilder(step_limits(CONFIG, 64, 10), 16).build([(a, 18)])
    for array in (step.tokens, step.positions, step.slots, step.seqs, step.block_tables):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert step.tree is None


def test_the_rows_of_a_draft_follow_the_last_known_token() -> None:
    a, b, c = (make_sequence(i, 17, 16, [2 * i, 2 * i + 1]) for i in range(3))
    b.draft = Draft([40, 41])
    c.draft = Draft([50, 51, 52], [ROOT, ROOT, 1])
    builder = StepBuilder(step_limits(replace(CONFIG, speculate="ngram"), 64, 10), 16)
    step, ready = builder.build([(a, 1), (b, 3), (c, 4)])
    assert ready == [a, b, c]
    assert root_rows(ready) == [0, 1, 4]
    assert step.logit_rows.tolist() == list(range(8))  # every row of a draft may be needed
    assert step.tokens.tolist() == [16, 16, 40, 41, 16, 50, 51, 52]
    assert step.positions.tolist() == [16, 16, 17, 18, 16, 17, 17, 18]
    assert step.slots.tolist() == [16, 48, 49, 50, 80, 81, 82, 83]
    assert step.seqs.tolist() == [[0, 1, 16], [1, 3, 16], [4, 4, 16]]
    assert step.tree is not None
    assert step.tree.tolist() == [0, 0, 0, 0, 0b1, 0b11, 0b101, 0b1101]


def test_a_step_of_chains_has_no_tree() -> None:
    a = make_sequence(0, 17, 16, [4, 9])
    a.draft = Draft([40, 41])
    step, _ = StepBuilder(step_limits(CONFIG, 64, 10), 16).build([(a, 3)])
    assert step.tree is None


def test_a_step_may_hold_logits_for_every_guess_where_there_are_guesses() -> None:
    roomy = replace(CONFIG, max_batched_tokens=512)
    drafting = replace(roomy, speculate="ngram")
    assert step_limits(drafting, 64, 10).max_logit_rows == 6 + MAX_DRAFTED + MAX_SCORED
    assert step_limits(roomy, 64, 10).max_logit_rows == 6 + MAX_SCORED


def test_rows_that_score_prompts_come_behind_the_others() -> None:
    a, b, c = (make_sequence(i, n, done, [2 * i, 2 * i + 1]) for i, (n, done) in enumerate(
        [(17, 16), (20, 0), (30, 4)]
    ))  # fmt: skip
    b.scores = [unscored(0)]
    c.scores = [unscored(i) for i in range(8)]  # computed once before: row 7 is the next to score
    step, ready = StepBuilder(step_limits(CONFIG, 64, 10), 16).build([(a, 1), (b, 20), (c, 6)])
    assert ready == [a, b]
    # b's last row samples, its 19 others score; c has rows 21 to 26 of positions 4 to 9.
    assert step.logit_rows.tolist() == [0, 20, *range(1, 20), 24, 25, 26]
