"""Cases SCH-01, SCH-03, SCH-04 and SCH-05 over HTTP."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.errors import PromptTooLongError
from tests.e2e.live import (
    ALPHABET,
    HttpServer,
    LiveServer,
    ServeProcess,
    script_model,
    texts,
    wait_until,
)
from tests.e2e.test_disconnect import reset, send
from tests.tiny import random_model, write_gguf

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


# ---- a small pool ----


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """`serve` of a model of context 1024 with a KV pool of 256 tokens."""
    path = script_model(tmp_path_factory.mktemp("small"), max_context=1024)
    server = ServeProcess(path, "--kv-memory", "16K", "--threads", "1")
    assert server.stats().num_blocks == 16
    yield server
    server.close()


class Watch:
    """Sees to it that there is never, for 2 s, something waiting and nothing running."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.longest_s = 0.0

    def _look(self) -> None:
        stuck_since = None
        while not self._is_over.wait(0.02):
            stats = self._server.stats()
            now = time.monotonic()
            if stats.num_running or not stats.num_waiting:
                stuck_since = None
                continue
            stuck_since = stuck_since or now
            self.longest_s = max(self.longest_s, now - stuck_since)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(5)
        assert self.longest_s < 2


def test_a_prompt_beyond_the_pool_is_refused_at_once_and_blocks_nobody(small):
    """SCH-01: the message names both sizes; ten short requests finish."""
    with Watch(small), ThreadPoolExecutor(10) as pool:
        start = time.monotonic()
        refused = small.post(COMPLETIONS, prompt="0" * 600, max_tokens=5)
        assert time.monotonic() - start < 1
        assert refused.status_code == 400
        for size in ("600", "256"):
            assert size in refused.json()["error"]["message"]
        answers = pool.map(lambda _: small.complete("a", temperature=0), range(10))
        assert [a["choices"][0]["text"] for a in answers] == [ALPHABET[1:]] * 10
    small.drain()
    small.survive()


def test_an_answer_that_outgrows_the_pool_ends_there_and_blocks_nobody(small):
    """SCH-01: 200 tokens and 500 more asked for; short requests run beside it."""
    with Watch(small), ThreadPoolExecutor(6) as pool:
        growing = [
            pool.submit(small.complete, "0" * 200, temperature=0, max_tokens=500) for _ in range(2)
        ]
        short = [pool.submit(small.complete, "a", temperature=0) for _ in range(10)]
        for future in growing:
            answer = future.result(20)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == 256
            assert answer["choices"][0]["text"] == ("1234567890" * 6)[:56]
        for future in short:
            assert future.result(20)["choices"][0]["text"] == ALPHABET[1:]
    small.drain()
    small.survive()


def test_choices_that_fit_only_one_at_a_time_all_finish(small):
    """SCH-01: n=4, each of 100 + 130 tokens in a pool of 256, beside a short request."""
    with Watch(small), ThreadPoolExecutor(2) as pool:
        body = {"prompt": "0" * 100, "temperature": 0, "max_tokens": 130, "n": 4}
        several = pool.submit(small.complete, **body)
        short = pool.submit(small.complete, "a", temperature=0)
        choices = several.result(20)["choices"]
        assert [choice["text"] for choice in choices] == ["1234567890" * 13] * 4
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        assert short.result(20)["choices"][0]["text"] == ALPHABET[1:]
        assert texts(small.stream(COMPLETIONS, **body)) == dict(enumerate(["1234567890" * 13] * 4))
    small.drain()
    small.survive()


# ---- long prompts beside streams ----

CHUNK = 32
LONG = 20 * CHUNK
SLACK_S = 0.3  # what a busy machine may add to any one step


@pytest.fixture(scope="module")
def heavy_path(tmp_path_factory):
    """A model whose steps take milliseconds, so that waiting can be told from noise."""
    model = random_model(
        "llama", seed=5, hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, inner=512,
        max_position_embeddings=1024,
    )  # fmt: skip
    return write_gguf(model, tmp_path_factory.mktemp("heavy") / "heavy.gguf", fmt="q8_0")


@pytest.fixture(params=["fcfs", "slo:step_ms=8"])
def heavy(request, heavy_path):
    server = LiveServer(
        heavy_path, kv_memory_bytes=32 * 2**20, num_threads=1, max_batched_tokens=CHUNK,
        policy=request.param,
    )  # fmt: skip
    yield server
    server.close()


def token_times(server: LiveServer, num_tokens: int, *, keep_on: Callable[[], bool]) -> list[float]:
    """Stream an answer; return when each event came. Ends early when `keep_on` says no."""
    body = {
        "model": server.name, "prompt": "the", "stream": True, "max_tokens": num_tokens,
        "temperature": 0, "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    times = []
    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", f"http://127.0.0.1:{server.port}{COMPLETIONS}", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
            if not keep_on():
                break
    return times


def long_ttft(server: LiveServer, seed: int) -> float:
    """Return the seconds to the one token of a long prompt of its own."""
    prompt = [97 + (seed * 7 + i) % 26 for i in range(LONG)]
    start = time.monotonic()
    response = httpx.post(
        f"http://127.0.0.1:{server.port}{COMPLETIONS}",
        json={"model": server.name, "prompt": prompt, "max_tokens": 1, "ignore_eos": True},
        timeout=60,
    )
    assert response.status_code == 200
    return time.monotonic() - start


def test_long_prompts_starve_neither_a_stream_nor_short_requests(heavy):
    """SCH-03 (a) and (c): four clients send long prompts back to back."""
    is_over = threading.Event()

    def feed(client: int) -> int:
        count = 0
        while not is_over.is_set():
            long_ttft(heavy, 100 * client + count)
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(feed, i) for i in range(4)]
        try:
            wait_until(lambda: heavy.stats().num_running + heavy.stats().num_waiting >= 4)
            stream = pool.submit(token_times, heavy, 300, keep_on=lambda: not is_over.is_set())
            waits = []
            until = time.monotonic() + 3
            while time.monotonic() < until:
                start = time.monotonic()
                heavy.complete("hi", max_tokens=1, ignore_eos=True)
                waits.append(time.monotonic() - start)
                time.sleep(0.1)
        finally:
            is_over.set()
        times = stream.result(30)
        assert sum(client.result(30) for client in clients) >= 4
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(gaps) > 50
    # One gap is granted to a stall of the machine: a starved stream has one at each long prompt.
    assert sorted(gaps)[-2] <= 5 * statistics.median(gaps) + SLACK_S
    half = len(waits) // 2
    assert half >= 2
    assert min(waits[half:]) <= 2 * max(waits[:half]) + SLACK_S
    heavy.drain()


def test_steady_streams_do_not_starve_a_long_prompt(heavy):
    """SCH-03 (b): seven decoders, then one long prompt."""
    solo_s = long_ttft(heavy, 1)
    is_over = threading.Event()
    with ThreadPoolExecutor(7) as pool:
        streams = [
            pool.submit(token_times, heavy, 900, keep_on=lambda: not is_over.is_set())
            for _ in range(7)
        ]
        try:
            wait_until(lambda: heavy.stats().num_running == 7)
            ttft_s = long_ttft(heavy, 2)
            assert heavy.stats().num_running == 7
        finally:
            is_over.set()
        for stream in streams:
            stream.result(30)
    assert ttft_s <= 4 * solo_s + SLACK_S
    heavy.drain()


# ---- clients that go ----


def test_three_hundred_cut_requests_leave_nothing_behind(long_script_path):
    """SCH-04: cut in the queue, in prefill, before the first token, in decode; by close, reset and
    timeout; DRAIN, open files and the canary's time as before."""
    server = ServeProcess(
        long_script_path, "--kv-memory", "64M", "--threads", "1", "--max-num-seqs", "4",
        "--max-batched-tokens", "32",
    )  # fmt: skip
    rng = random.Random(4)
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
    server.survive()
    num_files = server.num_open_files
    canary_s: list[float] = []

    def cut_one() -> None:
        stream, n = rng.random() < 0.5, rng.choice((1, 4))
        prompt = "0" * rng.choice((1, 40, 4000))
        how = rng.choice(("close", "reset", "timeout"))
        patience_s = rng.random() * 0.03
        if how == "timeout":
            body = {"model": server.name, "prompt": prompt, "max_tokens": 2000, "n": n}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(url, json=body, timeout=httpx.Timeout(10, read=patience_s + 0.001))
            return
        connection = send(server, prompt, max_tokens=2000, stream=stream, n=n)
        time.sleep(patience_s)
        connection.close() if how == "close" else reset(connection)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(50):
            cuts = [pool.submit(cut_one) for _ in range(6)]
            for cut in cuts:
                cut.result(20)
            for _ in range(2):
                start = time.monotonic()
                server.survive()
                canary_s.append(time.monotonic() - start)
    server.drain()
    stats = server.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    wait_until(lambda: server.num_open_files <= num_files, timeout_s=2)
    first, last = (sorted(part)[47] for part in (canary_s[:50], canary_s[-50:]))
    assert last <= 1.5 * first + 0.05
    server.survive()
    server.close()


# ---- the end of the context ----

CONTEXT = 512


@pytest.fixture(scope="module")
def server(script_path):
    live = ServeProcess(script_path, "--kv-memory", "1M", "--threads", "1")
    yield live
    live.close()


@pytest.mark.parametrize("max_tokens", [None, 1, CONTEXT, 10**9])
def test_a_prompt_one_short_of_the_context_gets_one_token(server, max_tokens):
    """SCH-05: text and ids; `prompt_tokens` is the true count."""
    for prompt in ("0" * (CONTEXT - 1), [48] * (CONTEXT - 1)):
        answer = server.complete(prompt, temperature=0, max_tokens=max_tokens)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["text"] == "1"
        assert answer["usage"]["prompt_tokens"] == CONTEXT - 1
        assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT + 1, 5 * CONTEXT])
@pytest.mark.parametrize("max_tokens", [None, 1, CONTEXT, 10**9])
def test_a_prompt_without_room_is_a_400_with_the_true_figures(server, size, max_tokens):
    """SCH-05."""
    for stream in (False, True):
        response = server.post(COMPLETIONS, prompt="0" * size, max_tokens=max_tokens, stream=stream)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        for figure in (CONTEXT, size, *([] if max_tokens is None else [max_tokens])):
            assert str(figure) in message
    server.survive()


def test_an_endless_answer_ends_at_the_contexts_end(server):
    """SCH-05: no max_tokens, and absurd ones, on a model that never ends by itself."""
    start = time.monotonic()
    for max_tokens in (None, CONTEXT, 10**9):
        answer = server.complete("0", temperature=0, max_tokens=max_tokens)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == CONTEXT
    assert time.monotonic() - start < 10


def test_a_long_chat_keeps_its_system_prompt_or_is_refused(server):
    """SCH-05: the code word at the start is counted, token for token, and never dropped."""

    def ask(filler: int) -> httpx.Response:
        messages = [
            {"role": "system", "content": "The code word is swordfish."},
            {"role": "user", "content": "x" * filler},
        ]
        return server.post(CHAT, messages=messages, max_tokens=1)

    empty = ask(1).json()["usage"]["prompt_tokens"] - 1
    room = CONTEXT - 1 - empty
    fitting = ask(room)
    assert fitting.json()["usage"]["prompt_tokens"] == CONTEXT - 1
    refused = ask(room + 1)
    assert refused.status_code == 400
    assert str(CONTEXT) in refused.json()["error"]["message"]


def test_a_text_beyond_any_context_is_refused_before_it_is_encoded(tmp_path, monkeypatch):
    """SCH-05, its kind: encoding megabytes only to refuse them would hold up every stream."""
    path = write_gguf(random_model(), tmp_path / "tiny.gguf")
    loaded = load_model(str(path), EngineConfig(max_model_len=64))
    longest = loaded.tokenizer.max_token_chars
    monkeypatch.setattr(loaded.tokenizer, "encode", lambda *a, **k: pytest.fail("was encoded"))
    text = "x" * (64 * longest + 1)
    with pytest.raises(PromptTooLongError, match=f"{len(text)} characters.*64 tokens"):
        loaded.encode_prompt(text)
    with pytest.raises(PromptTooLongError, match="characters"):
        loaded.encode_chat([{"role": "user", "content": [{"type": "text", "text": text}]}])
