"""What the prefix cache buys, and what it costs where nothing is shared, on one model.

    python benchmarks/prefix_cache.py MODEL [--rounds 5] [--only hit disk] [--json FILE]

1. hit: time to the first token of a prompt of 1,500 tokens, new and known, and of a new question
   of 20 tokens after a known prefix of 1,500.
2. together: four such prompts at once that share a prefix nobody has computed yet; until all four
   have their first token, against one of them alone.
3. chat: time to the first token of the fifth turn of a conversation.
4. nothing shared: the cache's own time for a prompt of 1,500 tokens, measured without a model, and
   beside it the prefill that it goes with.
5. disk: time to the first token of a prompt of 1,500 tokens that a process before has left in a
   tier on disk, the first that this process answers, against a new prompt.

The settings of a part take turns within a round. Figures are medians over the rounds; ratios are
medians of the ratios within a round, which what else the machine does disturbs less.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.config import EngineConfig
from paceline.engine.block_pool import BlockPool
from paceline.engine.build import LoadedModel, display_name, load_model
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.sequence import Sequence
from paceline.llm import new_request, stream
from paceline.types import SamplingParams

PREFIX = 1500
RNG = random.Random(0)


def tokens(num: int) -> list[int]:
    return [RNG.randrange(1000, 40000) for _ in range(num)]


def first_tokens(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: int = 1
) -> tuple[float, list[int]]:
    """Return the seconds until all `prompts` have their first token, and the first answer."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    begin = time.perf_counter()
    seconds, waiting, answer = 0.0, set(range(len(prompts))), []
    requests = [new_request(prompt, params) for prompt in prompts]
    rows = {request.id: row for row, request in enumerate(requests)}
    for delta in stream(loaded.engine, requests):
        row = rows[delta.request_id]
        if row in waiting and delta.token_ids:
            waiting.remove(row)
            seconds = time.perf_counter() - begin
        if row == 0:
            answer += delta.token_ids
    return seconds, answer


def cold(loaded: LoadedModel) -> float:
    return first_tokens(loaded, [tokens(PREFIX)])[0]


def hit(loaded: LoadedModel, question: int) -> float:
    prompt = tokens(PREFIX)
    first_tokens(loaded, [prompt])
    return first_tokens(loaded, [prompt + tokens(question)])[0]


def together(loaded: LoadedModel, num: int) -> float:
    prefix = tokens(PREFIX)
    return first_tokens(loaded, [prefix + tokens(8) for _ in range(num)])[0]


def fifth_turn(loaded: LoadedModel) -> float:
    """Return the seconds to the first token of the last of five turns of 60 + 60 tokens."""
    history: list[int] = []
    for _ in range(5):
        history += tokens(60)
        seconds, answer = first_tokens(loaded, [history], max_tokens=60)
        history += answer
    return seconds


def own_time() -> float:
    """Return the seconds that the cache itself takes for a new prompt, all of its life."""
    pool = BlockPool(200)
    cache = PrefixCache(pool, block_size=16)
    prompt = tokens(PREFIX)
    request = new_request(prompt, SamplingParams(max_tokens=1))
    seq = Sequence(
        request=request, index=0, number=0, token_ids=prompt, max_len=PREFIX + 1,
        sampler=None, decoder=None, matcher=None, ends={}, arrival_ns=0,
    )  # type: ignore[arg-type]  # fmt: skip
    begin = time.perf_counter()
    cache.begin_step([])
    match = cache.match(seq, 1)
    seq.block_table = pool.allocate(-(-PREFIX // 16))
    cache.admitted(seq, match)
    for done in (512, 1024, PREFIX):
        cache.placed(seq)
        seq.num_computed = done
        cache.begin_step([seq])
    cache.leaving(seq)
    pool.release(seq.block_table)
    return time.perf_counter() - begin


def from_disk(load: Callable[..., LoadedModel]) -> dict[str, float]:
    """Return the seconds to the first token of a restored prompt and of a new one."""
    with tempfile.TemporaryDirectory() as folder:
        spec, prompt = f"disk:path={folder},size=4G", tokens(PREFIX)
        before = load(kv_tier=spec)
        first_tokens(before, [prompt])
        before.engine.stop(60.0)
        after = load(kv_tier=spec)
        figures = {
            "restored from disk": first_tokens(after, [prompt])[0],
            "computed": first_tokens(after, [tokens(PREFIX)])[0],
        }
        assert after.engine.stats().num_blocks_restored == (PREFIX - 1) // 16
        after.engine.stop(60.0)
    return figures


Settings = dict[str, Callable[[], float]]


def interleaved(settings: Settings, rounds: int) -> dict[str, list[float]]:
    """Run each setting once to warm up, then all of them in turn; return what each round took."""
    results: dict[str, list[float]] = {name: [] for name in settings}
    for i in range(rounds + 1):
        for name, measure in settings.items():
            value = measure()
            if i:
                results[name].append(value)
    return results


def parts(on: LoadedModel, off: LoadedModel) -> dict[str, Settings]:
    return {
        "hit": {
            "new, cache off": lambda: cold(off),
            "new": lambda: cold(on),
            "known": lambda: hit(on, 0),
            "known, new question of 20": lambda: hit(on, 20),
            "own time": own_time,
        },
        "together": {
            "one of four alone": lambda: together(on, 1),
            "four at once": lambda: together(on, 4),
            "four at once, cache off": lambda: together(off, 4),
        },
        "chat": {
            "fifth turn of a chat": lambda: fifth_turn(on),
            "fifth turn of a chat, cache off": lambda: fifth_turn(off),
        },
    }


RATIOS = (
    ("known", "new"),
    ("known, new question of 20", "new"),
    ("new", "new, cache off"),
    ("own time", "new"),
    ("four at once", "one of four alone"),
    ("four at once, cache off", "one of four alone"),
    ("fifth turn of a chat", "fifth turn of a chat, cache off"),
    ("restored from disk", "computed"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    names = ["hit", "together", "chat", "disk"]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def load(**options: object) -> LoadedModel:
        config = EngineConfig(num_threads=args.threads, max_model_len=2048, **options)  # type: ignore[arg-type]
        return load_model(args.model, config)

    seconds: dict[str, list[float]] = {}
    if set(args.only) != {"disk"}:
        for name, settings in parts(load(), load(prefix_cache=False)).items():
            if name in args.only:
                seconds |= interleaved(settings, args.rounds)
    if "disk" in args.only:
        runs = [from_disk(load) for _ in range(args.rounds)]
        seconds |= {name: [run[name] for run in runs] for name in runs[0]}
    for name, values in seconds.items():
        print(f"{name:32} {statistics.median(values) * 1e3:9.2f} ms", flush=True)
    ratios: dict[str, float] = {}
    for name, base in RATIOS:
        if name in seconds:
            pairs = zip(seconds[name], seconds[base], strict=True)
            ratios[f"{name} / {base}"] = statistics.median(a / b for a, b in pairs)
    for name, ratio in ratios.items():
        print(f"{name:60} {ratio:9.4f}")
    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        report = {
            "model": display_name(args.model), "threads": args.threads, "rounds": args.rounds,
            "commit": commit, "machine": platform.machine(), "prefix": PREFIX,
            "seconds": seconds, "median_ratios": ratios,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
