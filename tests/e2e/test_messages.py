"""Anthropic's Messages API over real HTTP: fields, streams, keys, and the end of calls."""

from __future__ import annotations

import concurrent.futures
import json

import httpx
import pytest

from paceline.server.door import read_keys
from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.messages.writer import MessageWriter
from tests.e2e.live import LiveServer, wait_until
from tests.e2e.test_cases_server import ODD
from tests.e2e.test_tools import HERMES

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
# The model writes random letters: only what is bounded comes to an end.
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Ulm", '"Bad" {Ort}\n😀']}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
WEATHER = {"name": "weather", "input_schema": SCHEMA}
ENDLESS = {"type": "object", "properties": {"a": {"type": "array", "minItems": 9000}},
           "required": ["a"]}  # fmt: skip
LONG = {"max_tokens": 12_000, "output_config": {"format": {"type": "json_schema",
                                                           "schema": ENDLESS}}}  # fmt: skip


@pytest.fixture(scope="module")
def live(long_script_path, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    server = LiveServer(
        long_script_path, chat_template=HERMES, kv_memory_bytes=64 * 2**20, num_threads=1,
        max_num_seqs=1, keys=read_keys(str(keys)),
    )  # fmt: skip
    server.client.headers.update(
        {"x-api-key": "sk-0123456789abcdef", "anthropic-version": "2023-06-01"}
    )
    yield server
    server.close()


def ask(server, path=MESSAGES, **body):
    body = {"max_tokens": 40, "temperature": 0, "messages": HI, **body}
    reply = server.post(path, **body)
    assert reply.status_code == 200, reply.text
    return reply


def events(reply):
    """Return the events of a stream, its framing checked."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in reply.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found, kind):
    deltas = [e["delta"] for e in found if e["type"] == "content_block_delta"]
    return "".join(delta.get(kind, "") for delta in deltas)


def test_an_answer_and_its_stream_are_the_same(live):
    whole = ask(live, system="Be brief.")
    message = whole.json()
    assert message["content"] == [{"type": "text", "text": "HELO"}]
    assert (message["stop_reason"], message["role"]) == ("end_turn", "assistant")
    assert whole.headers["request-id"] == whole.headers["x-request-id"]
    streamed = ask(live, system="Be brief.", stream=True)
    assert streamed.headers["request-id"]
    found = events(streamed)
    assert joined(found, "text") == "HELO"
    assert found[-2]["usage"]["output_tokens"] == message["usage"]["output_tokens"] == 5
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_stop_sequences_are_named_in_the_answer(live):
    for sequence, text in (("L", "HE"), ("ELO", "H"), ("x", "HELO")):
        message = ask(live, stop_sequences=[sequence, "zzz"]).json()
        assert message["content"] == [{"type": "text", "text": text}]
        is_hit = sequence != "x"
        assert message["stop_sequence"] == (sequence if is_hit else None)
        assert message["stop_reason"] == ("stop_sequence" if is_hit else "end_turn")
        end = events(ask(live, stop_sequences=[sequence], stream=True))[-2]["delta"]
        assert end["stop_sequence"] == message["stop_sequence"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_that_must_be_used_is_used(live, choice):
    body = {"tools": [WEATHER], "temperature": 1, "seed": 5, "max_tokens": 400,
            "tool_choice": {**choice, "disable_parallel_tool_use": True}}  # fmt: skip
    message = ask(live, **body).json()
    [block] = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert block["input"]["city"] in SCHEMA["properties"]["city"]["enum"]
    assert message["stop_reason"] == "tool_use"
    found = events(ask(live, **body, stream=True))
    assert json.loads(joined(found, "partial_json")) == block["input"]


def test_a_tool_that_may_be_used_changes_no_words(live):
    for choice in ({"type": "auto"}, {"type": "none"}, None):
        message = ask(live, tools=[WEATHER], tool_choice=choice).json()
        assert message["content"] == [{"type": "text", "text": "HELO"}]


def test_a_use_that_is_cut_has_what_came_whole_in_both_forms(live):
    body = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
    for max_tokens in (1, 25, 45, 60):
        message = ask(live, **body, max_tokens=max_tokens).json()
        assert message["stop_reason"] == "max_tokens"
        found = events(ask(live, **body, max_tokens=max_tokens, stream=True))
        names = [e["content_block"]["name"] for e in found if e["type"] == "content_block_start"]
        assert names == [block["name"] for block in message["content"]]
        assert all(block["input"] == {} for block in message["content"])


def test_a_count_is_what_the_answer_counts(live):
    body = {"system": [{"type": "text", "text": "Be brief."}], "tools": [WEATHER], "messages": [
        *HI, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Ulm"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "sunny" * 1200}]}]}  # fmt: skip
    counted = live.post(COUNT, **body)
    assert counted.status_code == 200, counted.text
    usage = ask(live, **body).json()["usage"]
    num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": num_input}
    again = ask(live, **body).json()["usage"]
    assert again["cache_read_input_tokens"] == num_input - 1


def test_an_answer_by_a_schema_is_json(live):
    format_ = {"type": "json_schema", "schema": SCHEMA}
    message = ask(live, output_config={"format": format_}, max_tokens=300).json()
    assert set(json.loads(message["content"][0]["text"])) == {"city"}


def test_timings_come_with_the_usage(live):
    assert ask(live, timings=True).json()["usage"]["paceline"]["wall_ms"] > 0
    assert events(ask(live, timings=True, stream=True))[-2]["usage"]["paceline"]["wall_ms"] > 0


def test_keys_and_wrong_routes_have_anthropics_errors(live):
    with httpx.Client(base_url=live.client.base_url) as stranger:
        reply = stranger.post(MESSAGES, json={"model": "script"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        keys = {"authorization": "Bearer sk-0123456789abcdef"}
        body = {"model": "other", "max_tokens": 1, "messages": HI}
        reply = stranger.post(MESSAGES, json=body, headers=keys)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert reply.json()["request_id"] == reply.headers["request-id"]
    reply = live.client.get(MESSAGES)
    assert (reply.status_code, reply.json()["type"]) == (405, "error")
    for path in (MESSAGES, COUNT):
        for content in (b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000):
            headers = {"content-type": "application/json"}
            reply = live.client.post(path, content=content, headers=headers)
            assert (reply.status_code, reply.json()["type"]) == (400, "error")
    live.survive()


@pytest.mark.parametrize(
    "thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]
)
def test_thinking_of_a_model_that_does_not_reason_is_refused(live, thinking):
    reply = live.post(MESSAGES, messages=HI, max_tokens=5, thinking=thinking)
    told = "thinking is given, and this model does not reason: leave it out"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, told)


def test_a_prompt_beyond_the_context_is_refused(live):
    reply = live.post(MESSAGES, max_tokens=1, messages=[{"role": "user", "content": "a" * 20_000}])
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("messages: ")


FIELDS = [
    (path, field)
    for path, kind in ((MESSAGES, MessageRequest), (COUNT, CountRequest))
    for field in (*kind.__struct_fields__, *kind.neutral, *kind.noted, "no_such_field")
]


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_an_odd_value_in_any_field_is_an_answer_or_a_4xx_that_names_it(live, path, field):
    for value in ODD:
        body = {"model": "script", "messages": HI}
        body |= {"max_tokens": 2} if path == MESSAGES else {}
        body.pop(field, None)
        content = json.dumps(body)[:-1] + f', "{field}": {value}}}'
        headers = {"content-type": "application/json"}
        reply = live.client.post(path, content=content.encode(), headers=headers)
        if reply.status_code == 200 or (field == "deadline_ms" and reply.status_code in (429, 504)):
            continue
        assert reply.status_code in (400, 404), (value, reply.text)
        error = reply.json()
        assert error["type"] == "error"
        is_broken_json = value in ("NaN", "Infinity", "1e400")
        assert is_broken_json or field in error["error"]["message"], (value, error)
    live.survive()


def test_a_deadline_ends_a_stream_with_an_error_event(live):
    reply = ask(live, **LONG, temperature=1, deadline_ms=400, stream=True)
    found = events(reply)
    assert found[0]["type"] == "message_start"
    assert (found[-1]["type"], found[-1]["error"]["type"]) == ("error", "timeout_error")
    live.drain()


def test_a_stream_that_waits_is_pinged_and_loses_nothing(live, monkeypatch):
    monkeypatch.setattr(MessageWriter, "quiet_s", 0.05)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        holder = pool.submit(ask, live, **LONG, temperature=1, deadline_ms=2500, stream=True)
        wait_until(lambda: live.stats().num_running)
        found = events(ask(live, stream=True))
        holder.result()
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"]
    assert joined(found, "text") == "HELO"
    assert kinds[-1] == "message_stop"
    live.drain()
