"""What the clients of a soak do: whole calls, cut ones, slow ones, and ones that are wrong."""

from __future__ import annotations

import base64
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.e2e.live import ALPHABET, parse_events, texts

HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}"
TIMEOUT_S = 600  # an answer that does not come by then never will, on the busiest machine
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}, "is_dst": {"type": "boolean"}},
    "required": ["zone", "is_dst"],
    "additionalProperties": False,
}
# Each is refused with a 400, but for those that say otherwise.
WRONG: tuple[tuple[str, bytes, int], ...] = (
    ("/v1/completions", b"", 400),
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[]", 400),
    ("/v1/completions", b'{"model": "\xff"}', 400),
    ("/v1/completions", b"[" * 100_000, 400),
    ("/v1/completions", b'{"model": "nobody", "prompt": "a"}', 404),
    ("/v1/completions", b'{"model": "M", "prompt": "a", "bogus": 1}', 400),
    ("/v1/completions", b'{"model": "M", "prompt": "a", "n": 100000}', 400),
    ("/v1/completions", b'{"model": "M", "prompt": "a", "temperature": -1}', 400),
    ("/v1/completions", b'{"model": "M", "prompt": [1, -5]}', 400),
    ("/v1/chat/completions", b'{"model": "M", "messages": [{}]}', 400),
    ("/v1/chat/completions", b'{"model": "M", "messages": "x"}', 400),
    ("/v1/messages", b'{"model": "M", "messages": []}', 400),
    ("/v1/responses", b'{"model": "M", "input": 5}', 400),
    ("/v1/responses/none", b"", 405),
    ("/v1/embeddings", b'{"model": "M", "input": []}', 400),
    ("/tokenize", b'{"prompt": "a", "messages": []}', 400),
    ("/nowhere", b"{}", 404),
)


class Client:
    """One client of the storm: what it does follows from its seed alone."""

    def __init__(self, port: int, model: str, *, seed: str, is_script: bool) -> None:
        self.rng = random.Random(seed)
        self.port = port
        self.model = model
        self.is_script = is_script  # answers are known
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)
        self.statuses: Counter[int] = Counter()

    def moves(self) -> Iterator[Move]:
        """Yield what to do, without end: each thing once, then by its weight."""
        yield from self.rng.sample(list(MOVES), len(MOVES))
        while True:
            yield from self.rng.choices(list(MOVES), list(MOVES.values()))

    def close(self) -> None:
        self.http.close()

    def fields(self, path: str, **extra: Any) -> dict[str, Any]:
        """Return a body for one of GENERATING that asks for the known answer."""
        text = "a" if path == "/v1/completions" else "Hi"
        turns = [{"role": "user", "content": text}]
        asked: dict[str, Any] = {
            "/v1/completions": {"prompt": text},
            "/v1/responses": {"input": text, "store": self.rng.random() < 0.3},
        }.get(path, {"messages": turns})
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        return {"model": self.model, "temperature": 0, limit: 30, **asked, **extra}

    def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any] | None:
        """Return the answer; None where the server was too busy to give one."""
        reply = self.http.post(path, json=body)
        self.statuses[reply.status_code] += 1
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) > 0
            return None
        assert reply.status_code == status, f"{path}: {reply.status_code} {reply.text[:300]}"
        return reply.json()

    def open(self, path: str, body: dict[str, Any], num_bytes: int | None = None) -> socket.socket:
        """Send a call, or its first bytes, on a connection that takes in little unread."""
        content = json.dumps(body)
        text = f"{HEAD.format(path=path, size=len(content))}\r\n\r\n{content}".encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(TIMEOUT_S)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(text[:num_bytes])
        return connection

    def drop(self, connection: socket.socket) -> None:
        """Close in order, or with a reset."""
        if self.rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, *[0] * 7)))
        connection.close()


Move = Callable[[Client], None]  # raises AssertionError where an answer is wrong


def whole(client: Client) -> None:
    """A call of any API that generates, and its answer."""
    path = client.rng.choice(GENERATING)
    answer = client.post(path, **client.fields(path))
    if answer is None or not client.is_script:
        return
    text = {
        "/v1/completions": lambda: answer["choices"][0]["text"],
        "/v1/chat/completions": lambda: answer["choices"][0]["message"]["content"],
        "/v1/messages": lambda: answer["content"][0]["text"],
        "/v1/responses": lambda: answer["output"][0]["content"][0]["text"],
    }[path]()
    assert text == (ALPHABET[1:] if path == "/v1/completions" else "HELO"), f"{path}: {text!r}"


def stream(client: Client) -> None:
    """A stream that is read to its end, of several choices at times."""
    n = client.rng.choice((1, 1, 4))
    body = client.fields("/v1/completions", stream=True, n=n)
    with client.http.stream("POST", "/v1/completions", json=body) as reply:
        client.statuses[reply.status_code] += 1
        raw = reply.read()
    if reply.status_code == 429:
        return
    assert reply.status_code == 200, raw
    events = parse_events(raw)
    assert events[-1] == "[DONE]"
    if client.is_script:
        assert texts(events) == dict.fromkeys(range(n), ALPHABET[1:])


def stored(client: Client) -> None:
    """A response that is kept, gone on from, and deleted."""
    path = "/v1/responses"
    first = client.post(path, **client.fields(path, store=True))
    if first is None:
        return
    second = client.post(
        path, **client.fields(path, store=False, previous_response_id=first["id"])
    )  # fmt: skip
    assert second is None or second["previous_response_id"] == first["id"]
    assert client.http.get(f"{path}/{first['id']}").json()["id"] == first["id"]
    assert client.http.delete(f"{path}/{first['id']}").json()["deleted"] is True


def cut(client: Client) -> None:
    """A call that is left at any point of its way: in its head, its body, its answer."""
    path = client.rng.choice(GENERATING)
    body = client.fields(path, stream=client.rng.random() < 0.5)
    if path != "/v1/responses":
        body["max_tokens"] = 200
    phase = client.rng.choice(("head", "body", "queue", "answer"))
    num_bytes = {"head": client.rng.randrange(1, 100), "body": 150}.get(phase)
    connection = client.open(path, body, num_bytes)
    if phase == "answer":
        connection.recv(client.rng.choice((1, 100, 1000)))
    else:
        time.sleep(client.rng.random() * 0.1)
    client.drop(connection)


def slow(client: Client) -> None:
    """A reader that takes a stream a few bytes at a time, and gives up at times."""
    body = client.fields("/v1/completions", stream=True, n=4, max_tokens=100, prompt="0")
    connection = client.open("/v1/completions", body)
    for _ in range(client.rng.randrange(5, 60)):
        if not connection.recv(64):
            break
        time.sleep(0.02)
    client.drop(connection)


def wrong(client: Client) -> None:
    """A body that is none."""
    path, body, status = client.rng.choice(WRONG)
    content = body.replace(b'"M"', json.dumps(client.model).encode())
    reply = client.http.post(path, content=content, headers={"content-type": "application/json"})
    client.statuses[reply.status_code] += 1
    assert reply.status_code == status, f"{path} {body[:60]!r}: {reply.status_code} {reply.text}"
    assert reply.json()["error"]["message"]


def garbage(client: Client) -> None:
    """Bytes that are no HTTP."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(client.rng.randbytes(200) + b"\r\n\r\n")
        connection.recv(1000)


def schema(client: Client) -> None:
    """An answer that is bound to a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "clock", "schema": CLOCK}}
    body = client.fields("/v1/chat/completions", response_format=form, max_tokens=100)
    answer = client.post("/v1/chat/completions", **{**body, "temperature": 1, "seed": 1})
    if answer is not None and answer["choices"][0]["finish_reason"] == "stop":
        assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"zone", "is_dst"}


def tool(client: Client) -> None:
    """A call of a tool that must be made."""
    tools = [{"type": "function", "function": {"name": "clock", "parameters": CLOCK}}]
    body = client.fields("/v1/chat/completions", tools=tools, tool_choice="required",
                         parallel_tool_calls=False, max_tokens=120)  # fmt: skip
    answer = client.post("/v1/chat/completions", **{**body, "temperature": 1, "seed": 1})
    if answer is not None and answer["choices"][0]["finish_reason"] == "tool_calls":
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")


def long(client: Client) -> None:
    """A prompt of hundreds of tokens, new each time, scored or left at times."""
    digits = "".join(client.rng.choices("0123456789", k=client.rng.randrange(200, 450)))
    body = client.fields("/v1/completions", prompt=digits, max_tokens=5)
    if client.rng.random() < 0.3:
        body |= {"echo": True, "logprobs": 2, "max_tokens": 0}
    if client.rng.random() < 0.3:
        connection = client.open("/v1/completions", body)
        time.sleep(client.rng.random() * 0.3)
        return client.drop(connection)
    answer = client.post("/v1/completions", **body)
    assert answer is None or answer["usage"]["prompt_tokens"] >= 50
    return None


def late(client: Client) -> None:
    """A call that can hardly be answered in time."""
    body = client.fields("/v1/completions", deadline_ms=client.rng.choice((1, 20, 200)))
    reply = client.http.post("/v1/completions", json=body)
    client.statuses[reply.status_code] += 1
    assert reply.status_code in (200, 429, 504), reply.text


def embed(client: Client) -> None:
    """Vectors of texts."""
    answer = client.post(
        "/v1/embeddings", model=client.model, input=["a", "bc"], encoding_format="base64"
    )
    if answer is not None:
        assert len(base64.b64decode(answer["data"][1]["embedding"])) % 4 == 0


def look(client: Client) -> None:
    """What operators and the page ask."""
    path = client.rng.choice(("/health", "/ready", "/metrics", "/v1/paceline/live", "/v1/models",
                              "/v1/trace?last_s=5", "/", "/openapi.json"))  # fmt: skip
    reply = client.http.get(path)
    client.statuses[reply.status_code] += 1
    assert reply.status_code == 200, f"{path}: {reply.text[:300]}"


MOVES: dict[Move, int] = {
    whole: 8, stream: 8, stored: 2, cut: 12, slow: 3, wrong: 8, garbage: 1, schema: 3, tool: 3,
    long: 6, late: 3, embed: 2, look: 3,
}  # fmt: skip


def burst(client: Client, num_connections: int = 500) -> None:
    """Many connections at once: some silent, some with a call that is left, some answered."""
    body = client.fields("/v1/completions", max_tokens=3)
    connections: list[socket.socket] = []
    try:
        for idx in range(num_connections):
            sent = (0, 40, None, None)[idx % 4]  # bytes; None: the whole call
            connections.append(client.open("/v1/completions", body, sent))
        for connection in connections[2::4]:
            head = connection.recv(12)
            assert head in (b"HTTP/1.1 200", b"HTTP/1.1 429"), head
            client.statuses[int(head[-3:])] += 1
    finally:
        for connection in connections:
            client.drop(connection)
