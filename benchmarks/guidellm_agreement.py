"""Do `paceline bench` and guidellm measure the same? Both on one server, each client on one core.

    python benchmarks/guidellm_agreement.py MODEL --guidellm /path/to/guidellm --tokenizer DIR \
        [--users 1 2 4] [--rounds 5] [--json FILE]

`paceline serve MODEL --threads 1` has core 0, the client at hand core 1, so that neither takes time
from the server. Both send the same load, `--requests` a user, from as many users, of as many tokens
in and out, with another seed each round. The clients take turns, and the order swaps every round.
Printed are means over the rounds with Student's 95 % intervals, and the ratio of a round's two runs
with its interval: they agree where it holds 1 and is narrow. With --json rounds that FILE has are
not run again. DIR is a folder with the model's tokenizer.json, for guidellm's prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ledger_server import serving

from paceline.bench.statistics import mean_figure, ratio_figure

SERVER_CORE, CLIENT_CORE = 0, 1
INPUT, OUTPUT = 128, 32
NARROW = 0.2  # an interval of a ratio that is wider shows no agreement
METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT (guidellm's ITL)", "e2e_ms": "E2E",
           "output_tokens_per_s": "output tok/s"}  # fmt: skip


def run_client(command: list[str]) -> str:
    """Run a client on its core and return what it prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        ["taskset", "-c", str(CLIENT_CORE), *command],
        capture_output=True, text=True, timeout=500, env=environment,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def with_guidellm(args: argparse.Namespace, url: str, users: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        settings = {
            "--backend": f"kind=openai_http,target={url}",
            "--profile": f"kind=concurrent,streams={users}",
            "--constraint": f"kind=max_requests,count={args.requests * users}",
            "--tokenizer": f"kind=hf_auto,model={args.tokenizer}",
            "--data": f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
            "--seed": f"kind=static,value={seed}",
            "--output": f"kind=json,path={report}",
        }
        words = [word for pair in settings.items() for word in pair]
        run_client([str(args.guidellm), "run", "--disable-console", *words])
        [run] = json.loads(report.read_text())["benchmarks"]
    metrics = {name: metric["successful"] for name, metric in run["metrics"].items()
               if isinstance(metric, dict) and "successful" in metric}  # fmt: skip
    tokens = metrics["output_token_count"]["total_sum"]
    return {
        "ttft_ms": metrics["time_to_first_token_ms"]["mean"],
        "tpot_ms": metrics["inter_token_latency_ms"]["mean"],
        "e2e_ms": 1e3 * metrics["request_latency"]["mean"],
        "output_tokens_per_s": tokens / (run["end_time"] - run["start_time"]),
        "input_tokens": metrics["prompt_token_count"]["mean"],
        "output_tokens": metrics["output_token_count"]["mean"],
    }


def with_bench(args: argparse.Namespace, url: str, users: int, seed: int) -> dict[str, float]:
    printed = run_client([
        sys.executable, "-m", "paceline", "bench", "--target", url, "--json", "--seed", str(seed),
        "--workload", f"synthetic:input={INPUT},output={OUTPUT}", "--tokenizer", args.model,
        "--concurrency", str(users), "--requests", str(args.requests * users),
    ])  # fmt: skip
    [stage] = json.loads(printed)["stages"]
    latency, throughput = stage["latency_ms"], stage["throughput"]
    num_ok = stage["requests"]["ok"]
    return {
        **{f"{name}_ms": latency[name]["mean"]["value"] for name in ("ttft", "tpot", "e2e")},
        "output_tokens_per_s": throughput["output_tokens_per_s"],
        "input_tokens": throughput["input_tokens"] / num_ok,
        "output_tokens": throughput["output_tokens"] / num_ok,
    }


CLIENTS: dict[str, Callable[[argparse.Namespace, str, int, int], dict[str, float]]] = {
    "guidellm": with_guidellm, "paceline bench": with_bench,
}  # fmt: skip


@contextmanager
def pinned_server(model: str) -> Iterator[str]:
    """Serve the model on its core alone; the clients go to the other one themselves."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {SERVER_CORE})  # the server inherits it
    try:
        with serving([model], ["--threads", "1", "--no-prefix-cache"]) as server:
            os.sched_setaffinity(0, cores)
            warm = server.content({"prompt": "word " * INPUT, "max_tokens": OUTPUT})
            for _ in range(3):
                urllib.request.urlopen(
                    urllib.request.Request(
                        f"{server.url}/v1/completions", warm, {"content-type": "application/json"}
                    )
                ).read()
            yield server.url
    finally:
        os.sched_setaffinity(0, cores)


def print_load(users: int, rounds: list[dict[str, dict[str, float]]]) -> None:
    print(f"{users} users, {len(rounds)} rounds")
    for name, label in METRICS.items():
        told = []
        for client in CLIENTS:
            figure = mean_figure([found[client][name] for found in rounds])
            low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
            told.append(f"{client} {figure.value:.2f} ({low:.2f} to {high:.2f})")
        pairs = [(found["guidellm"][name], found["paceline bench"][name]) for found in rounds]
        ratio = ratio_figure(pairs)
        if ratio is None or ratio.low is None or ratio.high is None:
            verdict = "too few rounds for an interval"
        else:
            is_agreed = ratio.low <= 1 <= ratio.high
            verdict = f"guidellm / ours {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}): "
            is_narrow = ratio.high - ratio.low <= NARROW
            agreed = "they agree" if is_narrow else "no difference shown, by a wide interval"
            verdict += agreed if is_agreed else "they differ"
        print(f"  {label:22} {told[0]}; {told[1]}; {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--guidellm", type=Path, required=True, help="its executable")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder, for guidellm")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, default=15, help="a user and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="takes the results; keeps what it has")
    args = parser.parse_args()
    if not {SERVER_CORE, CLIENT_CORE} <= os.sched_getaffinity(0):
        raise SystemExit(f"cores {SERVER_CORE} and {CLIENT_CORE} are needed")
    loads = json.loads(args.json.read_text())["loads"] if args.json and args.json.exists() else {}
    with pinned_server(args.model) as url:
        for number in range(args.rounds):  # a round has each load, so that the hours are shared
            for users in args.users:
                rounds = loads.setdefault(str(users), [])
                if len(rounds) > number:
                    continue
                order = list(CLIENTS) if number % 2 == 0 else list(CLIENTS)[::-1]
                rounds.append({c: CLIENTS[c](args, url, users, number + 1) for c in order})
                print(f"round {number + 1}, {users} users: {json.dumps(rounds[-1])}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps({
                        "benchmark": "guidellm_agreement", "server": "--threads 1, core 0",
                        "client": "core 1", "loads": loads,
                    }, indent=1) + "\n")  # fmt: skip
    for users in args.users:
        print_load(users, loads[str(users)])


if __name__ == "__main__":
    main()
