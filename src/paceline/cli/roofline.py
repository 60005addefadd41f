"""`paceline roofline`: what this machine can do at best, and how near a model comes to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec.structs import replace

from paceline.config import EngineConfig
from paceline.cpu import resolve_num_threads
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel

_ROOM = 1024 + 512  # tokens that the table of step costs needs beside what is asked for
_DEFAULT_CONTEXT = 512


def roofline(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A catalogue name, a GGUF file, a folder of HF safetensors, or a hub id. Without "
            "it: the machine alone.",
            show_default=False,
        ),
    ] = None,
    *,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            max=1024,
            show_default=False,
            help="Streams that decode together. Default: 1.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            show_default=False,
            help="Tokens of the prompt, and that each stream holds. Default: 512, or what the "
            "model can hold.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=1024,
            show_default=False,
            help="Threads of the native core. Default: CPU mask and cgroup quota.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            show_default=False,
            help="KV cache format: f16, bf16, f32, int8, fp8, k8v4 or int4. Default: the engine's.",
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again what is known from before.")
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw it, into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine's ceilings, and show how near a model comes to them.

    A ceiling is what the CPU reaches when it does nothing else: multiply-adds from registers, and
    reading, from each cache and from memory. Decoding reads all weights for each token, so memory
    bounds it; a prompt multiplies many tokens with each weight, so arithmetic bounds it. The floor
    of a TTFT or TPOT is what the ceilings allow; the ratio says how many times longer it takes.

    Ceilings and the cost of steps are kept in the cache folder, for this machine and model file.

    **Examples**

    - `paceline roofline`: the machine

    - `paceline roofline smollm2-135m --batch 8 --context 2048`

    - `paceline roofline ./model.gguf --svg roofline.svg --json | jq .roofline.tpot`
    """  # fmt: skip
    from paceline.cli.bench_values import check_output
    from paceline.cli.stages import show_stages
    from paceline.measure.ceilings import find_ceilings

    num_threads = resolve_num_threads(threads)[0]
    if svg is not None and model is None:
        raise ParameterError("--svg draws a model's steps: name a model")
    for name, value in (("--batch", batch), ("--context", context), ("--kv-dtype", kv_dtype)):
        if value is not None and model is None:
            raise ParameterError(f"{name} {value} is of a model's steps: name a model")
    check_output("--svg", svg)
    found = None
    with show_stages() as stages:
        machine = find_ceilings(
            num_threads, refresh=refresh, on_probe=stages.within("the machine's ceilings")
        )
    ceilings = machine.at(num_threads)
    assert ceilings is not None
    if model is not None:
        from paceline.measure.roofline import measure_roofline

        batch = batch or 1
        # --kv-dtype is checked by EngineConfig.
        config = EngineConfig(num_threads=num_threads)
        if kv_dtype is not None:
            config = replace(config, kv_dtype=kv_dtype)
        loaded, context = load_with_room(model, config, batch=batch, context=context)
        with show_stages() as stages:
            found = measure_roofline(
                loaded, ceilings, batch=batch, context=context, refresh=refresh,
                on_stage=stages.show, on_shape=stages.within("the cost of a step by its tokens"),
            )  # fmt: skip
        loaded.engine.stop()
    if as_json:
        report = {"ceilings": machine, "roofline": found}
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        from paceline.cli.roofline_table import print_machine, print_roofline

        print_machine(machine)
        if found is not None:
            print_roofline(found)
    if svg is not None and found is not None:
        from paceline.measure.roofline_svg import draw

        svg.write_text(draw(found), encoding="utf-8")
        print(f"{svg}: open it in a browser", file=sys.stderr)


def load_with_room(
    model: str, config: EngineConfig, *, batch: int, context: int | None
) -> tuple[LoadedModel, int]:
    """Return the model, loaded so that it can run what is asked for, and the context chosen.

    The table of step costs wants more room than that; where the model's context is shorter it has
    fewer points.
    """
    from paceline.cli.loading import find_model, load
    from paceline.weights.checkpoint import open_checkpoint

    longest = open_checkpoint(find_model(model)).config.max_context
    chosen = min(_DEFAULT_CONTEXT, longest - 1) if context is None else context
    if chosen >= longest:
        raise ParameterError(
            f"context is {chosen}, the model's is {longest} tokens, the next one included: "
            "lower --context"
        )
    config = replace(
        config,
        max_num_seqs=max(config.max_num_seqs, batch),
        max_batched_tokens=max(config.max_batched_tokens, batch),
        max_model_len=min(longest, max(chosen + 1, _ROOM)),
        ledger=True,
    )
    return load(model, config), chosen
