"""Log-probabilities of prompts: right, the same however they are computed, and as lm-eval asks."""

from __future__ import annotations

import math
import random
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.completion import ChoiceBuilder
from paceline.errors import ParameterError
from paceline.types import Request
from paceline.weights.checkpoint import open_checkpoint
from tests.conftest import reference_logits
from tests.e2e.live import LiveServer
from tests.e2e.test_law1 import make_engine
from tests.tiny import random_model, write_gguf

B = 16  # tokens of a block
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * B  # K and V, layers, KV heads, head size, f32, tokens
LENGTHS = (1, 2, B - 1, B, B + 1, 2 * B, 2 * B + 1, 5 * B, 300)
SCORE = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = random_model("llama", seed=5, max_position_embeddings=512)
    return write_gguf(model, tmp_path_factory.mktemp("echo") / "random.gguf", fmt="f32")


def load(path, **options):
    return LLM(str(path), kv_dtype="f32", **{"kv_memory_bytes": 200 * BLOCK_BYTES, **options})


def ids(num, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num)]


def bits(items):
    return [
        struct.pack("<d", i.logprob) + repr((i.token_id, i.rank, i.top)).encode() for i in items
    ]


def all_bits(llm, prompts, params=SCORE):
    answers = llm.generate(prompts, params, progress=False)
    return [bits(a.outputs[0].prompt_logprobs + a.outputs[0].logprobs) for a in answers]


@pytest.fixture(scope="module")
def alone(path):
    """Bits of each length's prompt, cold, whole, and by itself."""
    with load(path, num_threads=1, prefix_cache=False) as llm:
        return {n: all_bits(llm, [ids(n)])[0] for n in LENGTHS}


def test_they_are_those_of_the_reference(path):
    prompt = ids(150)
    logits = reference_logits(open_checkpoint(path), prompt).astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    with load(path) as llm:
        [choice] = llm.generate([prompt], SCORE, progress=False)[0].outputs
    scores = choice.prompt_logprobs
    assert [item.token_id for item in scores] == prompt
    assert math.isnan(scores[0].logprob)
    assert (scores[0].rank, scores[0].top) == (0, ())
    for position, item in enumerate(scores[1:]):
        row = wanted[position]
        assert item.logprob == pytest.approx(row[item.token_id], abs=2e-4)
        assert [i for i, _ in item.top] == np.argsort(-row)[:2].tolist()
        assert item.rank == 1 + int((row > row[item.token_id]).sum())


@pytest.mark.parametrize(
    "options",
    [{}, {"num_threads": 2}, {"max_batched_tokens": 7}, {"policy": "slo:step_ms=1"},
     {"speculate": "ngram"}],
    ids=["cached", "threads", "chunks", "slo", "speculation"],
)  # fmt: skip
def test_they_are_the_same_bits_cold_hot_and_in_any_batch(path, alone, options):
    rng = random.Random(1)
    with load(path, **options) as llm:
        for _ in range(3):
            order = rng.sample(LENGTHS, len(LENGTHS))
            assert all_bits(llm, [ids(n) for n in order]) == [alone[n] for n in order]
        plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        mixed = [SCORE if i % 2 else plain for i in range(len(LENGTHS))]
        answers = llm.generate([ids(n) for n in LENGTHS], mixed, progress=False)
        for i, answer in enumerate(answers):
            if i % 2:
                choice = answer.outputs[0]
                assert bits(choice.prompt_logprobs + choice.logprobs) == alone[LENGTHS[i]]
            else:
                assert answer.outputs[0].prompt_logprobs == ()


def test_preemption_repeats_none_and_loses_none(path):
    long = SamplingParams(
        temperature=0, max_tokens=60, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    prompts = [ids(5 * B - 7 * i, i) for i in range(5)]
    with load(path) as llm:
        wanted = all_bits(llm, prompts, long)
    # Each is to grow to eight blocks or so, and there are 24; in chunks, so some are cut short.
    engine = make_engine(path, kv_memory_bytes=24 * BLOCK_BYTES, max_batched_tokens=24)
    builders = [ChoiceBuilder(0, True) for _ in prompts]
    for i, builder in enumerate(builders):
        request = Request(id=str(i), prompt_token_ids=tuple(prompts[i]), params=long)
        engine.submit(request, builder.add)
    while engine.step():
        engine.check_integrity()
    assert engine.stats().num_preemptions > 0
    choices = [builder.choice() for builder in builders]
    assert [bits(choice.prompt_logprobs + choice.logprobs) for choice in choices] == wanted
    engine.stop()


def test_each_choice_brings_the_prompts(path, alone):
    several = SamplingParams(
        temperature=1, seed=3, n=3, max_tokens=2, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    with load(path) as llm:
        choices = llm.generate([ids(40)], several, progress=False)[0].outputs
        assert len({tuple(bits(choice.prompt_logprobs)) for choice in choices}) == 1
        assert len(choices[0].prompt_logprobs) == 40


def test_a_scored_prompt_need_not_be_continued(path, alone):
    nothing = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2, n=2)
    with load(path) as llm:
        for _ in range(2):
            choices = llm.generate([ids(2 * B)], nothing, progress=False)[0].outputs
            for choice in choices:
                assert (choice.text, choice.token_ids, choice.finish_reason) == ("", (), "length")
                assert choice.usage.completion_tokens == 0
                assert bits(choice.prompt_logprobs) == alone[2 * B][:-1]
        llm._loaded.engine.check_integrity()


def test_padding_of_the_head_has_no_log_probability(tmp_path):
    model = random_model("llama", vocab_size=400)
    padded = write_gguf(model, tmp_path / "padded.gguf")
    with LLM(str(padded), kv_memory_bytes=2**22) as llm:
        first = llm._loaded.tokenizer.vocab_size
        llm.generate([[1, first]], SamplingParams(max_tokens=1), progress=False)
        with pytest.raises(ParameterError, match=f"token id {first}"):
            llm.generate([[1, first]], SCORE, progress=False)


def test_a_prompt_without_finite_logits_fails_alone(tmp_path, path, alone):
    model = random_model("llama", seed=5, max_position_embeddings=512)
    embedding = model.tensors["model.embed_tokens.weight"].copy()
    embedding[281] = np.nan
    broken = model.with_tensor("model.embed_tokens.weight", embedding)
    engine = make_engine(write_gguf(broken, tmp_path / "broken.gguf"), max_batched_tokens=512)
    deltas = {"bad": [], "good": []}
    builder = ChoiceBuilder(0, True)
    for name, prompt in (("bad", [5, 281, 6]), ("good", ids(2 * B))):
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
        request = Request(id=name, prompt_token_ids=tuple(prompt), params=params)
        engine.submit(request, deltas[name].append)
    while engine.step():
        engine.check_integrity()
    [bad], [good] = deltas["bad"], deltas["good"]
    assert bad.finish_reason == "error"
    assert "not finite" in bad.error
    assert bad.prompt_logprobs == ()
    builder.add(good)
    assert bits(builder.choice().prompt_logprobs) == alone[2 * B][:-1]
    engine.stop()


# ---- over HTTP ----


@pytest.fixture(scope="module")
def server(path):
    live = LiveServer(path, kv_dtype="f32", kv_memory_bytes=200 * BLOCK_BYTES, num_threads=1)
    yield live
    live.close()


def ask_as_lm_eval(server, contexts, continuations):
    """What lm-eval's local-completions sends for log-likelihoods, and how it reads the answer."""
    prompts = [[*c, *more] for c, more in zip(contexts, continuations, strict=True)]
    answer = server.complete(prompts, max_tokens=1, logprobs=1, seed=1234, echo=True, temperature=0)
    found = []
    for choice, context, prompt in zip(answer["choices"], contexts, prompts, strict=True):
        logprobs = choice["logprobs"]
        own = logprobs["token_logprobs"][len(context) : -1]
        top = logprobs["top_logprobs"][len(context) : -1]
        assert len(own) == len(prompt) - len(context)
        is_greedy = all(a == max(b.values()) for a, b in zip(own, top, strict=True))
        found.append((sum(own), is_greedy))
    return found


def test_lm_evals_requests_are_answered_as_it_reads_them(path, server):
    contexts, rest = [ids(n) for n in (5, 20, 40)], [ids(n, 9) for n in (3, 1, 6)]
    for _ in range(2):  # cold, then hot
        found = ask_as_lm_eval(server, contexts, rest)
        for (total, is_greedy), context, more in zip(found, contexts, rest, strict=True):
            logits = reference_logits(open_checkpoint(path), [*context, *more]).astype(np.float64)
            rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            wanted = sum(rows[len(context) + i - 1, token] for i, token in enumerate(more))
            assert total == pytest.approx(wanted, abs=1e-3)
            assert not is_greedy
    greedy = server.complete(contexts[1], max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    tokens = [max(top, key=top.get) for top in greedy["choices"][0]["logprobs"]["top_logprobs"]]
    assert len(tokens) == 4


def test_an_echo_without_new_tokens_has_text_offsets_and_no_completion(server):
    answer = server.complete("abcd", max_tokens=0, logprobs=2, echo=True)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(logprobs["tokens"]).endswith("abcd")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    likeliest = logprobs["top_logprobs"][1:]
    assert all(len(top) - (t not in list(top)[:2]) == 2
               for top, t in zip(likeliest, logprobs["tokens"][1:], strict=True))  # fmt: skip
    ends = [a + len(t) for a, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert logprobs["text_offset"][1:] == ends[:-1]
    server.drain()


def test_a_stream_says_the_same(server):
    body = {"prompt": ids(20), "max_tokens": 3, "logprobs": 1, "echo": True, "temperature": 0}
    whole = server.complete(**body)["choices"][0]
    events = [e for e in server.stream("/v1/completions", **body) if e != "[DONE]"]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [item for part in parts for item in part] == whole["logprobs"][name]


def test_calls_that_score_and_calls_that_write_share_steps(server):
    def ask(seed):
        body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
        if seed % 2:
            body |= {"echo": True, "logprobs": 2}
        return server.complete(ids(10 + 7 * (seed % 5), seed % 5), **body)["choices"]

    calm = [ask(seed) for seed in range(10)]
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, range(10))) == calm
    server.drain()


@pytest.mark.parametrize("pool_tokens", [512, 800])
def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued(path, pool_tokens):
    """Nothing follows it, so it needs no room for more: lm-eval's windows are this long."""
    blocks = pool_tokens // B * BLOCK_BYTES
    score = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    with load(path, kv_memory_bytes=blocks) as llm:
        full = llm.generate([ids(512)], score, progress=False)[0].outputs[0]
        most = llm.generate([ids(512)[:511]], SCORE, progress=False)[0].outputs[0]
        assert [item.logprob for item in full.prompt_logprobs[1:511]] == [
            item.logprob for item in most.prompt_logprobs[1:]
        ]
        assert (len(full.prompt_logprobs), full.token_ids) == (512, ())
        with pytest.raises(ParameterError, match="shorten the prompt to 512 "):
            llm.generate([ids(513)], score, progress=False)
        with pytest.raises(ParameterError, match="shorten the prompt to 511 "):
            llm.generate([ids(512)], SCORE, progress=False)
