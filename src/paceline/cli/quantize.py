"""`paceline quantize`: write a model in fewer bytes."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Model

if TYPE_CHECKING:
    from paceline.quantize.base import Method
    from paceline.quantize.calibration import Calibration
    from paceline.quantize.formats import Target
    from paceline.quantize.mixed import Mix
    from paceline.quantize.recipe import Recipe
    from paceline.quantize.run import Result
    from paceline.quantize.source import Source

CALIBRATED = ("gptq", "awq")
METHODS = ("rtn", *CALIBRATED)


def quantize(
    model: Model,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="A folder to write, or a file NAME.gguf.", show_default=False
        ),
    ],
    fmt: Annotated[
        str,
        typer.Option(
            "--format",
            help="int4, int8 or fp8, which is emulated (into a folder); q4_0, q4_1, q5_0, q5_1, "
            "q8_0, q4_k, q5_k or q6_k (into a folder or a GGUF file).",
        ),
    ] = "int8",
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            help="Weights that share a scale, of int4, int8 and fp8: 32, 64, 128 or channel. "
            "Default: 64.",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--sym/--asym",
            help="One scale a group, or a scale and a minimum (int4, int8). Default: --sym.",
        ),
    ] = None,
    embeddings: Annotated[
        str,
        typer.Option(
            "--embeddings",
            help="What embedding and head get: auto (8 bits beside int4, 6 beside K-quants), same "
            "(as the other weights), or keep (as they are).",
        ),
    ] = "auto",
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="How weights are rounded: rtn, to the nearest; gptq, so that the outputs for a "
            "text change least (int4, int8, q4_0, q4_1, q8_0); awq, with more precision where "
            "inputs are large (every format). gptq and awq need --calibrate and take longer.",
        ),
    ] = "rtn",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="A text like those that the model will read, for gptq, awq and --mixed. Of its "
            "first million characters, windows of 512 tokens are taken.",
            show_default=False,
        ),
    ] = None,
    calibrate_tokens: Annotated[
        int | None,
        typer.Option(
            "--calibrate-tokens",
            min=1,
            help="Tokens of that text to run through the model. Default: 8192 for gptq, else 4096.",
        ),
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order",
            help="gptq: round inputs that are large first. Default: --act-order.",
        ),
    ] = None,
    mixed: Annotated[
        str | None,
        typer.Option(
            "--mixed",
            help="Choose bits for each linear: int4 or int8 beside those, q4_k, q5_k or q6_k "
            "beside those. Within bits a weight, on average over them (4.8), or bytes of the whole "
            "model (400M). More bits go where rounding costs most for the text of --calibrate.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what each tensor would become, and write nothing."),
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads. Default: all of this process.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model in fewer bytes a weight: decode reads them all for every token.

    Reads a folder of safetensors (f32, f16, bf16) or a GGUF file, piece by piece, in some 100 MB
    (gptq, awq and --mixed need more: they run the model over a text, layer by layer).
    Norms and biases stay as they are (awq scales some). **Killed half way? Run the same command
    again**: it goes on where it stopped. Weights that have few bits already lose more by a second
    rounding: begin with a float model where you can.

    **Examples**

    - `paceline quantize ./Qwen2.5-0.5B --format int4 --group 64 -o qwen-int4`

    - `paceline quantize ./Qwen2.5-0.5B --format int4 --method gptq --calibrate my.txt -o q4`

    - `paceline quantize ./Qwen2.5-0.5B --format int4 --mixed 4.8 --calibrate my.txt --dry-run -o q`

    - `paceline quantize model-f16.gguf --format q4_k -o model-q4_k.gguf`

    - `paceline quantize ./Qwen2.5-0.5B --format q4_k -o qwen-q4_k.gguf`

    - `paceline run ./qwen-int4 "Why is the sky blue?"`
    """
    from paceline.cpu import resolve_num_threads

    num_threads = resolve_num_threads(threads)[0]
    # Read by NumPy when it is imported, below: methods that read a text multiply large matrices.
    os.environ["OPENBLAS_NUM_THREADS"] = str(num_threads)

    from paceline.cli.loading import find_model
    from paceline.cli.pull import ProgressBar
    from paceline.quantize.formats import parse_target
    from paceline.quantize.recipe import new_recipe
    from paceline.quantize.run import quantize as write
    from paceline.quantize.source import open_source
    from paceline.quantize.staging import refuse_existing

    check_method(method, calibrate, calibrate_tokens, act_order, is_mixed=mixed is not None)
    target = parse_target(fmt, group, symmetric)
    if not dry_run:
        refuse_existing(out, force)
    source = open_source(find_model(model), to_gguf=out.suffix.lower() == ".gguf")
    chosen = build_method(method, source, target, calibrate, calibrate_tokens, act_order)
    new = partial(
        new_recipe, source, out, method=chosen.name, embeddings=embeddings,
        rewritten=chosen.rewrites(source),
    )  # fmt: skip
    mix = None
    recipe = new(target=target, settings=chosen.settings)
    if mixed is not None and calibrate is not None:
        calibration = calibration_for(method, source, calibrate, calibrate_tokens)
        recipe, mix = mixed_recipe(source, new, recipe, mixed, calibration, num_threads)
    result = None
    if not dry_run:
        with ProgressBar(out.name) as bar:
            result = write(
                source, out, recipe, chosen, num_threads=num_threads, force=force,
                progress=bar.update,
            )  # fmt: skip
    facts = describe(out, recipe, result, mix)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def check_method(
    name: str, calibrate: Path | None, calibrate_tokens: int | None, act_order: bool | None, *,
    is_mixed: bool = False,
) -> None:  # fmt: skip
    """Raise ParameterError for an unknown method, and for options that go with another one."""
    from paceline.errors import ParameterError

    if name not in METHODS:
        raise ParameterError(f"method is {name!r}: choose {', '.join(METHODS)}", param="method")
    if name in CALIBRATED and calibrate is None:
        raise ParameterError(
            f"method {name} rounds weights for a text: name one with --calibrate FILE",
            param="calibrate",
        )
    if is_mixed and calibrate is None:
        raise ParameterError(
            "mixed measures what rounding costs for a text: name one with --calibrate FILE",
            param="calibrate",
        )
    readers = METHODS if is_mixed else CALIBRATED
    options = {
        "--calibrate": (calibrate, readers), "--calibrate-tokens": (calibrate_tokens, readers),
        "--act-order": (act_order, ("gptq",)),
    }  # fmt: skip
    for option, (value, methods) in options.items():
        if name not in methods and value is not None:
            raise ParameterError(
                f"method {name} has no {option}: leave it out, or choose --method "
                f"{' or '.join(methods)}",
                param=option.strip("-").replace("-", "_"),
            )


def build_method(
    name: str, source: Source, target: Target, calibrate: Path | None = None,
    calibrate_tokens: int | None = None, act_order: bool | None = None,
) -> Method:  # fmt: skip
    """Return the method, built for this model where it calibrates."""
    if name == "rtn" or calibrate is None:
        from paceline.quantize.rtn import RoundToNearest

        return RoundToNearest()
    calibration = calibration_for(name, source, calibrate, calibrate_tokens)
    if name == "awq":
        from paceline.quantize.awq import Awq

        return Awq(calibration)
    from paceline.quantize.gptq import Gptq, check_target

    check_target(target)
    return Gptq(calibration, act_order=act_order is not False)


def calibration_for(
    method: str, source: Source, calibrate: Path, calibrate_tokens: int | None
) -> Calibration:
    from paceline.quantize.calibration import DEFAULT_TOKENS, GPTQ_TOKENS, read_calibration

    default = GPTQ_TOKENS if method == "gptq" else DEFAULT_TOKENS
    return read_calibration(calibrate, source, num_tokens=calibrate_tokens or default)


def mixed_recipe(
    source: Source, new: Callable[..., Recipe], recipe: Recipe, mixed: str,
    calibration: Calibration, num_threads: int,
) -> tuple[Recipe, Mix]:  # fmt: skip
    """Return a recipe of `new` with bits for each linear as measured, in place of `recipe`."""
    from paceline.cli.pull import ProgressBar
    from paceline.quantize.mixed import candidates, mix, parse_budget

    budget, target = parse_budget(mixed), candidates(recipe.target)[0]
    smallest = new(target=target)
    with ProgressBar("measuring") as bar:
        found = mix(
            source, smallest, budget, calibration, num_threads=num_threads, progress=bar.update
        )
    settings = {
        **recipe.settings, "mixed": {**found.summary(), "calibration": calibration.summary()},
    }  # fmt: skip
    return new(target=target, settings=settings, linears=found.targets), found


def describe(
    out: Path, recipe: Recipe, result: Result | None, mix: Mix | None = None
) -> dict[str, Any]:
    """Return what was written, or would be, and what did not get the format asked for."""
    from paceline.quantize.recipe import lossy_sources

    facts = {
        "path": str(out), "is_dry_run": result is None,
        "bytes": sum(t.num_bytes for t in recipe.tensors) if result is None else result.num_bytes,
        "source_bytes": sum(t.tensor.load().num_bytes for t in recipe.tensors),
        "resumed_tensors": 0 if result is None else result.num_resumed,
        "rounded_before": lossy_sources(recipe), **recipe.summary(),
    }  # fmt: skip
    if mix is not None:
        facts["mixed_errors"] = mix.errors()
    return facts


def _print(facts: dict[str, Any]) -> None:
    from paceline.engine.memory import format_bytes
    from paceline.weights.tensor import F8_FORMATS

    would = "would have " if facts["is_dry_run"] else ""
    print(
        f"{facts['path']}: {would}{format_bytes(facts['bytes'])}, the source has "
        f"{format_bytes(facts['source_bytes'])}"
    )
    for fmt, count in facts["bytes_by_format"].items():
        print(f"  {fmt:9}{format_bytes(count)}")
    if "mixed" in facts:
        _print_mix(facts["mixed"])
    by_note: dict[tuple[str, str], list[str]] = {}
    for name, (fmt, note) in facts["exceptions"].items():
        by_note.setdefault((fmt, note), []).append(name)
    for (fmt, note), names in by_note.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"  {names[0]}{more}: {fmt} ({note})")
    if facts["bytes_by_format"].keys() & F8_FORMATS:
        print("  fp8 is emulated: no CPU here multiplies it, so it saves memory and costs time")
    if facts["rounded_before"]:
        kinds = ", ".join(facts["rounded_before"])
        print(f"  the source had rounded weights ({kinds}): a float model would lose less")


def _print_mix(mixed: dict[str, Any]) -> None:
    """Print which linears get which format, those of all layers together."""
    print(f"  linears, within {mixed['budget']}: {mixed['bits']:.3f} bits a weight on average")
    kinds: dict[str, Counter[str]] = {}
    for name, fmt in mixed["formats"].items():
        kinds.setdefault(fmt, Counter())[re.sub(r"\d+", "*", name)] += 1
    for fmt in sorted(kinds):
        parts = ", ".join(f"{count} {name}" for name, count in kinds[fmt].most_common())
        print(f"    {fmt}: {parts}")
