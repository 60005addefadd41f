"""OpenAI's Responses API over real HTTP: fields, streams, what is kept, and for whom."""

from __future__ import annotations

import json
import signal

import httpx
import pytest

from paceline.server.door import read_keys
from paceline.server.responses.schema import ResponseRequest
from tests.e2e.live import LiveServer, ServeProcess, wait_until
from tests.e2e.test_cases_server import ODD
from tests.e2e.test_tools import HERMES

RESPONSES = "/v1/responses"
KEYS = ("sk-tenant-one-0123", "sk-tenant-two-0123")
# The model writes random letters: only what is bounded comes to an end.
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Ulm", '"Bad" {Ort}\n😀']}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
# What it is bound to ends long after anybody looks.
ENDLESS = {"type": "object", "properties": {"a": {"type": "array", "minItems": 9000}},
           "required": ["a"]}  # fmt: skip

LONG = {"background": True, "temperature": 1, "max_output_tokens": 12_000,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": ENDLESS}}}  # fmt: skip


@pytest.fixture(scope="module")
def live(long_script_path, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS))
    server = LiveServer(
        long_script_path, chat_template=HERMES, kv_memory_bytes=64 * 2**20, num_threads=1,
        keys=read_keys(str(keys)),
    )  # fmt: skip
    server.client.headers["authorization"] = f"Bearer {KEYS[0]}"
    yield server
    server.close()


def ask(server, **body):
    reply = server.post(RESPONSES, **{"input": "Hi", "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply


def text_of(response):
    return "".join(p["text"] for i in response["output"] for p in i.get("content", ()))


def events(reply):
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in reply.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_answer_and_its_stream_are_the_same(live):
    response = ask(live, instructions="Be brief.", metadata={"a": "b"}).json()
    assert (response["status"], text_of(response)) == ("completed", "HELO")
    assert response["id"].startswith("resp_")
    assert response["metadata"] == {"a": "b"}
    found = events(ask(live, instructions="Be brief.", metadata={"a": "b"}, stream=True))
    last = found[-1]["response"]
    assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == "HELO"
    for name in response.keys() - {"id", "output", "created_at", "completed_at", "usage"}:
        assert last[name] == response[name], name
    assert last["usage"]["total_tokens"] == response["usage"]["total_tokens"]


def test_a_response_can_be_asked_for_again_until_it_is_deleted(live):
    for is_stream in (False, True):
        reply = ask(live, stream=is_stream)
        response = events(reply)[-1]["response"] if is_stream else reply.json()
        path = f"{RESPONSES}/{response['id']}"
        assert live.client.get(path).json() == response
        gone = live.client.delete(path)
        assert gone.json() == {"id": response["id"], "object": "response", "deleted": True}
        for reply in (live.client.get(path), live.client.delete(path),
                      live.client.get(f"{path}/input_items"),
                      live.client.post(f"{path}/cancel")):  # fmt: skip
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")


def test_what_is_not_to_be_kept_is_not(live):
    response = ask(live, store=False).json()
    assert response["store"] is False
    assert live.client.get(f"{RESPONSES}/{response['id']}").status_code == 404


def test_a_conversation_goes_on_as_if_it_were_sent_again(live):
    first = ask(live, instructions="Left out later").json()
    second = ask(live, previous_response_id=first["id"], input="More").json()
    assert second["previous_response_id"] == first["id"]
    turns = [{"role": "user", "content": "Hi"}, *first["output"],
             {"role": "user", "content": "More"}]  # fmt: skip
    again = ask(live, input=turns).json()
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    live.client.delete(f"{RESPONSES}/{first['id']}")
    third = ask(live, previous_response_id=second["id"], input="And?").json()
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_input_items_are_listed_in_pages(live):
    first = ask(live).json()
    second = ask(live, previous_response_id=first["id"], input="More").json()
    path = f"{RESPONSES}/{second['id']}/input_items"
    listed = live.client.get(path, params={"order": "asc"}).json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    assert listed["data"][1] == first["output"][0]
    assert not listed["has_more"]
    page = live.client.get(path, params={"limit": 2}).json()
    assert [item["id"] for item in page["data"]] == [
        item["id"] for item in reversed(listed["data"][1:])
    ]
    assert (page["has_more"], page["last_id"]) == (True, listed["data"][1]["id"])
    rest = live.client.get(path, params={"after": page["last_id"]}).json()
    assert rest["data"] == listed["data"][:1]
    for query in ({"limit": 0}, {"limit": "x"}, {"limit": 101}, {"order": "up"}, {"after": "x"},
                  {"include[]": "x"}):  # fmt: skip
        reply = live.client.get(path, params=query)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(query)))
    for query in ({"stream": "true"}, {"starting_after": 1}):
        reply = live.client.get(f"{RESPONSES}/{second['id']}", params=query)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(query)))


def test_a_key_sees_the_responses_of_no_other(live):
    response = ask(live).json()
    path = f"{RESPONSES}/{response['id']}"
    with httpx.Client(base_url=live.client.base_url) as other:
        assert other.get(path).status_code == 401
        other.headers["authorization"] = f"Bearer {KEYS[1]}"
        assert other.get(path).status_code == 404
        assert other.delete(path).status_code == 404
        assert other.get(f"{path}/input_items").status_code == 404
        body = {"model": "script", "input": "x", "previous_response_id": response["id"]}
        reply = other.post(RESPONSES, json=body)
        assert reply.json()["error"]["code"] == "previous_response_not_found"
    assert live.client.get(path).json() == response


@pytest.mark.parametrize(
    ("metadata", "param"),
    [({str(i): "x" for i in range(17)}, "metadata"), ({"a": "x" * 513}, "metadata.a"),
     ({"k" * 65: "x"}, "metadata")],
)  # fmt: skip
def test_metadata_is_bounded_since_every_event_repeats_it(live, metadata, param):
    ask(live, metadata={"k" * 64: "x" * 512})
    reply = live.post(RESPONSES, input="Hi", metadata=metadata)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def state(server, response):
    reply = server.client.get(f"{RESPONSES}/{response['id']}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_response_in_the_background_is_asked_for_until_it_has_ended(live):
    response = ask(live, background=True, metadata={"a": "b"}).json()
    assert (response["status"], response["output"], response["usage"]) == ("queued", [], None)
    assert response["background"] is True
    wait_until(lambda: state(live, response)["status"] == "completed")
    ended = state(live, response)
    assert (text_of(ended), ended["usage"]["output_tokens"]) == ("HELO", 5)
    assert ended["metadata"] == {"a": "b"}
    more = ask(live, previous_response_id=response["id"], input="More").json()
    assert text_of(more) == "HELO"
    path = f"{RESPONSES}/{response['id']}"
    items = live.client.get(f"{path}/input_items").json()["data"]
    assert [item["role"] for item in items] == ["user"]
    reply = live.client.post(f"{path}/cancel")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_id")


def test_a_response_in_the_background_can_be_cancelled_and_is_no_beginning(live):
    response = ask(live, **LONG).json()
    path = f"{RESPONSES}/{response['id']}"
    wait_until(lambda: state(live, response)["status"] == "in_progress")
    refused = live.post(RESPONSES, input="x", previous_response_id=response["id"])
    assert refused.json()["error"]["param"] == "previous_response_id"
    assert "in_progress" in refused.json()["error"]["message"] or "queued" in refused.text
    for _ in range(2):
        cancelled = live.client.post(f"{path}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert cancelled.json()["output"] == []
    assert state(live, response)["status"] == "cancelled"
    live.drain()
    assert live.calls[-1].outcome == "aborted"


def test_deleting_a_response_in_the_background_ends_it(live):
    response = ask(live, **LONG).json()
    path = f"{RESPONSES}/{response['id']}"
    assert live.client.delete(path).json()["deleted"] is True
    assert live.client.get(path).status_code == 404
    live.drain()
    assert live.client.get(path).status_code == 404


def test_a_response_in_the_background_that_fails_says_why(live):
    response = ask(live, **LONG, deadline_ms=300).json()
    wait_until(lambda: state(live, response)["status"] == "failed")
    assert "deadline of 300 ms" in state(live, response)["error"]["message"]
    live.drain()


def test_many_responses_in_the_background_are_made_together_and_leave_nothing_behind(live):
    responses = [ask(live, background=True).json() for _ in range(20)]
    for response in responses:
        wait_until(lambda: state(live, response)["status"] == "completed")  # noqa: B023
        assert text_of(state(live, response)) == "HELO"
    live.drain()
    live.survive()


def test_a_key_cannot_end_what_another_has_in_the_background(live):
    response = ask(live, **LONG).json()
    path = f"{RESPONSES}/{response['id']}"
    with httpx.Client(base_url=live.client.base_url) as other:
        other.headers["authorization"] = f"Bearer {KEYS[1]}"
        assert other.get(path).status_code == 404
        assert other.post(f"{path}/cancel").status_code == 404
        assert other.delete(path).status_code == 404
    assert state(live, response)["status"] in ("queued", "in_progress")
    assert live.client.post(f"{path}/cancel").json()["status"] == "cancelled"


def test_a_server_that_is_stopped_ends_its_background_first(long_script_path):
    """One has its grace and is made; one that is too long is ended with it."""
    with ServeProcess(
        long_script_path, "--kv-memory", "64M", "--threads", "1", "--grace", "1"
    ) as server:
        response = ask(server, **LONG).json()
        wait_until(lambda: state(server, response)["status"] == "in_progress")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/ready").status_code == 503)
        assert state(server, response)["status"] == "in_progress"  # it may still be asked for
        server.process.wait(20)
    assert "Traceback" not in server.log
    assert "never awaited" not in server.log


def test_a_response_that_has_ended_cannot_be_cancelled(live):
    response = ask(live).json()
    reply = live.client.post(f"{RESPONSES}/{response['id']}/cancel")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_id")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_tool_that_must_be_called_is_called(live, choice):
    body = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False,
            "temperature": 1, "seed": 5, "max_output_tokens": 400}  # fmt: skip
    response = ask(live, **body).json()
    [call] = response["output"]
    assert (call["type"], call["name"], call["status"]) == (
        "function_call", "weather", "completed"
    )  # fmt: skip
    found = events(ask(live, **body, stream=True))
    streamed = "".join(e["delta"] for e in found if e["type"].endswith("arguments.delta"))
    assert streamed == call["arguments"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    more = {"previous_response_id": response["id"], "input": [result], "tools": [WEATHER]}
    assert text_of(ask(live, **more).json()) == "HELO"


def test_an_answer_that_is_cut_says_so_in_both_forms(live):
    response = ask(live, max_output_tokens=2).json()
    assert (response["status"], text_of(response)) == ("incomplete", "HE")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert events(ask(live, max_output_tokens=2, stream=True))[-1]["type"] == "response.incomplete"


def test_an_answer_by_a_schema_is_json(live):
    format_ = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    response = ask(live, text={"format": format_}, max_output_tokens=300).json()
    assert set(json.loads(text_of(response))) == {"city"}
    assert response["text"]["format"]["schema"] == SCHEMA


def test_a_deadline_ends_a_stream_as_failed(live):
    format_ = {"type": "json_schema", "name": "a", "schema": ENDLESS}
    found = events(ask(live, text={"format": format_}, temperature=1, deadline_ms=400,
                       max_output_tokens=12_000, stream=True))  # fmt: skip
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert found[-2]["code"] == "deadline_exceeded"
    assert live.client.get(f"{RESPONSES}/{found[0]['response']['id']}").status_code == 404
    live.drain()


def test_timings_come_with_the_usage(live):
    assert ask(live, timings=True).json()["usage"]["paceline"]["wall_ms"] > 0


FIELDS = [*ResponseRequest.__struct_fields__, *ResponseRequest.neutral, *ResponseRequest.noted,
          "no_such_field"]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_in_any_field_is_an_answer_or_a_4xx_that_names_it(live, field):
    for value in ODD:
        body = {"model": "script", "input": "Hi", "max_output_tokens": 2}
        body.pop(field, None)
        content = json.dumps(body)[:-1] + f', "{field}": {value}}}'
        headers = {"content-type": "application/json"}
        reply = live.client.post(RESPONSES, content=content.encode(), headers=headers)
        if reply.status_code == 200 or (field == "deadline_ms" and reply.status_code in (429, 504)):
            continue
        assert reply.status_code in (400, 404), (value, reply.text)
        error = reply.json()["error"]
        is_broken_json = value in ("NaN", "Infinity", "1e400")
        assert is_broken_json or field in f"{error['param']} {error['message']}", (value, error)


def test_odd_bodies_and_routes_leave_the_server_whole(live):
    for content in (b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000):
        headers = {"content-type": "application/json"}
        reply = live.client.post(RESPONSES, content=content, headers=headers)
        assert (reply.status_code, "message" in reply.json()["error"]) == (400, True)
    assert live.client.get(RESPONSES).status_code == 405
    assert live.client.get(f"{RESPONSES}/{'x' * 10_000}").status_code == 404
    reply = live.post(RESPONSES, input="a" * 20_000)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
    live.survive()
    live.drain()
