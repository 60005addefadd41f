"""What of a decode step is not the native step: HTTP, JSON, scheduling, sampling, detokenising.

    python benchmarks/step_overhead.py MODEL [--streams 1 32] [--seconds 20] [--json FILE]

For each number of streams a `paceline serve MODEL` of its own writes that many streams over HTTP at
once. From the server's trace: of the steps that decode one token for each of them and follow each
other, the time from the begin of one to the begin of the next, and how much of it the backend took.
All else is overhead, whatever it waits for. It is the sum over the steps; the median step beside it
says whether some few are the cause. `phases` divide it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from ledger_server import Server, serving

from paceline import __version__

# At one stream and at 32, in per cent of a step: what the API is held to.
TARGETS = {1: 8.0, 32: 12.0}
LEAD_S = 3.0  # before what is measured: all streams decode by then


def steps_of(server: Server, num_streams: int, seconds: float) -> list[dict[str, Any]]:
    """Return the steps of the last `seconds` while `num_streams` streams are being written."""
    stop = threading.Event()

    def stream(idx: int) -> None:
        while not stop.is_set():
            server.complete(
                f"stream-{idx}", prompt=f"Story number {idx}:", max_tokens=512, ignore_eos=True,
                stream=True,
            )  # fmt: skip

    threads = [threading.Thread(target=stream, args=(i,), daemon=True) for i in range(num_streams)]
    for thread in threads:
        thread.start()
    time.sleep(LEAD_S + seconds)
    trace = json.loads(urllib.request.urlopen(f"{server.url}/v1/trace?last_s={seconds}").read())
    stop.set()
    engine = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    steps = [event for event in engine if event["name"].startswith("step ")]
    for step in steps:
        step["phases"] = Counter()
    begins = {step["ts"]: step for step in steps}
    own = None
    for event in sorted(engine, key=lambda e: (e["ts"], -e["dur"])):
        if begins.get(event["ts"]) is event:
            own = event
        elif own is not None:
            own["phases"][event["name"]] += event["dur"]
    return steps


def shares(steps: list[dict[str, Any]], num_streams: int) -> dict[str, Any]:
    """Return what of the time of full decode steps that follow each other is not the backend's."""
    periods, forwards, phases = [], [], Counter()
    for step, after in itertools.pairwise(sorted(steps, key=lambda step: step["ts"])):
        if all(s["args"]["tokens"] == {"decode": num_streams} for s in (step, after)):
            periods.append((after["ts"] - step["ts"]) / 1e3)
            forwards.append(step["args"]["forward_ms"])
            phases.update(step["phases"])
    if not periods:
        raise SystemExit(f"no step decoded {num_streams} streams: more --seconds may help")
    each = [1 - forward / period for forward, period in zip(forwards, periods, strict=True)]
    total = sum(periods)
    return {
        "steps": len(periods),
        "step_ms": statistics.median(periods),
        "overhead_percent": 100 * (1 - sum(forwards) / total),
        "median_percent": 100 * statistics.median(each),
        "phases_percent": {name: phases[name] / total / 10 for name in sorted(phases)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each of them")
    parser.add_argument("--options", default="", help="of the server, in quotes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = {}
    for num_streams in args.streams:
        with serving([args.model], args.options.split()) as server:
            told = shares(steps_of(server, num_streams, args.seconds), num_streams)
        found[str(num_streams)] = told
        target = TARGETS.get(num_streams)
        print(
            f"{num_streams} streams: {told['overhead_percent']:.1f} % of {told['step_ms']:.2f} ms "
            f"are not the backend's (median step {told['median_percent']:.1f} %, "
            f"{told['steps']} steps)" + (f"; at most {target:.0f} % are wanted" if target else "")
        )
    if args.json:
        about = {
            "version": __version__, "model": args.model, "options": args.options,
            "cores": os.cpu_count(), "machine": platform.processor() or platform.machine(),
        }  # fmt: skip
        args.json.write_text(json.dumps({"about": about, "streams": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
