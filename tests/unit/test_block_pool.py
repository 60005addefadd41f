from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.block_pool import BlockPool, EngineIntegrityError

steps = st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 9)), max_size=30)


@given(steps)
def test_books_close_over_any_use(uses: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    tables: list[list[int]] = []
    for use, number in uses:
        if use == "a" and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif use == "s" and tables:
            table = tables[number % len(tables)]
            pool.share(table)
            tables.append(list(table))
        elif use == "r" and tables:
            table = tables.pop(number % len(tables))
            num_free = pool.num_free
            num_exclusive = pool.num_exclusive(table)
            pool.release(table)
            assert pool.num_free == num_free + num_exclusive
        pool.check_integrity(tables)
        assert pool.num_free + pool.num_live + pool.num_cached == 12
        assert pool.num_live == len({block for table in tables for block in table})


def test_blocks_of_two_holders_stay_until_both_let_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.release(blocks)
    assert not pool.is_shared(blocks[0])
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 4


def test_a_prefix_is_reused_last_because_the_tail_is_freed_first() -> None:
    pool = BlockPool(3)
    first, _, last = pool.allocate(3)
    pool.release([first, last])
    assert pool.allocate(1) == [first]


def test_more_blocks_than_are_free_is_a_bug_that_is_found() -> None:
    pool = BlockPool(3)
    with pytest.raises(EngineIntegrityError):
        pool.allocate(4)


def test_leaks_and_missing_holders_are_found() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(EngineIntegrityError):
        pool.check_integrity([])
    with pytest.raises(EngineIntegrityError):
        pool.check_integrity([blocks, blocks])
    pool.release(blocks)
    with pytest.raises(EngineIntegrityError):
        pool.check_integrity([blocks])
