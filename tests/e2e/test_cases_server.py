"""SRV-01 and SRV-05: odd values in every field, and many callers at once."""

from __future__ import annotations

import concurrent.futures
import json
import random

import httpx
import pytest

from paceline.server.schema import INFORMATIONAL, ChatRequest, CompletionRequest
from tests.e2e.live import ALPHABET, LiveServer, parse_events, texts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
SHAPES = {
    CHAT: (ChatRequest, {"messages": HI}),
    COMPLETIONS: (CompletionRequest, {"prompt": "a"}),
}
ODD = (
    "null", '"x"', '""', "true", "NaN", "Infinity", "1e400", "-1", "0", "1.5", str(2**31),
    str(2**63), "[]", "{}", "[[1]]", '["x"]', '{"x": 1}', '{"type": "x"}', "[null]",
)  # fmt: skip
FIELDS = [
    (path, field)
    for path, (kind, _) in SHAPES.items()
    for field in (*kind.__struct_fields__, *kind.neutral, *INFORMATIONAL, "no_such_field")
]


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_an_odd_value_in_any_field_is_an_answer_or_a_4xx_that_names_it(server, path, field):
    for value in ODD:
        body = {"model": "script", **SHAPES[path][1], "max_tokens": 2}
        body.pop(field, None)
        text = json.dumps(body)[:-1] + f', "{field}": {value}}}'
        reply = server.client.post(
            path, content=text.encode(), headers={"content-type": "application/json"}
        )
        if reply.status_code == 200:
            continue
        if field == "deadline_ms" and reply.status_code in (429, 504):
            continue  # milliseconds that are too few
        assert reply.status_code in (400, 404), (value, reply.text)
        error = reply.json()["error"]
        assert error["message"]
        is_broken_json = value in ("NaN", "Infinity", "1e400")
        assert is_broken_json or field in f"{error['param']} {error['message']}", (value, error)
    server.survive()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"100000": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"97": 1e9}), ("stop_token_ids", [100_000]), ("stop_token_ids", [-1]),
        ("prompt", [100_000]), ("prompt", [-1]), ("prompt", ""), ("prompt", ["a", []]),
        ("prompt", ["a", [10**9]]), ("model", "another"),
    ],
)  # fmt: skip
def test_ids_out_of_the_vocabulary_never_reach_the_engine(server, field, value):
    body = {"model": "script", "prompt": "a", "max_tokens": 1, field: value}
    reply = server.client.post(COMPLETIONS, json=body)
    assert reply.status_code == (404 if field == "model" else 400), reply.text
    assert field in str(reply.json()["error"])
    server.survive()
    server.drain()


def test_wrong_methods_and_paths_have_the_error_shape(server):
    for method, path, status in (("GET", CHAT, 405), ("POST", "/health", 405), ("GET", "/x", 404)):
        reply = server.client.request(method, path)
        assert (reply.status_code, "message" in reply.json()["error"]) == (status, True)


def test_many_callers_get_their_own_answers_even_under_one_name(long_script_path):
    """SRV-05: equal ids, mixed lengths, a fifth of the calls cut."""
    live = LiveServer(long_script_path, kv_memory_bytes=64 * 2**20, num_threads=1, max_num_seqs=16)
    url = f"http://127.0.0.1:{live.port}"
    schema = {"type": "object", "properties": {"ok": {"const": "own"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip

    def call(number: int) -> None:
        rng = random.Random(number)
        letter = rng.choice(ALPHABET[:20])
        body = {"model": "script", "prompt": f"{number}{letter}", "temperature": 0}
        headers = {"x-request-id": f"same-{number % 3}"}
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
            if rng.random() < 0.2:
                with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as reply:
                    next(reply.iter_raw(), None)
                return
            if rng.random() < 0.2:
                body["structured_outputs"] = {"json": schema}
                text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
                assert json.loads(text) == {"ok": "own"}
                return
            if rng.random() < 0.5:
                reply = client.post(COMPLETIONS, json={**body, "stream": True})
                text = texts(parse_events(reply.content))[0]
            else:
                reply = client.post(COMPLETIONS, json=body)
                text = reply.json()["choices"][0]["text"]
            assert text == ALPHABET[ALPHABET.index(letter) + 1 :]
            assert reply.headers["x-request-id"] == headers["x-request-id"]

    try:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            list(pool.map(call, range(300)))
        live.drain()
        live.survive()
    finally:
        live.close()
