"""What a draft model's guesses lose, and save, where its head knows fewer tokens.

    python benchmarks/draft_head.py MODEL DRAFT [--tokens 128] [--json FILE]

MODEL writes greedy answers to the prompts of `paceline bench spec`; DRAFT, of the same tokens,
reads along with its whole head. Its guess with a head of the first n ids is the likeliest of these,
so one reading tells about every n. Counted for each, and no time is measured:

- known: how many of the answers' tokens are below n, which is what could be right at all;
- right: how many of the guesses are the token that came;
- chain: the tokens of a step whose draft goes on as the engine's do, while the joint confidence is
  above 0.6, to at most 3 tokens: with the known one a tile of 4 rows, which AVX2 multiplies in
  little more than the time of one;
- rate: tokens in a plain step's time, were each guess to cost what its bytes are of a plain step's,
  and the rows of a draft and guesses behind a wrong one nothing. The engine chooses lengths by what
  steps cost, so this is for comparing heads, and no prediction.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from paceline import LLM, SamplingParams
from paceline.backends.native import NativeBackend
from paceline.bench.spec_prompts import PROMPTS
from paceline.catalog import resolve
from paceline.engine.speculation.draft_model import MIN_CONFIDENCE
from paceline.measure.floors import model_costs
from paceline.measure.quality import limits_for, sequence_logits
from paceline.models.base import EMBEDDING, HEAD, build_plan
from paceline.weights.checkpoint import Checkpoint, open_checkpoint

SIZES = (4096, 8192, 16384, 32768, 40960, 49152, 65536, 98304)
MAX_CONTEXT = 1024
MAX_DEPTH = 3
KV_BYTES = 512 * 2**20


class Text(Struct, frozen=True):
    """An answer, and for each size of the head the guess and its confidence at each token."""

    tokens: list[int]
    guesses: dict[int, list[int]]
    confidences: dict[int, list[float]]


def write_texts(model: str, num_tokens: int) -> list[tuple[str, list[int], int]]:
    """Return (workload, tokens, how many of them are the prompt) of each prompt."""
    asked = [(workload, prompt) for workload, prompts in PROMPTS.items() for prompt in prompts]
    with LLM(model, kv_memory_bytes=KV_BYTES) as llm:
        prompts = [llm.loaded.encode_chat([{"role": "user", "content": text}]) for _, text in asked]
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        answers = llm.generate(prompts, params, progress=False)
    return [
        (workload, [*prompt, *answer.outputs[0].token_ids], len(prompt))
        for (workload, _), prompt, answer in zip(asked, prompts, answers, strict=True)
    ]


def read_along(
    checkpoint: Checkpoint, texts: list[tuple[str, list[int], int]], sizes: list[int]
) -> dict[str, list[Text]]:
    """Return the answers of each workload with what heads of these sizes would have guessed."""
    kv, limits = limits_for(MAX_CONTEXT, block_size=16)
    backend = NativeBackend()
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
    read: dict[str, list[Text]] = {}
    for workload, tokens, num_prompt in texts:
        guesses: dict[int, list[int]] = {n: [] for n in sizes}
        confidences: dict[int, list[float]] = {n: [] for n in sizes}
        for logits in sequence_logits(backend, tokens, kv=kv, limits=limits, first=num_prompt - 1):
            for n in sizes:
                short = logits[:, :n]
                guesses[n] += short.argmax(axis=1).tolist()
                above = short - short.max(axis=1, keepdims=True)
                confidences[n] += (1 / np.exp(above).sum(axis=1)).tolist()
        read.setdefault(workload, []).append(Text(tokens[num_prompt:], guesses, confidences))
    backend.close()
    return read


def play(text: Text, size: int) -> tuple[int, int]:
    """Return the steps and the guesses that an answer takes with a head of this size."""
    begin = num_steps = num_guesses = 0
    while begin < len(text.tokens):
        num_right, joint = 0, 1.0
        for i in range(begin, min(begin + MAX_DEPTH, len(text.tokens))):
            num_guesses += 1
            if text.guesses[size][i] != text.tokens[i]:
                break
            num_right += 1
            joint *= text.confidences[size][i]
            if joint < MIN_CONFIDENCE:
                break
        begin += num_right + 1
        num_steps += 1
    return num_steps, num_guesses


def compare(texts: list[Text], size: int, guess_cost: float) -> dict[str, float]:
    tokens = [token for text in texts for token in text.tokens]
    pairs = [pair for text in texts for pair in zip(text.tokens, text.guesses[size], strict=False)]
    played = [play(text, size) for text in texts]
    num_steps, num_guesses = (sum(column) for column in zip(*played, strict=True))
    return {
        "known": sum(token < size for token in tokens) / len(tokens),
        "right": sum(token == guess for token, guess in pairs) / len(pairs),
        "chain": len(tokens) / num_steps,
        "rate": len(tokens) / (num_steps + num_guesses * guess_cost),
    }


def row_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of a row of the head."""
    head = checkpoint.tensors[EMBEDDING if checkpoint.config.tie_embeddings else HEAD]
    return head.num_bytes // head.shape[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target, draft = (open_checkpoint(resolve(name)) for name in (args.model, args.draft))
    num_ids = draft.config.vocab_size
    sizes = [*(n for n in SIZES if n < num_ids), num_ids]
    read = read_along(draft, write_texts(args.model, args.tokens), sizes)
    plain_bytes, whole_bytes = (model_costs(c).weight_bytes for c in (target, draft))
    rows: list[dict[str, Any]] = []
    for size in sizes:
        guess_bytes = whole_bytes - (num_ids - size) * row_bytes(draft)
        guess_cost = guess_bytes / plain_bytes
        rows.append({
            "num_ids": size, "guess_bytes": guess_bytes, "guess_cost": guess_cost,
            "workloads": {name: compare(texts, size, guess_cost) for name, texts in read.items()},
        })  # fmt: skip
    num_tokens = {name: sum(len(text.tokens) for text in texts) for name, texts in read.items()}
    report = {"model": target.name, "draft": draft.name, "num_tokens": num_tokens, "heads": rows}
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
