"""The prefix cache over HTTP: PFX-01 and PFX-02, tenants, and the figures that tell of it."""

from __future__ import annotations

import hashlib
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.server.door import Keys
from tests.e2e.live import LiveServer, wait_until
from tests.tiny import random_model, write_gguf

B = 16  # tokens of a block
COMPLETIONS = "/v1/completions"
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * B  # K and V, layers, KV heads, head size, f32, tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = random_model("llama", seed=5, max_position_embeddings=512)
    return write_gguf(model, tmp_path_factory.mktemp("prefix") / "random.gguf", fmt="f32")


def serve(path, **options):
    return LiveServer(path, kv_dtype="f32", num_threads=1, **options)


@pytest.fixture(scope="module")
def uncached(path):
    live = serve(path, kv_memory_bytes=400 * BLOCK_BYTES, prefix_cache=False)
    yield live
    live.close()


@pytest.fixture
def server(path):
    live = serve(path, kv_memory_bytes=400 * BLOCK_BYTES)
    yield live
    live.close()


def ids(num: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num)]


def scored(server: LiveServer, prompt: list[int], **body) -> tuple[object, int]:
    """Return (text and log-probabilities, cached tokens) of a greedy answer."""
    answer = server.complete(
        prompt, **{"temperature": 0, "max_tokens": 8, "logprobs": 2, "ignore_eos": True, **body}
    )
    choice, usage = answer["choices"][0], answer["usage"]
    return (choice["text"], choice["logprobs"]), usage["prompt_tokens_details"]["cached_tokens"]


def metric(server: LiveServer, name: str) -> float:
    text = server.client.get("/metrics").text
    [value] = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 2 * B + 1, 5 * B])
def test_hot_is_cold_is_uncached_at_every_block_edge(server, uncached, length):
    prompt = ids(length)
    expected, _ = scored(uncached, prompt)
    assert scored(server, prompt) == (expected, 0)
    assert scored(server, prompt) == (expected, length - 1)
    others = [prompt[:B] + ids(n + 1, seed=n) for n in range(20)]
    random.Random(length).shuffle(others)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda other: scored(server, other)[0], others))
    assert found == [scored(uncached, other)[0] for other in others]
    assert scored(server, prompt)[0] == expected


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 2 * B + 1, 5 * B])
def test_a_prompts_own_scores_are_the_same_hot_cold_and_uncached(server, uncached, length):
    """PFX-01: all of the prompt has its log-probability but the first token, which follows none."""
    prompt = ids(length)
    expected, _ = scored(uncached, prompt, echo=True)
    values = expected[1]["token_logprobs"]
    assert len(values) == length + 8
    assert [i for i, value in enumerate(values) if value is None] == [0]
    assert [scored(server, prompt, echo=True)[0] for _ in range(2)] == [expected, expected]
    others = [prompt[:B] + ids(n + 1, seed=n) for n in range(20)]
    random.Random(length).shuffle(others)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda other: scored(server, other, echo=True)[0], others))
    assert found == [scored(uncached, other, echo=True)[0] for other in others]
    assert scored(server, prompt, echo=True)[0] == expected
    plain, cached_tokens = scored(server, prompt)
    assert (plain, cached_tokens) == (scored(uncached, prompt)[0], length - 1)


def test_a_stream_and_a_whole_answer_tell_the_same_of_the_cache(server):
    prompt = ids(40)
    scored(server, prompt)
    events = server.stream(COMPLETIONS, prompt=prompt, max_tokens=1,
                           stream_options={"include_usage": True})  # fmt: skip
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 39}


def test_the_prompt_of_n_choices_counts_once(server):
    prompt = ids(40)
    scored(server, prompt)
    answer = server.complete([prompt, ids(5, seed=9)], n=3, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 39}


def test_tenants_with_a_salt_share_with_nobody_else(server):
    prompt = ids(40)
    for salt in (None, "a", "b"):
        assert [scored(server, prompt, cache_salt=salt)[1] for _ in range(2)] == [0, 39]


def test_tenants_with_keys_learn_nothing_of_each_other(path):
    """Neither from cached tokens nor from repeated ones; not even with the other's salt."""
    names = ["key-of-tenant-one", "key-of-tenant-two"]
    keys = Keys([hashlib.sha256(name.encode()).digest() for name in names])
    prompt = ids(40)

    def found(name, salt):
        server.client.headers["authorization"] = f"Bearer {name}"
        usage = server.complete(prompt, max_tokens=1, timings=True, cache_salt=salt)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return cached, usage["paceline"]["repeated_tokens"]

    with serve(path, kv_memory_bytes=400 * BLOCK_BYTES, keys=keys) as server:
        for name in names:
            for salt in (None, "a"):
                assert [found(name, salt) for _ in range(2)] == [(0, 0), (39, 32)]


def test_the_choices_of_a_call_do_not_repeat_its_prompt(path):
    with serve(path, kv_memory_bytes=400 * BLOCK_BYTES) as server:
        usage = server.complete(ids(40), n=3, max_tokens=2, temperature=1, timings=True)["usage"]
        assert usage["paceline"]["repeated_tokens"] == 0


@pytest.mark.parametrize("salt", ["", 7, "x" * 1025])
def test_a_salt_that_is_none_is_refused_by_name(server, salt):
    response = server.post(COMPLETIONS, prompt="a", cache_salt=salt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_metrics_count_what_was_looked_up_and_found(server):
    for _ in range(2):
        scored(server, ids(40))
    assert metric(server, "vllm:prefix_cache_queries_total") == 80
    assert metric(server, "vllm:prefix_cache_hits_total") == 39
    assert metric(server, "paceline:kv_blocks_cached") > 0
    assert metric(server, "paceline:kv_blocks_live") == 0


def test_the_ledger_has_the_look_up(server):
    answer = server.complete(ids(300), max_tokens=1, timings=True)
    assert 0 < answer["usage"]["paceline"]["parts_ms"]["cache_lookup"] < 50


def test_under_pressure_answers_stay_the_same_and_the_books_close(path, uncached):
    """PFX-02: 300 calls over 10 prefixes, a pool for one and a half of the long prompts."""
    server = serve(path, kv_memory_bytes=30 * BLOCK_BYTES, max_num_seqs=8)
    rng = random.Random(2)
    prefixes = [ids(rng.randrange(20, 200), seed=n) for n in range(10)]
    prompts = []
    for n in range(300):
        prefix = prefixes[min(int(rng.expovariate(0.5)), 9)]
        prompts.append(prefix + ids(rng.choice([1, 3, 17, 100]), seed=1000 + n))
    gone = set(rng.sample(range(300), 30))

    def ask(n: int) -> object:
        if n not in gone:
            return scored(server, prompts[n])[0]
        with server.client.stream("POST", COMPLETIONS, json={
            "model": server.name, "prompt": prompts[n], "stream": True, "max_tokens": 40,
        }) as response:  # fmt: skip
            next(response.iter_raw())
        return None

    is_over = threading.Event()
    sums = []

    def scrape() -> None:
        while not is_over.wait(0.05):
            stats = server.stats()
            sums.append(
                stats.num_free_blocks + stats.num_live_blocks + stats.num_cached_blocks
                - stats.num_blocks
            )  # fmt: skip

    scraper = threading.Thread(target=scrape)
    scraper.start()
    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(ask, range(300)))
    is_over.set()
    scraper.join()
    for n in random.Random(3).sample(sorted(set(range(300)) - gone), 60):
        assert found[n] == scored(uncached, prompts[n])[0]
    wait_until(lambda: server.stats().num_live_blocks == 0)
    server.engine.check_integrity()
    stats = server.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert stats.num_prefix_hit > 0
    long = ids(470, seed=77)  # fits only when all that is cached is given up
    assert scored(server, long) == (scored(uncached, long)[0], 0)
    refused = server.post(COMPLETIONS, prompt=ids(490), max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert sums
    server.close()


@pytest.mark.parametrize("harm", ["gone", "cut", "turned"])
def test_stored_blocks_that_went_bad_are_computed_again(path, uncached, tmp_path, harm):
    server = serve(path, kv_memory_bytes=30 * BLOCK_BYTES, kv_tier=f"disk:path={tmp_path},size=64M")
    prompt = ids(200, seed=1)
    expected = scored(uncached, prompt)[0]
    assert scored(server, prompt) == (expected, 0)
    for n in range(4):
        scored(server, ids(300, seed=10 + n))
    server.engine._cache._tier._levels[-1].store.settle()
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 100]
    assert len(files) > 12
    for file in files:
        if harm == "gone":
            file.unlink()
        elif harm == "cut":
            file.write_bytes(file.read_bytes()[:100])
        else:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    assert scored(server, prompt)[0] == expected
    server.engine.check_integrity()
    server.close()
