"""Engines in processes of their own, stopped while another one is measured."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

from engines import HERE

_TIMEOUT_S = 3600.0  # for one answer: the longest prompt on the slowest engine takes minutes
_START_TIMEOUT_S = 600.0


class EngineError(Exception):
    """An engine could not do what it was asked; the others go on."""


class EngineProcess:
    """A subprocess that holds one loaded engine. `pause` stops all of its threads."""

    def __init__(self, command: Sequence[str], **pipes: Any) -> None:
        self._log: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(command, stderr=self._log, text=True, bufsize=1, **pipes)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"


class Worker(EngineProcess):
    """`worker.py`: prefill and decode without a server."""

    def __init__(self, python: str, module: str, model: str, options: dict[str, Any]) -> None:
        script = str(HERE / "worker.py")
        super().__init__(
            [python, script, module, model, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            self._answer(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def call(self, op: str, **arguments: Any) -> float:
        """Return the seconds that the worker measured."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        except BrokenPipeError:
            raise EngineError(self._last_words()) from None
        return self._answer(_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> float:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise EngineError(f"no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the engine's process ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return float(answer["seconds"])


class Server(EngineProcess):
    """A server process; ready when it answers /health."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        super().__init__(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.port = port
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise EngineError(f"the server ended: {self._last_words()}")
            if time.monotonic() > end:
                raise EngineError(f"the server was not ready within {_START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return b" 200 " in connection.recv(64)
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_output_s(command: Sequence[str]) -> float:
    """Return the seconds from the start of a process to the first byte that it prints."""
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, bufsize=0)
        assert process.stdout is not None
        with process.stdout:
            first = process.stdout.read(1)
            took = time.perf_counter() - start
        process.wait()
        if not first:
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines()
            raise EngineError(f"the process printed nothing: {' '.join(words[-1:])[:300]}")
    return took
