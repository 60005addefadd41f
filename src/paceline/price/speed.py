"""One round of one candidate, in a process of its own: batches through the engine, and its memory.

    python -c "from paceline.price.speed import main; main()" SPEC

SPEC is a `Spec` as JSON; the result is one JSON object on stdout.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from paceline.config import EngineConfig
from paceline.errors import PacelineError

_WARM_TOKENS = 16  # of the answer that comes before the clocks: weights and code are there then


class Spec(Struct, frozen=True, kw_only=True):
    """What to load, and the batches to run; prompts are drawn from `seed`."""

    path: str
    kv_dtype: str
    batches: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    num_threads: int | None
    seed: int


def engine_config(spec: Spec, block_bytes: int) -> EngineConfig:
    """Return an engine whose KV cache holds the widest batch and no more, for all alike."""
    length = spec.input_tokens + spec.output_tokens
    widest = max(spec.batches)
    config = EngineConfig(
        kv_dtype=spec.kv_dtype,  # type: ignore[arg-type]  # checked by EngineConfig
        num_threads=spec.num_threads, max_model_len=length, max_num_seqs=widest,
        prefix_cache=False,
    )  # fmt: skip
    blocks = -(-length // config.block_size) * widest
    return msgspec.structs.replace(config, kv_memory_bytes=blocks * block_bytes)


def measure(spec: Spec) -> dict[str, Any]:
    """Return the batches' figures, after one that warms up, and the memory that was taken."""
    from paceline.bench.offline import Cell, run_batch
    from paceline.engine.build import load_model
    from paceline.engine.memory import kv_token_bytes
    from paceline.weights.checkpoint import open_checkpoint

    path = Path(spec.path)
    model = open_checkpoint(path).config
    block_bytes = kv_token_bytes(model, spec.kv_dtype) * EngineConfig().block_size
    loaded = load_model(spec.path, engine_config(spec, block_bytes), path=path)
    rng = random.Random(spec.seed)
    warm = min(_WARM_TOKENS, spec.output_tokens)
    run_batch(loaded, Cell(batch=1, input_tokens=spec.input_tokens, output_tokens=warm), rng)
    batches = []
    for size in spec.batches:
        cell = Cell(batch=size, input_tokens=spec.input_tokens, output_tokens=spec.output_tokens)
        batches.append({"batch": size, **asdict(run_batch(loaded, cell, rng))})
    facts = {
        "batches": batches,
        "resident_bytes": resident_bytes(),
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes": loaded.kv.num_bytes,
        "isa": loaded.isa,
        "num_threads": loaded.config.num_threads,
    }
    loaded.engine.stop(timeout_s=5.0)
    return facts


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Return the memory that this process holds now, pages of mapped files included."""
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    """Measure what the one argument asks for; an error is a line on stderr and exit code 1."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        print(json.dumps(measure(msgspec.json.decode(sys.argv[1], type=Spec))))
    except PacelineError as error:
        sys.exit(f"paceline: {error}")
