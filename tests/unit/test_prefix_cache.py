"""The prefix cache: what is computed, what is found, who waits for whom, and what is given up."""

from __future__ import annotations

import pytest

from paceline.engine.block_pool import BlockPool, EngineIntegrityError
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.policies.fcfs import FCFS
from paceline.types import Request, SamplingParams
from tests.unit.scripted_engine import Answers, finish, make_engine, make_request, run
from tests.unit.test_kv_tier import read_only

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Cached:
    """An engine with a prefix cache, and the tokens of each of its steps."""

    def __init__(self, **options) -> None:
        self.steps: list[int] = []
        self.engine: Engine = make_engine(
            on_forward=lambda step: self.steps.append(len(step.tokens)),
            prefix_cache=True,
            **options,
        )

    def run(self, *requests: Request) -> Answers:
        """Run to the end; `steps` are those of this run."""
        self.steps.clear()
        return run(self.engine, *requests)

    def submit(self, *requests: Request) -> Answers:
        answers = Answers()
        for request in requests:
            self.engine.submit(request, answers)
        return answers

    def step(self) -> None:
        self.engine.step()
        self.engine.check_integrity()


def tokens(num: int, *, begin: int = 1) -> tuple[int, ...]:
    """Return a prompt without a period within 40 tokens."""
    return tuple((begin + i * i) % 47 for i in range(num))


def cached_tokens(answers: Answers, request_id: str = "a", index: int = 0) -> int:
    usage = answers[request_id, index].end.usage
    assert usage is not None
    return usage.cached_tokens


# ---- hits ----


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 80])
def test_full_prefix_hit_still_computes_last_token(length):
    cached = Cached(max_batched_tokens=128)
    prompt = tokens(length)
    cold = cached.run(make_request("a", prompt, GREEDY))
    assert cached.steps == [length, 1, 1, 1]
    assert cached_tokens(cold) == 0
    hot = cached.run(make_request("a", prompt, GREEDY))
    assert cached.steps == [1, 1, 1, 1]
    assert cached_tokens(hot) == length - 1
    assert hot["a", 0].outcome() == cold["a", 0].outcome()


@pytest.mark.parametrize("cut", [1, 7, 15, 16, 17, 31, 40, 49])
def test_a_prompt_begins_where_it_leaves_the_known_one(cut):
    cached = Cached()
    cached.run(make_request("a", tokens(50), ONE))
    prompt = (*tokens(cut), 47, 47)  # 47 is in no other prompt
    answers = cached.run(make_request("b", prompt, GREEDY))
    assert cached_tokens(answers, "b") == cut
    assert cached.steps[0] == 2
    alone = run(make_engine(), make_request("b", prompt, GREEDY))
    assert answers["b", 0].outcome() == alone["b", 0].outcome()


def test_equal_tokens_after_another_beginning_are_no_hit():
    cached = Cached()
    cached.run(make_request("a", (47, *tokens(31)), ONE))
    answers = cached.run(make_request("b", (46, *tokens(31)), ONE))
    assert cached_tokens(answers, "b") == 0


def test_the_next_turn_hits_on_the_generated_tokens():
    cached = Cached()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = cached.run(make_request("a", tokens(10), params))["a", 0]
    turn = (*tokens(10), *first.token_ids, 3, 4)
    answers = cached.run(make_request("a", turn, ONE))
    assert cached_tokens(answers) == 10 + 40 - 1  # the last token of an answer is not computed


def test_a_choice_that_found_no_seat_finds_the_prompt():
    cached = Cached(max_num_seqs=1)
    params = SamplingParams(seed=1, max_tokens=2, n=3, ignore_eos=True)
    answers = cached.run(make_request("a", tokens(40), params))
    assert cached.steps == [40, 1, 1, 1]
    assert [cached_tokens(answers, "a", i) for i in range(3)] == [0, 0, 0]


def test_a_preempted_sequence_goes_on_from_what_is_still_cached():
    cached = Cached(num_blocks=6, max_model_len=96)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [make_request(i, tokens(34, begin=n), params) for n, i in enumerate("ab")]
    answers = cached.run(*requests)
    assert cached.engine.stats().num_preemptions > 0
    num_needed = 2 * (34 + 29)
    assert num_needed < sum(cached.steps) < num_needed + 34
    for request in requests:
        alone = run(make_engine(), request)
        assert answers[request.id, 0].outcome() == alone[request.id, 0].outcome()
        assert cached_tokens(answers, request.id) == 0  # what it computed itself does not count


def test_of_two_that_compute_the_same_block_one_copy_stays():
    cached = Cached()
    prompt = tokens(17)  # too little to be waited for
    cached.submit(make_request("a", (*prompt, 1), GREEDY), make_request("b", (*prompt, 2), GREEDY))
    cached.step()
    assert (cached.steps, cached.engine.stats().num_live_blocks) == ([36], 4)
    cached.step()
    assert cached.engine.stats().num_live_blocks == 3
    finish(cached.engine)
    assert cached.engine.stats().num_cached_blocks == 3


def test_a_last_block_that_is_known_is_not_kept_twice():
    cached = Cached()
    for _ in range(3):
        cached.run(make_request("a", tokens(20), ONE))
    assert cached.engine.stats().num_cached_blocks == 2


def test_of_many_blocks_that_begin_alike_one_that_was_found_is_looked_at_again():
    cached = Cached()
    prompts = [(*tokens(16), 5, n, n, n) for n in range(10, 36)]
    for prompt in prompts[:16]:
        cached.run(make_request("a", prompt, ONE))
    assert cached_tokens(cached.run(make_request("a", prompts[0], ONE))) == 19
    for prompt in prompts[16:]:
        cached.run(make_request("a", prompt, ONE))
    assert cached_tokens(cached.run(make_request("a", prompts[0], ONE))) == 19


def test_without_the_cache_nothing_is_found_or_kept():
    engine = make_engine(prefix_cache=False)
    for _ in range(2):
        answers = run(engine, make_request("a", tokens(40), ONE))
        assert cached_tokens(answers) == 0
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_prefix_queried, stats.num_prefix_hit) == (0, 0)


def test_queries_and_hits_count_prompt_tokens():
    cached = Cached()
    cached.run(make_request("a", tokens(40), GREEDY))
    cached.run(make_request("a", tokens(50), GREEDY))
    stats = cached.engine.stats()
    assert (stats.num_prefix_queried, stats.num_prefix_hit) == (90, 40)


# ---- who may share ----


def test_tenants_find_nothing_of_each_other():
    cached = Cached()
    prompt = tokens(40)
    for salt in ("", "a", "b"):
        for expected in (0, 39):
            request = make_request("a", prompt, ONE, cache_salt=salt)
            assert cached_tokens(cached.run(request)) == expected


def test_tenants_do_not_wait_for_each_other():
    cached = Cached(max_batched_tokens=128)
    prompt = tokens(50)
    cached.run(make_request("a", prompt, ONE), make_request("b", prompt, ONE, cache_salt="b"))
    assert cached.steps == [100]


def test_a_model_finds_nothing_of_another():
    pools = [BlockPool(8) for _ in range(2)]
    one, other = (
        PrefixCache(pool, block_size=16, identity=name)
        for pool, name in zip(pools, ("one f16", "one f32"), strict=True)
    )
    [seq] = make_engine()._maker.choices(
        make_request("a", tokens(20)), request_number=0, first_number=0, arrival_ns=0
    )
    hashes = set()
    for cache in (one, other):
        seq.chain = None
        hashes.add(cache._hash(seq, 0))
    assert len(hashes) == 2


# ---- a prefix that is being computed ----


def test_others_wait_for_the_first_of_a_new_prefix():
    cached = Cached(max_batched_tokens=64, max_model_len=512)
    requests = [make_request(i, (*tokens(200), n), GREEDY) for n, i in enumerate("abcd", 40)]
    answers = cached.run(*requests)
    assert sum(cached.steps) == 201 + 3 * 1 + 4 * 3 + 3 * (200 - 192)
    assert [cached_tokens(answers, i) for i in "abcd"] == [0, 192, 192, 192]


def test_one_that_waits_for_a_prefix_holds_nobody_up():
    cached = Cached(max_batched_tokens=256, max_model_len=512)
    answers = cached.submit(
        make_request("a", tokens(200), ONE),
        make_request("b", tokens(200), ONE),
        make_request("c", (9, 8, 7), ONE),
    )
    cached.step()
    assert {request_id for request_id, _ in answers} == {"a", "c"}
    cached.step()
    assert answers["b", 0].is_finished
    assert cached.steps == [203, 1]


def test_the_next_in_line_takes_over_when_the_first_is_aborted():
    cached = Cached(max_batched_tokens=64, max_model_len=512)
    requests = [make_request(i, tokens(200), ONE) for i in "abc"]
    answers = cached.submit(*requests)
    cached.step()
    assert cached.steps == [64]
    cached.engine.abort("a")
    finish(cached.engine)
    assert cached.steps == [64, 64, 64, 8 + 8]  # what is less than a wait is computed twice
    assert [cached_tokens(answers, i) for i in "bc"] == [64, 192]


def test_the_next_in_line_takes_over_when_the_first_is_preempted():
    cached = Cached(num_blocks=14, max_batched_tokens=64, max_model_len=224, policy="priority")
    cached.submit(
        make_request("a", tokens(160), ONE, priority=1),
        make_request("b", tokens(160), ONE, priority=1),
    )
    cached.step()
    answers = cached.submit(make_request("urgent", tokens(90, begin=5), GREEDY, priority=0))
    cached.step()
    assert cached.engine.stats().num_preemptions == 1
    finish(cached.engine)
    assert answers["urgent", 0].is_finished
    assert sum(cached.steps) <= 160 + 93 + 160  # "a" once more at most


def test_the_first_is_not_waited_for_while_it_stands_still():
    class Unfair(FCFS):
        def quota(self, seq, budget):
            return 0 if seq.request.id == "a" else budget.num_left

    cached = Cached(max_batched_tokens=256, max_model_len=512)
    cached.engine._scheduler.policy = Unfair()
    stream = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    cached.submit(make_request("stream", (9, 8, 7), stream))
    cached.step()
    cached.submit(*(make_request(i, tokens(200), ONE) for i in "ab"))
    cached.step()
    assert cached.steps == [3, 1]
    cached.step()
    assert cached.steps == [3, 1, 201]
    finish(cached.engine)


def test_a_more_urgent_sequence_does_not_wait_for_a_less_urgent_one():
    cached = Cached(max_batched_tokens=32, max_model_len=512, policy="priority")
    cached.submit(make_request("a", tokens(200), ONE, priority=1))
    cached.step()
    cached.submit(make_request("b", tokens(200), ONE, priority=0))
    cached.step()
    assert cached.engine.stats().num_running == 2
    finish(cached.engine)


# ---- memory ----


def test_cached_blocks_are_given_up_for_a_prompt_that_needs_them():
    cached = Cached(num_blocks=8, max_model_len=128)
    for begin in range(5):
        prompt = tokens(100, begin=begin)
        answers = cached.run(make_request("a", prompt, GREEDY))
        assert cached_tokens(answers) < 16
        alone = run(make_engine(), make_request("a", prompt, GREEDY))
        assert answers["a", 0].outcome() == alone["a", 0].outcome()
        stats = cached.engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_a_prompt_that_fills_the_pool_may_copy_from_a_block_that_it_overwrites():
    cached = Cached(num_blocks=4, max_model_len=64, max_batched_tokens=64)
    cached.run(make_request("a", tokens(63), ONE))
    prompt = (*tokens(60), 47, 47, 47)
    answers = cached.run(make_request("a", prompt, ONE))
    assert cached_tokens(answers) == 60
    alone = run(make_engine(), make_request("a", prompt, ONE))
    assert answers["a", 0].outcome() == alone["a", 0].outcome()


def test_the_least_recently_used_prefix_is_given_up_first_and_its_tail_before_its_head():
    cached = Cached(num_blocks=12, max_model_len=192)
    a, b, c = (make_request("abc"[n], tokens(65, begin=n), ONE) for n in range(3))
    for request in (a, b, a):  # five blocks each
        cached.run(request)
    cached.run(c)  # two blocks are free: the tail of b is given up for the rest
    assert cached.engine.stats().num_free_blocks == 0
    assert cached_tokens(cached.run(a)) == 64
    assert cached_tokens(cached.run(b), "b") == 32


def test_only_the_uncached_part_counts_for_admission():
    cached = Cached(num_blocks=10, max_model_len=160)
    prompt = tokens(96)  # six blocks
    cached.run(make_request("first", prompt, ONE))
    long = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    cached.submit(*(make_request(i, (*prompt, n), long) for n, i in enumerate("abcd")))
    cached.step()
    assert cached.engine.stats().num_running == 4  # six shared blocks and one each
    finish(cached.engine)
    assert cached.engine.stats().num_preemptions == 0


def test_a_failed_step_leaves_nothing_in_the_cache():
    def fail(step):
        raise RuntimeError("no luck")

    engine = make_engine(on_forward=fail, prefix_cache=True)
    answers = run(engine, make_request("a", tokens(40), ONE))
    assert answers["a", 0].end.finish_reason == "error"
    assert engine.stats().num_cached_blocks == 0


def test_a_copy_that_failed_is_not_taken_for_the_rows_it_should_have():
    cached = Cached(num_blocks=4, max_model_len=64, max_batched_tokens=64)
    cached.run(make_request("a", tokens(63), ONE))
    backend = cached.engine._backend
    copy_blocks = backend.copy_blocks

    def fail(src, dst):
        raise RuntimeError("no luck")

    backend.copy_blocks = fail
    request = make_request("b", (*tokens(60), 47, 47, 47), ONE)  # the source is given up for it
    assert cached.run(request)["b", 0].end.finish_reason == "error"
    backend.copy_blocks = copy_blocks
    assert cached_tokens(cached.run(request), "b") == 48


def test_the_last_block_of_choices_that_go_on_is_not_kept_for_the_one_that_ended():
    params = {"max_tokens": 9, "n": 2, "temperature": 1.5, "ignore_eos": True}
    for seed in range(9):
        free = run(
            make_engine(), make_request("a", tokens(20), SamplingParams(seed=seed, **params))
        )
        firsts = [free["a", i].token_ids[0] for i in range(2)]
        if firsts[0] in free["a", 1].token_ids:
            continue
        ends = SamplingParams(seed=seed, stop_token_ids=(firsts[0],), **params)
        answers = Cached().run(make_request("a", tokens(20), ends))
        assert [len(answers["a", i].token_ids) for i in range(2)] == [1, 9]
        return
    raise AssertionError("no seed makes the choices differ")


def test_an_aborted_prompt_leaves_what_it_has_computed():
    cached = Cached(max_batched_tokens=20)
    cached.submit(make_request("a", tokens(50), ONE))
    cached.step()
    cached.engine.abort("a")
    finish(cached.engine)
    answers = cached.run(make_request("b", tokens(50), ONE))
    assert cached_tokens(answers, "b") == 20


def test_a_wrong_entry_is_found_by_the_check():
    cached = Cached()
    cached.run(make_request("a", tokens(40), ONE))
    cache = cached.engine._cache
    assert cache is not None
    block = next(iter(cache._by_hash.values()))
    cache._forget(block)
    with pytest.raises(EngineIntegrityError):
        cached.engine.check_integrity()


# ---- the tier ----


def settle(cached: Cached) -> None:
    cached.engine._cache._tier._levels[-1].store.settle()


def test_what_memory_gave_up_comes_back_from_disk(tmp_path):
    cached = Cached(num_blocks=6, max_model_len=96, kv_tier=f"disk:path={tmp_path},size=1M")
    prompts = {i: tokens(80, begin=n) for n, i in enumerate("abc")}
    for i, prompt in prompts.items():
        cached.run(make_request(i, prompt, GREEDY))
        settle(cached)
    answers = cached.run(make_request("a", (*prompts["a"], 1), GREEDY))
    assert cached_tokens(answers) == 80
    assert cached.engine.stats().num_blocks_restored == 5
    alone = run(make_engine(), make_request("a", (*prompts["a"], 1), GREEDY))
    assert answers["a", 0].outcome() == alone["a", 0].outcome()
    cached.engine.stop()


def test_what_memory_gave_up_comes_back_from_host_and_then_lies_in_one_place():
    cached = Cached(num_blocks=6, max_model_len=96, kv_tier="host:size=1M")
    prompts = {i: tokens(80, begin=n) for n, i in enumerate("abc")}
    for i in "abcabc":
        answers = cached.run(make_request(i, (*prompts[i], 1), GREEDY))
    assert cached_tokens(answers, "c") == 80
    assert cached.engine.stats().num_blocks_restored == 15
    host = cached.engine._cache._tier._levels[0].store
    assert not any(key in host for key in cached.engine._cache._by_hash)
    alone = run(make_engine(), make_request("c", (*prompts["c"], 1), GREEDY))
    assert answers["c", 0].outcome() == alone["c", 0].outcome()
    cached.engine.stop()


def test_what_was_cached_at_the_end_is_there_after_a_restart(tmp_path):
    spec = f"disk:path={tmp_path},size=1M"
    first = Cached(kv_tier=spec)
    first.run(make_request("a", tokens(80), GREEDY))
    first.engine.stop()
    second = Cached(kv_tier=spec)
    settle(second)
    answers = second.run(make_request("a", tokens(80), GREEDY))
    assert cached_tokens(answers) == 64  # whole blocks before the last token
    alone = run(make_engine(), make_request("a", tokens(80), GREEDY))
    assert answers["a", 0].outcome() == alone["a", 0].outcome()
    second.engine.stop()


def test_what_was_pinned_at_the_end_is_there_after_a_restart(tmp_path):
    """Nothing evicts it, so the end is the only time at which the disk can get it."""
    spec = f"disk:path={tmp_path},size=1M"
    first = Cached(kv_tier=spec)
    first.run(make_request("a", tokens(80), GREEDY, pin="x"))
    first.engine.stop()
    second = Cached(kv_tier=spec)
    settle(second)
    assert cached_tokens(second.run(make_request("a", tokens(80), GREEDY))) == 64
    second.engine.stop()


def test_a_folder_that_becomes_read_only_keeps_nobody_from_an_answer(tmp_path, caplog):
    cached = Cached(num_blocks=6, max_model_len=96, kv_tier=f"disk:path={tmp_path},size=1M")
    prompts = [(*tokens(80, begin=n), 1) for n in range(4)]
    cached.run(make_request("a", prompts[0], GREEDY))
    cached.run(make_request("a", prompts[1], GREEDY))
    settle(cached)
    with read_only():
        for i in (2, 3, 0, 2, 3, 0):
            answers = cached.run(make_request("a", prompts[i], GREEDY))
            settle(cached)
            assert cached_tokens(answers) == (80 if i == 0 else 0)  # the first is on disk
            alone = run(make_engine(), make_request("a", prompts[i], GREEDY))
            assert answers["a", 0].outcome() == alone["a", 0].outcome()
        cached.engine.stop()
    [told] = [record.getMessage() for record in caplog.records]
    assert "Read-only file system" in told


def test_a_broken_file_is_computed_and_so_is_what_follows(tmp_path):
    spec = f"disk:path={tmp_path},size=1M"
    first = Cached(kv_tier=spec)
    first.run(make_request("a", tokens(80), GREEDY))
    hashes = first.engine._cache._by_hash
    third = sorted(hashes, key=hashes.get)[2]
    first.engine.stop()
    (tmp_path / third.hex()[:2] / third.hex()).write_bytes(b"")
    second = Cached(kv_tier=spec)
    settle(second)
    answers = second.run(make_request("a", tokens(80), GREEDY))
    assert cached_tokens(answers) == 32
    alone = run(make_engine(), make_request("a", tokens(80), GREEDY))
    assert answers["a", 0].outcome() == alone["a", 0].outcome()
    second.engine.stop()


def test_the_second_of_two_does_not_restore_what_the_first_is_restoring(tmp_path):
    spec = f"disk:path={tmp_path},size=1M"
    first = Cached(kv_tier=spec)
    first.run(make_request("a", tokens(80), GREEDY))
    first.engine.stop()
    second = Cached(kv_tier=spec)
    settle(second)
    answers = second.run(*(make_request(i, (*tokens(80), n), GREEDY) for n, i in enumerate("ab")))
    assert [cached_tokens(answers, i) for i in "ab"] == [80, 80]
    assert second.engine.stats().num_blocks_restored == 5
    second.engine.stop()


def test_a_block_may_be_copied_and_then_overwritten_by_a_restored_one(tmp_path):
    spec = f"disk:path={tmp_path},size=1M"
    before = Cached(kv_tier=spec)
    before.run(make_request("q", tokens(33, begin=9), ONE))
    before.engine.stop()
    cached = Cached(num_blocks=6, max_model_len=96, max_batched_tokens=128, kv_tier=spec)
    settle(cached)
    cached.run(make_request("p", tokens(20), ONE))  # its last block will be the oldest
    cached.run(make_request("g", tokens(40, begin=5), ONE))  # leaves one block free
    requests = (
        make_request("p", (*tokens(19), 47, 47), GREEDY),  # copies rows into the free block
        make_request("q", (*tokens(33, begin=9), 1), GREEDY),  # is restored into their source
    )
    answers = cached.run(*requests)
    assert (cached_tokens(answers, "p"), cached_tokens(answers, "q")) == (19, 32)
    for request in requests:
        alone = run(make_engine(), request)
        assert answers[request.id, 0].outcome() == alone[request.id, 0].outcome()
    cached.engine.stop()
