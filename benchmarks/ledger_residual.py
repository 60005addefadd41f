"""What no part of the ledger claims, under a load like a real one.

    python benchmarks/ledger_residual.py MODEL [--rate 2] [--seconds 120] [--json FILE]

Poisson arrivals at a `paceline serve MODEL` of its own: chat streams, long prompts, several
choices, JSON schemas, clients that hang up, and refused calls. Every call's ledger comes from the
access log, so that nothing is asked while the load runs. Printed are the residual's share of a
call's wall time (median, p99, maximum), and the calls in which it is largest. With --json calls are
added to those that FILE has, and the figures are those of all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ledger_server import Server, serving

from paceline.measure.machine import cpu_model

WORDS = [
    "river",
    "stone",
    "open",
    "morning",
    "under",
    "seven",
    "garden",
    "follow",
    "silver",
    "never",
    "paper",
    "north",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def chat(rng: random.Random, num_words: int, num_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text(rng, num_words)}]
    return {"messages": messages, "max_tokens": num_tokens, "stream": True, **more}


def chat_stream(server: Server, name: str, rng: random.Random) -> None:
    read(server, name, chat(rng, rng.randint(5, 120), rng.randint(8, 100)))


def long_prompt(server: Server, name: str, rng: random.Random) -> None:
    read(server, name, chat(rng, rng.randint(800, 2500), 8, stream=False))


def choices(server: Server, name: str, rng: random.Random) -> None:
    read(server, name, chat(rng, 30, 40, n=rng.randint(2, 5), temperature=1.0, stop=["river"]))


def schema(server: Server, name: str, rng: random.Random) -> None:
    read(server, name, chat(rng, 20, 40, response_format=FORM, stream=rng.random() < 0.5))


def hang_up(server: Server, name: str, rng: random.Random) -> None:
    """Leave within a second: in the queue, in the prompt, or in the answer."""
    connection = server.connect(name, chat(rng, rng.choice((10, 1000)), 300))
    connection.socket.sendall(connection.head + connection.content)
    connection.socket.settimeout(rng.random())
    try:
        while connection.socket.recv(1 << 16):
            pass
    except TimeoutError:
        pass
    connection.socket.close()


def refused(server: Server, name: str, rng: random.Random) -> None:
    bad: dict[str, Any] = rng.choice(({"temperature": -1}, {"no_such_field": 1}, {"messages": []}))
    read(server, name, {**chat(rng, 2000, 8), **bad})


def read(server: Server, name: str, body: dict[str, Any]) -> None:
    connection = server.connect(name, body)
    connection.socket.sendall(connection.head + connection.content)
    connection.read_all()


# kind -> (what it does, its share of the calls)
KINDS: dict[str, tuple[Callable[[Server, str, random.Random], None], float]] = {
    "chat": (chat_stream, 0.5), "long": (long_prompt, 0.1), "choices": (choices, 0.1),
    "schema": (schema, 0.1), "hang-up": (hang_up, 0.15), "refused": (refused, 0.05),
}  # fmt: skip


def load(server: Server, rate: float, seconds: float, rng: random.Random) -> None:
    """Send calls, and return when the last one has ended. A call's name begins with its kind."""
    weights = [share for _, share in KINDS.values()]
    threads: list[threading.Thread] = []
    due = time.monotonic()
    end = due + seconds
    while (due := due + rng.expovariate(rate)) < end:
        time.sleep(max(0.0, due - time.monotonic()))
        [kind] = rng.choices(list(KINDS), weights)
        name = f"{kind}-{len(threads)}"
        threads.append(
            threading.Thread(target=KINDS[kind][0], args=(server, name, random.Random(name)))
        )
        threads[-1].start()
    for thread in threads:
        thread.join()


def about(server: Server) -> dict[str, Any]:
    """Return what answered: the model, the version, and what of the machine it used."""
    trace = json.loads(urllib.request.urlopen(f"{server.url}/v1/trace?last_s=1").read())
    told = trace["otherData"]["paceline"]
    names = ("model", "version", "isa", "num_threads")
    return {**{name: told[name] for name in names}, "machine": cpu_model()}


def share(call: dict[str, Any]) -> float:
    """Return the residual's share of the call's wall time."""
    residual: float = call["parts_ms"]["residual"] / call["wall_ms"]
    return residual


def quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def report(calls: list[dict[str, Any]]) -> dict[str, Any]:
    shares = sorted(share(call) for call in calls)
    ms = sorted(call["parts_ms"]["residual"] for call in calls)
    return {
        "calls": len(calls),
        "outcomes": dict(Counter(call["outcome"] for call in calls)),
        "kinds": dict(Counter(kind_of(call) for call in calls)),
        "share_percent": {
            name: 100 * quantile(shares, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        },
        "ms": {name: quantile(ms, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))},
    }


def kind_of(call: dict[str, Any]) -> str:
    return str(call["request_id"]).rpartition("-")[0]


def print_report(found: dict[str, Any], worst: Sequence[dict[str, Any]]) -> None:
    told = ", ".join(f"{name} {value:.4f} %" for name, value in found["share_percent"].items())
    most = ", ".join(f"{name} {value:.3f} ms" for name, value in found["ms"].items())
    print(f"{found['calls']} calls {found['outcomes']} {found['kinds']}")
    print(f"residual, of a call's wall time: {told}; {most}")
    for call in worst:
        parts = sorted(call["parts_ms"].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{part} {ms:.2f}" for part, ms in parts[:6])
        print(f"{share(call):8.3%} of {call['wall_ms']:8.1f} ms, {call['request_id']}, "
              f"{call['outcome']}: {shown}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, default=2.0, help="calls a second")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, help="default: another one for each addition to FILE")
    parser.add_argument("--options", default="--kv-memory 64M --speculate ngram",
                        help="of the server")  # fmt: skip
    parser.add_argument("--json", type=Path, help="takes the results, and adds to what it has")
    args = parser.parse_args()
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    runs: list[dict[str, Any]] = before.get("runs", [])
    calls: list[dict[str, Any]] = before.get("ledgers", [])
    seed = len(calls) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls.jsonl"
        with serving([args.model], [*args.options.split(), "--access-log", str(log)]) as server:
            served = about(server)
            if before and before["served"] != served:
                sys.exit(f"{args.json} is of {before['served']}, this is {served}: give a new file")
            load(server, args.rate, args.seconds, random.Random(seed))
            time.sleep(1.0)  # those that hung up are written when the engine has let go of them
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    calls += [
        {key: call[key] for key in ("request_id", "outcome", "wall_ms", "parts_ms")}
        for call in lines
        if kind_of(call) in KINDS
    ]
    if not calls:
        sys.exit("no call came: give a higher --rate or more --seconds")
    runs.append({"rate": args.rate, "seconds": args.seconds, "seed": seed, "options": args.options})
    found = report(calls)
    print_report(found, sorted(calls, key=share)[-8:][::-1])
    if args.json:
        result = {"benchmark": "ledger_residual", "served": served, "runs": runs, **found}
        args.json.write_text(json.dumps({**result, "ledgers": calls}) + "\n")


if __name__ == "__main__":
    main()
