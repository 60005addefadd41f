"""Blocks in host memory: the bound, the order, and what goes on to the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.engine.kv_tier import KVTier, open_tier
from paceline.engine.kv_tier_disk import DiskStore
from paceline.engine.kv_tier_host import HostStore
from tests.unit.test_kv_tier import BLOCK, TOKENS, Blocks, block, key

SIZE = BLOCK + len(TOKENS)


def fill(store: HostStore, *numbers: int) -> None:
    for number in numbers:
        assert store.put(key(number), TOKENS, block(number))


def held(store: HostStore | DiskStore) -> list[int]:
    return [number for number in range(10) if key(number) in store]


def test_a_block_comes_back_as_it_was_and_leaves() -> None:
    store = HostStore(max_bytes=4 * SIZE)
    fill(store, 1, 2)
    np.testing.assert_array_equal(store.get(key(1), TOKENS), block(1))
    assert held(store) == [2]
    assert store.get(key(1), TOKENS) is None


def test_equal_keys_of_other_tokens_are_a_miss() -> None:
    store = HostStore(max_bytes=4 * SIZE)
    fill(store, 1)
    assert store.get(key(1), TOKENS[::-1]) is None
    assert held(store) == [1]


def test_the_size_is_a_bound_and_what_came_first_goes_first() -> None:
    store = HostStore(max_bytes=3 * SIZE)
    fill(store, 1, 2, 3, 3, 4, 5)
    assert held(store) == [3, 4, 5]
    store.get(key(4), TOKENS)
    fill(store, 6)
    assert held(store) == [3, 5, 6]


def test_what_the_host_gives_up_goes_to_the_disk_and_at_the_end_all_of_it(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, max_bytes=2**20, block_bytes=BLOCK)
    host = HostStore(max_bytes=2 * SIZE, below=disk)
    fill(host, 1, 2, 3, 4)
    disk.settle()
    assert (held(host), held(disk)) == ([3, 4], [1, 2])
    host.close(5)
    disk.close(5)
    again = DiskStore(tmp_path, max_bytes=2**20, block_bytes=BLOCK)
    again.settle()
    assert held(again) == [1, 2, 3, 4]
    again.close(5)


def test_at_the_end_blocks_of_the_host_and_the_pool_are_as_old_as_their_use(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, max_bytes=2**20, block_bytes=BLOCK)
    host = HostStore(max_bytes=3 * SIZE, below=disk)
    tier = KVTier([host, disk], Blocks())
    for number in (1, 2, 3, 4, 1, 5, 2):
        tier.store(number, key(number), TOKENS)
    disk.settle()
    assert (held(host), held(disk)) == ([1, 2, 5], [1, 2, 3, 4])
    tier.store(1, key(1), TOKENS)  # used last of these: 5, 2, 1
    for number in (7, 6):
        assert tier.keep(number, key(number), TOKENS, wait_s=1)
    tier.close(5)
    for num_left, expected in ((5, [1, 2, 5, 6, 7]), (3, [1, 6, 7]), (1, [7])):
        again = DiskStore(tmp_path, max_bytes=num_left * (SIZE + 100), block_bytes=BLOCK)
        again.settle()
        assert held(again) == expected
        again.close(5)


class Broken(HostStore):
    """A store that takes nothing."""

    def put(self, key: bytes, tokens: bytes, block: object, *, wait_s: float = 0.0) -> bool:
        return False


def test_a_store_below_that_takes_nothing_loses_blocks_and_no_more() -> None:
    host = HostStore(max_bytes=2 * SIZE, below=Broken(max_bytes=SIZE))
    fill(host, 1, 2, 3)
    assert held(host) == [2, 3]
    host.close(5)
    assert held(host) == []


class Clock:
    """Each look at it takes `step_s`, which the test sets."""

    def __init__(self) -> None:
        self.now_s = self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Slow(HostStore):
    """A store from which a block takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(max_bytes=100 * SIZE)
        self._clock, self._seconds = clock, seconds

    def get(self, key: bytes, tokens: bytes) -> object:  # type: ignore[override]
        self._clock.now_s += self._seconds
        return super().get(key, tokens)


def test_each_store_has_its_own_cost_and_the_most_time_saved_in_all_counts() -> None:
    clock = Clock()
    quick, slow = Slow(clock, 0.1), Slow(clock, 2.0)
    tier = KVTier([quick, slow], Blocks(), clock=clock)
    fill(quick, 0, 3)
    fill(slow, 9, 1)
    np.testing.assert_array_equal(
        tier.load([key(0), key(9), key(8)], [TOKENS] * 3), np.stack([block(0), block(9)])
    )
    tier.observe(512, 512 * 0.1)  # 1.6 s a block of 16 tokens
    fill(quick, 2)
    assert tier.num_worth_restoring([key(3)], 16) == 1
    assert tier.num_worth_restoring([key(1)], 16) == 0
    assert tier.num_worth_restoring([key(1), key(2)], 16) == 2  # 2.1 s against 3.2 s
    assert tier.num_worth_restoring([key(2), key(1)], 16) == 1
    tried = [tier.num_worth_restoring([key(1)], 16) for _ in range(40)]
    assert tried[-1] == 1  # a cost that kept it from restoring is not believed for ever


def test_both_tiers_in_one_spec_and_a_path_may_have_a_plus(tmp_path: Path) -> None:
    path = tmp_path / "a+b"
    tier = open_tier(f"host:size=1M+disk:path={path},size=1M", Blocks())
    assert [type(level.store) for level in tier._levels] == [HostStore, DiskStore]
    assert path.is_dir()
    assert tier.is_lasting
    tier.close(5)


def test_memory_alone_is_not_filled_at_the_end() -> None:
    tier = open_tier("host:size=1M", Blocks())
    assert not tier.is_lasting
    tier.close(5)
