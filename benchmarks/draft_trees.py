"""What draft trees could win over the chains of a draft model, played over its own guesses.

    python benchmarks/draft_trees.py MODEL DRAFT [--tokens 72] [--json FILE]

MODEL writes greedy answers to the prompts of `paceline bench spec`; DRAFT, of the same tokens, says
at each place its two likeliest tokens. Then drafting is played over these texts, without a model:

- chain: the likeliest token, as long as their joint confidence is above a threshold; the guess with
  which it falls below is the last one;
- leaves: the second token beside it wherever its joint confidence is above another threshold; it
  costs a row, and no guess of the draft model;
- tree: where the second token is right, the tree goes on from it.

A step costs what the model's table of step costs says for its rows, a guess a share of a plain step
that is given: 0.1, 0.2 and 0.35. All thresholds and depths of a grid are tried and each way's best
counts, so leaves and tree, which have one threshold more, are flattered; the tree twice, as neither
the rows of a branch beyond its first wrong token nor the draft model's rows for them cost anything.
`held_out` chooses once for all workloads, by the first prompt of each, and counts the second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from paceline import LLM, SamplingParams
from paceline.backends.native import NativeBackend
from paceline.bench.spec_prompts import PROMPTS
from paceline.catalog import resolve
from paceline.measure.quality import limits_for, sequence_logits
from paceline.measure.step_table import StepTable, find_step_table
from paceline.models.base import build_plan
from paceline.weights.checkpoint import open_checkpoint

WORKLOADS = ("code", "edit", "chat", "prose")
MAX_CONTEXT = 1024
KV_BYTES = 512 * 2**20
THRESHOLDS = (0.3, 0.45, 0.6, 0.75, 0.9)  # of a chain's joint confidence
SECONDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # of a second token's; a chain has none
DEPTHS = (1, 2, 3, 5, 7)
GUESS_COSTS = (0.1, 0.2, 0.35)


class Place(Struct, frozen=True):
    """A token of a text, and the draft model's two likeliest tokens there."""

    token: int
    guesses: tuple[int, int]
    confidences: tuple[float, float]


Text = list[Place]


def write_texts(model: str, num_tokens: int) -> tuple[list[tuple[str, list[int], int]], StepTable]:
    """Return (workload, tokens, how many of them are the prompt) of each prompt, and the costs."""
    asked = [(workload, prompt) for workload in WORKLOADS for prompt in PROMPTS[workload]]
    with LLM(model, kv_memory_bytes=KV_BYTES) as llm:
        table = find_step_table(llm.loaded)
        prompts = [llm.loaded.encode_chat([{"role": "user", "content": text}]) for _, text in asked]
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        answers = llm.generate(prompts, params, progress=False)
    return [
        (workload, [*prompt, *answer.outputs[0].token_ids], len(prompt))
        for (workload, _), prompt, answer in zip(asked, prompts, answers, strict=True)
    ], table


def read_along(draft: str, texts: list[tuple[str, list[int], int]]) -> dict[str, list[Text]]:
    """Return the texts with what the draft model would have guessed at each place."""
    checkpoint = open_checkpoint(resolve(draft))
    kv, limits = limits_for(MAX_CONTEXT, block_size=16)
    backend = NativeBackend(num_threads=None)
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
    read: dict[str, list[Text]] = {}
    for workload, tokens, num_prompt in texts:
        text: Text = []
        for logits in sequence_logits(backend, tokens, kv=kv, limits=limits, first=num_prompt - 1):
            for row in logits:
                chances = np.exp(row.astype(np.float64) - row.max())
                first, second = (int(i) for i in np.argsort(-chances)[:2])
                confidences = chances[[first, second]] / chances.sum()
                token = (
                    tokens[num_prompt + len(text)] if num_prompt + len(text) < len(tokens) else -1
                )
                text.append(Place(token, (first, second), tuple(confidences.tolist())))
        read.setdefault(workload, []).append(text[:-1])
    backend.close()
    return read


def draft_once(
    text: Text, begin: int, threshold: float, depth: int, second: float | None, goes_on: bool
) -> tuple[int, int, int]:
    """Return the tokens that a step at `begin` gives, the rows of its draft, and its guesses."""
    joint, num_rows, num_guesses, num_right = 1.0, 0, 0, 0
    for place in text[begin : begin + depth]:
        has_second = second is not None and joint * place.confidences[1] >= second
        num_guesses += 1
        num_rows += 1 + has_second
        if place.token == place.guesses[0]:
            joint *= place.confidences[0]
        elif has_second and place.token == place.guesses[1]:
            joint *= place.confidences[1] if goes_on else 0.0
        else:
            break
        num_right += 1
        if joint < threshold:
            break
    return min(num_right + 1, len(text) - begin), num_rows, num_guesses


def rate(
    texts: Sequence[Text], cost: Callable[[int], float], guess_cost: float, options: Any
) -> float:
    """Return tokens in the time of a plain step."""
    num_tokens, steps = 0, 0.0
    for text in texts:
        begin = 0
        while begin < len(text):
            given, num_rows, num_guesses = draft_once(text, begin, *options)
            begin += given
            num_tokens += given
            steps += cost(1 + num_rows) + num_guesses * guess_cost
    return num_tokens / steps


def compare(texts: Sequence[Text], cost: Callable[[int], float]) -> dict[str, Any]:
    places = [place for text in texts for place in text]
    row: dict[str, Any] = {
        "num_tokens": len(places),
        "first_right": sum(p.token == p.guesses[0] for p in places) / len(places),
        "second_right": sum(p.token == p.guesses[1] for p in places) / len(places),
    }
    for guess_cost in GUESS_COSTS:
        chain, leaves, tree = (
            max(
                rate(texts, cost, guess_cost, options)
                for options in product(THRESHOLDS, DEPTHS, seconds, (goes_on,))
            )
            for seconds, goes_on in (((None,), False), (SECONDS, False), (SECONDS, True))
        )
        row[f"guess_cost_{guess_cost}"] = {
            "chain": chain, "leaves_gain": leaves / chain - 1, "tree_gain": tree / chain - 1
        }  # fmt: skip
    return row


def held_out(read: dict[str, list[Text]], cost: Callable[[int], float]) -> dict[str, Any]:
    """Return the gain on the second text of each workload of what is best for the first ones."""
    first, second = ([texts[i] for texts in read.values()] for i in (0, 1))
    row = {}
    for guess_cost in GUESS_COSTS:
        rates = []
        for seconds, goes_on in (((None,), False), (SECONDS, False), (SECONDS, True)):
            best = max(
                product(THRESHOLDS, DEPTHS, seconds, (goes_on,)),
                key=lambda options: rate(first, cost, guess_cost, options),
            )
            rates.append(rate(second, cost, guess_cost, best))
        chain, leaves, tree = rates
        row[f"guess_cost_{guess_cost}"] = {
            "chain": chain, "leaves_gain": leaves / chain - 1, "tree_gain": tree / chain - 1
        }  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, default=72)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts, table = write_texts(args.model, args.tokens)
    plain_s = table.seconds(1, kind="verify")

    def cost(num_rows: int) -> float:
        return max(table.seconds(num_rows, kind="verify") / plain_s, 1.0)

    read = read_along(args.draft, texts)
    report = {
        "model": table.model,
        "draft": args.draft,
        "num_threads": table.num_threads,
        "machine": table.machine.cpu,
        "step_costs": {n: cost(n) for n in (1, 2, 4, 8, 16)},
        "held_out": held_out(read, cost),
        "workloads": {workload: compare(group, cost) for workload, group in read.items()},
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
