"""Every field of every API, alone and beside each other one: it works, or a 400 names it."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.e2e.live import ServeProcess, parse_events
from tests.e2e.parameters import APIS, CHATS, COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.e2e.test_cases_server import ODD
from tests.e2e.test_tools import HI

USES = [(name, field) for name, api in APIS.items() for field in api.uses]
NEUTRAL = [
    (name, field) for name, api in APIS.items() for field in getattr(api.kind, "neutral", ())
]


@pytest.fixture(scope="module")
def server(script_path):
    live = ServeProcess(script_path, "--kv-memory", "8M", "--threads", "1")
    yield live
    live.survive()
    live.close()


def blamed(reply, fields):
    """Assert that a 400 names one of `fields`, and return which."""
    error = reply.json()["error"]
    told = error.get("param") or error["message"]  # Anthropic's errors name it in the message
    blames = [field for field in fields if told.startswith(field)]
    assert blames, (reply.text, fields)
    return max(blames, key=len)


def has_answer(reply, api: Api, body):
    """Assert that an answer is whole, streamed or not."""
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        if "n" in body:
            assert len(reply.json()["choices"]) == body["n"]
        return
    if api in (CHATS, COMPLETIONS):
        *events, last = parse_events(reply.content)
        assert last == "[DONE]"
        ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert sorted(ends) == list(range(body.get("n", 1)))
    else:
        kinds = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
        assert kinds[-1] in ("response.completed", "response.incomplete", "message_stop")
        assert "error" not in kinds


@pytest.mark.parametrize("name", APIS)
def test_each_field_that_the_server_knows_has_a_use_here(name):
    api = APIS[name]
    assert api.fields - {"model"} == (api.uses.keys() | api.body.keys()) - {"model"}


@pytest.mark.parametrize(("name", "field"), USES)
def test_a_field_works_or_is_refused_by_its_name(server, name, field):
    api = APIS[name]
    body = api.beside(field)
    reply = server.post(api.path, **body)
    if field in api.refused:
        assert reply.status_code == 400, reply.text
        assert blamed(reply, body) == field
    else:
        has_answer(reply, api, body)


@pytest.mark.parametrize("name", APIS)
def test_a_misspelt_field_is_refused_by_its_name(server, name):
    reply = server.post(APIS[name].path, **APIS[name].body, temprature=1)
    assert reply.status_code == 400
    assert blamed(reply, ["temprature"])


@pytest.mark.parametrize(("name", "field"), NEUTRAL)
def test_a_field_without_effect_is_refused_unless_it_asks_for_nothing(server, name, field):
    api = APIS[name]
    for value in api.kind.neutral[field]:
        has_answer(server.post(api.path, **api.body, **{field: value}), api, {})
    reply = server.post(api.path, **api.body, **{field: "something"})
    assert reply.status_code == 400, reply.text
    assert blamed(reply, [field])


@pytest.mark.parametrize(("name", "field"), USES)
def test_two_fields_work_together_or_one_is_refused_by_its_name(server, name, field):
    api = APIS[name]
    pairs = [pair for pair in itertools.combinations(api.uses, 2) if pair[0] == field]
    for pair in pairs:
        body = api.beside(*pair)
        reply = server.post(api.path, **body)
        if reply.status_code == 400:
            blamed(reply, body)
        else:
            assert not api.refused & {*pair}, pair
            has_answer(reply, api, body)


@pytest.mark.parametrize("name", ["counts", "embeddings", "tokens", "texts", "prefixes"])
def test_an_odd_value_in_any_field_is_an_answer_or_a_4xx_that_names_it(server, name):
    """SRV-01, of the APIs that write nothing; the others have this beside their own tests."""
    api = APIS[name]
    for field, value in itertools.product((*sorted(api.fields), "no_such_field"), ODD):
        body = {"model": server.name, **api.body}
        body.pop(field, None)
        content = json.dumps(body)[:-1] + f', "{field}": {value}}}'
        headers = {"content-type": "application/json"}
        reply = server.client.post(api.path, content=content.encode(), headers=headers)
        if reply.status_code == 200 or (field == "deadline_ms" and reply.status_code in (429, 504)):
            continue
        assert reply.status_code in (400, 404), (field, value, reply.text)
        told = str(reply.json()["error"])
        is_broken_json = value in ("NaN", "Infinity", "1e400")
        # One of two fields that are both absent, or both there, is named.
        others = {"prompt", "messages"} if field in ("prompt", "messages", "tools") else set()
        assert is_broken_json or any(f in told for f in {field, *others}), (field, value, told)


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, "HELO"), ({"stop": ["x", "y", "z", "q", "LO"]}, "HE"), ({"max_tokens": 3}, "HEL"),
        ({"max_completion_tokens": 2}, "HE"), ({"stop_token_ids": [ord("L")]}, "HE"),
        ({"stop": "L", "include_stop_str_in_output": True}, "HEL"),
        ({"structured_outputs": {"regex": "HEL"}}, "HEL"),
        ({"logit_bias": {str(ord("E")): -100}, "structured_outputs": {"choice": ["HE", "HX"]}},
         "HX"),
        ({"bad_words": ["X"], "structured_outputs": {"choice": ["HY", "HX"]}}, "HY"),
    ],
)  # fmt: skip
def test_a_field_of_chats_has_its_effect_whole_and_streamed(server, fields, content):
    body = {"temperature": 0, **fields}
    for n in (1, 2):
        answer = server.chat(n=n, **body)
        assert [c["message"]["content"] for c in answer["choices"]] == [content] * n
    events = server.stream(CHATS.path, messages=HI, **body)
    pieces = [choice["delta"].get("content", "") for e in events[:-1] for choice in e["choices"]]
    assert "".join(pieces) == content


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"max_tokens": 3}, "bcd"), ({"stop": "e"}, "bcd"), ({"stop_token_ids": [101]}, "bcd"),
        ({"stop": "e", "include_stop_str_in_output": True}, "bcde"),
        ({"echo": True, "stop": "d"}, "abc"), ({"stop": ["c"], "min_tokens": 3}, "bcdefgh"),
        ({"max_tokens": 2, "logit_bias": {"98": -100, "120": 100}}, "xx"),
        ({"bad_words": ["b"], "structured_outputs": {"choice": ["b", "cd"]}}, "cd"),
    ],
)  # fmt: skip
def test_a_field_of_completions_has_its_effect_whole_and_streamed(server, fields, content):
    body = {"prompt": "a", "temperature": 0, "max_tokens": 7, **fields}
    for n in (1, 2):
        assert [c["text"] for c in server.complete(n=n, **body)["choices"]] == [content] * n
    events = server.stream(COMPLETIONS.path, **body)
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == content


def said(reply):
    """Return the text of a response or a message, whole or streamed."""
    assert reply.status_code == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        answer = reply.json()
        items = answer.get("output", [answer])
        return "".join(part["text"] for item in items for part in item["content"])
    data = [json.loads(x[6:]) for x in reply.text.splitlines() if x.startswith("data: ")]
    deltas = [event["delta"] for event in data if event["type"].endswith("delta")]
    return "".join(d if isinstance(d, str) else d.get("text", "") for d in deltas)


@pytest.mark.parametrize(
    ("api", "fields", "content"),
    [
        (RESPONSES, {}, "HELO"), (RESPONSES, {"max_output_tokens": 3}, "HEL"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a",
                                         "schema": {"const": "HX"}}}}, '"HX"'),
        (MESSAGES, {}, "HELO"), (MESSAGES, {"max_tokens": 3}, "HEL"),
        (MESSAGES, {"stop_sequences": ["x", "LO"]}, "HE"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema",
                                                 "schema": {"const": "HX"}}}}, '"HX"'),
    ],
)  # fmt: skip
def test_a_field_of_responses_and_messages_has_its_effect(server, api, fields, content):
    for stream in (False, True):
        body = {**api.body, "temperature": 0, "stream": stream, **fields}
        assert said(server.post(api.path, **body)) == content
