"""What one client sends may be refused, and must not hold up, cost memory of, or change another's.

The plain cases, field by field, are in test_cases_server.py; these are the large ones.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time

import pytest

from paceline.server import body
from tests.e2e.live import Canary, LiveServer, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(long_script_path):
    live = LiveServer(long_script_path, kv_memory_bytes=64 * 2**20, num_threads=1)
    yield live
    live.survive()
    live.drain()
    live.close()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def more(connection):
    """Return what comes next. The connection must not end."""
    part = connection.recv(65536)
    assert part
    return part


def answer_of(connection):
    """Return status and JSON of one answer; the connection may go on."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += more(connection)
    head, _, content = raw.partition(b"\r\n\r\n")
    [size] = [int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
    while len(content) < size:
        content += more(connection)
    return int(head.split()[1]), json.loads(content)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ["a"] * 256, "n": 128}, "n", "at most 1024 answers"),
        ({"prompt": ["a"] * 9, "n": 128}, "n", "n is 128 for each of 9 prompts"),
        ({"bad_words": ["a" * 9000, "b" * 9000]}, "bad_words", "18000 characters in all"),
        ({"bad_words": ["a" * 100] * 1024}, "bad_words", "102400 characters in all"),
        ({"stop": [f"{i}" for i in range(10_000)]}, "stop", "at most 64 items"),
        ({"stop": ["a" * 2000]}, "stop", "at most 1024"),
        ({"logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias", "at most 4096 fields"),
    ],
)  # fmt: skip
def test_more_than_a_call_may_ask_for_is_a_400_that_names_it(server, fields, param, says):
    with Canary(server):
        reply = server.post(COMPLETIONS, **{"prompt": "a", "max_tokens": 1, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert len(reply.content) < 1000


@pytest.mark.parametrize("value", ["{}", "[]", '{"role": "user", "content": "a"}'])
def test_a_body_of_too_many_parts_is_refused_before_they_are_made(server, value):
    content = f'{{"model": "script", "messages": [{",".join([value] * 300_000)}]}}'
    with Canary(server):
        reply = server.client.post(CHAT, content=content.encode(), headers={
            "content-type": "application/json"})  # fmt: skip
    assert reply.status_code == 400
    assert "lists and objects: send at most 250000" in reply.json()["error"]["message"]


def test_a_body_of_too_many_values_is_refused_and_one_of_many_is_read(server):
    for num_ids, says in ((2_100_000, "values: send at most 2000000"), (300_000, "tokens")):
        reply = server.post(COMPLETIONS, prompt=[97] * num_ids)
        assert reply.status_code == 400
        assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "length"),
    [
        ('{"model": "script", "prompt": "a", "NAME": 1}', 600),
        ('{"model": "NAME", "prompt": "a"}', 600),
        ('{"model": "script", "prompt": "a", "logit_bias": {"NAME": 1}}', 600),
        ('{"model": "script", "prompt": "a", "stream_options": {"NAME": 1}}', 600),
        ('{"model": "script", "prompt": "a", "structured_outputs": {"regex": "(NAME"}}', 600),
        ('{"model": "script", "prompt": "a", "service_tier": "NAME"}', 600),
        ('{"model": "script", "prompt": ["a", {"NAME": 1}]}', 600),
    ],
)
def test_an_error_shows_only_the_beginning_of_what_is_long(server, content, length):
    raw = content.replace("NAME", "k" * 100_000).encode()
    headers = {"content-type": "application/json"}
    reply = server.client.post(COMPLETIONS, content=raw, headers=headers)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"]
    assert len(reply.content) < length, reply.text[:1000]


def test_long_texts_are_cut_beside_the_event_loop(server, monkeypatch):
    """Each route that tokenises does it on another thread where the text is long."""
    threads = []
    encode, decode = server.loaded.tokenizer.encode, server.loaded.tokenizer.decode

    def noted(work):
        def noting(*args, **options):
            threads.append(threading.current_thread())
            return work(*args, **options)

        return noting

    monkeypatch.setattr(server.loaded.tokenizer, "encode", noted(encode))
    monkeypatch.setattr(server.loaded.tokenizer, "decode", noted(decode))
    text = "a" * 5000
    turns = [{"role": "user", "content": text}]
    for path, fields in (
        ("/tokenize", {"prompt": text}), ("/detokenize", {"tokens": [97] * 2000}),
        ("/v1/messages/count_tokens", {"messages": turns}),
        (COMPLETIONS, {"prompt": text, "max_tokens": 1}),
        (CHAT, {"messages": turns, "max_tokens": 1}),
        ("/v1/responses", {"input": text, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": turns, "max_tokens": 1}),
        ("/v1/cache/prefixes", {"prompt": text}),
    ):  # fmt: skip
        threads.clear()
        assert server.post(path, **fields).status_code == 200
        assert threads, path
        assert server._thread not in threads, path


def test_bodies_that_are_held_have_a_bound_in_all(server, monkeypatch):
    """Who sends the most of many bodies holds memory: who comes then is told to come back."""
    noted, hold = [], body._hold

    def noting(http, num_bytes):
        hold(http, num_bytes)
        noted.append(num_bytes)

    monkeypatch.setattr(body, "MAX_HELD_BYTES", 200_000)
    monkeypatch.setattr(body, "_hold", noting)
    head = f"{HEAD.format(path=COMPLETIONS)}Content-Length: 150000\r\n\r\n".encode()
    long = {"prompt": "a", "max_tokens": 1, "user": "x" * 100_000}
    with connect(server) as held:
        held.sendall(head + b"{" + b" " * 140_000)
        wait_until(lambda: sum(noted) > 140_000)
        reply = server.post(COMPLETIONS, **long)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert "bodies of open calls" in reply.json()["error"]["message"]
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
    wait_until(lambda: server.post(COMPLETIONS, **long).status_code == 200)


def test_readers_that_do_not_read_hold_nobody_up_and_get_all_of_it_later(server):
    """SRV-03: each has its own text in the end, whole."""
    readers = []
    for number in range(8):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        content = json.dumps({"model": "script", "prompt": str(number), "temperature": 0, "n": 2,
                              "max_tokens": 1500, "stream": True}).encode()  # fmt: skip
        head = HEAD.format(path=COMPLETIONS) + f"Content-Length: {len(content)}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + content)
        readers.append(connection)
    with Canary(server) as canary:
        wait_until(lambda: len(canary.heard) > 5, timeout_s=30)
    for number, connection in enumerate(readers):
        with connection:
            raw = b"".join(iter(lambda: connection.recv(4096), b""))  # noqa: B023
        found = re.findall(rb'"index":(\d),"text":"(.)"', raw)
        digits = "".join(str((number + 1 + i) % 10) for i in range(1500))
        for index in (b"0", b"1"):
            assert b"".join(text for idx, text in found if idx == index).decode() == digits


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.0\r\nHost: x\r\n", 200),
        (HEAD.format(path=COMPLETIONS).encode() + b"Expect: 100-continue\r\n", 200),
        (HEAD.format(path=COMPLETIONS).encode() + b"Accept-Encoding: gzip, \xff\r\n", 200),
        (HEAD.format(path=COMPLETIONS).encode() + b"X-Request-Id: \xc3\xa9" + b"y" * 500 + b"\r\n",
         200),
        (HEAD.format(path=COMPLETIONS).encode() + b"Content-Encoding: gzip\r\n", 200),
        (HEAD.format(path="/v1/completions?a=%00&%ff").encode(), 200),
        (HEAD.format(path="//v1/completions").encode(), 404),
        (HEAD.format(path="/v1/completions/").encode(), 307),
        (HEAD.format(path="/v1/%2e%2e/v1/completions").encode(), 404),
    ],
)  # fmt: skip
def test_odd_heads_are_answered(server, sent, status):
    content = json.dumps({"model": "script", "prompt": "a", "max_tokens": 1}).encode()
    with connect(server) as connection, Canary(server):
        connection.sendall(sent + b"Content-Length: %d\r\n\r\n" % len(content))
        time.sleep(0.05)
        connection.sendall(content)
        raw = connection.recv(65536)
        if raw.startswith(b"HTTP/1.1 100"):
            raw = raw.partition(b"\r\n\r\n")[2] or connection.recv(65536)
    assert int(raw.split()[1]) == status, raw


def test_requests_that_are_pipelined_are_answered_in_their_order(server):
    contents = [
        json.dumps({"model": "script", "prompt": "a", "temperature": 0, "max_tokens": n}).encode()
        for n in (25, 1, 3)
    ]
    head = HEAD.format(path=COMPLETIONS).encode()
    with connect(server) as connection, Canary(server):
        connection.sendall(
            b"".join(head + b"Content-Length: %d\r\n\r\n%b" % (len(c), c) for c in contents)
        )
        raw = b""
        while raw.count(b'"usage"') < 3:
            raw += more(connection)
    lengths = [raw.index(b'"completion_tokens":%d' % n) for n in (25, 1, 3)]
    assert lengths == sorted(lengths)


def test_a_client_that_only_reads_from_now_on_gets_its_answer_or_is_gone(server):
    """A socket that is half closed: the server may take it for a client that left."""
    content = json.dumps({"model": "script", "prompt": "0", "max_tokens": 3000}).encode()
    with connect(server) as connection, Canary(server):
        connection.sendall(
            HEAD.format(path=COMPLETIONS).encode() + b"Content-Length: %d\r\n\r\n" % len(content)
        )
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        raw = connection.recv(65536)
    assert raw == b"" or raw.startswith(b"HTTP/1.1 200")
    server.drain()


def test_chunks_that_are_none_end_their_connection_alone(server):
    head = HEAD.format(path=COMPLETIONS).encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    with Canary(server):
        for chunks in (
            b"zz\r\n{}\r\n",
            b"-1\r\n\r\n",
            b"ffffffffffffffffff\r\n{",
            b"2\r\n{}XX0\r\n",
        ):
            with connect(server) as connection:
                connection.sendall(head + chunks)
                assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        content = json.dumps({"model": "script", "prompt": "a", "max_tokens": 1}).encode()
        with connect(server) as connection:
            connection.sendall(head)
            for byte in content:
                connection.sendall(b"1\r\n%c\r\n" % byte)
            connection.sendall(b"0\r\n\r\n")
            assert answer_of(connection)[0] == 200
