"""Soak: chaotic load on a real server, and what must be as before when it is over.

`python -m tests.e2e.soak --minutes 30` runs it on a tiny model that knows its answers, `--model
FILE` on a real one. A canary streams the same answer all the time: its text never changes, and its
longest gap stays under MAX_GAP_RATIO times the longest when nobody else asks; what the machine held
up the canary itself is taken off both. Every answer of the storm is checked. At the end memory, KV
blocks, open files and threads are back at the baseline. Exit status 1 says that something of this
did not hold; `gaps` of the report then says when, and what the server's steps were.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.live import ServeProcess, script_model, wait_until
from tests.e2e.soak_canary import Canary
from tests.e2e.soak_gaps import GapBook
from tests.e2e.soak_moves import MOVES, TIMEOUT_S, Client, Move, burst

MAX_GAP_RATIO = 3.0
# Logs of finished calls, of steps and of responses fill up to their bounds; an allocator keeps
# pages. A leak of 1 KiB a call is more than this after half an hour.
MAX_GROWTH_BYTES = 48 * 2**20
NUM_LOGGED_STEPS = 8192  # after so many a server forgets the first for each new one
MAX_FILL_S = 600
# Pools of threads start one more where calls come together, up to a few each, and keep it.
MAX_MORE_THREADS = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server holds while nobody asks for anything."""

    anon_bytes: int
    num_files: int
    num_threads: int
    num_live_blocks: int

    @classmethod
    def of(cls, server: ServeProcess) -> Footprint:
        proc = Path(f"/proc/{server.process.pid}")
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        return cls(
            anon_bytes=int(status["RssAnon"].split()[0]) * 1024,
            num_files=server.num_open_files,
            num_threads=int(status["Threads"]),
            num_live_blocks=engine_of(server)["num_live_blocks"],
        )

    def excess(self, baseline: Footprint, *, pool_bytes: int) -> list[str]:
        """Say what is more than it was; pages of the KV pool come when they are first used."""
        growth = self.anon_bytes - baseline.anon_bytes
        found = [
            f"{name} went from {before} to {now}"
            for name, before, now in (
                ("open files", baseline.num_files, self.num_files),
                ("threads", baseline.num_threads + MAX_MORE_THREADS, self.num_threads),
                ("KV blocks in use", baseline.num_live_blocks, self.num_live_blocks),
            )
            if now > before
        ]
        if growth > MAX_GROWTH_BYTES + pool_bytes:
            found.append(f"memory grew by {growth / 2**20:.0f} MiB")
        return found


def step_back() -> None:
    """Let the server go before this thread: real clients have machines of their own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Storm:
    """Clients that do what they like while inside. `faults` are the answers that were wrong."""

    def __init__(
        self, server: ServeProcess, *, num_clients: int, seed: int, burst_s: float, is_script: bool
    ) -> None:
        self.moves: Counter[str] = Counter()
        self.faults: list[str] = []
        self._burst_s = burst_s
        self._is_over = threading.Event()
        self._clients = [
            Client(server.port, server.name, seed=f"{seed}-{idx}", is_script=is_script)
            for idx in range(num_clients + 1)
        ]
        self._threads = [
            threading.Thread(target=self._roam, args=(client,), daemon=True)
            for client in self._clients[1:]
        ]
        self._threads.append(
            threading.Thread(target=self._burst, args=(self._clients[0],), daemon=True)
        )

    @property
    def statuses(self) -> Counter[int]:
        return sum((client.statuses for client in self._clients), Counter())

    def _roam(self, client: Client) -> None:
        """Do each thing once, however slow the machine is, and then more until it is over."""
        step_back()
        for num_done, move in enumerate(client.moves()):
            if num_done >= len(MOVES) and self._is_over.is_set():
                return
            self._do(client, move)

    def _burst(self, client: Client) -> None:
        step_back()
        self._do(client, burst)
        while not self._is_over.wait(self._burst_s):
            self._do(client, burst)

    def _do(self, client: Client, move: Move) -> None:
        try:
            move(client)
            self.moves[move.__name__] += 1
        except Exception as fault:
            self.faults.append(f"{move.__name__}: {type(fault).__name__}: {fault}")

    def __enter__(self) -> Storm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S + 60)
            assert not thread.is_alive(), "a client waits for an answer that does not come"
        for client in self._clients:
            client.close()


@dataclass(slots=True)
class Report:
    """What a soak saw. `failures` is empty where all of it held."""

    seconds: float
    seed: int
    moves: dict[str, int]
    statuses: dict[int, int]
    baseline: Footprint
    after: Footprint
    num_songs: int
    quiet_gap_ms: float
    storm_gap_ms: float
    storm_stall_ms: float  # of a longest gap, that the machine did not let the canary run
    gaps: list[dict[str, Any]]  # that were too long, and what the server did meanwhile
    failures: list[str] = field(default_factory=list)

    @property
    def gap_ratio(self) -> float:
        return self.storm_gap_ms / self.quiet_gap_ms


def engine_of(server: ServeProcess) -> dict[str, Any]:
    """Return the engine's books, asked for on a connection that does not stay."""
    return httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=TIMEOUT_S).json()["engine"]


def steps_of(server: ServeProcess) -> float:
    """Return the number of steps that a server has run."""
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=TIMEOUT_S).text
    [line] = [x for x in text.splitlines() if x.startswith("paceline:step_seconds_count")]
    return float(line.split()[-1])


def trace_of(server: ServeProcess, *, last_s: int) -> dict[str, Any]:
    """Return the trace of a server's last seconds."""
    url = f"http://127.0.0.1:{server.port}/v1/trace?last_s={last_s}"
    trace: dict[str, Any] = httpx.get(url, timeout=TIMEOUT_S).json()
    return trace


def pool_bytes(server: ServeProcess) -> int:
    """Return the size of the KV pool."""
    about = trace_of(server, last_s=1)["otherData"]["paceline"]
    size: int = about["num_blocks"] * about["block_size"] * about["kv_token_bytes"]
    return size


def settled(server: ServeProcess) -> Footprint:
    """Return the footprint once nothing runs and closed connections are let go of."""

    def is_idle() -> bool:
        stats = engine_of(server)
        return not any(stats[f"num_{name}"] for name in ("running", "waiting", "live_blocks"))

    wait_until(is_idle, timeout_s=TIMEOUT_S)
    files = [server.num_open_files]

    def are_files_steady() -> bool:
        time.sleep(0.5)
        files.append(server.num_open_files)
        return len(files) > 4 and len(set(files[-4:])) == 1

    wait_until(are_files_steady, timeout_s=TIMEOUT_S)
    return Footprint.of(server)


def soak(
    server: ServeProcess,
    *,
    seconds: float,
    seed: int,
    num_clients: int = 12,
    song: dict[str, Any],
    is_script: bool,
) -> Report:
    """Storm a server for `seconds`. `song` is what the canary asks for.

    A storm and a report of it go before, so that the baseline has what a server takes once and
    keeps: its logs are full then, and its allocator has had room for the largest answer.
    """
    storm = {"num_clients": num_clients, "is_script": is_script}
    with Storm(server, seed=-1 - seed, burst_s=seconds / 50, **storm):
        time.sleep(seconds / 5)
        wait_until(lambda: steps_of(server) > NUM_LOGGED_STEPS, timeout_s=MAX_FILL_S)
        trace_of(server, last_s=3600)
    baseline = settled(server)
    with Canary(server.port, song) as quiet:
        time.sleep(seconds / 3)  # for about as many tokens: the longest of many gaps is longer
    book = GapBook(server.port, limit_ms=MAX_GAP_RATIO * quiet.longest_gap_ms)
    with (
        Canary(server.port, song, on_gap=book.note) as canary,
        Storm(server, seed=seed, burst_s=max(seconds / 60, 2.0), **storm) as load,
    ):
        time.sleep(seconds)
    after = settled(server)
    report = Report(
        seconds=seconds, seed=seed, moves=dict(load.moves), statuses=dict(load.statuses),
        baseline=baseline, after=after, num_songs=len(canary.gaps),
        quiet_gap_ms=quiet.longest_gap_ms, storm_gap_ms=canary.longest_gap_ms,
        storm_stall_ms=canary.longest_stall_ms, gaps=book.kept,
        failures=[*load.faults[:20], *after.excess(baseline, pool_bytes=pool_bytes(server))],
    )  # fmt: skip
    if len(quiet.texts | canary.texts) != 1:
        report.failures.append(f"the canary's text changed: {quiet.texts | canary.texts}")
    return report


def allow_files(num_files: int) -> None:
    """Raise this process's limit of open files, which its servers inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(num_files, hard), hard))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="length of the storm")
    parser.add_argument("--model", type=Path, help="a model file; default: one that spells")
    parser.add_argument("--clients", type=int, default=12, help="that roam at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument(
        "options",
        nargs="*",
        help="of `paceline serve`, after --; a 64 MB KV pool and --policy slo:step_ms=25 if none",
    )
    given = parser.parse_args()
    options = given.options or ["--policy", "slo:step_ms=25", "--kv-memory", "64M"]
    allow_files(4096)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or script_model(Path(folder), max_context=2048)
        song = {"prompt": "0123", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
        with ServeProcess(model, *options) as server:
            report = soak(
                server, seconds=given.minutes * 60, seed=given.seed, num_clients=given.clients,
                song={"model": server.name, **song}, is_script=given.model is None,
            )  # fmt: skip
    if report.gap_ratio >= MAX_GAP_RATIO:
        report.failures.append(
            f"the canary's longest gap is {report.gap_ratio:.1f} times its quiet one, without what "
            f"the machine held it up ({report.storm_stall_ms:.0f} ms in a gap at most): see gaps"
        )
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
