"""The OpenAI API over real HTTP."""

import concurrent.futures
import json

import httpx
import pytest

from tests.e2e.live import ALPHABET, EMOJI, choices, texts

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


# ---- answers ----


def test_a_completion_has_openais_shape(server):
    answer = server.complete("a", temperature=0)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "script"
    assert answer["choices"] == [
        {"index": 0, "text": ALPHABET[1:], "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["usage"]["completion_tokens"] == 26
    assert answer["usage"]["total_tokens"] == 27


def test_a_chat_goes_through_the_template(server):
    answer = server.chat(temperature=0)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "HELO", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_max_tokens_cuts_with_finish_reason_length(server):
    answer = server.complete("a", temperature=0, max_tokens=3)
    assert answer["choices"][0]["text"] == "bcd"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_token_ids_and_lists_of_prompts_are_answered_in_order(server):
    answer = server.complete([[98], [99]], temperature=0, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["cd", "de"]
    answer = server.complete(["x", "a", "y"], temperature=0, max_tokens=1, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["y", "y", "b", "b", "z", "z"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert server.complete([97], temperature=0, max_tokens=1)["choices"][0]["text"] == "b"


@pytest.mark.parametrize(("stop", "text"), [("e", "bcd"), (["zz", "fg"], "bcde"), ("b", "")])
def test_stop_strings_end_the_text(server, stop, text):
    body = {"temperature": 0, "stop": stop}
    answer = server.complete("a", **body)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert texts(server.stream(COMPLETIONS, prompt="a", **body)).get(0, "") == text


def test_the_stop_string_is_kept_where_asked_for(server):
    answer = server.complete("a", temperature=0, stop="ef", include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "bcdef"


def test_logit_bias_and_bad_words_change_the_answer(server):
    assert (
        server.complete("a", temperature=0, max_tokens=1, logit_bias={"120": 100})["choices"][0][
            "text"
        ]
        == "x"
    )
    banned = server.complete("a", temperature=0, max_tokens=1, bad_words=["b"])
    assert banned["choices"][0]["text"] != "b"


def test_a_seed_fixes_a_sampled_answer(server):
    body = {"temperature": 1.5, "max_tokens": 8, "logit_bias": {"98": -20}, "n": 2}
    first, again = (server.complete("a", seed=5, **body)["choices"] for _ in range(2))
    assert first == again
    other = server.complete("a", seed=6, **body)["choices"]
    assert first != other


# ---- streams ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("max_tokens", [2, 50])
def test_streams_carry_one_role_one_finish_and_usage_only_where_asked(
    server, path, n, options, max_tokens
):
    """STR-04."""
    body = {"temperature": 0, "n": n, "max_tokens": max_tokens}
    body |= {"messages": HI} if path == CHAT else {"prompt": "a"}
    events = server.stream(path, **body, **({} if options is None else {"stream_options": options}))
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    for index in range(n):
        own = [choice for choice in choices(events) if choice["index"] == index]
        if path == CHAT:
            roles = [choice["delta"].get("role") for choice in own]
            assert roles == ["assistant"] + [None] * (len(own) - 1)
        finishes = [c["finish_reason"] for c in own if c["finish_reason"] is not None]
        assert finishes == ["length" if max_tokens == 2 else "stop"]
        assert own[-1]["finish_reason"] is not None
    whole = server.post(path, **body).json()
    assert texts(events) == {
        c["index"]: c["message"]["content"] if path == CHAT else c["text"] for c in whole["choices"]
    }
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    chunks = events[:-1]
    if options == {"include_usage": True}:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_characters_of_several_tokens_arrive_whole(server, max_tokens):
    body = {"prompt": "#", "temperature": 0, "max_tokens": max_tokens}
    whole = server.complete(**body)
    joined = texts(server.stream(COMPLETIONS, **body)).get(0, "")
    assert joined == whole["choices"][0]["text"]
    assert "\ufffd" not in joined[:-1]
    assert EMOJI[1:].startswith(joined.rstrip("\ufffd"))
    assert whole["usage"]["completion_tokens"] == min(max_tokens, 9)


def test_illegal_bytes_become_replacement_marks_and_harm_nobody(server):
    for byte in (0x80, 0xFF, 0xC3):
        answer = server.complete("a", temperature=0, max_tokens=3, logit_bias={str(byte): 100})
        assert "\ufffd" in answer["choices"][0]["text"]
    server.survive()


def test_two_streams_run_side_by_side_and_keep_their_texts(server):
    prompts = {"a": ALPHABET[1:], "#": EMOJI[1:], "c": ALPHABET[3:], "p": ALPHABET[16:]}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            streams = pool.map(
                lambda prompt: server.stream(COMPLETIONS, prompt=prompt, temperature=0), prompts
            )
            assert [texts(events)[0] for events in streams] == list(prompts.values())


# ---- logprobs ----


def test_logprobs_of_a_completion_line_up(server):
    body = {"prompt": "a", "temperature": 0, "max_tokens": 4, "logprobs": 2}
    whole = server.complete(**body)["choices"][0]["logprobs"]
    assert whole["tokens"] == list("bcde")
    assert whole["text_offset"] == [0, 1, 2, 3]
    assert all(-0.01 < logprob <= 0 for logprob in whole["token_logprobs"])
    assert [len(top) for top in whole["top_logprobs"]] == [2] * 4
    pieces = [c["logprobs"] for c in choices(server.stream(COMPLETIONS, **body)) if c["logprobs"]]
    for name, values in whole.items():
        assert [value for piece in pieces for value in piece[name]] == values


def test_logprobs_of_a_chat_line_up(server):
    body = {"messages": HI, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = server.post(CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in whole[:4]] == list("HELO")
    assert whole[0]["bytes"] == [72]
    assert whole[0]["top_logprobs"][0]["token"] == "H"
    assert len(whole[0]["top_logprobs"]) == 3
    streamed = [c["logprobs"] for c in choices(server.stream(CHAT, **body)) if c["logprobs"]]
    assert [item for piece in streamed for item in piece["content"]] == whole


# ---- other routes ----


def test_models_lists_the_served_model(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("script", "model")
    assert server.client.get("/v1/models/script").json() == model
    missing = server.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_health_shows_the_engines_books(server):
    server.drain()
    health = server.client.get("/health").json()
    assert health["status"] == "ok"
    books = health["engine"]
    assert books["num_free_blocks"] + books["num_cached_blocks"] == books["num_blocks"] > 0


def test_the_callers_request_id_is_echoed(server):
    body = {"model": "script", "prompt": "a", "max_tokens": 1}
    given = server.client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert len(server.client.post(COMPLETIONS, json=body).headers["x-request-id"]) == 32


# ---- refusals ----

BAD_VALUES = [
    None, True, "x", -1, 0, 2**31, 2**63, 1.5, "", [], {}, [[]], [None], 1e308, -1e308,
]  # fmt: skip
FIELDS = [
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "bad_words", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "skip_special_tokens", "seed", "n", "priority", "prompt", "messages",
    "max_completion_tokens", "logprobs", "top_logprobs", "tools", "response_format", "user",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_is_a_server_error(server, field):
    for value in BAD_VALUES:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
            response = server.post(path, **{"max_tokens": 2, **body, field: value})
            assert response.status_code in (200, 400, 404), (path, value, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"]
    server.survive()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"1000000": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"prompt": [10**6]}, None),
        ({"prompt": [-1]}, None), ({"prompt": ["a", [10**6]]}, None), ({"prompt": ""}, None),
        ({"temperature": -1}, "temperature"), ({"tools": [1]}, "tools"),
        ({"nonsense": 1}, "nonsense"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(server, fields, param):
    response = server.post(COMPLETIONS, **{"prompt": "a", "max_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    server.drain()
    server.survive()


def test_a_prompt_longer_than_the_context_is_a_400_with_both_figures(server):
    response = server.post(COMPLETIONS, prompt="x" * 600)
    assert response.status_code == 400
    assert "600" in response.json()["error"]["message"]
    assert "512" in response.json()["error"]["message"]


def test_generation_ends_at_the_contexts_end(server):
    answer = server.complete("0", temperature=0, max_tokens=10**9)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512
    one = server.complete([48] * 511, temperature=0)
    assert one["usage"]["completion_tokens"] == 1


def test_messages_that_the_template_cannot_take_are_a_400(server):
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": [{"type": "image"}]}]):
        response = server.post(CHAT, messages=messages)
        assert response.status_code in (200, 400), response.text
    assert server.post(CHAT, messages=[]).status_code == 400


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"model": "script", "prompt": "\xff"}', "application/json", 400),
        (b'{"model": "script", "prompt": "\\ud800 x"}', "application/json", 400),
        (b'{"model": "script", "prompt": "a", "temperature": NaN}', "application/json", 400),
        (b"prompt=a", "application/x-www-form-urlencoded", 415),
        (b" " * (17 * 2**20), "application/json", 413),
    ],
    ids=["cut", "utf8", "surrogate", "nan", "form", "huge"],
)
def test_a_broken_body_is_refused_cleanly(server, content, kind, status):
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert response.status_code == status
    assert response.json()["error"]["message"]
    server.survive()


def test_other_paths_and_methods_answer_in_the_error_shape(server):
    assert server.client.get("/v1/nothing").status_code == 404
    wrong = server.client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")


def test_a_wrong_model_is_a_404(server):
    response = server.client.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "a"})
    assert response.status_code == 404
    assert "gpt-9" in response.json()["error"]["message"]


def test_a_long_body_in_many_pieces_is_read_whole(server):
    body = json.dumps({"model": "script", "prompt": "a", "max_tokens": 1, "user": "x" * 100_000})
    pieces = (body[i : i + 999].encode() for i in range(0, len(body), 999))
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
    response = httpx.post(url, content=pieces, headers={"content-type": "application/json"})
    assert response.json()["choices"][0]["text"] == "b"
