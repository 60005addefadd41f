"""Streams of responses in the background: followed, left and taken up again."""

import json
import signal
import threading

import httpx
import pytest

from paceline.server.door import read_keys
from tests.e2e.live import LiveServer, ServeProcess, wait_until
from tests.e2e.test_responses import KEYS, LONG, RESPONSES, state, text_of
from tests.e2e.test_tools import HERMES

ASK = {"model": "script", "input": "Hi", "temperature": 0, "background": True, "stream": True}
LONG_ASK = {**ASK, **LONG, "seed": 1}


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


def parsed(lines):
    """Yield the events of a stream's lines as they come."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line:
            found = json.loads(line.removeprefix("data: "))
            assert found["type"] == name
            yield found


def begin(server, num_events, **body):
    """Ask, read the first events, and leave."""
    with server.client.stream("POST", RESPONSES, json={**ASK, **body}) as reply:
        assert reply.status_code == 200, reply.read()
        events = parsed(reply.iter_lines())
        return [next(events) for _ in range(num_events)]


def follow(server, response_id, **query):
    params = {"stream": "true", **query}
    reply = server.client.get(f"{RESPONSES}/{response_id}", params=params, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return list(parsed(reply.iter_lines()))


def cancel(server, response_id):
    return server.client.post(f"{RESPONSES}/{response_id}/cancel")


def test_a_stream_tells_that_it_is_queued_and_ends_with_what_is_kept(live):
    with live.client.stream("POST", RESPONSES, json=ASK) as reply:
        events = list(parsed(reply.iter_lines()))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert kinds[-1] == "completed"
    assert [events[i]["response"]["status"] for i in (0, 1, 2)] == [
        "queued", "queued", "in_progress"
    ]  # fmt: skip
    last = events[-1]["response"]
    assert text_of(last) == "HELO"
    assert state(live, last) == last
    assert follow(live, last["id"]) == events
    assert follow(live, last["id"], starting_after=3, include_obfuscation="false") == events[4:]
    assert follow(live, last["id"], starting_after=len(events)) == []
    assert live.calls[-1].outcome == "ok"


def test_a_response_goes_on_without_its_client_who_takes_it_up_where_it_was(live):
    first = begin(live, 8, **{**LONG, "max_output_tokens": 1500})
    response = first[0]["response"]
    rest = follow(live, response["id"], starting_after=first[-1]["sequence_number"])
    everything = follow(live, response["id"])
    assert first + rest == everything
    assert [event["sequence_number"] for event in everything] == list(range(len(everything)))
    assert everything[-1]["type"] == "response.incomplete"
    assert everything[-1]["response"]["usage"]["output_tokens"] == 1500
    deltas = "".join(e["delta"] for e in everything if e["type"].endswith("text.delta"))
    assert deltas == text_of(state(live, response))
    live.drain()
    assert live.calls[-1].outcome == "ok"


def test_while_it_is_made_a_response_has_no_output_and_may_be_followed_by_several(live):
    first = begin(live, 30, **LONG)
    response = first[0]["response"]
    assert (state(live, response)["status"], state(live, response)["output"]) == ("in_progress", [])
    seen = {"a": [], "b": []}

    def read(events):
        url, params = f"{RESPONSES}/{response['id']}", {"stream": "true"}
        with live.client.stream("GET", url, params=params) as reply:
            events.extend(parsed(reply.iter_lines()))

    readers = [threading.Thread(target=read, args=(events,)) for events in seen.values()]
    for reader in readers:
        reader.start()
    wait_until(lambda: all(seen.values()))
    assert cancel(live, response["id"]).json()["status"] == "cancelled"
    for reader in readers:
        reader.join(30)
    assert seen["a"] == seen["b"]
    assert seen["a"][:30] == first
    assert (seen["a"][-1]["type"], seen["a"][-1]["code"]) == ("error", "response_cancelled")
    assert follow(live, response["id"]) == seen["a"]
    assert state(live, response)["output"] == []
    live.drain()
    assert live.calls[-1].outcome == "aborted"


def test_a_response_that_fails_tells_so_in_its_stream_and_afterwards(live):
    with live.client.stream("POST", RESPONSES, json={**LONG_ASK, "deadline_ms": 400}) as reply:
        events = list(parsed(reply.iter_lines()))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "deadline_exceeded"
    failed = events[-1]["response"]
    assert state(live, failed) == failed
    assert follow(live, failed["id"]) == events
    live.drain()


def test_deleting_a_response_ends_its_stream_and_forgets_its_events(live):
    first = begin(live, 4, **LONG)
    response_id = first[0]["response"]["id"]
    assert live.client.delete(f"{RESPONSES}/{response_id}").json()["deleted"] is True
    reply = live.client.get(f"{RESPONSES}/{response_id}", params={"stream": "true"})
    assert reply.status_code == 404
    live.drain()


def test_a_key_follows_the_responses_of_no_other(live):
    response_id = begin(live, 1)[0]["response"]["id"]
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    with httpx.Client(base_url=live.client.base_url, headers=headers) as other:
        reply = other.get(f"{RESPONSES}/{response_id}", params={"stream": "true"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize(
    ("query", "param"),
    [({"stream": "yes"}, "stream"), ({"stream": "true", "starting_after": "x"}, "starting_after"),
     ({"stream": "true", "starting_after": "-1"}, "starting_after"),
     ({"stream": "true", "starting_after": "1" * 40}, "starting_after"),
     ({"stream": "true", "include_obfuscation": "1"}, "include_obfuscation"),
     ({"starting_after": "1"}, "starting_after"),
     ({"include_obfuscation": "true"}, "include_obfuscation"),
     ({"include": "x"}, "include")],
)  # fmt: skip
def test_a_question_that_cannot_be_answered_is_refused_by_name(live, query, param):
    response_id = begin(live, 1)[0]["response"]["id"]
    reply = live.client.get(f"{RESPONSES}/{response_id}", params=query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [{"stream": False}, {"background": False}])
def test_only_a_stream_in_the_background_has_events_that_are_kept(live, body):
    reply = live.client.post(RESPONSES, json={**ASK, **body})
    if body == {"stream": False}:
        response = reply.json()
        wait_until(lambda: state(live, response)["status"] == "completed")
    else:
        response = list(parsed(reply.iter_lines()))[-1]["response"]
    reply = live.client.get(f"{RESPONSES}/{response['id']}", params={"stream": "true"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")


def test_a_server_that_is_stopped_ends_the_streams_of_its_background(long_script_path):
    with ServeProcess(
        long_script_path, "--kv-memory", "64M", "--threads", "1", "--grace", "1"
    ) as server:
        with server.client.stream("POST", RESPONSES, json=LONG_ASK) as reply:
            events = parsed(reply.iter_lines())
            response = next(events)["response"]
            with server.client.stream(
                "GET", f"{RESPONSES}/{response['id']}", params={"stream": "true"}
            ) as second:
                follower = parsed(second.iter_lines())
                next(follower)
                server.process.send_signal(signal.SIGTERM)
                ends = [list(one)[-2:] for one in (events, follower)]
        server.process.wait(20)
    assert ends[0] == ends[1]
    assert [event["type"] for event in ends[0]] == ["error", "response.failed"]
    assert ends[0][0]["code"] == "shutting_down"
    assert "Traceback" not in server.log
    assert "never awaited" not in server.log
