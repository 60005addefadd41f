"""Offline: the engine alone, without HTTP, over batch sizes and prompt lengths."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.llm import new_request, stream
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`batch` prompts of `input_tokens` at once, each continued by `output_tokens`."""

    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one batch did. Decode is timed while all of it decodes: from the last prompt's first
    token to the first answer's end; None where that span holds nothing."""

    ttft_s: float  # median over the batch
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    output_tokens_per_s: float
    total_tokens_per_s: float
    e2e_s: float


def measure(
    loaded: LoadedModel,
    cells: Sequence[Cell],
    num_rounds: int,
    *,
    seed: int = 0,
    on_round: Callable[[Cell, int], None] = lambda cell, idx: None,
) -> tuple[list[dict[str, Any]], bool]:
    """Return a row a cell, medians and ranges over interleaved rounds after one that warms up, and
    whether Ctrl-C ended them.

    Prompts are random and all distinct, so that no cache can answer them. After Ctrl-C the rows are
    those of the batches that were whole; without one it raises KeyboardInterrupt.
    """
    rng = random.Random(seed)
    batches: dict[Cell, list[Batch]] = {}
    is_interrupted = False
    try:
        for idx in range(num_rounds + 1):
            for cell in cells:
                on_round(cell, idx)
                batch = run_batch(loaded, cell, rng)
                if idx:
                    batches.setdefault(cell, []).append(batch)
    except KeyboardInterrupt:
        if not batches:
            raise
        is_interrupted = True
    return [_row(cell, found) for cell, found in batches.items()], is_interrupted


def run_batch(loaded: LoadedModel, cell: Cell, rng: random.Random) -> Batch:
    params = SamplingParams(temperature=0, max_tokens=cell.output_tokens, ignore_eos=True)
    ids = _ordinary_ids(loaded)
    prompts = [rng.choices(ids, k=cell.input_tokens) for _ in range(cell.batch)]
    begin = time.perf_counter()
    requests = [new_request(prompt, params) for prompt in prompts]
    firsts: dict[str, float] = {}
    ends: list[float] = []
    moments: list[tuple[float, int]] = []
    for delta in stream(loaded.engine, requests):
        now = time.perf_counter() - begin
        if delta.token_ids:
            firsts.setdefault(delta.request_id, now)
            moments.append((now, len(delta.token_ids)))
        if delta.finish_reason is not None:
            ends.append(now)
    wall_s, last_first, first_end = max(ends), max(firsts.values()), min(ends)
    decoded = sum(count for now, count in moments if last_first < now <= first_end)
    num_input = cell.batch * cell.input_tokens
    num_output = sum(count for _, count in moments)
    return Batch(
        ttft_s=statistics.median(firsts.values()),
        prefill_tokens_per_s=num_input / last_first,
        decode_tokens_per_s=decoded / (first_end - last_first) if decoded else None,
        output_tokens_per_s=num_output / wall_s,
        total_tokens_per_s=(num_input + num_output) / wall_s,
        e2e_s=wall_s,
    )


def _ordinary_ids(loaded: LoadedModel) -> Sequence[int]:
    tokenizer = loaded.tokenizer
    return [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]


def _row(cell: Cell, batches: Sequence[Batch]) -> dict[str, Any]:
    def figure(name: str) -> dict[str, float] | None:
        values = [value for batch in batches if (value := getattr(batch, name)) is not None]
        return spread(values) if values else None

    names = Batch.__dataclass_fields__
    return {
        "batch": cell.batch,
        "input_tokens": cell.input_tokens,
        "output_tokens": cell.output_tokens,
        "rounds": len(batches),
        **{name: figure(name) for name in names},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of a figure over rounds, and its ends."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def grid(batches: Sequence[int], inputs: Sequence[int], output_tokens: int) -> Iterator[Cell]:
    for input_tokens in inputs:
        for batch in batches:
            yield Cell(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)
