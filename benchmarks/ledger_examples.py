"""Ledgers with each part as the bottleneck, made on purpose. docs/ledger.md shows its output.

    python benchmarks/ledger_examples.py MODEL [--large MODEL --drafter MODEL] [--json FILE]
        [--only PART …]
    python benchmarks/ledger_examples.py --json FILE --into docs/ledger.md

Each example starts `paceline serve MODEL` with the options it names, causes one kind of delay, and
prints the ledger of the call that suffered it. With --json those that FILE has already are not made
again, unless --only names them: a run may be broken off and continued. `--into` puts the table of
FILE in the place of the one in a document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import ledger_causes as causes
from ledger_server import Server, serving

from tests.tiny import write_gguf

_RESULT_KEYS = ("outcome", "wall_ms", "ttft_ms", "tpot_ms", "parts_ms", "blame")
_HEADER = "| the bottleneck | what was done | wall | its parts (1.5 % and more) | what helps |"


@dataclass(frozen=True, kw_only=True)
class Example:
    """`cause` makes the call "example", or one that it names, on a server with `options`.

    `done` and `helps` are told.

    In options {drafter} is the draft model, {folder} an empty folder.
    """

    cause: Callable[[Server], str | None]
    done: str
    helps: str
    options: str = ""
    is_cached: bool = False  # the others repeat their prompts, and mean them to be computed
    has_twin: bool = False  # the same file is served as a second model
    is_large: bool = False  # --large is served
    is_tiny: bool = False  # causes.tiny_model() is served


EXAMPLES = {
    "load": Example(
        cause=causes.unloaded_model, has_twin=True,
        done="the first call for the second of two models",
        helps="memory for both: who is unloaded is loaded again"),
    "receive": Example(
        cause=causes.slow_upload, done="a body sent in pieces, half a second apart",
        helps="the client's network"),
    "parse": Example(
        cause=causes.big_nonsense, done="two million token ids, the last of a wrong type: refused",
        helps="the client's bug"),
    "template": Example(
        cause=causes.slow_template, options="--chat-template {folder}/slow.jinja",
        done="a chat template that loops 3,000 times for each of 20 letters",
        helps="a simpler template"),
    "tokenise": Example(
        cause=causes.too_long, done="12,000 words into a context of 8,192: refused",
        helps="cut prompts before sending"),
    "handoff": Example(
        cause=causes.token_beside_bodies,
        done="one token, while four clients send two million token ids each; of 20 the worst",
        helps="smaller bodies; the event loop waits for the GIL"),
    "queue_budget": Example(
        cause=causes.one_seat, options="--max-num-seqs 1",
        done="`--max-num-seqs 1`, and another's answer runs", helps="more seats"),
    "queue_kv": Example(
        cause=causes.little_memory, options="--kv-memory 12M",
        done="`--kv-memory 12M`, and another holds it",
        helps="more memory, `--kv-dtype int8`, a shorter `--max-model-len`"),
    "queue_prefix": Example(
        cause=causes.same_prompt_ahead, is_cached=True, options="--max-batched-tokens 2048",
        done="another call computes the same 1,500 words, `--max-batched-tokens 2048`",
        helps="it is help: computed once instead of twice; `paceline cache warm`"),
    "turn": Example(
        cause=causes.other_model_computes, has_twin=True,
        done="a stream; the server's other model computes 3,000 words",
        helps="a smaller `--max-batched-tokens`: shorter turns; a server for each"),
    "cache_lookup": Example(
        cause=causes.from_disk, is_cached=True,
        options="--kv-memory 40M --kv-tier disk:path={folder}/kv,size=1G",
        done="1,500 words come back from disk, `--kv-memory 40M --kv-tier disk:…`",
        helps="more `--kv-memory`; computing them takes longer"),
    "prefill": Example(
        cause=causes.long_prompt, done="a prompt of 1,500 words, one token back",
        helps="TTFT is this; a shorter prompt, or a faster machine"),
    "prefill_others": Example(
        cause=causes.prompts_together, done="one of eight prompts of 60 words in one step",
        helps="a smaller `--max-batched-tokens`: they take turns"),
    "recompute": Example(
        cause=causes.pushed_aside, options="--policy priority --max-num-seqs 1",
        done="`--policy priority --max-num-seqs 1`; six that matter more push it aside",
        helps="seats and memory for all, the prefix cache (off here)"),
    "preemption": Example(
        cause=causes.outgrown_memory, options="--kv-memory 18M",
        done="`--kv-memory 18M`; two answers outgrow it", helps="more memory; fewer seats"),
    "decode": Example(
        cause=causes.long_answer, done="150 tokens from one stream", helps="TPOT is this"),
    "decode_others (prompts)": Example(
        cause=causes.prompts_beside, done="a stream; three prompts of 900 words arrive",
        helps="`--policy slo:step_ms=50` bounds a step"),
    "decode_others (streams)": Example(
        cause=causes.streams_beside, done="one of 16 streams",
        helps="fewer at once: `--max-num-seqs`"),
    "draft": Example(
        cause=causes.guesses, options="--speculate draft:model={drafter}", is_large=True,
        done="the 0.5B drafts for the 1.5B: `--speculate draft:model=…`",
        helps="a draft model that is much smaller, or `ngram`"),
    "verify": Example(
        cause=causes.guesses, options="--speculate ngram",
        done="`--speculate ngram` on text that repeats itself",
        helps="right guesses are cheaper than steps; wrong ones are `blame`'s"),
    "gil_wait": Example(
        cause=causes.stream_beside_bodies, is_tiny=True,
        done="a stream of a model of one layer; four clients send two million token ids each",
        helps="smaller bodies; another server for them"),
    "grammar": Example(
        cause=causes.first_structure, done="the first JSON schema that the server sees, 20 tokens",
        helps="ask for one before the first user does"),
    "sample": Example(
        cause=causes.many_choices, done="`n` 32, penalties, 20 log-probabilities",
        helps="fewer log-probabilities"),
    "detokenise": Example(
        cause=causes.many_stops, is_tiny=True,
        done="a model of one layer, 32 wide; `n` 32, 16 stop strings of 1,000 letters",
        helps="fewer and shorter stop strings"),
    "engine": Example(
        cause=causes.many_tiny_answers, is_tiny=True,
        done="a model of one layer, 32 wide; `n` 32, 200 tokens each",
        helps="a larger model: a step costs the engine as much"),
    "send": Example(
        cause=causes.slow_reader, done="nobody reads the answer for 40 s",
        helps="the client's reader"),
}  # fmt: skip


def run(
    example: Example, model: str, *, large: str, drafter: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the ledger of the example's call, and the options that its server had."""
    with tempfile.TemporaryDirectory() as folder:
        served = large if example.is_large else model
        if example.is_tiny:
            served = str(write_gguf(causes.tiny_model(), Path(folder) / "tiny.gguf"))
        (Path(folder) / "slow.jinja").write_text(causes.SLOW_TEMPLATE)
        twin = Path(folder) / f"{causes.TWIN}.gguf"
        twin.symlink_to(Path(model).resolve())
        options = example.options.format(drafter=drafter, folder=folder).split()
        options += [] if example.is_cached else ["--no-prefix-cache"]
        with serving([served, *([str(twin)] if example.has_twin else [])], options) as server:
            name = example.cause(server) or "example"
            return server.ledger(name), options


def shares(result: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (part, share of the wall time), the largest first."""
    parts = ((part, ms / result["wall_ms"]) for part, ms in result["parts_ms"].items())
    return sorted(parts, key=lambda item: -item[1])


def table(results: dict[str, Any]) -> str:
    """Return the rows that docs/ledger.md shows, in the order of EXAMPLES."""
    rows = [_HEADER, "|---|---|---|---|---|"]
    for name, example in EXAMPLES.items():
        if name not in results:
            continue
        wall = results[name]["wall_ms"]
        told = f"{wall / 1e3:.1f} s" if wall >= 995 else f"{wall:.0f} ms"
        found = shares(results[name])
        parts = ", ".join(f"{part} {share:.0%}" for part, share in found if share >= 0.015)
        is_bottleneck = name.split()[0] in (found[0][0], "preemption")  # that is several parts
        note = "" if is_bottleneck else ", as large as it gets"
        rows.append(f"| `{name}`{note} | {example.done} | {told} | {parts} | {example.helps} |")
    return "\n".join(rows) + "\n"


def put_into(document: Path, text: str) -> None:
    """Replace the table that begins with our header, up to the first empty line."""
    before, found, rest = document.read_text().partition(_HEADER)
    if not found:
        raise SystemExit(f"{document} has no line {_HEADER!r}: put it where the table shall be")
    _, _, after = rest.partition("\n\n")
    document.write_text(f"{before}{text}\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="without one nothing is run")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b", help="for `draft`")
    parser.add_argument("--drafter", default="qwen2.5-coder-0.5b", help="what drafts for it")
    parser.add_argument("--only", nargs="+", choices=list(EXAMPLES))
    parser.add_argument("--json", type=Path, help="takes the results; keeps what it has")
    parser.add_argument("--into", type=Path, help="a document whose table is replaced")
    args = parser.parse_args()
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    missing = [name for name in EXAMPLES if name not in results]
    for name in (args.only or missing) if args.model else ():
        ledger, options = run(EXAMPLES[name], args.model, large=args.large, drafter=args.drafter)
        results[name] = {"options": options, **{key: ledger.get(key) for key in _RESULT_KEYS}}
        shown = ", ".join(f"{part} {share:.0%}" for part, share in shares(results[name])[:5])
        print(f"{name:24} {ledger['wall_ms']:8.1f} ms: {shown}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.into:
        put_into(args.into, table(results))


if __name__ == "__main__":
    main()
