"""A `paceline serve` of its own for the ledger's benchmarks, and what they say to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class Server:
    """A running server; `name` of a call is its `x-request-id`, by which its ledger is found."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def complete(self, name: str, **body: Any) -> None:
        """Have a completion to its end. A refusal is an end, too."""
        self.post("completions", name, **body)

    def chat(self, name: str, **body: Any) -> None:
        self.post("chat/completions", name, **body)

    def post(self, route: str, name: str, **body: Any) -> None:
        self.send(route, name, self.content(body))

    def send(self, route: str, name: str, content: bytes) -> None:
        headers = {"content-type": "application/json", "x-request-id": name}
        url = f"{self.url}/v1/{route}"
        try:
            urllib.request.urlopen(urllib.request.Request(url, content, headers)).read()
        except urllib.error.HTTPError as error:  # a benchmark may be about a refusal
            error.read()

    def start(self, name: str, **body: Any) -> threading.Thread:
        thread = threading.Thread(target=self.complete, args=(name,), kwargs=body)
        thread.start()
        return thread

    def connect(self, name: str, body: dict[str, Any], *, receive_bytes: int = 0) -> Connection:
        content = self.content(body)
        connection = socket.socket()
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        host, port = self.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        path = "chat/completions" if "messages" in body else "completions"
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\n"
            f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return Connection(connection, head.encode(), content)

    def ledger(self, name: str) -> dict[str, Any]:
        """Return the timeline of a call, as soon as it is over."""
        for _ in range(100):
            try:
                reply = urllib.request.urlopen(f"{self.url}/v1/requests/{name}/timeline").read()
                call = dict(json.loads(reply))
                if call["outcome"] != "running":
                    return call
            except urllib.error.HTTPError:
                pass
            time.sleep(0.05)
        raise SystemExit(f"the call {name} did not end")

    def content(self, body: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model, "temperature": 0, **body}).encode()


@dataclass
class Connection:
    """A connection on which the caller writes the request and reads the answer at will."""

    socket: socket.socket
    head: bytes
    content: bytes

    def read_all(self) -> None:
        while self.socket.recv(1 << 20):
            pass
        self.socket.close()


@contextmanager
def serving(models: Sequence[str], options: Sequence[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "paceline", "serve", *models, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if " serving " in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                url = line.split(" on ")[1].strip().removesuffix("/v1")
                listed = json.loads(urllib.request.urlopen(f"{url}/v1/models").read())
                yield Server(url, listed["data"][0]["id"])
                return
        raise SystemExit(f"the server did not start: {' '.join(command)}\n{said}")
    finally:
        process.terminate()
        process.wait()
