"""Structured answers over real HTTP."""

import concurrent.futures
import json
import logging
import re

import pytest

from paceline import LLM, SamplingParams, Structured
from tests.e2e.live import Canary, texts

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog"]},
        "ids": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["ok", "kind", "ids"],
    "additionalProperties": False,
}
BY_SCHEMA = {
    "type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}
}  # fmt: skip


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"ok", "kind", "ids"}
        and isinstance(value["ok"], bool)
        and value["kind"] in ("cat", "dog")
        and len(value["ids"]) <= 3
        and all(isinstance(i, int) and 0 <= i <= 99 for i in value["ids"])
    )


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_a_schema_is_kept_to_streamed_or_not(server, temperature, n):
    body = {"messages": HI, "response_format": BY_SCHEMA, "temperature": temperature, "n": n,
            "seed": 5, "max_tokens": 200}  # fmt: skip
    answer = server.post(CHAT, **body).json()
    whole = {c["index"]: c["message"]["content"] for c in answer["choices"]}
    assert len(whole) == n
    assert all(is_valid(text) for text in whole.values())
    assert {c["finish_reason"] for c in answer["choices"]} == {"stop"}
    assert texts(server.stream(CHAT, **body)) == whole


def test_structures_go_with_every_other_parameter(server):
    words = {"structured_outputs": {"regex": "[a-z]{4,30}"}, "max_tokens": 40, "temperature": 0}
    plain = server.complete("a", **words)["choices"][0]["text"]
    assert re.fullmatch("[a-z]{4,30}", plain)
    stopped = server.complete("a", **words, stop=["ef"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("bcd", "stop")
    cut = server.complete("a", **{**words, "max_tokens": 3})["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("bcd", "length")
    scored = server.complete("a", **words, logprobs=2)["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == plain + "<|endoftext|>"
    biased = server.complete("a", **words, logit_bias={"120": 100, "48": 100})["choices"][0]["text"]
    assert set(biased) == {"x"}  # "0" has the same bias, and may not come
    on = server.complete("a", **words, ignore_eos=True)["choices"][0]
    assert (len(on["text"]), on["finish_reason"]) == (30, "stop")
    echoed = server.complete("a", **words, echo=True)["choices"][0]["text"]
    assert echoed == "a" + plain


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [({"choice": ["yes", "no"]}, "yes|no"), ({"grammar": 'start: "ab" /c+/'}, "abc+"),
     ({"json": {"type": "integer", "minimum": 10, "maximum": 12}}, "1[0-2]"),
     ({"json_object": True}, r"\{.*\}")],
)  # fmt: skip
def test_the_extras_bind_completions(server, structure, pattern):
    for temperature in (0, 1):
        choice = server.complete(
            "a", structured_outputs=structure, temperature=temperature, seed=1, max_tokens=400,
            logit_bias={"125": 4},  # a model of random letters would hardly ever close its braces
        )["choices"][0]  # fmt: skip
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"], re.DOTALL)


def test_blanks_cannot_fill_an_answer(server):
    """STO-01: every blank is what the model likes best."""
    bias = {str(ord(blank)): 8 for blank in " \t\n\r"}
    answer = server.chat(response_format=BY_SCHEMA, temperature=0, max_tokens=400, logit_bias=bias)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert is_valid(choice["message"]["content"])
    outside = re.sub(r'"[^"]*"', "string", choice["message"]["content"])
    assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 13
    assert choice["message"]["content"].endswith("}")


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"json": {"type": "object", "properties": {"a": "x"}}}, "schema"),
        ({"json": {"type": "strnig"}}, "strnig"), ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "unclosed"), ({"regex": "(?<=a)b"}, "look"), ({"json": {"enum": []}}, ""),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"json": {"description": "x" * 300_000}}, "262144"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_a_400_and_harms_nobody(server, structure, says):
    """STO-02: never free text with 200."""
    with Canary(server):
        response = server.post(COMPLETIONS, prompt="a", structured_outputs=structure, max_tokens=9)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["param"], says in error["message"]) == ("structured_outputs", True)
    server.survive()


MANY = {"type": "object", "properties": {f"p{i}": {} for i in range(2001)}}
MANY_FORMAT = {"type": "json_schema", "name": "a", "schema": MANY}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema",
                "json_schema": {"name": "a", "schema": MANY}}}, "response_format"),
        (CHAT, {"messages": HI, "structured_outputs": {"json": MANY}}, "structured_outputs"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": MANY}}, "structured_outputs"),
        ("/v1/responses", {"input": "a", "text": {"format": MANY_FORMAT}}, "text.format"),
    ],
    ids=["format", "extra", "completions", "responses"],
)  # fmt: skip
def test_a_schema_that_is_too_large_is_named_in_the_words_of_its_api(server, path, body, param):
    error = server.post(path, **body).json()["error"]
    assert error["param"] == param
    assert error["message"] == "the schema has 2001 properties: at most 2000 are allowed"


def test_a_grammar_that_turns_out_too_complex_is_a_400_and_harms_nobody(server, caplog):
    caplog.set_level(logging.INFO)
    words = " | ".join(f'"w{number}"' for number in range(3000))
    fields = {"prompt": "a", "structured_outputs": {"grammar": f"start: {words}"}}
    with Canary(server):
        response = server.post(COMPLETIONS, **fields)
        events = server.stream(COMPLETIONS, **fields)
    assert response.status_code == 400
    for error in (response.json()["error"], events[-1]["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
        assert "too complex" in error["message"]
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_a_choice_of_many_texts_is_one_of_them(server):
    texts = [f"text {number}" for number in range(10_000)]
    for temperature in (0, 1):
        answer = server.complete("a", structured_outputs={"choice": texts}, max_tokens=20, seed=1,
                                 temperature=temperature)  # fmt: skip
        assert answer["choices"][0]["text"] in texts


def test_a_structured_answer_is_the_same_in_any_batch(server):
    bodies = [
        {"prompt": "a", "structured_outputs": {"json": SCHEMA}, "temperature": 0},
        {"prompt": "a", "structured_outputs": {"json": SCHEMA}, "temperature": 1, "seed": 3},
        {"prompt": "a", "temperature": 0},
        {"prompt": "a", "structured_outputs": {"regex": "[a-z]{3}[0-9]{5}"}, "temperature": 1,
         "seed": 9, "logprobs": 1},
        {"prompt": "0", "temperature": 1, "seed": 2, "logit_bias": {"52": 5}},
    ]  # fmt: skip

    def ask(body):
        return server.complete(**body, max_tokens=60)["choices"]

    alone = [ask(body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        for _ in range(4):
            assert list(pool.map(ask, bodies * 2)) == alone * 2


def test_the_ledger_names_the_grammar(server):
    usage = server.complete(
        "a", structured_outputs={"regex": "[a-z]{9}[0-9]"}, timings=True, max_tokens=20
    )["usage"]
    assert usage["paceline"]["parts_ms"]["grammar"] > 0


def test_forced_tokens_are_counted_and_take_no_step(server):
    before = server.engine.stats()
    usage = server.complete(
        "a", structured_outputs={"regex": "[ab] and no more than that[.]{2,3}"}, timings=True,
        max_tokens=40,
    )["usage"]  # fmt: skip
    after = server.engine.stats()
    num_forced = usage["paceline"]["forced_tokens"]
    assert num_forced >= 15
    assert after.num_forced_tokens - before.num_forced_tokens == num_forced
    assert after.num_steps - before.num_steps == usage["completion_tokens"] - num_forced
    metrics = server.client.get("/metrics").text
    assert re.search(rf"^paceline:forced_tokens_total{{.*}} {after.num_forced_tokens}.0$", metrics,
                     re.MULTILINE)  # fmt: skip
    assert "spec_decode" not in metrics


def test_continuous_usage_counts_up_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(COMPLETIONS, prompt="a", temperature=0, max_tokens=5,
                           stream_options=options)[:-1]  # fmt: skip
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(chunk["usage"]["prompt_tokens"] == 1 for chunk in chunks)


def test_an_echo_repeats_text_and_ids(server):
    body = {"temperature": 0, "max_tokens": 2, "echo": True}
    assert [c["text"] for c in server.complete(["ab", "x"], **body)["choices"]] == ["abcd", "xyz"]
    assert server.complete([97, 98], **body)["choices"][0]["text"] == "abcd"
    assert texts(server.stream(COMPLETIONS, prompt=["ab", "x"], **body)) == {0: "abcd", 1: "xyz"}


def test_structures_work_offline(script_path):
    params = SamplingParams(
        temperature=1, seed=4, n=2, max_tokens=200, structured=Structured(json_schema=SCHEMA)
    )
    with LLM(script_path, num_threads=1, kv_memory_bytes=8 * 2**20) as llm:
        [answer] = llm.generate("a", params, progress=False)
    assert all(is_valid(choice.text) for choice in answer.outputs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"bad_words": ["yes"]}, "bad_words"),
     ({"min_tokens": 2}, "min_tokens")],
)  # fmt: skip
def test_a_request_that_forbids_its_own_structure_is_told_so(server, caplog, fields, param):
    caplog.set_level(logging.INFO)
    fields = {"structured_outputs": {"choice": ["yes"]}, "max_tokens": 9, **fields}
    if param == "min_tokens":
        vocab_size = server.loaded.tokenizer.vocab_size
        fields["stop_token_ids"] = list(range(vocab_size))[:1024]
    with Canary(server):
        response = server.post(COMPLETIONS, prompt="a", **fields)
        events = server.stream(COMPLETIONS, prompt="a", **fields)
    for error in (response.json()["error"], events[-1]["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert "forbidden" in error["message"]
    assert response.status_code == 400
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_a_bias_cannot_contradict_a_structure(server):
    bias = {str(i): -100 for i in server.loaded.tokenizer.encode("yes", add_special=False)}
    fields = {"structured_outputs": {"choice": ["yes"]}, "logit_bias": bias}
    assert server.complete("a", max_tokens=9, **fields)["choices"][0]["text"] == "yes"
