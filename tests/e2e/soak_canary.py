"""The canary of a soak: one stream after the other, in a process that nothing else holds up.

`python -m tests.e2e.soak_canary PORT BODY` streams the completion of the JSON `BODY` over and over
until its input ends, and writes a line of JSON for each answer: its text, its longest gap, and how
much of that the machine did not let the canary itself run.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.e2e.live import parse_events, texts
from tests.e2e.soak_gaps import Gap


class Canary:
    """A canary process that sings while inside; `texts` and `gaps` are what it heard.

    `on_gap` is called, on another thread, with the longest gap of each song when it is over.
    """

    def __init__(
        self, port: int, body: dict[str, Any], *, on_gap: Callable[[Gap], object] = lambda _: None
    ) -> None:
        self._command = [sys.executable, "-m", __spec__.name, str(port), json.dumps(body)]
        self._on_gap = on_gap
        self._has_sung = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.texts: set[str] = set()
        self.gaps: list[Gap] = []

    def __enter__(self) -> Canary:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True,
        )  # fmt: skip
        self._reader.start()
        self._has_sung.wait(600)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(600)
        self._reader.join(600)
        self._process.stdout.close()
        with self._errors as errors:
            errors.seek(0)
            assert self._process.returncode == 0, f"the canary died: {errors.read()}"

    def _read(self) -> None:
        for line in self._process.stdout:
            song = json.loads(line)
            self.texts.add(song["text"])
            self.gaps.append(Gap(**song["gap"]))
            self._has_sung.set()
            self._on_gap(self.gaps[-1])
        self._has_sung.set()

    @property
    def longest_gap_ms(self) -> float:
        """The longest that the server was the cause of."""
        return max(gap.server_ms for gap in self.gaps)

    @property
    def longest_stall_ms(self) -> float:
        return max(gap.stalled_ms for gap in self.gaps)


class Pulse:
    """Sleeps for a moment over and over, and knows when it was woken too late."""

    _BEAT_NS = 10_000_000

    def __init__(self) -> None:
        self._late: list[tuple[int, int]] = []  # when it should have woken, and when it did
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            due_ns = time.monotonic_ns() + self._BEAT_NS
            time.sleep(self._BEAT_NS / 1e9)
            self._late.append((due_ns, time.monotonic_ns()))

    def take_ms(self, begin_ns: int, end_ns: int) -> float:
        """Return how much of a time the machine held us up, and forget what was until now."""
        late, self._late = self._late, []
        return sum(max(min(end_ns, b) - max(begin_ns, a), 0) for a, b in late) / 1e6


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
    raw, last_ns, gap = b"", 0, (0, 0)
    while piece := response.read1(65536):
        now_ns = time.monotonic_ns()
        if last_ns:
            gap = max(gap, (last_ns, now_ns), key=lambda g: g[1] - g[0])
        raw, last_ns = raw + piece, now_ns
    return {"text": texts(parse_events(raw))[0], "gap": {"begin_ns": gap[0], "end_ns": gap[1]}}


def main() -> None:
    port, fields = int(sys.argv[1]), json.loads(sys.argv[2])
    body = json.dumps({**fields, "stream": True}).encode()
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    connection, pulse = http.client.HTTPConnection("127.0.0.1", port, timeout=600), Pulse()
    while True:
        song = sing(connection, body)
        song["gap"]["stalled_ms"] = pulse.take_ms(**song["gap"])
        print(json.dumps(song), flush=True)
        if is_over.is_set():
            return


if __name__ == "__main__":
    main()
