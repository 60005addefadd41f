"""Servers that the bench starts, the adapters' HTTP side, and the engine without HTTP."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.bench import tether
from paceline.bench.adapters.shell import App, Piece, Runner
from tests.e2e.live import PACELINE
from tests.e2e.test_bench import bench

ENGINE = "--kv-memory 8M"


def test_our_own_server_is_started_measured_and_ended(script_path):
    document = bench(
        "--serve", str(script_path), "--serve-with", ENGINE, "--threads", "1", "--requests", "4",
        "--workload", "synthetic:input=4,output=6", "--endpoint", "completions",
        "--server-timings",
    )  # fmt: skip
    stage = document["stages"][0]
    assert (stage["target"], stage["requests"]["ok"]) == ("paceline", 4)
    port = document["config"]["targets"]["paceline"].split(":")[2].split("/")[0]
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True).stdout
    assert f":{int(port):04X} 00000000:0000 0A" not in listening


def test_our_own_server_is_up_once_it_asks_for_a_key_whatever_the_proxy_is(script_path, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-this-test\n")
    document = bench(
        "--serve", str(script_path), "--serve-with", f"{ENGINE} --api-keys {keys}",
        "--api-key", f"@{keys}", "--requests", "1", "--workload", "synthetic:input=4,output=2",
        "--endpoint", "completions", env={**os.environ, "http_proxy": "http://127.0.0.1:1"},
    )  # fmt: skip
    assert document["stages"][0]["requests"]["ok"] == 1


@pytest.fixture
def peer_python(tmp_path):
    """A "Python" that answers as a peer's adapter does, whatever module it is to run."""
    server = tmp_path / "server.py"
    server.write_text("""
import http.server, json, sys
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Models).serve_forever()
""")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{server}" "$@"\n')
    python.chmod(0o755)
    return python


def is_running(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # an orphan may wait for its new parent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_bench_that_ends_takes_its_servers_with_it(script_path, tmp_path, peer_python, number):
    log = tmp_path / "log.jsonl"
    command = [*PACELINE, "bench", "--serve", str(script_path), "--serve-with", ENGINE,
               "--peer", "llama.cpp", "--peer-python", f"llama.cpp={peer_python}",
               "--threads", "1", "--workload", "synthetic:input=4,output=600", "--duration", "60s",
               "--log", str(log)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not log.exists() and time.monotonic() < deadline:  # it is opened once all are up
            time.sleep(0.02)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        code = process.wait(20)
    finally:
        process.kill()
        process.wait()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, children))


def test_a_server_whose_bench_ended_before_it_began_does_not_begin(tmp_path):
    command = [sys.executable, tether.__file__, str(os.getppid()), "touch", str(tmp_path / "began")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, list(tmp_path.iterdir())) == (1, [])
    assert "the parent ended before" in result.stderr


def test_a_peer_whose_python_is_not_there_is_named_with_its_remedy(script_path):
    command = [*PACELINE, "bench", "--peer", "openvino", "--peer-model", str(script_path),
               "--peer-python", "openvino=/no/python"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "openvino did not start (/no/python cannot be run: No such file" in result.stderr


def test_a_peer_that_is_not_installed_is_named_with_its_remedy(script_path):
    if importlib.util.find_spec("openvino_genai"):
        pytest.skip("openvino-genai is installed here")
    command = [*PACELINE, "bench", "--peer", "openvino", "--peer-model", str(script_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "openvino did not start" in result.stderr
    assert "pip install openvino-genai" in result.stderr
    assert "--peer-python openvino=PATH" in result.stderr


class Counting:
    """An engine that counts: each stream gets "0 1 2 …", a token a step."""

    name = "counting"
    num_slots = 2
    context = 100

    def __init__(self):
        self.running: dict[int, list[int]] = {}
        self.most = 0
        self.num_dropped = 0

    def encode(self, messages, prompt):
        return list(range(len(messages or prompt)))

    def submit(self, stream, ids, max_tokens, ignore_eos):
        self.running[stream] = [0, max_tokens]
        self.most = max(self.most, len(self.running))

    def step(self):
        time.sleep(0.005)
        pieces = []
        for stream, state in self.running.items():
            state[0] += 1
            reason = "length" if state[0] >= state[1] else None
            pieces.append(Piece(stream, f"{state[0]} ", 1, reason))
        return pieces

    def drop(self, stream):
        del self.running[stream]
        self.num_dropped += 1


@pytest.fixture
def counting():
    engine = Counting()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(App(engine, Runner(engine)).serve, "127.0.0.1", 0)
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield engine, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def test_an_adapter_streams_batches_up_to_its_slots_and_frees_them(counting):
    engine, url = counting
    document = bench("--target", url, "--workload", "synthetic:input=5,output=7", "--requests",
                     "6", "--concurrency", "4")  # fmt: skip
    stage = document["stages"][0]
    assert stage["requests"]["ok"] == 6
    assert stage["throughput"]["output_tokens"] == 6 * 7
    assert stage["tokens"]["output_from"] == {"usage": 6}
    assert (engine.most, engine.num_dropped, engine.running) == (2, 6, {})


def test_an_adapter_drops_those_that_leave_and_refuses_what_does_not_fit(counting):
    engine, url = counting
    cut = bench("--target", url, "--workload", "synthetic:input=5,output=90", "--duration", "1s",
                "--rate", "20", "--arrival", "constant", "--timeout", "200ms", code=1)  # fmt: skip
    assert cut["stages"][0]["requests"]["timeout"] > 5
    deadline = time.monotonic() + 5
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.running == {}
    refused = bench("--target", url, "--workload", "synthetic:input=5,output=101",
                    "--requests", "1", code=1)  # fmt: skip
    assert "exceed 100" in refused["stages"][0]["errors"][0]["what"]


def test_offline_measures_each_batch_and_length(script_path):
    command = [*PACELINE, "bench", "offline", str(script_path), "--batch", "1,3", "--input",
               "8,20", "--output", "5", "--rounds", "2", "--threads", "1", "--json",
               *ENGINE.split()]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    rows = document["rows"]
    assert [(row["input_tokens"], row["batch"]) for row in rows] == [
        (8, 1),
        (8, 3),
        (20, 1),
        (20, 3),
    ]
    for row in rows:
        wall_s = row["e2e_s"]["median"]
        assert row["rounds"] == 2
        assert 0 < row["ttft_s"]["median"] <= wall_s
        assert row["output_tokens_per_s"]["low"] <= 5 * row["batch"] / wall_s * 1.01
        # At least a token of each, over a part of the wall time.
        assert row["decode_tokens_per_s"]["median"] >= row["batch"] / wall_s * 0.99
    assert document["preemptions"] == 0


def test_offline_refuses_a_batch_that_is_no_number(script_path):
    command = [*PACELINE, "bench", "offline", str(script_path), "--batch", "1,x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert "--batch is 'x'" in result.stderr


def test_offline_refuses_an_answer_that_the_context_does_not_hold(script_path):
    command = [*PACELINE, "bench", "offline", str(script_path), "--batch", "1", "--input", "8",
               "--output", "60", "--max-model-len", "64", *ENGINE.split()]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert "do not fit a context of 64 tokens" in result.stderr
