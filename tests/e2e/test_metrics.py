"""What the server says of itself agrees with what its clients saw."""

import json
import random
import socket
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import fmean
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.live import LiveServer, ServeProcess, script_model, wait_until
from tests.e2e.test_ledger import timeline


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return script_model(tmp_path_factory.mktemp("metrics"), max_context=4096)


def scrape(server):
    """{(name, values of the labels beyond model and engine, by name): value}, buckets left out."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            if not sample.name.endswith("_bucket"):
                values[sample.name, tuple(labels[k] for k in sorted(labels))] = sample.value
    return values


# ---- the books balance ----


class Books:
    """What the clients of a chaotic load counted."""

    def __init__(self) -> None:
        self.calls = Counter()  # by outcome
        self.tokens = Counter()  # of answered calls
        self.reasons = Counter()  # of answered calls' choices
        self.num_gaps = 0  # choices of more than one token

    def answered(self, choices, usage):
        self.calls["ok"] += 1
        self.tokens["prompt"] += usage["prompt_tokens"]
        self.tokens["completion"] += usage["completion_tokens"]
        self.reasons.update(choice["finish_reason"] for choice in choices)


def post_and_leave(server, body, wait_s):
    content = json.dumps({"model": server.name, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
        + content
    )
    time.sleep(wait_s)
    connection.close()


def one_call(server, books, seed):
    rng = random.Random(seed)
    kind = rng.choice(("whole", "whole", "stream", "stream", "refused", "left"))
    n = rng.choice((1, 1, 2))
    body = {"prompt": "0" * rng.randrange(1, 120), "max_tokens": rng.randrange(1, 30),
            "temperature": 0, "n": n}  # fmt: skip
    if kind == "whole":
        answer = server.complete(**body)
        books.answered(answer["choices"], answer["usage"])
    elif kind == "stream":
        events = server.stream("/v1/completions", stream_options={"include_usage": True}, **body)
        *chunks, usage, done = events
        assert done == "[DONE]"
        ended = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert len(ended) == n
        books.answered(ended, usage["usage"])
    elif kind == "refused":
        bad = rng.choice(({"bogus": 1}, {"temperature": -1}, {"model": "other"}, {"prompt": ""}))
        status = server.client.post(
            "/v1/completions", json={"model": server.name, **body, **bad}
        ).status_code
        assert status in (400, 404)
        books.calls["refused"] += 1
    else:
        post_and_leave(server, {**body, "max_tokens": 350}, rng.random() * 0.05)
        books.calls["aborted"] += 1


def test_the_books_balance_after_a_chaotic_load(script):
    books = Books()
    with LiveServer(script, num_threads=1, max_num_seqs=8, kv_memory_bytes=2**15,
                    prefix_cache=False) as server:  # fmt: skip
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda seed: one_call(server, books, seed), range(160)))
        server.drain()
        num_calls = sum(books.calls.values())
        wait_until(lambda: len(server.calls) == num_calls)
        values, stats = scrape(server), server.stats()
        calls = list(server.calls)

    for outcome in ("ok", "refused", "aborted", "failed"):
        assert values["paceline:request_seconds_count", (outcome,)] == books.calls[outcome]
        parts = sum(
            value for (name, labels), value in values.items()
            if name == "paceline:part_seconds_total" and labels[0] == outcome
        )  # fmt: skip
        assert parts == pytest.approx(values["paceline:request_seconds_sum", (outcome,)])
    for kind in ("prompt", "completion"):
        assert values["paceline:tokens_total", (kind, "ok")] == books.tokens[kind]
    for reason in ("stop", "length"):
        assert values["vllm:request_success_total", (reason,)] == books.reasons[reason]
    assert values["vllm:e2e_request_latency_seconds_count", ()] == books.calls["ok"]
    assert values["vllm:time_to_first_token_seconds_count", ()] == books.calls["ok"]

    residuals = sorted(
        1 - sum(call.parts()) / call.wall_ns() for call in calls if call.outcome == "ok"
    )
    assert 0 <= residuals[len(residuals) * 99 // 100] < 0.02

    # Every token that the engine made belongs to a call; every token but a first has a gap.
    made = sum(values["paceline:tokens_total", ("completion", o)] for o in ("ok", "aborted"))
    assert values["vllm:generation_tokens_total", ()] == made == stats.num_generated_tokens
    begun = [e for call in calls for e in call.choices.values() if e.usage.completion_tokens]
    assert values["vllm:inter_token_latency_seconds_count", ()] == made - len(begun)
    assert values["vllm:num_preemptions_total", ()] == stats.num_preemptions > 0
    assert values["paceline:step_seconds_count", ()] == stats.num_steps
    tokens = [
        values["paceline:step_tokens_total", (k,)] for k in ("prefill", "recompute", "decode")
    ]
    assert sum(tokens) == values["vllm:iteration_tokens_total_sum", ()]
    assert tokens[0] >= books.tokens["prompt"]
    assert values["vllm:num_requests_running", ()] == values["vllm:num_requests_waiting", ()] == 0


def test_one_token_answers_have_a_ttft_and_no_tpot(script):
    with LiveServer(script, num_threads=1, kv_memory_bytes=2**24) as server:
        for stream in (True, False):
            server.post("/v1/completions", prompt="a", max_tokens=1, stream=stream)
        values = scrape(server)
        assert values["vllm:time_to_first_token_seconds_count", ()] == 2
        assert values["vllm:request_time_per_output_token_seconds_count", ()] == 0
        assert values["vllm:inter_token_latency_seconds_count", ()] == 0


def test_ttft_does_not_stop_at_the_role_chunk(script):
    """The first chunk of a chat says who speaks, at once; the first content needs a step."""
    with LiveServer(script, num_threads=1, kv_memory_bytes=2**24) as server:
        forward = server.engine._backend.forward

        def slow(step):
            time.sleep(0.05)
            return forward(step)

        server.engine._backend.forward = slow
        server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        assert scrape(server)["vllm:time_to_first_token_seconds_sum", ()] > 0.05


# ---- clients and server agree ----


APIS = {  # path -> the body, without its length
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "PROMPT"}]},
    "/v1/completions": {"prompt": "PROMPT"},
    "/v1/messages": {"messages": [{"role": "user", "content": "PROMPT"}]},
    "/v1/responses": {"input": "PROMPT", "store": False},
}
STORY = "Tell a very long story about a lighthouse keeper and all the ships that he has seen. " * 3
CONTENT = {"text_completion", "chat.completion.chunk", "content_block_delta",
           "response.output_text.delta"}  # fmt: skip


def content_of(event):
    """Return the text that an event of any of the APIs adds to the answer; "" for the others."""
    if event.get("object", event.get("type")) not in CONTENT:
        return ""
    for choice in event.get("choices", ()):
        return choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


def watch(server, path, key, prompt, max_tokens):
    """Stream one answer; return its TTFT and the gaps between its contents, in ms."""
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = json.dumps({"model": server.name, "temperature": 0, "stream": True, **APIS[path],
                        length: max_tokens}).replace("PROMPT", prompt).encode()  # fmt: skip
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n\r\n"
    )
    stamps, data = [], b""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        begin = time.monotonic()
        connection.sendall(head.encode() + asked)
        while received := connection.recv(1 << 16):
            now = time.monotonic()
            data += received
            *lines, data = data.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {") and content_of(json.loads(line[6:])):
                    stamps.append(now)
    return (stamps[0] - begin) * 1e3, [(b - a) * 1e3 for a, b in pairwise(stamps)]


def close_to(seen_ms, told_ms):
    """2 ms or 5 %, whichever is more."""
    return abs(seen_ms - told_ms) <= max(2.0, 0.05 * seen_ms)


def are_close(pairs):
    """The median of their differences is within the bound, and none is far beyond it."""
    off_ms = [abs(seen - told) for seen, told in pairs]
    seen_ms = statistics.median(seen for seen, _ in pairs)
    return close_to(seen_ms, seen_ms - statistics.median(off_ms)) and max(off_ms) < 50


def told_gaps(call):
    """Return the gaps between the ends of the steps that gave a call its text, in ms.

    A token that ends an answer has none.
    """
    [choice] = call["choices"]
    ends = [step["end_ms"] for step in choice["steps"] if step["new_tokens"]]
    return [b - a for a, b in pairwise(ends[: -1 if choice["finish_reason"] == "stop" else None])]


@pytest.fixture(scope="module")
def watched(real_model):
    """{path: [(what a client saw, what the server tells of the same call)]}, four at a time."""
    found = {path: [] for path in APIS}
    with ServeProcess(real_model("smollm2-135m"), "--kv-memory", "256M") as server:
        watch(server, "/v1/completions", "warm", "warm up", 4)
        for turn in range(4):
            with ThreadPoolExecutor(len(APIS)) as pool:
                keys = {path: f"{turn} {path}" for path in APIS}
                seen = {
                    path: pool.submit(watch, server, path, key, f"{key}: " + STORY, 24)
                    for path, key in keys.items()
                }
            for path, key in keys.items():
                told = timeline(server, quote(key, safe=""))
                found[path].append((seen[path].result(), told))
    return found


@pytest.mark.real
@pytest.mark.parametrize("path", APIS)
def test_clients_of_every_api_and_the_server_agree_on_ttft_and_itl(watched, path):
    """Of four streams at once, one an API: both sides read one clock, CLOCK_MONOTONIC.

    The client's stamps are later by the way from the kernel to a Python thread, and by the GIL that
    four of them share; where others use the machine, by their turns on the cores. So the bound is
    for the median of four calls, and of all gaps: a late stamp makes one gap longer and the next
    one shorter, which the tails of their distribution show, not its mean.
    """
    ttfts = [(seen[0], told["ttft_ms"]) for seen, told in watched[path]]
    assert are_close(ttfts), ttfts
    seen_gaps = [gap for seen, _ in watched[path] for gap in seen[1]]
    gaps = [gap for _, told in watched[path] for gap in told_gaps(told)]
    assert len(gaps) > 40
    assert close_to(statistics.median(seen_gaps), statistics.median(gaps))
    means = [(fmean(seen[1]), fmean(told_gaps(told))) for seen, told in watched[path]]
    assert are_close(means), means
