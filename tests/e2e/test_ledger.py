"""Law 2 over real HTTP: the parts of a call's time sum to it, whatever happens to the call."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from paceline.measure.ledger import Part
from paceline.server.timekeeping import TimedProtocol
from tests.e2e.live import ALPHABET, LiveServer, script_model, wait_until
from tests.e2e.test_disconnect import reset, send

LABELS = {part.label for part in Part} | {"residual"}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return script_model(tmp_path_factory.mktemp("ledger"), max_context=16_384)


@pytest.fixture(scope="module")
def server(script):
    with LiveServer(script, num_threads=1, max_num_seqs=4, kv_memory_bytes=256 * 2**20) as live:
        yield live


def timeline(server, key):
    """The timeline of a call, as soon as the call is over: that is after its last byte."""
    path = f"/v1/requests/{key}/timeline"

    def is_over():
        reply = server.client.get(path)
        return reply.status_code == 200 and reply.json()["outcome"] != "running"

    wait_until(is_over, timeout_s=20)
    return server.client.get(path).json()


def assert_closes(call, *, slack_ms=0.0):
    parts = call["parts_ms"]
    assert parts.keys() <= LABELS
    assert sum(parts.values()) == pytest.approx(call["wall_ms"], abs=1e-6)
    assert all(value >= 0 for value in parts.values()), parts
    assert parts["residual"] <= 0.02 * call["wall_ms"] + slack_ms, parts
    if call["ttft_parts_ms"] is not None:
        assert sum(call["ttft_parts_ms"].values()) == pytest.approx(call["ttft_ms"], abs=1e-6)
        assert all(value >= 0 for value in call["ttft_parts_ms"].values())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_parts_of_an_answer_sum_to_its_wall_time(server, path, n, stream):
    key = f"sum-{'chat' in path}-{n}-{stream}"
    body = {"model": server.name, "n": n, "stream": stream, "temperature": 0, "max_tokens": 30}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body["prompt"] = ["0" * 40, "a"]
    begin = time.monotonic()
    response = server.client.post(path, json=body, headers={"x-request-id": key})
    wall_ms = (time.monotonic() - begin) * 1e3
    assert response.status_code == 200
    call = timeline(server, key)
    assert_closes(call)
    assert 0 < call["wall_ms"] <= wall_ms
    assert (call["outcome"], call["stream"], len(call["choices"])) == ("ok", stream, n * (
        1 if "chat" in path else 2))  # fmt: skip
    assert call["parts_ms"]["prefill"] > 0
    assert ("template" in call["parts_ms"]) == ("chat" in path)


def test_the_front_ends_time_is_booked_where_it_was_spent(server):
    long_text = "0" * 12_000
    call = _completed(server, "long-text", prompt=long_text, max_tokens=1)
    assert call["parts_ms"]["tokenise"] > 0.2
    assert call["parts_ms"]["prefill"] > call["parts_ms"]["tokenise"]


def _completed(server, key, **body):
    body = {"model": server.name, "temperature": 0, **body}
    response = server.client.post("/v1/completions", json=body, headers={"x-request-id": key})
    assert response.status_code == 200, response.text
    return timeline(server, key)


def test_an_upload_that_dawdles_is_receiving_and_nothing_else(server):
    content = json.dumps({"model": server.name, "prompt": "a", "max_tokens": 2}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: slow-up\r\n"
        connection.sendall(head)
        time.sleep(0.4)
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content[:10])
        time.sleep(0.4)
        connection.sendall(content[10:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    call = timeline(server, "slow-up")
    # 800 from the head's first byte on, less what a loaded server reads it late.
    assert call["parts_ms"]["receive"] > 450
    assert_closes(call)


class SmallBuffers(TimedProtocol):
    """A server whose kernel takes little, so that a slow reader is felt at once."""

    def connection_made(self, transport):
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.mark.parametrize("stream", [True, False])
def test_a_slow_readers_time_is_sending(script, stream):
    with LiveServer(script, num_threads=1, kv_memory_bytes=2**24, protocol=SmallBuffers) as server:
        body = {"model": server.name, "prompt": "0", "temperature": 0, "stream": stream,
                "max_tokens": 300, "logprobs": 20}  # fmt: skip
        content = json.dumps(body).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: slow-down\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )
        wait_until(lambda: server.stats().num_generated_tokens == 300)
        time.sleep(0.5)  # the answer is made; the reader has not begun
        while connection.recv(1 << 20):
            pass
        connection.close()
        call = timeline(server, "slow-down")
        assert call["outcome"] == "ok"
        assert call["parts_ms"]["send"] > 450
        assert_closes(call)


# ---- ends that are no answers ----


@pytest.mark.parametrize("cut", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_call_that_is_given_up_closes_in_every_phase(server, phase, stream, cut):
    others = []
    if phase == "queue":
        others = [send(server, model=server.name, stream=True) for _ in range(4)]
        wait_until(lambda: server.stats().num_running == 4)
    before, num_calls = server.stats().num_generated_tokens, len(server.calls)
    prompt = "0" * 12_000 if phase == "prefill" else "0"
    connection = send(server, model=server.name, stream=stream, prompt=prompt, seed=77)
    if phase == "queue":
        wait_until(lambda: server.stats().num_waiting == 1)
        time.sleep(0.1)
    elif phase == "prefill":
        wait_until(lambda: server.stats().num_running == 1)
    else:
        wait_until(lambda: server.stats().num_generated_tokens > before + 5)
    cut(connection)
    call = next_call(server, num_calls)
    for other in others:
        other.close()
    server.drain()
    assert call.outcome == "aborted"
    figures = call.figures()
    assert_closes(figures)
    if phase == "queue":
        assert figures["parts_ms"]["queue_budget"] > 90


def next_call(server, num_before):
    """The call that ends next, after `num_before` others."""
    wait_until(lambda: len(server.calls) > num_before)
    return server.calls[num_before]


def test_a_client_that_leaves_in_its_body_is_an_aborted_call(server):
    num_calls = len(server.calls)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: body\r\n"
        b'Content-Length: 100\r\n\r\n{"model":'
    )
    time.sleep(0.05)
    connection.close()
    call = next_call(server, num_calls)
    assert call.outcome == "aborted"
    assert_closes(call.figures(), slack_ms=0.2)
    parts_ms = server.client.get("/v1/requests/body/timeline").json()["parts_ms"]
    assert max(parts_ms, key=parts_ms.get) == "receive"


def test_a_refused_call_closes_and_is_called_refused(server):
    for body in ({"prompt": "a", "bogus": 1}, {"prompt": "0" * 20_000}, {"prompt": ""}):
        num_calls = len(server.calls)
        response = server.post("/v1/completions", **body)
        assert response.status_code == 400
        call = next_call(server, num_calls)
        assert call.outcome == "refused"
        assert call.request_id == response.headers["x-request-id"]
        assert_closes(call.figures())
        assert {"receive;", "parse;", "total;"} <= {
            item.partition("dur=")[0] for item in response.headers["server-timing"].split(", ")
        }


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_call_closes_with_the_failed_steps_time_unexplained(server, monkeypatch, stream):
    def fail(step):
        time.sleep(0.02)
        raise RuntimeError("no luck")

    num_calls = len(server.calls)
    monkeypatch.setattr(server.engine._backend, "forward", fail)
    response = server.post("/v1/completions", prompt="a", stream=stream)
    assert response.status_code == (200 if stream else 500)
    call = next_call(server, num_calls)
    assert call.outcome == "failed"
    figures = call.figures()
    assert_closes(figures, slack_ms=1e9)
    assert figures["parts_ms"]["residual"] >= 20
    assert "no luck" in call.error


# ---- calls that still run ----


@pytest.fixture(scope="module")
def busy(script):
    """A server of their own: they are given up after more steps than a trace holds."""
    options = {"num_threads": 1, "max_num_seqs": 4, "kv_memory_bytes": 256 * 2**20}
    with LiveServer(script, **options) as live:
        yield live


def so_far(server, key, **query):
    reply = server.client.get(f"/v1/requests/{key}/timeline", params=query)
    assert reply.status_code == 200, reply.text
    call = reply.json()
    assert call["outcome"] == "running"
    assert "residual" not in call["parts_ms"]
    assert sum(call["parts_ms"].values()) == pytest.approx(call["wall_ms"], abs=1e-6)
    assert all(value >= 0 for value in call["parts_ms"].values()), call["parts_ms"]
    return call


def open_stream(server, key, **body):
    return send(server, headers=f"X-Request-Id: {key}\r\n", stream=True, **body)


def test_a_running_call_shows_what_is_booked_so_far_and_ends_as_itself(busy):
    before = busy.stats().num_generated_tokens
    connection = open_stream(busy, "running", max_tokens=3000)
    wait_until(lambda: busy.stats().num_generated_tokens > before + 60)
    first = so_far(busy, "running")
    [choice] = first["choices"]
    assert choice["finish_reason"] is None
    assert choice["completion_tokens"] >= 60
    assert first["ttft_ms"] < first["wall_ms"]
    assert first["parts_ms"]["decode"] > 0
    # All but the last steps, which are booked together, is booked, however long those take.
    assert first["parts_ms"]["unbooked"] < first["wall_ms"] - choice["steps"][10]["end_ms"]
    assert choice["num_steps"] == len(choice["steps"]) > 0
    seen = choice["steps"][-1]["step"]
    now = busy.stats().num_generated_tokens
    wait_until(lambda: busy.stats().num_generated_tokens > now + 60)
    later = so_far(busy, "running", after_step=seen)
    assert later["wall_ms"] > first["wall_ms"]
    assert later["choices"][0]["steps"][0]["step"] == seen + 1
    assert later["choices"][0]["num_steps_forgotten"] == 0
    connection.close()
    ended = timeline(busy, "running")
    assert ended["outcome"] == "aborted"
    assert "unbooked" not in ended["parts_ms"]
    assert ended["parts_ms"]["decode"] > later["parts_ms"]["decode"]


def test_a_running_call_of_several_choices_shows_them_once_they_have_their_prompt(busy):
    before = busy.stats().num_generated_tokens
    connection = open_stream(busy, "several", n=3, max_tokens=3000, prompt="0" * 50)
    wait_until(lambda: busy.stats().num_generated_tokens > before + 20)
    call = so_far(busy, "several")
    assert [choice["index"] for choice in call["choices"]] == [0, 1, 2]
    assert call["prompt_tokens"] == 50
    connection.close()
    busy.drain()


def test_a_call_in_the_queue_is_all_unbooked_and_has_no_step(busy):
    others = [open_stream(busy, f"seat-{number}") for number in range(4)]
    wait_until(lambda: busy.stats().num_running == 4)
    queued = open_stream(busy, "queued", n=2)
    wait_until(lambda: busy.stats().num_waiting == 1)
    time.sleep(0.05)
    call = so_far(busy, "queued")
    assert call["parts_ms"]["unbooked"] > 0.9 * 50
    assert call["ttft_ms"] is None
    assert [choice["steps"] for choice in call["choices"]] == [[]]
    for connection in (*others, queued):
        connection.close()
    busy.drain()
    assert timeline(busy, "queued")["outcome"] == "aborted"


def test_a_step_says_how_many_tokens_it_gave(server):
    call = _completed(server, "marked", prompt="k" * 1500, max_tokens=5)  # more than one budget
    assert [step["new_tokens"] for step in call["choices"][0]["steps"]] == [0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/requests/any/timeline", "after_step"),
        ("/v1/trace", "last_s, model"),
        ("/v1/paceline/live", "after_s, by, model"),
    ],
)
def test_a_parameter_that_a_report_does_not_know_is_refused_by_name(server, path, known):
    response = server.client.get(path, params={"last": "5"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (
        "last", f"{path} has no parameter 'last': it has {known}",
    )  # fmt: skip


@pytest.mark.parametrize("value", ["x", "", "1.0", "1_0", " 1", "٣", str(-(2**63) - 1), "9" * 5000])
def test_after_step_must_be_a_number_of_64_bits(server, value):
    response = server.client.get("/v1/requests/any/timeline", params={"after_step": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "after_step"


# ---- company ----


def test_64_at_once_close_and_know_what_others_cost(server):
    with ThreadPoolExecutor(64) as pool:
        calls = list(pool.map(  # prompts that have nothing in common
            lambda number: _completed(
                server, f"crowd-{number}", prompt=f"{number:02}" * 100, max_tokens=10
            ),
            range(64),
        ))  # fmt: skip
    for call in calls:
        assert_closes(call)
        own = call["blame"]["prefill_ms"] + call["blame"]["decode_ms"]
        parts = call["parts_ms"]
        shared = parts.get("prefill_others", 0) + parts.get("decode_others", 0)
        assert own == pytest.approx(shared)
    ids = {call["id"] for call in calls}
    blamed = {row["request"] for call in calls for row in call["blame"]["prefill_of"]}
    assert blamed - {None} <= ids
    assert len(blamed) > 8
    waiting = sorted(call["parts_ms"].get("queue_budget", 0) for call in calls)
    assert waiting[-1] > 5 * waiting[0]  # four seats for 64


def test_the_price_of_a_preemption_is_named(script):
    with LiveServer(script, num_threads=1, kv_memory_bytes=20 * 2**10, block_size=16,
                    max_model_len=300, prefix_cache=False) as small:  # fmt: skip
        assert small.stats().num_blocks == 20  # two prompts of 150 fit, their answers do not
        for attempt in range(20):  # on a busy machine the first may end before the second comes
            keys = f"a{attempt}", f"b{attempt}"
            with ThreadPoolExecutor(2) as pool:
                calls = list(pool.map(
                    lambda key: _completed(small, key, prompt="0" * 150, max_tokens=60), keys
                ))  # fmt: skip
            for call in calls:
                assert_closes(call)
            preempted = max(calls, key=lambda call: call["blame"]["num_preemptions"])
            if preempted["blame"]["num_preemptions"]:
                break
        assert preempted["blame"]["num_preemptions"] >= 1
        assert preempted["blame"]["preemption_ms"] == pytest.approx(
            preempted["parts_ms"]["recompute"] + preempted["parts_ms"]["queue_kv"], rel=0.5
        )
        steps = [step for choice in preempted["choices"] for step in choice["steps"]]
        assert any(step["kind"] == "recompute" for step in steps)


# ---- how it is told ----


def test_usage_has_the_ledger_only_when_asked(server):
    plain = server.complete("a", temperature=0)
    assert "paceline" not in plain["usage"]
    asked = server.complete("a", temperature=0, timings=True)
    assert asked["choices"][0]["text"] == plain["choices"][0]["text"] == ALPHABET[1:]
    assert_closes(asked["usage"]["paceline"])
    assert "paceline" not in server.complete("a", timings=False)["usage"]


def test_a_stream_that_asks_for_timings_gets_a_usage_chunk(server):
    events = server.stream("/v1/completions", prompt="a", temperature=0, timings=True)
    *_, usage = [event for event in events if event != "[DONE]"]
    assert usage["choices"] == []
    assert_closes(usage["usage"]["paceline"])


def test_the_header_asks_as_the_field_does(server):
    def ask(value):
        return server.client.post(
            "/v1/completions",
            json={"model": server.name, "prompt": "a"},
            headers={"x-paceline-timings": value},
        )

    assert "paceline" in ask("true").json()["usage"]
    assert "paceline" not in ask("false").json()["usage"]
    assert ask("maybe").status_code == 400


def test_server_timing_has_all_parts_of_a_whole_answer_and_the_known_ones_of_a_stream(server):
    def durations(response):
        items = [item.split(";dur=") for item in response.headers["server-timing"].split(", ")]
        return {name: float(ms) for name, ms in items}

    whole = durations(server.post("/v1/completions", prompt="a", temperature=0))
    total = whole.pop("total")
    assert {"parse", "tokenise", "prefill", "decode", "send"} <= whole.keys()
    assert sum(whole.values()) == pytest.approx(total, abs=0.02)
    streamed = durations(server.post("/v1/completions", prompt="a", stream=True))
    assert {"parse", "tokenise"} <= streamed.keys()
    assert "decode" not in streamed


def test_the_steps_of_a_prompt_stand_with_its_first_choice_and_are_not_forgotten(server):
    call = _completed(server, "apart", prompt=["0" * 40, "a"], n=3, max_tokens=5, ignore_eos=True)
    choices = call["choices"]
    assert call["num_choices"] == len(choices) == 6  # of which four have a seat at first
    assert [choice["num_steps"] for choice in choices] == [len(c["steps"]) for c in choices]
    assert [choice["num_steps_forgotten"] for choice in choices] == [0] * 6
    assert choices[0]["num_steps"] == 5
    assert choices[1]["num_steps"] == 4


def test_a_timeline_is_found_by_both_ids_and_shows_each_step(server):
    server.client.headers["x-request-id"] = "both"
    try:
        answer = server.complete("a", temperature=0)
    finally:
        del server.client.headers["x-request-id"]
    call = timeline(server, "both")
    assert call == timeline(server, answer["id"])
    [choice] = call["choices"]
    assert choice["num_steps"] == len(choice["steps"]) == 26
    assert choice["num_steps_forgotten"] == 0
    assert [step["kind"] for step in choice["steps"]] == ["prefill"] + ["decode"] * 25
    ends = [step["end_ms"] for step in choice["steps"]]
    assert ends == sorted(ends)
    assert ends[-1] <= call["wall_ms"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "Hi", "store": False}),
        ("/v1/cache/prefixes", {"prompt": "0" * 40}),
    ],
)
def test_a_timeline_has_the_model_that_was_asked_for_beside_the_one_that_it_went_to(
    server, path, body
):
    for model, status in ((server.name, 200), ("gpt-4", 404)):
        key = f"asked {path} {model}"
        headers = {"x-request-id": key}
        reply = server.client.post(path, json={"model": model, **body}, headers=headers)
        assert reply.status_code == status, reply.text
        call = timeline(server, quote(key, safe=""))
        assert (call["asked_model"], call["model"]) == (model, server.name)


PLAIN_IDS = [
    "a/b", "/", "a//b/", "trace/7/timeline", "two words", "100% of #1?", "%2F", "a\\b", "a+b&c=d",
    "<i>\"'`;", "..a", "{key}", "x" * 128,
]  # fmt: skip


@pytest.mark.parametrize("given", PLAIN_IDS)
def test_a_printable_id_of_a_caller_leads_to_its_timeline(server, given):
    response = server.client.post(
        "/v1/completions",
        json={"model": server.name, "prompt": "a", "max_tokens": 2},
        headers={"x-request-id": given},
    )
    assert response.headers["x-request-id"] == given
    call = timeline(server, quote(given, safe=""))
    assert (call["request_id"], call["id"]) == (given, response.json()["id"])


@pytest.mark.parametrize("given", [b"caf\xc3\xa9", b"\xff\xfe", b"tab\there", b"x" * 129, b""])
def test_an_id_that_is_not_plain_is_replaced_by_one_that_leads_to_the_timeline(server, given):
    response = server.client.post(
        "/v1/completions",
        json={"model": server.name, "prompt": "a", "max_tokens": 2},
        headers=[(b"x-request-id", given)],
    )
    chosen = response.headers["x-request-id"]
    assert chosen.encode() != given
    assert timeline(server, chosen)["id"] == response.json()["id"]


def test_a_slash_in_the_address_of_a_timeline_need_not_be_encoded(server):
    _completed(server, "team/7", prompt="a", max_tokens=1)
    assert timeline(server, "team/7")["request_id"] == "team/7"


def test_an_unknown_timeline_is_a_404_that_says_what_to_give(server):
    response = server.client.get("/v1/requests/nonsense/timeline")
    assert response.status_code == 404
    assert "x-request-id" in response.json()["error"]["message"]


def test_without_a_ledger_answers_are_the_same_and_timings_are_refused(script):
    with LiveServer(script, num_threads=1, ledger=False, kv_memory_bytes=2**24) as bare:
        assert bare.complete("a", temperature=0)["choices"][0]["text"] == ALPHABET[1:]
        response = bare.post("/v1/completions", prompt="a", timings=True)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "timings"
        assert bare.client.get("/v1/trace").status_code == 404
        assert bare.client.get("/metrics").status_code == 200


@pytest.mark.parametrize("last_s", ["soon", "nan", "inf", "0", "-1"])
def test_a_trace_of_no_sensible_time_is_refused(server, last_s):
    response = server.client.get("/v1/trace", params={"last_s": last_s})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "last_s"


def test_a_trace_has_every_step_and_call_in_rows_that_do_not_overlap(server):
    threads = [
        threading.Thread(target=server.complete, args=("0" * 50,), kwargs={"max_tokens": 20})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: server.stats().num_running == 0)
    events = server.client.get("/v1/trace", params={"last_s": 600}).json()["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    for row in {(event["pid"], event["tid"]) for event in slices}:
        open_ends = []
        for event in sorted(
            (e for e in slices if (e["pid"], e["tid"]) == row), key=lambda e: (e["ts"], -e["dur"])
        ):
            while open_ends and open_ends[-1] <= event["ts"] + 0.01:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.01, (row, event)  # nested
            open_ends.append(end)
    steps = [event for event in slices if event["name"].startswith("step ")]
    assert len(steps) == server.stats().num_steps
