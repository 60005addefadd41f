from __future__ import annotations

import pytest

from paceline.engine.block_pool import BlockPool
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.sequence import Sequence, State
from paceline.policies.base import load_policy
from paceline.types import Request, SamplingParams


class NoText:
    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class NoSampler:
    def commit(self, token_id: int) -> None:
        pass


def make_scheduler(
    *, num_blocks: int = 8, max_num_seqs: int = 4, max_tokens: int = 32, policy: str = "fcfs"
) -> Scheduler:
    return Scheduler(
        policy=load_policy(policy),
        pool=BlockPool(num_blocks),
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_tokens=max_tokens,
    )


def add(scheduler: Scheduler, number: int, num_prompt: int, priority: int = 0) -> Sequence:
    request = Request(
        id=str(number),
        prompt_token_ids=tuple(range(num_prompt)),
        params=SamplingParams(),
        priority=priority,
    )
    seq = Sequence(
        request=request,
        index=0,
        number=number,
        token_ids=list(request.prompt_token_ids),
        max_len=1000,
        sampler=NoSampler(),
        decoder=NoText(),
        matcher=None,
        ends={},
        arrival_ns=0,
    )
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler) -> Schedule:
    """Schedule, and take one token for each sequence that is computed to its end."""
    schedule = scheduler.schedule(1)
    for seq, n in schedule.chunks:
        seq.num_computed += n
        if seq.num_computed == len(seq.token_ids):
            seq.append_token(5, 1)
    scheduler.pool.check_integrity(seq.block_table for seq in scheduler.running)
    return schedule


def test_running_sequences_get_their_token_before_a_prompt_takes_the_rest() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, 0, 10)
    step(scheduler)
    b = add(scheduler, 1, 60)
    assert step(scheduler).chunks == [(a, 1), (b, 31)]
    assert step(scheduler).chunks == [(a, 1), (b, 29)]
    assert step(scheduler).chunks == [(a, 1), (b, 1)]


def test_an_older_prompt_does_not_keep_a_younger_decode_waiting() -> None:
    scheduler = make_scheduler(num_blocks=20)
    a = add(scheduler, 0, 90)
    b = add(scheduler, 1, 5)
    assert step(scheduler).chunks == [(a, 32)]
    step(scheduler)
    assert step(scheduler).chunks == [(a, 26), (b, 5)]
    a.token_ids += range(90)
    assert step(scheduler).chunks == [(b, 1), (a, 31)]


def test_a_prompt_holds_its_blocks_from_admission_on() -> None:
    scheduler = make_scheduler(num_blocks=8)
    a = add(scheduler, 0, 100)
    step(scheduler)
    assert len(a.block_table) == 7
    assert a.num_computed == 32


def test_the_last_in_the_order_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=2)
    a, b = add(scheduler, 0, 15), add(scheduler, 1, 15)
    step(scheduler)
    step(scheduler)
    schedule = step(scheduler)  # a's 17th token needs a block
    assert schedule.chunks == [(a, 1)]
    assert b.state is State.WAITING
    assert (b.num_computed, b.block_table, b.num_preemptions) == (0, [], 1)
    tokens = list(b.token_ids)
    scheduler.remove(a)
    assert step(scheduler).chunks == [(b, 17)]
    assert b.token_ids[:-1] == tokens


def test_the_first_in_the_order_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=3, max_num_seqs=3)
    a, *_ = (add(scheduler, i, 10) for i in range(3))
    for _ in range(30):
        step(scheduler)
    assert a.num_preemptions == 0
    assert len(a.token_ids) == 40


def test_nobody_overtakes_a_prompt_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4)
    a, b, c = add(scheduler, 0, 30), add(scheduler, 1, 40), add(scheduler, 2, 1)
    step(scheduler)
    assert [seq.state for seq in (a, b, c)] == [State.RUNNING, State.WAITING, State.WAITING]
    scheduler.remove(a)
    assert step(scheduler).chunks == [(b, 32)]
    assert step(scheduler).chunks == [(c, 1), (b, 8)]


def test_seats_are_limited() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for number in range(3):
        add(scheduler, number, 4)
    step(scheduler)
    assert len(scheduler.running) == 2
    assert len(scheduler.waiting) == 1


def test_the_budget_is_a_bound() -> None:
    scheduler = make_scheduler(max_tokens=3)
    for number in range(4):
        add(scheduler, number, 2)
    for _ in range(10):
        schedule = step(scheduler)
        assert sum(n for _, n in schedule.chunks) == schedule.num_tokens <= 3


def test_an_important_request_takes_blocks_and_seats_from_others() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2, policy="priority")
    a, b = add(scheduler, 0, 20, priority=5), add(scheduler, 1, 10, priority=1)
    step(scheduler)
    step(scheduler)
    c = add(scheduler, 2, 40, priority=0)
    assert step(scheduler).chunks == [(b, 1), (c, 31)]
    assert a.state is State.WAITING
    assert (b.state, c.state) == (State.RUNNING, State.RUNNING)


def test_a_request_never_takes_from_a_more_important_one() -> None:
    scheduler = make_scheduler(num_blocks=2, policy="priority")
    a = add(scheduler, 0, 20, priority=0)
    step(scheduler)
    b = add(scheduler, 1, 20, priority=1)
    assert step(scheduler).chunks == [(a, 1)]
    assert b.state is State.WAITING


def fork(scheduler: Scheduler, parent: Sequence, number: int) -> Sequence:
    child = add(scheduler, number, parent.num_prompt)
    scheduler.waiting.remove(child)
    scheduler.fork(parent, child)
    return child


def test_choices_share_the_prompt_and_copy_its_last_block_on_write() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, 0, 20)
    [(_, n)] = scheduler.schedule(1).chunks
    a.num_computed += n
    b, c = fork(scheduler, a, 1), fork(scheduler, a, 2)
    assert scheduler.pool.num_live == 2
    for seq in (a, b, c):
        seq.append_token(7, 1)
    first, last = a.block_table
    schedule = scheduler.schedule(1)
    assert schedule.copy_src == [last, last]
    assert schedule.copy_dst == [a.block_table[1], b.block_table[1]]
    assert c.block_table == [first, last]  # the last holder writes in place
    assert a.block_table[0] == b.block_table[0] == first
    assert scheduler.pool.num_live == 4


def test_a_full_last_block_is_not_copied() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, 0, 32)
    [(_, n)] = scheduler.schedule(1).chunks
    a.num_computed += n
    b = fork(scheduler, a, 1)
    for seq in (a, b):
        seq.append_token(7, 1)
    assert scheduler.schedule(1).copy_src == []
    assert scheduler.pool.num_live == 4


def test_a_choice_without_a_seat_waits_and_computes_the_prompt_itself() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    a = add(scheduler, 0, 20)
    [(_, n)] = scheduler.schedule(1).chunks
    a.num_computed += n
    b = fork(scheduler, a, 1)
    assert b.state is State.WAITING
    b.append_token(7, 1)
    scheduler.remove(a)
    assert scheduler.schedule(1).chunks == [(b, 21)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "slo"])
def test_a_choice_without_a_seat_takes_the_next_one_not_that_of_a_later_request(
    policy: str,
) -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy=policy)
    a, later = add(scheduler, 0, 10), add(scheduler, 2, 10)
    for seq, n in scheduler.schedule(1).chunks:
        seq.num_computed += n
    b = fork(scheduler, a, 1)
    for seq in (a, b, later):
        seq.append_token(7, 1)
    assert [seq for seq, _ in step(scheduler).chunks] == [a, later]
    assert scheduler.num_preemptions == 0
    scheduler.remove(a)
    assert [seq for seq, _ in step(scheduler).chunks] == [later, b]


def test_remove_is_idempotent_and_frees_everything() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 0, 20), add(scheduler, 1, 20)
    step(scheduler)
    for seq in (a, b, a, b):
        scheduler.remove(seq)
    assert not scheduler.has_work
    assert scheduler.pool.num_free == 8
    assert scheduler.schedule(1).chunks == []
