"""`paceline bench spec`: what speculation buys on this machine, and where it costs."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from msgspec.structs import replace

from paceline.bench.lengths import MAX_LENGTH
from paceline.cli.bench_offline import MAX_BATCH, is_given, read_counts, with_room
from paceline.cli.options import Model, engine_options
from paceline.config import EngineConfig
from paceline.errors import ParameterError


@engine_options
def spec(
    ctx: typer.Context,
    model: Model,
    *,
    workloads: Annotated[
        str,
        typer.Option(
            "--workloads",
            help="Several as edit,prose. Known: edit, echo, quotes, code, chat, prose.",
        ),
    ] = "edit,echo,quotes,code,chat,prose",
    batch: Annotated[str, typer.Option("--batch", help="Prompts at once; several as 1,8.")] = "1",
    output_tokens: Annotated[
        int,
        typer.Option("--output", min=2, max=MAX_LENGTH, help="Tokens of each answer, at most."),
    ] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds over each cell.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: EngineConfig,
) -> None:
    """Measure decoding with and without `--speculate`, in turns, over six kinds of text.

    Both sides run on one loaded model, a few tokens at a time: only the drafts differ. With
    `--speculate off` both are plain, and the spread around 1.00 is that of the measure itself.

    Beside the measured speed-up stands the one that the steps saved promise by the cost of steps on
    this machine, which is measured once (10 s and more) and kept. Texts are greedy, so both sides
    must write the same; the report says whether they did.
    Without `--speculate` it is ngram that is measured.

    **Examples**

    - `paceline bench spec qwen2.5-coder-1.5b`

    - `paceline bench spec qwen2.5-coder-0.5b --workloads edit,prose --batch 1,8,32 --json`

    - `paceline bench spec qwen2.5-coder-1.5b --speculate draft+ngram:model=qwen2.5-coder-0.5b`

    - `paceline bench spec qwen2.5-coder-1.5b --speculate off --workloads prose --batch 8`
    """
    from paceline.bench.engine_terminal import print_spec, show_status
    from paceline.bench.spec import measure
    from paceline.bench.spec_prompts import PROMPTS
    from paceline.cli.loading import load
    from paceline.measure.step_table import find_step_table

    names = workloads.split(",")
    for name in names:
        if name not in PROMPTS:
            raise ParameterError(f"--workloads names {name!r}: choose from {', '.join(PROMPTS)}")
    batches = read_counts(batch, "--batch", MAX_BATCH)
    config = with_room(config, max(batches), is_fixed=is_given(ctx, "max_num_seqs"))
    config = replace(config, max_num_seqs=max(config.max_num_seqs, 2 * max(batches)))
    if not is_given(ctx, "speculate"):
        config = replace(config, speculate="ngram")
    loaded = load(model, config)
    with show_status() as say:
        # Before anything is in the KV cache: measuring overwrites it.
        table = find_step_table(
            loaded, on_shape=lambda name, done, total: say(f"{done + 1} of {total}: {name}")
        )
        rows = measure(
            loaded,
            workloads=names,
            batches=batches,
            num_tokens=output_tokens,
            num_rounds=rounds,
            table=table,
            on_round=lambda name, size, idx: say(f"round {idx} of {rounds}: {size} x {name}"),
        )
    document = {
        "model": loaded.name,
        "isa": loaded.isa,
        "num_threads": loaded.config.num_threads,
        "speculate": config.speculate,
        "output_tokens": output_tokens,
        "rows": rows,
    }
    loaded.engine.stop()
    if as_json:
        print(json.dumps(document))
    else:
        print_spec(document)
