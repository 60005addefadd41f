"""Ledgers with each part as the bottleneck, made on purpose. docs/ledger.md shows its output.

    python benchmarks/ledger_examples.py MODEL [--json FILE]

Each example starts `paceline serve MODEL` with the options it names, causes one kind of delay, and
prints the ledger of the call that suffered it.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORD = "word "
_RESULT_KEYS = ("outcome", "wall_ms", "ttft_ms", "tpot_ms", "parts_ms", "blame")


class Server:
    """A running server, and what the examples say to it."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def complete(self, name: str, **body: Any) -> None:
        content = self._body(body)
        headers = {"content-type": "application/json", "x-request-id": name}
        request = urllib.request.Request(f"{self.url}/v1/completions", content, headers)
        try:
            urllib.request.urlopen(request).read()
        except urllib.error.HTTPError as error:  # an example may be about a refusal
            error.read()

    def start(self, name: str, **body: Any) -> threading.Thread:
        thread = threading.Thread(target=self.complete, args=(name,), kwargs=body)
        thread.start()
        return thread

    def connect(self, name: str, body: dict[str, Any], *, receive_bytes: int = 0) -> Connection:
        content = self._body(body)
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

    def _body(self, body: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model, "temperature": 0, **body}).encode()


@dataclass
class Connection:
    socket: socket.socket
    head: bytes
    content: bytes

    def read_all(self) -> None:
        while self.socket.recv(1 << 20):
            pass
        self.socket.close()


def long_prompt(server: Server) -> None:
    server.complete("example", prompt=WORD * 1500, max_tokens=1)


def long_answer(server: Server) -> None:
    server.complete("example", prompt="Once", max_tokens=150, ignore_eos=True)


def prompts_beside(server: Server) -> None:
    server.complete("alone", prompt="Once", max_tokens=20, ignore_eos=True)
    stream = server.start("example", prompt="Once", max_tokens=60, ignore_eos=True)
    time.sleep(0.2)
    others = [server.start(f"other-{i}", prompt=WORD * 900, max_tokens=1) for i in range(3)]
    for thread in (stream, *others):
        thread.join()


def prompts_together(server: Server) -> None:
    first = server.start("first", prompt=WORD * 60, max_tokens=1)
    time.sleep(0.03)  # the others arrive while its step runs, and share the next one
    names = ["example", *(f"other-{i}" for i in range(7))]
    threads = [first, *(server.start(n, prompt=WORD * 60, max_tokens=1) for n in names)]
    for thread in threads:
        thread.join()


def streams_beside(server: Server) -> None:
    server.complete("alone", prompt="Once", max_tokens=20, ignore_eos=True)
    names = ["example", *(f"other-{i}" for i in range(15))]
    threads = [server.start(n, prompt=n, max_tokens=60, ignore_eos=True) for n in names]
    for thread in threads:
        thread.join()


def one_seat(server: Server) -> None:
    first = server.start("first", prompt="Once", max_tokens=100, ignore_eos=True)
    time.sleep(0.2)
    server.complete("example", prompt="Once", max_tokens=5)
    first.join()


def little_memory(server: Server) -> None:
    first = server.start("first", prompt=WORD * 400, max_tokens=80, ignore_eos=True)
    time.sleep(0.2)
    server.complete("example", prompt=WORD * 400, max_tokens=5)
    first.join()


def outgrown_memory(server: Server) -> None:
    names = ("first", "example")
    threads = []
    for name in names:
        threads.append(server.start(name, prompt=WORD * 330, max_tokens=90, ignore_eos=True))
        time.sleep(0.05)
    for thread in threads:
        thread.join()


def slow_upload(server: Server) -> None:
    connection = server.connect("example", {"prompt": WORD * 100, "max_tokens": 1})
    connection.socket.sendall(connection.head)
    for begin in range(0, len(connection.content), 100):
        connection.socket.sendall(connection.content[begin : begin + 100])
        time.sleep(0.5)
    connection.read_all()


def slow_reader(server: Server) -> None:
    # The kernel takes some 3 MB of an answer before the server feels that nobody reads.
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "n": 8,
            "stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}  # fmt: skip
    connection = server.connect("example", body, receive_bytes=4096)
    connection.socket.sendall(connection.head + connection.content)
    time.sleep(40)
    connection.read_all()


def too_long(server: Server) -> None:
    server.complete("example", prompt=WORD * 12_000, max_tokens=1)


def big_nonsense(server: Server) -> None:
    server.complete("example", prompt=WORD * 400_000, no_such_field=1)


def many_choices(server: Server) -> None:
    server.complete("example", prompt="Once", max_tokens=30, n=32, temperature=1.5, top_p=0.99,
                    repetition_penalty=1.2, logprobs=20, ignore_eos=True)  # fmt: skip


# example -> (what it does, the server's options, the cause)
EXAMPLES: dict[str, tuple[list[str], Callable[[Server], None]]] = {
    "prefill": ([], long_prompt),
    "decode": ([], long_answer),
    "decode_others (prompts)": ([], prompts_beside),
    "decode_others (streams)": ([], streams_beside),
    "prefill_others": ([], prompts_together),
    "queue_budget": (["--max-num-seqs", "1"], one_seat),
    "queue_kv": (["--kv-memory", "12M"], little_memory),
    "preemption": (["--kv-memory", "18M"], outgrown_memory),
    "receive": ([], slow_upload),
    "send": ([], slow_reader),
    "tokenise": ([], too_long),
    "parse": ([], big_nonsense),
    "sample": ([], many_choices),
}


@contextmanager
def serving(model: str, options: list[str]) -> Iterator[Server]:
    # The examples repeat their prompts, and mean them to be computed.
    command = [sys.executable, "-m", "paceline", "serve", model, "--port", "0",
               "--no-prefix-cache", *options]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if " serving " in line:
                name, address = line.split(" serving ")[1].split(" on ")
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Server(address.strip().removesuffix("/v1"), name)
                return
        raise SystemExit(f"the server did not start: {' '.join(command)}")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--only", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for example in args.only:
        options, cause = EXAMPLES[example]
        with serving(args.model, options) as server:
            cause(server)
            ledger = server.ledger("example")
        results[example] = {
            "options": options, **{key: ledger.get(key) for key in _RESULT_KEYS},
        }  # fmt: skip
        wall = ledger["wall_ms"]
        shares = sorted(ledger["parts_ms"].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{part} {ms:.1f} ({ms / wall:.0%})" for part, ms in shares[:5])
        print(f"{example:24} {wall:8.1f} ms: {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
