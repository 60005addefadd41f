"""Queues that are full, deadlines, and time-outs, over real HTTP."""

import concurrent.futures
import time

import httpx
import pytest

from paceline.server.admission import Limits
from paceline.server.door import read_keys
from tests.e2e.live import LiveServer, parse_events, wait_until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "0", "temperature": 0, "max_tokens": 6000}


@pytest.fixture(scope="module")
def busy(long_script_path):
    """A server with one seat, and a queue of two prompts."""
    live = LiveServer(
        long_script_path, kv_memory_bytes=128 * 2**20, num_threads=1, max_num_seqs=1,
        limits=Limits(max_requests=2, timeout_s=1.5),
    )  # fmt: skip
    yield live
    live.drain()
    live.close()


def ask(server, **body):
    """Send a call on a connection of its own."""
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
    headers = body.pop("headers", {})
    return httpx.post(url, json={"model": server.name, **body}, timeout=60, headers=headers)


def hold_the_seat(server, pool):
    holder = pool.submit(ask, server, **LONG)
    wait_until(lambda: server.stats().num_running)
    wait_until(lambda: server.stats().num_generated_tokens)
    return holder


def forget_the_slow(server):
    """Let the queue learn a fast rate again, or it refuses deadlines that it could meet."""
    for _ in range(20):
        assert ask(server, prompt="a", max_tokens=1).status_code == 200


def test_a_key_that_floods_the_server_holds_no_other_up(long_script_path, tmp_path):
    path = tmp_path / "keys"
    path.write_text("a-key-that-floods\na-key-that-asks-once\n")
    with LiveServer(
        long_script_path, kv_memory_bytes=64 * 2**20, num_threads=1, max_num_seqs=1,
        keys=read_keys(str(path)),
    ) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:  # fmt: skip

        def ask_as(key):
            body = {"prompt": "0", "max_tokens": 300, "ignore_eos": True}
            reply = ask(server, headers={"authorization": f"Bearer {key}"}, **body)
            assert reply.status_code == 200
            return time.monotonic()

        flood = [pool.submit(ask_as, "a-key-that-floods") for _ in range(12)]
        wait_until(lambda: server.stats().num_waiting >= 10)
        once = pool.submit(ask_as, "a-key-that-asks-once").result()
        # The one that ran, perhaps one more, and one that ended while the reply was on its way.
        assert sum(call.result() < once for call in flood) <= 3


def test_what_is_beyond_the_queue_is_told_when_to_come_back(busy):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        holder = hold_the_seat(busy, pool)
        waiting = [pool.submit(ask, busy, prompt="a", max_tokens=1) for _ in range(2)]
        wait_until(lambda: busy.stats().num_waiting == 2)
        refused = ask(busy, prompt="a", max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert {call.result().status_code for call in waiting} <= {200, 503}
        assert holder.result().status_code == 200
    assert ask(busy, prompt="a", max_tokens=1).status_code == 200


def test_a_call_that_waits_too_long_ends_with_a_503(busy):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        holder = pool.submit(ask, busy, **{**LONG, "max_tokens": 12_000})
        wait_until(lambda: busy.stats().num_running)
        start = time.monotonic()
        late = ask(busy, prompt="a", max_tokens=1)
        if late.status_code == 503:  # else the machine was done with 12,000 tokens before
            assert 1.4 < time.monotonic() - start < 10
            assert late.json()["error"]["code"] == "queue_timeout"
            assert int(late.headers["retry-after"]) >= 1
        assert holder.result().status_code == 200


@pytest.mark.parametrize("by", ["field", "header"])
def test_a_deadline_ends_a_call_and_frees_what_it_holds(busy, by):
    limit = {"deadline_ms": 120} if by == "field" else {
        "headers": {"x-request-deadline-ms": "120"}
    }  # fmt: skip
    forget_the_slow(busy)
    start = time.monotonic()
    late = ask(busy, prompt="0", temperature=0, max_tokens=16_000, **limit)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - start < 5
    busy.drain()
    events = parse_events(
        ask(busy, prompt="0", temperature=0, max_tokens=16_000, stream=True, **limit).content
    )
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert len(events) > 1
    busy.drain()


def test_a_deadline_is_named_as_it_was_sent(busy):
    late = ask(busy, prompt="0", temperature=0, max_tokens=16_000, deadline_ms=1)
    assert "the deadline of 1 ms" in late.json()["error"]["message"]
    busy.drain()


@pytest.mark.parametrize(("field_ms", "header_ms"), [(1, "60000"), (60_000, "1")])
def test_of_two_deadlines_the_earlier_holds(busy, field_ms, header_ms):
    forget_the_slow(busy)
    late = ask(busy, prompt="0", temperature=0, max_tokens=16_000, deadline_ms=field_ms,
               headers={"x-request-deadline-ms": header_ms})  # fmt: skip
    assert "the deadline of 1 ms" in late.json()["error"]["message"]
    busy.drain()


def test_a_deadline_that_is_met_changes_nothing(busy):
    plain = ask(busy, prompt="a", temperature=0).json()
    timed = ask(busy, prompt="a", temperature=0, deadline_ms=60_000).json()
    assert timed["choices"] == plain["choices"]


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "1e99"])
def test_a_header_that_is_no_deadline_is_refused(busy, value):
    for field in ({}, {"deadline_ms": 60_000}):
        response = ask(busy, prompt="a", headers={"x-request-deadline-ms": value}, **field)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-deadline-ms"
    assert ask(busy, prompt="a", deadline_ms=0).json()["error"]["param"] == "deadline_ms"


def test_a_call_longer_than_the_queue_is_let_in_whole_where_nothing_waits(busy):
    ten = {"prompt": ["a"] * 10, "max_tokens": 1, "n": 2}
    answer = ask(busy, **ten)
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 20)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        holder = hold_the_seat(busy, pool)
        waiting = pool.submit(ask, busy, prompt="a", max_tokens=1, n=2)  # one prompt: one place
        wait_until(lambda: busy.stats().num_waiting == 1)
        refused = ask(busy, **ten)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "1 prompts wait, 10 more" in refused.json()["error"]["message"]
        assert waiting.result().status_code in (200, 503)
        assert holder.result().status_code == 200
