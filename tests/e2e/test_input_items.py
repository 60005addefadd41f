"""GET /v1/responses/ID/input_items: what an answer followed, page by page."""

from __future__ import annotations

import pytest

from tests.e2e.live import LiveServer, wait_until
from tests.e2e.test_responses import LONG, RESPONSES
from tests.e2e.test_tools import HERMES

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "x"}


@pytest.fixture(scope="module")
def live(long_script_path):
    server = LiveServer(
        long_script_path, chat_template=HERMES, kv_memory_bytes=64 * 2**20, num_threads=1
    )
    yield server
    server.close()


def ask(server, given, **body):
    fields = {"temperature": 0, "max_output_tokens": 2, **body}
    return server.post(RESPONSES, input=given, **fields)


def listed(server, response_id, **query):
    reply = server.client.get(f"{RESPONSES}/{response_id}/input_items", params=query)
    assert reply.status_code == 200, reply.text
    page = reply.json()
    ids = [item["id"] for item in page["data"]]
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[0], ids[-1])
    return page


def turns(num, **fields):
    return [{"role": "user", "content": str(i), **fields} for i in range(num)]


def test_a_word_alone_is_one_message_with_an_id(live):
    response = ask(live, "Hi").json()
    [item] = listed(live, response["id"])["data"]
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "role": "user", "status": "completed",
                    "content": [{"type": "input_text", "text": "Hi"}]}  # fmt: skip


def test_calls_results_and_thoughts_are_listed_as_they_were_sent(live):
    parts = [{"type": "input_text", "text": "y"}]
    sent = [{"role": "developer", "content": "d"}, *turns(1, id="msg_mine"), CALL, RESULT,
            {**RESULT, "output": parts, "id": "fco_mine", "status": "incomplete"},
            {"role": "assistant", "content": "a"}]  # fmt: skip
    response = ask(live, sent, instructions="not an item").json()
    items = listed(live, response["id"], order="asc")["data"]
    assert [item["type"] for item in items] == [
        "message", "message", "function_call", "function_call_output", "function_call_output",
        "message",
    ]  # fmt: skip
    assert items[1]["id"] == "msg_mine"
    assert items[2] == {**CALL, "id": items[2]["id"], "status": "completed"}
    assert items[3] == {**RESULT, "id": items[3]["id"], "status": "completed"}
    assert items[4] == sent[4]
    said = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    assert items[5]["content"] == [said]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 7, 45])
def test_pages_follow_each_other_to_the_end(live, order, limit):
    response = ask(live, turns(45)).json()
    seen, query = [], {"order": order, "limit": limit}
    while True:
        page = listed(live, response["id"], **query)
        seen += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        assert len(page["data"]) == limit
        assert len(seen) < 45
        query["after"] = page["last_id"]
    assert seen == [str(i) for i in range(45)][:: 1 if order == "asc" else -1]
    last = {**query, "after": listed(live, response["id"], order=order, limit=45)["last_id"]}
    empty = live.client.get(f"{RESPONSES}/{response['id']}/input_items", params=last).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None,
                     "has_more": False}  # fmt: skip


def test_the_latest_twenty_come_first_where_nothing_is_asked(live):
    response = ask(live, turns(25)).json()
    page = listed(live, response["id"])
    assert [item["content"][0]["text"] for item in page["data"]] == [
        str(i) for i in range(24, 4, -1)
    ]
    assert page["has_more"]


def test_an_id_that_two_items_have_is_refused_since_pages_could_not_go_on_after_it(live):
    reply = ask(live, turns(2, id="msg_1"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[1].id")
    first = ask(live, turns(1, id="msg_1")).json()
    for again in (turns(1, id="msg_1"), first["output"]):
        reply = ask(live, again, previous_response_id=first["id"])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[0].id")
    assert ask(live, turns(2, id="")).status_code == 200  # none of its own
    assert ask(live, [*turns(1, id="msg_1"), *first["output"]]).status_code == 200


def test_a_response_that_is_still_made_has_its_items_already(live):
    response = ask(live, "Hi", **LONG).json()
    path = f"{RESPONSES}/{response['id']}"
    try:
        [item] = listed(live, response["id"])["data"]
        assert item["content"][0]["text"] == "Hi"
        wait_until(lambda: live.client.get(path).json()["status"] == "in_progress")
        assert listed(live, response["id"])["data"] == [item]
    finally:
        live.client.post(f"{path}/cancel")
    assert listed(live, response["id"])["data"] == [item]


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"limit": "1.5"}, {"limit": ""},
                                   {"order": ""}, {"order": "ASC"}, {"after": ""},
                                   {"before": "x"}, {"include": "x"}])  # fmt: skip
def test_what_a_query_may_not_have_is_named(live, query):
    response = ask(live, "Hi").json()
    reply = live.client.get(f"{RESPONSES}/{response['id']}/input_items", params=query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(query)))
