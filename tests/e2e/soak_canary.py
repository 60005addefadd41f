"""The canary of a soak: one stream after the other, in a process that nothing else holds up.

`python -m tests.e2e.soak_canary PORT BODY` streams the completion of the JSON `BODY` over and over
until its input ends, and writes a line of JSON for each answer: its text, its longest gap, and the
longest time that the machine did not let the canary itself run.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from tests.e2e.live import parse_events, texts


class Canary:
    """A canary process that sings while inside; `songs` are what it heard, once it has left."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._command = [sys.executable, "-m", __spec__.name, str(port), json.dumps(body)]
        self.songs: list[dict[str, Any]] = []

    def __enter__(self) -> Canary:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True,
        )  # fmt: skip
        self._first = self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        rest, _ = self._process.communicate(timeout=600)
        with self._errors as errors:
            errors.seek(0)
            assert self._process.returncode == 0, f"the canary died: {errors.read()}"
        self.songs = [json.loads(line) for line in (self._first + rest).splitlines()]

    @property
    def texts(self) -> set[str]:
        return {song["text"] for song in self.songs}

    @property
    def longest_gap_ms(self) -> float:
        return max(song["longest_gap_ms"] for song in self.songs)

    @property
    def longest_stall_ms(self) -> float:
        return max(song["longest_stall_ms"] for song in self.songs)


class Pulse:
    """Sleeps for a moment over and over, and knows how much too late it woke up."""

    _BEAT_S = 0.01

    def __init__(self) -> None:
        self._longest_s = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            begin_s = time.monotonic()
            time.sleep(self._BEAT_S)
            self._longest_s = max(self._longest_s, time.monotonic() - begin_s - self._BEAT_S)

    def take_ms(self) -> float:
        """Return the longest delay since the last call."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s * 1e3


def ask(connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
    """Send a call on a connection that may have been closed since the last one: then on a new one.

    A server closes what is idle for some seconds, and a machine can stop the canary for so long
    between two songs. Who keeps connections must expect it (RFC 9112, 9.3.1); a connection that
    had no answer before is no such case, nor is one that ends within an answer.
    """
    headers = {"content-type": "application/json"}
    is_kept = connection.sock is not None
    try:
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse()
    except ConnectionError:  # RemoteDisconnected among them
        if not is_kept:
            raise
    connection.close()
    connection.request("POST", "/v1/completions", body, headers)
    return connection.getresponse()


def sing(connection: http.client.HTTPConnection, body: bytes) -> dict[str, Any]:
    """Stream one answer; a gap is between two arrivals of it, the wait for the first is none."""
    response = ask(connection, body)
    assert response.status == 200, response.read()
    raw, last_ns, longest_ns = b"", 0, 0
    while piece := response.read1(65536):
        now_ns = time.monotonic_ns()
        longest_ns = max(longest_ns, now_ns - last_ns if last_ns else 0)
        raw, last_ns = raw + piece, now_ns
    return {"text": texts(parse_events(raw))[0], "longest_gap_ms": longest_ns / 1e6}


def main() -> None:
    port, fields = int(sys.argv[1]), json.loads(sys.argv[2])
    body = json.dumps({**fields, "stream": True}).encode()
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    connection, pulse = http.client.HTTPConnection("127.0.0.1", port, timeout=600), Pulse()
    while True:
        song = sing(connection, body)
        print(json.dumps({**song, "longest_stall_ms": pulse.take_ms()}), flush=True)
        if is_over.is_set():
            return


if __name__ == "__main__":
    main()
