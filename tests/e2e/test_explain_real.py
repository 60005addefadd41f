"""`paceline explain` on SmolLM2, served slowly in one known way: it must find that one.

As in `test_explain`, but with the costs of a real model: a step reads 80 MB of weights, and a
token of a prompt costs a tenth of it.
"""

from __future__ import annotations

import pytest

from paceline.cpu import default_num_threads
from tests.e2e.planted import (
    PatientServer,
    ask,
    at_once,
    bound_of,
    expected_of,
    explained,
    huge_prompts_beside_streams,
    lowers,
    read_slowly,
    under_one_system_prompt,
)
from tests.e2e.test_ledger import SmallBuffers

pytestmark = pytest.mark.real
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, columns, f16


@pytest.fixture(scope="module")
def path(real_model):
    return real_model("smollm2-135m")


def test_a_tiny_budget_is_told_by_its_many_small_steps(path):
    with PatientServer(path, max_batched_tokens=2, kv_memory_bytes=64 * 2**20) as server:
        for i in range(4):
            ask(server, 100, 4, seed=i)
        found = explained(server)
    first = found.advice[0]
    assert first.change == {"--max-batched-tokens": "512"}
    assert "2 tokens a step" in first.why
    assert bound_of(found, "ttft", 50).cause == "prefill"
    assert bound_of(found, "ttft", 50).bound == "bandwidth"
    effect = expected_of(first, "ttft", 50)
    assert effect.after_ms < 0.7 * effect.before_ms


def test_a_tiny_kv_pool_is_told_by_the_waits_for_memory(path):
    with PatientServer(path, kv_memory_bytes=400 * TOKEN_BYTES) as server:
        at_once(server, 8, 100, 60)  # the pool holds two of them
        found = explained(server)
    assert bound_of(found, "ttft", 99).bound == "KV memory"
    assert found.advice[0].lever == "kv-memory"
    effect = expected_of(found.advice[0], "ttft", 99)
    assert effect.after_ms < 0.7 * effect.before_ms


def test_one_seat_is_told_by_the_queue_and_the_seats(path):
    with PatientServer(path, max_num_seqs=1, kv_memory_bytes=64 * 2**20) as server:
        at_once(server, 8, 20, 50)
        found = explained(server)
    assert bound_of(found, "ttft", 99).bound == "queue"
    assert found.advice[0].lever == "max-num-seqs"
    effect = expected_of(found.advice[0], "ttft", 99)
    assert effect.after_ms < 0.5 * effect.before_ms


@pytest.mark.skipif(default_num_threads()[0] < 2, reason="there is one core")
def test_one_thread_is_told_by_the_cores_that_are_idle(path):
    with PatientServer(path, num_threads=1, kv_memory_bytes=64 * 2**20) as server:
        for i in range(3):
            ask(server, 300, 30, seed=i)
        found = explained(server)
    assert (bound_of(found, "ttft", 50).cause, bound_of(found, "ttft", 50).bound) == (
        "prefill", "compute",
    )  # fmt: skip
    assert bound_of(found, "tpot", 50).bound == "bandwidth"
    assert found.advice[0].lever == "threads"


def test_a_huge_prompt_beside_streams_is_told_by_what_it_cost_them(path):
    with PatientServer(path, kv_memory_bytes=128 * 2**20) as server:
        huge_prompts_beside_streams(server, 1200, 40)
        found = explained(server)
    bound = bound_of(found, "tpot", 50)
    assert (bound.bound, bound.cause) == ("interference", "others_prefill")
    first = next(advice for advice in found.advice if lowers(advice, "tpot"))
    assert first.change["--policy"].startswith("slo:step_ms=")


def test_a_slow_reader_is_told_by_the_sending_and_nothing_is_advised_for_it(path):
    with PatientServer(path, kv_memory_bytes=64 * 2**20, protocol=SmallBuffers) as server:
        read_slowly(server, 150)
        found = explained(server)
    assert bound_of(found, "tpot", 50).bound == "slow reader"
    assert any("read slowly" in note for note in found.notes)
    moved = [e for advice in found.advice for e in advice.expected if e.metric == "tpot"]
    assert all(e.after_ms > 0.5 * e.before_ms for e in moved)


def test_a_long_system_prompt_repeated_is_told_by_what_prompts_share(path):
    with PatientServer(path, kv_memory_bytes=64 * 2**20, prefix_cache=False) as server:
        under_one_system_prompt(server, 512)
        found = explained(server)
    assert bound_of(found, "ttft", 50).cause == "prefill"
    assert found.repeated_share == pytest.approx(4 * 512 / (5 * 552))
    assert found.advice[0].lever == "prefix-cache"
    effect = expected_of(found.advice[0], "ttft", 50)
    assert effect.after_ms < 0.5 * effect.before_ms


def test_a_server_that_lacks_nothing_is_advised_no_option(path):
    with PatientServer(path, kv_memory_bytes=64 * 2**20) as server:
        for i in range(3):
            ask(server, 100, 30, seed=i)
        found = explained(server)
    assert bound_of(found, "ttft", 50).bound == "compute"
    assert bound_of(found, "tpot", 50).bound == "bandwidth"
    assert found.advice == ()
