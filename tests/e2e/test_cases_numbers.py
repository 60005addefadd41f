"""QNT-03: a prompt whose numbers overflow ends with an error, alone, and leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.weights.tensor import BLOCK, SCALE_OFFSETS, QTensor
from tests.e2e.live import LiveServer, texts
from tests.e2e.test_metrics import scrape
from tests.tiny import gguf_bytes, gguf_metadata, gguf_tensors, random_model, write_gguf

COMPLETIONS = "/v1/completions"
HUGE = 1e12  # beyond f16, and beyond an f16 scale of 127 or 448 codes
COLUMN = 5  # of the hidden state, which only the trigger has
PREFIX = [97 + i * i % 26 for i in range(40)]  # two blocks of tokens and some
GOOD = [*PREFIX, *b" all before us"]
BAD = [*PREFIX, *b"!", *(97 + i * i % 23 for i in range(39))]
OPTIONS = {"num_threads": 2, "kv_memory_bytes": 2**22, "max_batched_tokens": 48, "ledger": True}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
ASKED = {
    "greedy": GREEDY,
    "sampled": {**GREEDY, "temperature": 1.0, "seed": 4, "n": 2},
    "grammar": {"temperature": 0, "max_tokens": 12, "structured_outputs": {"regex": "[a-z]{12}"}},
    "scored": {**GREEDY, "logprobs": 2, "echo": True},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose values overflow half precision where "!" was read, and nowhere else."""
    model = random_model("llama", seed=9)
    embedding = model.tensors["model.embed_tokens.weight"].copy()
    embedding[:, COLUMN] = 0
    embedding[ord("!"), COLUMN] = 3
    name = "model.layers.0.self_attn.v_proj.weight"
    values = model.tensors[name].copy()
    values[:, COLUMN] = HUGE
    model = model.with_tensor("model.embed_tokens.weight", embedding).with_tensor(name, values)
    return write_gguf(model, tmp_path_factory.mktemp("numbers") / "overflows.gguf", fmt="f32")


@pytest.fixture(
    scope="module",
    params=["f16", "int8", "fp8", "k8v4", "int4", "f16+ngram", "k8v4+ngram"],
)
def server(request, path):
    kv_dtype, _, speculate = request.param.partition("+")
    options = {"speculate": speculate} if speculate else {}
    live = LiveServer(path, kv_dtype=kv_dtype, **options, **OPTIONS)
    yield live
    live.close()


def ask(server, prompt, **body):
    # "!" is never chosen: it would poison the step after it.
    return server.post(COMPLETIONS, prompt=prompt, **{"logit_bias": {str(ord("!")): -100}, **body})


def answer(server, prompt, **body):
    response = ask(server, prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def num_failed(server):
    return scrape(server)["paceline:request_seconds_count", ("failed",)]


def test_the_model_answers_where_values_fit(path):
    with LiveServer(path, kv_dtype="f32", **OPTIONS) as live:
        assert answer(live, BAD, **GREEDY)[0]["finish_reason"] == "length"


@pytest.mark.parametrize("how", ASKED)
def test_a_prompt_that_overflows_ends_with_an_error_and_a_counter_rises(server, how):
    before, num_cached = num_failed(server), server.stats().num_cached_blocks
    response = ask(server, BAD, **ASKED[how])
    assert response.status_code == 500, response.text
    assert "not finite" in response.json()["error"]["message"]
    assert num_failed(server) == before + 1
    server.drain()
    assert server.stats().num_cached_blocks == num_cached


def test_a_stream_that_overflows_ends_with_an_error_event_and_no_text(server):
    before = num_failed(server)
    body = {"prompt": BAD, "logit_bias": {str(ord("!")): -100}, **GREEDY}
    events = server.stream(COMPLETIONS, **body)
    errors = [event for event in events if event != "[DONE]" and "error" in event]
    assert len(errors) == 1
    assert "not finite" in errors[0]["error"]["message"]
    assert not any(texts([e for e in events if "choices" in e]).values())
    assert num_failed(server) == before + 1


def test_good_prompts_beside_a_bad_one_get_what_they_get_alone(server):
    """Seven good ones, each asked for in another way, with the bad one's beginning."""
    ways = [*ASKED.values(), {**GREEDY, "temperature": 0.8, "seed": 8}, GREEDY, GREEDY]
    jobs = [([*GOOD, 97 + i], body) for i, body in enumerate(ways)]
    alone = [answer(server, prompt, **body) for prompt, body in jobs]
    for round_of in range(4):
        jobs_and_bad = [*jobs[:round_of], (BAD, ASKED["sampled"]), *jobs[round_of:]]
        with ThreadPoolExecutor(8) as pool:
            asked = list(pool.map(lambda job: ask(server, job[0], **job[1]), jobs_and_bad))
        assert asked.pop(round_of).status_code == 500
        assert [response.json()["choices"] for response in asked] == alone
    server.drain()


def test_a_good_prompt_with_the_same_beginning_is_answered_after_a_bad_one(path):
    """And so where the bad one came first, and computed what they share."""
    for kv_dtype in ("f16", "int8", "int4"):
        with LiveServer(path, kv_dtype=kv_dtype, prefix_cache=False, **OPTIONS) as live:
            expected = answer(live, GOOD, **ASKED["scored"])
        with LiveServer(path, kv_dtype=kv_dtype, **OPTIONS) as live:
            for _ in range(2):
                assert ask(live, BAD, **GREEDY).status_code == 500
                assert answer(live, GOOD, **ASKED["scored"]) == expected
            found = live.complete(GOOD, **GREEDY)["usage"]["prompt_tokens_details"]
            assert found["cached_tokens"] == len(GOOD) - 1


def test_memory_that_a_bad_prompt_had_is_clean_for_the_next(path):
    """The pool is so small that the next prompt gets the very blocks that held no numbers."""
    for kv_dtype in ("f16", "int8", "fp8", "k8v4", "int4"):
        with LiveServer(path, kv_dtype=kv_dtype, **OPTIONS) as live:
            expected = answer(live, GOOD[::-1], **ASKED["scored"])
        options = {**OPTIONS, "kv_memory_bytes": 6 * 16 * 2 * 2 * 2 * 16 * 2}
        with LiveServer(path, kv_dtype=kv_dtype, **options) as live:
            for _ in range(3):
                assert ask(live, BAD, **GREEDY).status_code == 500
                assert answer(live, GOOD[::-1], **ASKED["scored"]) == expected


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1", "q6_k"])
def test_an_infinite_scale_is_told_at_load_and_a_scale_of_zero_is_a_weight_of_zero(
    tmp_path, caplog, fmt
):
    """Each in the row of one token of the embedding; in the reference that row is of zeros."""
    name = "token_embd.weight"
    model = random_model("llama", seed=9, hidden=256)
    tensors = gguf_tensors(model, "f32", {"model.embed_tokens.weight": fmt})
    answers = []
    for kind, scale in (("zero", 0.0), ("reference", None), ("infinite", np.inf)):
        data = tensors[name].data.reshape(len(tensors[name].data), -1, BLOCK[fmt][1]).copy()
        row = data[ord("?" if kind != "infinite" else "!")]
        if scale is None:
            row[:] = 0
        for at in SCALE_OFFSETS[fmt]:
            row[:, at : at + 2] = np.array([scale or 0], "<f2").view(np.uint8)
        changed = QTensor(fmt, tensors[name].shape, data.reshape(len(data), -1))
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(gguf_bytes(gguf_metadata(model), {**tensors, name: changed}))
        caplog.clear()
        with LiveServer(path, **OPTIONS) as live:
            is_told = "NaN or infinity in the weights model.embed_tokens.weight" in caplog.text
            assert is_told == (kind == "infinite")
            if kind == "infinite":
                assert ask(live, "abc!de", **GREEDY).status_code == 500
                assert num_failed(live) == 1
            else:
                answers.append(answer(live, "abc?de", **ASKED["scored"]))
    assert answers[0] == answers[1]
