"""`paceline bench offline`: the engine's own throughput and latency."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from paceline.cli.options import Model, engine_options
from paceline.config import EngineConfig
from paceline.errors import ParameterError


@engine_options
def offline(
    model: Model,
    *,
    batch: Annotated[
        str, typer.Option("--batch", help="Prompts at once; several as 1,8,32.")
    ] = "1,8",
    input_tokens: Annotated[
        str, typer.Option("--input", help="Tokens of each prompt; several as 128,2048.")
    ] = "512",
    output_tokens: Annotated[
        int, typer.Option("--output", min=2, help="Tokens of each answer.")
    ] = 64,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Rounds over all cells, after one to warm up.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: EngineConfig,
) -> None:
    """Measure the engine without HTTP, over batch sizes and prompt lengths.

    Prompts are random tokens, all distinct. Decode is timed while the whole batch decodes.

    **Examples**

    - `paceline bench offline smollm2-135m`

    - `paceline bench offline smollm2-135m --batch 1,2,4,8 --input 128,1024 --rounds 5 --json`
    """
    from paceline.bench.offline import grid, measure
    from paceline.bench.terminal import offline_status, print_offline
    from paceline.cli.loading import load

    batches, inputs = _counts(batch, "--batch"), _counts(input_tokens, "--input")
    config = msgspec.structs.replace(config, max_num_seqs=max(config.max_num_seqs, *batches))
    loaded = load(model, config)
    cells = list(grid(batches, inputs, output_tokens))
    with offline_status() as say:
        rows = measure(
            loaded,
            cells,
            rounds,
            seed=config.seed,
            on_round=lambda cell, idx: say(
                f"round {idx} of {rounds}: {cell.batch} x {cell.input_tokens} tokens"
            ),
        )
    document: dict[str, Any] = {
        "model": loaded.name,
        "isa": loaded.isa,
        "num_threads": loaded.config.num_threads,
        "preemptions": loaded.engine.stats().num_preemptions,
        "rows": rows,
    }
    loaded.engine.stop(timeout_s=5.0)
    if as_json:
        print(json.dumps(document))
    else:
        print_offline(document)


def _counts(text: str, what: str) -> Sequence[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise ParameterError(f"{what} is {text!r}: write numbers of at least 1, such as 1,8,32")
    return [int(part) for part in parts]
