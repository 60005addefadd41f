"""Speculation behind the API: the same answers, streamed and not, and figures that add up."""

import re
from unittest.mock import patch

import pytest

from paceline.bench.spec import Batch, measure
from paceline.bench.spec_prompts import PROMPTS
from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.errors import PacelineError, ParameterError
from tests.e2e.live import LiveServer, script_model, wait_until
from tests.tiny import random_model, write_gguf
from tests.unit.proposers import eager_pace

OPTIONS = {"num_threads": 1, "max_num_seqs": 4, "kv_memory_bytes": 64 * 2**20}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return script_model(tmp_path_factory.mktemp("speculation"), max_context=1024)


@pytest.fixture(scope="module")
def plain(script):
    with LiveServer(script, **OPTIONS) as live:
        yield live


@pytest.fixture(scope="module", params=["ngram:max=6", "draft:max=6,model={}"])
def drafting(script, request):
    """It drafts whatever it may: steps of this model are too short for drafts to pay."""
    with (
        patch("paceline.engine.speculation.speculator.Goodput", eager_pace()),
        LiveServer(script, speculate=request.param.format(script), **OPTIONS) as live,
    ):
        yield live


BODIES = [
    {"prompt": "0", "max_tokens": 120, "temperature": 0},
    {"prompt": "0", "max_tokens": 120, "temperature": 0, "logprobs": 3},
    {"prompt": "0", "max_tokens": 90, "temperature": 1.3, "seed": 5, "n": 3},
    {"prompt": "0", "max_tokens": 90, "temperature": 0, "stop": ["4567890123456789012"]},
    {"prompt": ["0", "a"], "max_tokens": 60, "temperature": 0},
    {"prompt": "0", "max_tokens": 60, "temperature": 0, "frequency_penalty": 2},
    {"prompt": "0", "max_tokens": 60, "temperature": 0, "repetition_penalty": 1.5},
    {"prompt": "0", "max_tokens": 60, "temperature": 0, "bad_words": ["5"], "min_tokens": 20},
    {"prompt": "0", "max_tokens": 60, "temperature": 0,
     "structured_outputs": {"regex": "[0-9]{3,5} or [1-9]+, then nothing"}},
    {"prompt": "0", "max_tokens": 90, "temperature": 1.3, "seed": 2, "n": 2,
     "structured_outputs": {"json": {"type": "object", "properties": {"digits": {"enum": [1, 23]}},
                                     "required": ["digits"], "additionalProperties": False}}},
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: "-".join(map(str, body)))
@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_are_the_same_with_and_without(plain, drafting, body, is_stream):
    def answer(server):
        if not is_stream:
            reply = server.complete(**body)
            return reply["choices"], reply["usage"]
        pieces = {}
        for event in server.stream("/v1/completions", **body):
            for choice in event["choices"] if event != "[DONE]" else ():
                kept = pieces.setdefault(choice["index"], ["", [], None])
                kept[0] += choice["text"]
                kept[1] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                kept[2] = choice["finish_reason"] or kept[2]
        return pieces

    assert answer(drafting) == answer(plain)
    drafting.drain()


def test_metrics_and_usage_tell_the_same_story(drafting):
    def totals():
        text = drafting.client.get("/metrics").text
        names = ("drafts", "draft_tokens", "accepted_tokens")
        pattern = r"vllm:spec_decode_num_{}_total{{[^}}]*}} (\S+)"
        return [float(re.search(pattern.format(name), text)[1]) for name in names]

    before = totals()
    usages = []
    for _ in range(3):
        reply = drafting.complete("0", max_tokens=200, temperature=0, timings=True)
        usages.append(reply["usage"]["paceline"])
    wait_until(lambda: drafting.stats().num_running == 0)
    drafts, drafted, accepted = (b - a for a, b in zip(before, totals(), strict=True))
    assert drafted == sum(usage.get("drafted_tokens", 0) for usage in usages)
    assert accepted == sum(usage.get("accepted_tokens", 0) for usage in usages)
    assert 0 < drafts <= drafted
    assert accepted <= drafted
    for usage in usages:
        assert sum(usage["parts_ms"].values()) == pytest.approx(usage["wall_ms"], abs=1e-6)
    assert any(usage["parts_ms"].get("draft", 0.0) > 0 for usage in usages)


def test_nothing_is_said_of_speculation_where_it_is_off(plain):
    reply = plain.complete("0", max_tokens=20, temperature=0, timings=True)
    assert "drafted_tokens" not in reply["usage"]["paceline"]
    assert "spec_decode" not in plain.client.get("/metrics").text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculate": "magic"}, "choose one of off, ngram"),
        ({"speculate": "ngram:max=" + "9" * 5000}, "an integer from 1 to 63"),
        ({"kv_tier": "tape:size=1G"}, "known is host:size=2G"),
        ({"kv_tier": "disk:path=a,b,size=1G"}, "kv_tier is .*'b' in .* not of the form key=value"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_before_the_model_is_read(options, said):
    with pytest.raises(ParameterError, match=said) as caught:
        load_model("/no/such/file.gguf", EngineConfig(**options))
    assert caught.value.param in options


def test_the_draft_model_gets_an_eighth_of_the_kv_memory(script):
    options = {**OPTIONS, "kv_memory_bytes": 2**20}
    plain = load_model(str(script), EngineConfig(**options))
    drafting = load_model(str(script), EngineConfig(speculate=f"draft:model={script}", **options))
    try:
        assert drafting.kv.num_blocks == pytest.approx(plain.kv.num_blocks * 7 / 8, abs=1)
        assert drafting.engine.stats().num_blocks == drafting.kv.num_blocks
    finally:
        plain.engine.stop()
        drafting.engine.stop()


def test_a_pool_without_room_for_a_draft_model_says_how_much_is_needed(script):
    config = EngineConfig(speculate=f"draft:model={script}", kv_memory_bytes=2**14)
    with pytest.raises(ParameterError, match="raise --kv-memory to"):
        load_model(str(script), config)


def test_a_draft_model_that_is_not_there_is_named(script):
    with pytest.raises(PacelineError, match="no-such-model"):
        load_model(str(script), EngineConfig(speculate="draft:model=no-such-model"))


def test_health_tells_of_speculation(drafting):
    drafting.complete("0", max_tokens=60, temperature=0)
    told = drafting.client.get("/health").json()["engine"]["speculation"]
    assert told["num_drafted"] > 0
    assert sum(told["steps"].values()) > 0


@pytest.fixture(scope="module")
def babbling(tmp_path_factory):
    model = random_model(seed=3, max_position_embeddings=512)
    return write_gguf(model, tmp_path_factory.mktemp("bench") / "random.gguf")


def test_a_round_of_the_bench_guesses_from_no_earlier_round(babbling):
    """Else greedy texts, the same in every round, would be known by heart from the second one."""
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace()):
        loaded = load_model(str(babbling), EngineConfig(speculate="ngram", **OPTIONS))
        rounds = [Batch(loaded, ["the"], 60, salt=salt).run() for salt in ("a", "b", "b")]
    assert len({run.texts for run in rounds}) == 1
    first, second, known = (run.num_steps for run in rounds)
    assert known < first == second


def bench(path, **options):
    """Return the row of two rounds of chat, three answers at once."""
    config = EngineConfig(**{**OPTIONS, "max_num_seqs": 6, **options})
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace()):
        loaded = load_model(str(path), config)
        try:
            [row] = measure(loaded, workloads=["chat"], batches=[3], num_tokens=60, num_rounds=2)
            assert loaded.engine.stats().num_preemptions == 0
        finally:
            loaded.engine.stop()
    return row


def test_the_bench_compares_drafts_with_none_on_one_engine(babbling):
    row = bench(babbling, speculate="ngram")
    assert row["is_same_text"]
    assert row["rounds"] == 2
    assert row["num_accepted"] > 0
    assert row["steps_saved"] >= 0


def test_neither_side_of_the_bench_guesses_from_what_the_other_wrote(babbling):
    """The model alone, its answers being no part of its prompts, is guessed as well as here."""
    config = EngineConfig(speculate="ngram", **{**OPTIONS, "max_num_seqs": 6})
    with patch("paceline.engine.speculation.speculator.Goodput", eager_pace()):
        loaded = load_model(str(babbling), config)
        for idx in range(2):
            prompts = [PROMPTS["chat"][i % 2] for i in range(idx, idx + 3)]
            Batch(loaded, prompts, 60, salt=f"alone {idx}").run()
        alone = loaded.engine.stats().speculation.num_accepted
        loaded.engine.stop()
    assert bench(babbling, speculate="ngram")["num_accepted"] == alone


def test_the_bench_compares_plain_decoding_with_itself(babbling):
    row = bench(babbling, speculate="off")
    assert row["is_same_text"]
    assert (row["num_drafted"], row["steps_saved"], row["mean_accepted_length"]) == (0, 0, None)


def test_the_bench_refuses_what_the_cache_does_not_hold_twice(babbling):
    with pytest.raises(ParameterError, match=r"of 3, with drafts and without, .*--kv-memory"):
        bench(babbling, speculate="ngram", kv_memory_bytes=2**16)
