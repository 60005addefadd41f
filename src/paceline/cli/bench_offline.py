"""`paceline bench offline`: the engine's own throughput and latency."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from paceline.bench.lengths import MAX_LENGTH
from paceline.bench.units import parse_integer
from paceline.cli.options import Model, engine_options
from paceline.config import EngineConfig
from paceline.errors import ParameterError

MAX_BATCH = 10_000
MAX_THREADS = 1024


@engine_options
def offline(
    ctx: typer.Context,
    model: Model,
    *,
    batch: Annotated[
        str, typer.Option("--batch", help="Prompts at once; several as 1,8,32.")
    ] = "1,8",
    input_tokens: Annotated[
        str, typer.Option("--input", help="Tokens of each prompt; several as 128,2048.")
    ] = "512",
    output_tokens: Annotated[
        int, typer.Option("--output", min=2, max=MAX_LENGTH, help="Tokens of each answer.")
    ] = 64,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Rounds over all cells, after one to warm up.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: EngineConfig,
) -> None:
    """Measure the engine without HTTP, over batch sizes and prompt lengths.

    Prompts are random tokens, all distinct. Decode is timed while the whole batch decodes. Figures
    are medians over the rounds, ranges their ends. Ctrl-C reports the rounds until then.

    **Examples**

    - `paceline bench offline smollm2-135m`

    - `paceline bench offline smollm2-135m --batch 1,2,4,8 --input 128,1024 --rounds 5 --json`
    """
    from paceline.bench.engine_terminal import print_offline, show_status
    from paceline.bench.offline import grid, measure
    from paceline.cli.loading import load

    batches = read_counts(batch, "--batch", MAX_BATCH)
    inputs = read_counts(input_tokens, "--input", MAX_LENGTH)
    loaded = load(model, with_room(config, max(batches), is_fixed=is_given(ctx, "max_num_seqs")))
    check_fits(max(inputs), output_tokens, loaded.config.max_model_len)
    cells = list(grid(batches, inputs, output_tokens))
    with show_status() as say:
        rows, is_interrupted = measure(
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
        "interrupted": is_interrupted,
    }
    loaded.engine.stop(timeout_s=5.0)
    if as_json:
        print(json.dumps(document))
    else:
        print_offline(document)


def read_counts(text: str, what: str, high: int) -> Sequence[int]:
    return [parse_integer(part, what, 1, high) for part in text.split(",")]


def is_given(ctx: typer.Context, parameter: str) -> bool:
    """True where the user wrote the option, be it with its default value."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name != "DEFAULT"


def with_room(config: EngineConfig, batch: int, *, is_fixed: bool) -> EngineConfig:
    """Return a config that runs the whole batch at once. Raises where the user's own (`is_fixed`)
    does not."""
    if is_fixed and config.max_num_seqs < batch:
        raise ParameterError(
            f"--max-num-seqs is {config.max_num_seqs}, less than a --batch of {batch}: raise it, "
            "or leave it out"
        )
    if config.num_threads is not None and config.num_threads > MAX_THREADS:
        raise ParameterError(f"--threads is {config.num_threads}: it must be at most {MAX_THREADS}")
    return msgspec.structs.replace(config, max_num_seqs=max(config.max_num_seqs, batch))


def check_fits(input_tokens: int, output_tokens: int, max_model_len: int | None) -> None:
    if max_model_len is not None and input_tokens + output_tokens > max_model_len:
        raise ParameterError(
            f"--input {input_tokens} and --output {output_tokens} do not fit a context of "
            f"{max_model_len} tokens: ask for less, or raise --max-model-len and --kv-memory"
        )
