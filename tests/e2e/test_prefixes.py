"""/v1/cache/prefixes and `paceline cache`: beginnings that are computed ahead, and pinned."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.server.door import read_keys
from tests.e2e.live import LiveServer, ServeProcess
from tests.e2e.test_cli import paceline

PATH = "/v1/cache/prefixes"
SYSTEM = {"role": "system", "content": "Answer in the manner of a sailor. " * 3}
LONG = "abcdefgh" * 10


@pytest.fixture
def server(script_path):
    live = LiveServer(script_path, kv_memory_bytes=2**20, num_threads=1)
    yield live
    live.close()


def prefix(server, **body):
    response = server.post(PATH, **body)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def pins(server):
    return server.client.get(PATH).json()["data"]


def test_what_was_computed_ahead_is_found_by_the_first_who_asks(server):
    told = prefix(server, prompt=LONG)
    assert (told["object"], told["cached_tokens"], told["pinned_tokens"]) == ("cache.prefix", 0, 0)
    assert cached(server.complete(LONG + "z", max_tokens=1)) >= told["prompt_tokens"] - 1
    again = prefix(server, prompt=LONG)
    assert again["cached_tokens"] == told["prompt_tokens"] - 1
    assert pins(server) == []


def test_a_system_prompt_is_computed_up_to_where_messages_begin_to_differ(server):
    told = prefix(server, messages=[SYSTEM])
    for text in ("Hi", "Ahoy! What is the weather?"):
        answer = server.post("/v1/chat/completions", max_tokens=1,
                             messages=[SYSTEM, {"role": "user", "content": text}])  # fmt: skip
        assert cached(answer.json()) >= told["prompt_tokens"] - 1
    whole = prefix(server, messages=[SYSTEM, {"role": "user", "content": "Hi"}])
    assert whole["prompt_tokens"] > told["prompt_tokens"]


def test_a_pin_is_there_until_it_is_let_go(server):
    told = prefix(server, prompt=LONG, pin=True)
    assert told["pinned_tokens"] == told["prompt_tokens"] // 16 * 16
    assert pins(server) == [told]
    for i in range(60):  # several times what the cache holds
        server.complete(f"{i:03}" * 100, max_tokens=1)
    assert cached(server.complete(LONG + "z", max_tokens=1)) >= told["pinned_tokens"]
    gone = server.client.delete(f"{PATH}/{told['id']}")
    assert gone.json() == {"id": told["id"], "object": "cache.prefix", "deleted": True}
    assert pins(server) == []
    for i in range(60):
        server.complete(f"{i:03}" * 100, max_tokens=1)
    assert cached(server.complete(LONG + "z", max_tokens=1)) == 0
    for name in (told["id"], "none", "", "a/b"):
        missing = server.client.delete(f"{PATH}/{name}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "pin_not_found")


def test_what_is_pinned_again_is_the_same_pin(server):
    first, again = (prefix(server, prompt=LONG, pin=True) for _ in range(2))
    assert (again["id"], again["pinned_tokens"]) == (first["id"], first["pinned_tokens"])
    assert [pin["id"] for pin in pins(server)] == [first["id"]]
    longer = prefix(server, prompt=LONG * 2, pin=True)
    assert longer["id"] != first["id"]
    # Both hold the beginning, and it counts once.
    assert server.engine.stats().num_live_blocks * 16 == longer["pinned_tokens"]


def test_pins_belong_to_a_key(script_path, tmp_path):
    path = tmp_path / "keys"
    path.write_text("a-key-of-the-first\na-key-of-the-second\n")
    with LiveServer(
        script_path, kv_memory_bytes=2**20, num_threads=1, keys=read_keys(str(path))
    ) as server:
        server.client.headers["authorization"] = "Bearer a-key-of-the-first"
        told = prefix(server, prompt=LONG, pin=True)
        server.client.headers["authorization"] = "Bearer a-key-of-the-second"
        assert pins(server) == []
        assert server.client.delete(f"{PATH}/{told['id']}").status_code == 404
        assert cached(server.complete(LONG + "z", max_tokens=1)) == 0
        server.client.headers["authorization"] = "Bearer a-key-of-the-first"
        assert pins(server) == [told]
        size = server.engine.stats().num_blocks * 16
        # Longer and longer ones: their common beginning is in the key's share once.
        held = [prefix(server, prompt="c" * 16 * n, pin=True) for n in range(12, 32)]
        assert sum(pin["pinned_tokens"] for pin in held) > size // 4
        refused = None
        for i in range(size // 480):
            response = server.post(PATH, prompt=f"{i:03}" * 160, pin=True)
            if response.status_code != 200:
                refused = response.json()["error"]["message"]
                break
        assert "this key's pins hold" in refused
        server.client.headers["authorization"] = "Bearer a-key-of-the-second"
        assert prefix(server, prompt="b" * 200, pin=True)["pinned_tokens"] >= 192


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "messages": []}, 400, "prompt"),
        ({"prompt": "a", "tools": []}, 400, "tools"),
        ({"prompt": "a", "pin": True}, 400, "pin"),
        ({"prompt": LONG, "pin": "yes"}, 400, "pin"),
        ({"prompt": LONG, "stream": True}, 400, "stream"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "a" * 5000}, 400, "prompt"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "system", "content": "a" * 5000}]}, 400, "messages"),
        ({"prompt": LONG, "model": "other"}, 404, "model"),
        ({"prompt": LONG, "cache_salt": ""}, 400, "cache_salt"),
    ],
)
def test_bad_bodies_are_refused_by_field(server, body, status, param):
    response = server.client.post(PATH, json={"model": server.name, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_page_may_not_send_a_body_without_a_type(server):
    body = json.dumps({"model": server.name, "prompt": LONG, "pin": True})
    refused = server.client.post(PATH, content=body, headers={"origin": "https://evil.example"})
    assert (refused.status_code, pins(server)) == (415, [])
    assert server.client.post(PATH, content=body).status_code == 200


def test_half_of_the_cache_can_be_pinned_and_no_more(server):
    size = server.engine.stats().num_blocks * 16
    for i in range(size // 480):
        response = server.post(PATH, prompt=f"{i:03}" * 160, pin=True)
        if response.status_code != 200:
            break
    assert (response.status_code, response.json()["error"]["param"]) == (400, "pin")
    assert size / 2 - 480 < sum(pin["pinned_tokens"] for pin in pins(server)) <= size / 2


def test_the_command_warms_pins_lists_and_lets_go(script_path, tmp_path):
    system, chat = tmp_path / "system.txt", tmp_path / "chat.json"
    system.write_text(SYSTEM["content"])
    chat.write_text(json.dumps({"messages": [SYSTEM, {"role": "user", "content": "Hi"}]}))
    with ServeProcess(script_path, "--kv-memory", "8M") as server:
        url = ("--url", f"127.0.0.1:{server.port}")
        cold = paceline("cache", "warm", f"@{system}", *url)
        assert (cold.returncode, ", 0 of them known before" in cold.stdout) == (0, True)
        told = json.loads(
            paceline("cache", "warm", "--messages", str(chat), "--pin", "--json", *url).stdout
        )
        assert told["cached_tokens"] > 90
        listed = paceline("cache", "list", *url)
        assert listed.stdout.startswith(f"{told['id']}  {told['pinned_tokens']} of ")
        assert json.loads(paceline("cache", "list", "--json", *url).stdout)["data"] == [told]
        assert paceline("cache", "unpin", told["id"], *url).returncode == 0
        refused = paceline("cache", "unpin", told["id"], *url)
        assert (refused.returncode, "there is no pin" in refused.stderr) == (1, True)
        raw = paceline("cache", "warm", LONG, "--raw", *url)
        assert raw.returncode == 0
        assert cached(server.complete(LONG + "z", max_tokens=1)) >= len(LONG) - 1


@pytest.mark.parametrize("text", ["hello", '[{"role": "user", "content": "\\ud800"}]'])
def test_a_file_that_is_no_json_is_named(text, tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(text)
    refused = paceline("cache", "warm", "--messages", str(path))
    assert (refused.returncode, f"{path} holds no JSON" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of them"),
        (("a", "--messages", "none.json"), "one of them"),
        (("--messages", "none.json"), "none.json cannot be read"),
        (("@none.txt",), "none.txt cannot be read"),
        (("a", "--url", "127.0.0.1:1"), "is the server up?"),
        (("a", "--url", "127.0.0.1:0"), "is no address"),
    ],
)
def test_what_the_command_cannot_do_is_said(arguments, said):
    refused = paceline("cache", "warm", *arguments)
    assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr


@pytest.mark.parametrize("said", [b"<html>hello</html>", b"{}", b'{"data": []}', b'{"data": [{}]}'])
def test_a_server_of_another_kind_is_told_apart(said):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        url = ("--url", f"127.0.0.1:{other.server_port}")
        refused = paceline("cache", "warm", "a", *url)
        listed = None if b"[]" in said else paceline("cache", "list", "--json", *url)
        other.shutdown()
        thread.join()
    for answer in filter(None, (refused, listed)):
        assert answer.returncode == 1
        assert "does not answer as a Paceline server does" in answer.stderr
        assert "Traceback" not in answer.stderr
