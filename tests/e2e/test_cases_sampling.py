"""Cases SMP-02, SMP-03 and SMP-04: sampling options on the native backend and over HTTP."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.types import SamplingParams
from tests.e2e.live import LiveServer, ServeProcess, script_model
from tests.e2e.test_law1 import BLOCK_BYTES, Job, alone, make_engine, run
from tests.tiny import TinyTokenizer, context_free_model, random_model, write_gguf

TOKENIZER = TinyTokenizer()


# ---- neighbours ----


@pytest.fixture(scope="module")
def random_path(tmp_path_factory) -> Path:
    model = random_model("llama", seed=21)
    return write_gguf(model, tmp_path_factory.mktemp("random") / "random.gguf")


PROMPT = tuple(b"the cat sat on the mat and ")
OPTIONS: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 2.0},
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "max_tokens": 9},
    {"logit_bias": {101: 6.0, 120: -9.0}, "logprobs": 3},
    {"temperature": 0.9, "top_k": 7, "seed": 3},
    {"temperature": 1.2, "min_p": 0.05, "seed": 4, "max_tokens": 5, "logprobs": 0},
    {"stop": ("e", "a"), "logprobs": 1},
    {"bad_words": ("th",), "min_tokens": 4, "ignore_eos": False},
)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 14, "ignore_eos": True, **options})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("gap", [0, 3])
def test_a_penalised_twin_leaves_the_plain_one_alone(random_path, order, gap):
    """SMP-02: identical prompts, one with repetition_penalty 2, in both orders of arrival."""
    jobs = [
        Job(prompt=PROMPT, params=greedy(**OPTIONS[i]), arrives_at=gap * place)
        for place, i in enumerate(order)
    ]
    assert alone(random_path, jobs[0]) != alone(random_path, jobs[1])
    engine = make_engine(random_path, num_threads=1)
    assert run(engine, jobs) == [alone(random_path, job) for job in jobs]
    engine.stop(5)


def test_fifty_shuffled_batches_give_each_request_what_it_gets_alone(random_path):
    """SMP-02: eight kinds of options; requests end at different steps, so that slots are reused."""
    rng = random.Random(7)
    prompts = (PROMPT, PROMPT[:5], PROMPT * 2)
    for _ in range(50):
        jobs = [
            Job(prompt=rng.choice(prompts), params=greedy(**options), arrives_at=rng.randrange(12))
            for options in rng.sample(OPTIONS, len(OPTIONS))
        ]
        engine = make_engine(
            random_path, num_threads=1, max_num_seqs=rng.choice((3, 5, 8)), max_batched_tokens=48
        )
        assert run(engine, jobs) == [alone(random_path, job) for job in jobs]
        engine.stop(5)


# ---- penalties ----

PENALTIES: dict[str, tuple[dict[str, float], str]] = {
    "none": ({}, "XXXXXX"),
    "presence": ({"presence_penalty": 1.5}, "XYXXXX"),
    "frequency": ({"frequency_penalty": 0.4}, "XXXYXY"),
    "repetition": ({"repetition_penalty": 2.0}, "YXXXXX"),
}


@pytest.fixture(scope="module")
def xy_path(tmp_path_factory) -> Path:
    x, y = TOKENIZER.byte_ids("XY")
    model = context_free_model({x: 5.0, y: 4.0}, other=-20.0)
    return write_gguf(model, tmp_path_factory.mktemp("xy") / "xy.gguf")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_penalties_give_the_texts_of_hand_calculation(xy_path, prefix_cache):
    """SMP-03 over HTTP: alone, then all together, several times."""
    server = LiveServer(xy_path, kv_memory_bytes=2**20, num_threads=1, prefix_cache=prefix_cache)

    def text(name: str) -> str:
        options, _ = PENALTIES[name]
        answer = server.complete("XXXXX", temperature=0, max_tokens=6, **options)
        return answer["choices"][0]["text"]

    expected = {name: want for name, (_, want) in PENALTIES.items()}
    assert {name: text(name) for name in PENALTIES} == expected
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert dict(zip(PENALTIES, pool.map(text, PENALTIES), strict=True)) == expected
    server.close()


@pytest.mark.parametrize("num_blocks", [4, 5, 40])
def test_penalties_outlive_a_preemption(xy_path, num_blocks):
    """SMP-03 with a preemption in the middle: 14 + 6 tokens do not fit a block of 16."""
    block_bytes = 2 * 16 * 4 * 16  # K and V of one layer and one head of 16, f32, 16 tokens
    prompt = tuple(b"ZZZZZZZZZXXXXX")
    jobs = [
        Job(prompt=prompt, params=greedy(max_tokens=6, **options))
        for options, _ in PENALTIES.values()
    ]
    engine = make_engine(xy_path, num_threads=1, kv_memory_bytes=num_blocks * block_bytes)
    results = run(engine, jobs)
    texts = [bytes(row[0][0]).decode() for row in results]
    assert texts == [want for _, want in PENALTIES.values()]
    assert (engine.stats().num_preemptions > 0) == (num_blocks < 8)
    engine.stop(5)


# ---- extreme values ----


@pytest.fixture(scope="module")
def sampler(random_path):
    server = LiveServer(random_path, kv_memory_bytes=400 * BLOCK_BYTES, num_threads=1)
    yield server
    server.close()


BASE = {"prompt": "the cat", "max_tokens": 12, "ignore_eos": True, "seed": 5}


def text_of(server: LiveServer, **options: object) -> str:
    answer = server.complete(**{**BASE, **options})
    assert answer["usage"]["completion_tokens"] == 12
    return answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-12}, {"temperature": 1e-6}, {"temperature": 1e-4},
        {"temperature": 1, "top_p": 1e-6}, {"temperature": 1, "top_k": 1},
        {"temperature": 1, "min_p": 1}, {"temperature": 1e-12, "top_p": 1e-6, "top_k": -1},
    ],
    ids=str,
)  # fmt: skip
def test_narrow_values_give_the_greedy_text(sampler, options):
    """SMP-04."""
    expected = text_of(sampler, temperature=0)
    assert expected
    assert text_of(sampler, temperature=1) != expected
    assert text_of(sampler, **options) == expected


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**6}, {"min_p": 0}])
def test_off_values_change_nothing(sampler, options):
    """SMP-04."""
    assert text_of(sampler, temperature=1, **options) == text_of(sampler, temperature=1)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"top_p": 0}, {"top_k": -2},
        {"temperature": -1e-12}, {"min_p": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_values_without_a_meaning_are_a_400_that_names_them(sampler, options):
    """SMP-04."""
    response = sampler.post("/v1/completions", **BASE, **options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(options))
    assert text_of(sampler, temperature=0)


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({"top_k": 0}, 40, 50), ({"top_k": -1}, 40, 50), ({"top_k": 1}, 1, 1)],
    ids=["0", "-1", "1"],
)
def test_fifty_equally_likely_tokens_are_seen_unless_only_one_is_kept(
    fifty_server, options, least, most
):
    """SMP-04: 400 seeds, one token each."""

    def first(seed: int) -> str:
        answer = fifty_server.complete("!", seed=seed, max_tokens=1, **options)
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(4) as pool:
        seen = set(pool.map(first, range(400)))
    assert least <= len(seen) <= most
    assert seen <= {chr(65 + i) for i in range(50)}


@pytest.fixture(scope="module")
def fifty_server(tmp_path_factory):
    model = context_free_model({65 + i: 3.0 for i in range(50)}, other=-60.0)
    path = write_gguf(model, tmp_path_factory.mktemp("fifty") / "fifty.gguf")
    server = LiveServer(path, kv_memory_bytes=2**20, num_threads=1)
    yield server
    server.close()


def test_a_server_survives_the_sweep_of_extreme_values(tmp_path):
    """SMP-04, SURVIVE: the same process answers as ever."""
    server = ServeProcess(script_model(tmp_path), "--kv-memory", "2M", "--threads", "1")
    for options in (
        {"temperature": 1e-12}, {"temperature": 1e-300}, {"temperature": 1e300}, {"top_p": 1e-300},
        {"top_p": 1e-6, "temperature": 1e-6}, {"min_p": 1}, {"top_k": 2**31 - 1},
        {"repetition_penalty": 1e-30}, {"repetition_penalty": 1e30}, {"typical_p": 1e-9},
        {"frequency_penalty": -2}, {"temperature": 1e-12, "logit_bias": {"98": 100, "99": 100}},
    ):  # fmt: skip
        response = server.post("/v1/completions", prompt="a", max_tokens=5, **options)
        assert response.status_code in (200, 400), options
        if response.status_code == 200:
            assert response.json()["usage"]["completion_tokens"] >= 1
    server.drain()
    server.survive()
    server.close()
