"""Servers that the bench starts itself: our own, and peers on the same model and threads."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import paceline
from paceline.errors import PacelineError, ParameterError

# name -> (module of paceline.bench.adapters, package that it needs)
PEERS = {
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "openvino": ("openvino", "openvino-genai"),
    "transformers": ("transformers", "transformers torch"),
}
_START_S = 300.0
_STOP_S = 10.0
_KEY_WANTED = (401, 403)
_MAX_LOG_CHARS = 400


class ServerStartError(PacelineError):
    """A server that the bench starts did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all servers of a comparison share. `pythons` names another Python for a peer."""

    model: Path
    num_threads: int
    slots: int = 8
    context: int = 8192
    serve_arguments: Sequence[str] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def running(
    names: Sequence[str], settings: Settings, *, on_start: Callable[[str], None] = lambda name: None
) -> Iterator[list[tuple[str, str]]]:
    """Yield (name, URL) of servers that are up; "paceline" is our own. They end with the block."""
    with contextlib.ExitStack() as stack:
        # Told to end, or left by its terminal, this process must still end its servers.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                before = signal.signal(number, lambda number, _: sys.exit(128 + number))
                stack.callback(signal.signal, number, before)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        (folder / "lib").mkdir()
        # A peer's Python sees our package and nothing else that is installed beside it.
        (folder / "lib" / "paceline").symlink_to(Path(paceline.__file__).parent)
        servers = []
        for name in names:
            on_start(name)
            servers.append(stack.enter_context(_server(name, settings, folder)))
        yield servers


@contextlib.contextmanager
def _server(name: str, settings: Settings, folder: Path) -> Iterator[tuple[str, str]]:
    port = _free_port()
    command, environment = _command(name, settings, port, folder)
    # The kernel ends it with the thread that starts it: this one, which waits for the run.
    tether = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tether.py"))]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*tether, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(name, url, process, log)
        yield name, url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(
    name: str, settings: Settings, port: int, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Return a server's command line and what it adds to the environment."""
    threads, slots = str(settings.num_threads), str(settings.slots)
    if name == "paceline":
        program = "from paceline.cli.main import main; main()"
        arguments = ["serve", str(settings.model), "--port", str(port), "--threads", threads]
        return [sys.executable, "-c", program, *arguments, *settings.serve_arguments], {}
    module, _ = PEERS[name]
    if name == "llama.cpp" and name not in settings.pythons and shutil.which("llama-server"):
        context = str(settings.context * settings.slots)
        return [
            "llama-server", "-m", str(settings.model), "--port", str(port), "--parallel", slots,
            "-t", threads, "-c", context,
        ], {}  # fmt: skip
    python = settings.pythons.get(name, sys.executable)
    arguments = [str(settings.model), "--port", str(port), "--threads", threads]
    arguments += ["--slots", slots, "--context", str(settings.context)]
    command = [python, "-P", "-m", f"paceline.bench.adapters.{module}", *arguments]
    return command, {"PYTHONPATH": str(folder / "lib")}


def _wait(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server lists its models, or says that it wants a key.

    Raises ServerStartError with its last words.
    """
    deadline = time.monotonic() + _START_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy is
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            remedy = ""
            if name in PEERS:
                remedy = (
                    f": it needs `pip install {PEERS[name][1]}`, or the Python that has it as "
                    f"--peer-python {name}=PATH"
                )
            reason = (last or ["no message"])[0][:_MAX_LOG_CHARS]
            raise ServerStartError(f"{name} did not start ({reason}){remedy}")
        try:
            with direct.open(f"{url}/v1/models", timeout=2):
                return
        except urllib.error.HTTPError as error:
            if error.code in _KEY_WANTED:
                return
            time.sleep(0.1)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise ServerStartError(f"{name} was not up within {_START_S:.0f} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def parse_pythons(texts: Sequence[str]) -> dict[str, str]:
    """Return the Python of each peer from "name=path"."""
    pythons: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or name not in PEERS or not path:
            raise ParameterError(
                f"--peer-python is {text!r}: write NAME=PATH with one of {', '.join(PEERS)}"
            )
        pythons[name] = path
    return pythons
