"""`paceline price`: what each format of a model takes, how fast it is, and what it costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Model
from paceline.config import ACTIVATIONS, usual_kv_dtype
from paceline.errors import OutputError, ParameterError

if TYPE_CHECKING:
    from paceline.price.candidates import Candidate
    from paceline.price.run import PriceList

QUALITY = "Quality"
SPEED = "Speed"
# Option -> its value under --quick, where the user gives none.
QUICK: dict[str, Any] = {"batch": "1,8", "input_tokens": 128, "output_tokens": 32, "rounds": 1,
                         "windows": 8}  # fmt: skip
DEFAULTS: dict[str, Any] = {"batch": "1,8,32", "input_tokens": 256, "output_tokens": 64,
                            "rounds": 3, "windows": None}  # fmt: skip


def _option(panel: str, *flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, show_default=False, **settings)


def price(
    model: Model,
    *,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weights",
            help="Weights to price: source (the model as it is), FORMAT:GROUP[:asym], "
            "METHOD/FORMAT:GROUP, or paths of models that were made already; several as a,b. "
            "Default: source,int8:64,int4:64,q4_k, and with --calibrate int4:64 by each method "
            "that reads a text.",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            help="KV cache formats, several as a,b: f16, bf16, f32, int8, fp8, k8v4 or int4. Each "
            "goes with all weights.",
        ),
    ] = f"{usual_kv_dtype()},int8",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="A text for methods like gptq; another one than --text.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        _option(QUALITY, "--text", help="A UTF-8 text to measure perplexity, KL and top-1 over."),
    ] = None,
    no_quality: Annotated[
        bool, _option(QUALITY, "--no-quality", help="Sizes and speeds alone: no --text.")
    ] = False,
    context: Annotated[
        int, _option(QUALITY, "--context", min=4, help="Tokens of a window of the text (512).")
    ] = 512,
    windows: Annotated[
        int | None,
        _option(QUALITY, "--windows", min=1, help="Only the first N windows. Default: all."),
    ] = None,
    activations: Annotated[
        str,
        _option(
            QUALITY,
            "--activations",
            help="f32 (default): differences are the formats' alone; q8: as a server answers.",
        ),
    ] = "f32",
    humaneval: Annotated[
        bool,
        _option(
            QUALITY,
            "--humaneval",
            help="HumanEval pass@1 too: runs programs that the model writes, so it needs "
            "--allow-code-execution.",
        ),
    ] = False,
    allow_code_execution: Annotated[
        bool,
        _option(
            QUALITY,
            "--allow-code-execution",
            help="Run what the model wrote, in a sandbox that bounds time, memory and files.",
        ),
    ] = False,
    problems: Annotated[
        int | None, _option(QUALITY, "--problems", min=1, help="Only the first N of HumanEval.")
    ] = None,
    humaneval_file: Annotated[
        str | None, _option(QUALITY, "--humaneval-file", help="Problems in HumanEval's form.")
    ] = None,
    max_tokens: Annotated[
        int, _option(QUALITY, "--max-tokens", min=1, help="Tokens of an answer there (512).")
    ] = 512,
    batch: Annotated[
        str | None, _option(SPEED, "--batch", help="Streams at once; several as 1,8,32 (default).")
    ] = None,
    input_tokens: Annotated[
        int | None, _option(SPEED, "--input", min=1, help="Tokens of each prompt (256).")
    ] = None,
    output_tokens: Annotated[
        int | None, _option(SPEED, "--output", min=2, help="Tokens of each answer (64).")
    ] = None,
    rounds: Annotated[
        int | None,
        _option(SPEED, "--rounds", min=1, help="Rounds over all candidates in turn (3)."),
    ] = None,
    threads: Annotated[
        int | None,
        _option(SPEED, "--threads", min=1, help="Threads. Default: all of this process."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One round, batches of 1 and 8, eight windows: a first look."),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            help="Work in this folder and leave it: models, and figures that are not measured "
            "again. Default: one in PACELINE_HOME, deleted at the end.",
            show_default=False,
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write a picture.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the price list of a model: what each format of weights and KV cache saves and costs.

    For each candidate: bytes on disk, memory of a process that ran it, TTFT, TPOT, prefill and
    decode speed, and beside the source's: perplexity, KL and top-1, with intervals. Candidates that
    no other one beats in bytes, or in speed, at their KL are marked.

    Each is made and measured in a process of its own, speeds in turn over several rounds. **Killed
    half way? Run the same command again**: nothing is measured twice.

    **Examples**

    - `paceline price smollm2-135m --text book.txt --quick`

    - `paceline price ./Qwen2.5-0.5B --text book.txt --calibrate other.txt --svg prices.svg`

    - `paceline price ./model --weights source,int4:64,int4:64:asym,./model-awq --kv f16,int8,k8v4
      --text book.txt --keep prices`
    """
    from paceline.cli.eval import consent
    from paceline.cli.loading import find_model, refuse_encoder
    from paceline.cli.stages import show_stages
    from paceline.evaluate.state import State
    from paceline.price.run import Load, PriceList, Quality

    _check_asked(
        text=text, no_quality=no_quality, calibrate=calibrate, activations=activations,
        humaneval=humaneval, svg=svg,
        problems={"--allow-code-execution": allow_code_execution, "--problems": problems,
                  "--humaneval-file": humaneval_file},
    )  # fmt: skip
    if humaneval:
        consent(allow_code_execution)
    chosen = _with_defaults(
        {"batch": batch, "input_tokens": input_tokens, "output_tokens": output_tokens,
         "rounds": rounds, "windows": windows},
        QUICK if quick else DEFAULTS,
    )  # fmt: skip
    refuse_encoder(model)
    source = find_model(model)
    listed = PriceList(
        source,
        _candidates(source, weights, kv, calibrate),
        quality=Quality(
            text=text, context=context, windows=chosen["windows"], activations=activations,
            humaneval=humaneval, problems=problems, humaneval_file=humaneval_file,
            max_tokens=max_tokens,
        ),
        load=Load(
            batches=_batches(chosen["batch"]), input_tokens=chosen["input_tokens"],
            output_tokens=chosen["output_tokens"], rounds=chosen["rounds"], num_threads=threads,
        ),
        calibrate=calibrate,
        work=keep,
    )  # fmt: skip
    with State(listed.state_path, listed.identity, option="another folder with --keep") as state:
        with show_stages() as stages:
            measured = listed.run(state, stages.show)
        _report(model, listed, measured, as_json=as_json, svg=svg)
        if keep is None:
            shutil.rmtree(listed.work, ignore_errors=True)


def _with_defaults(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _check_asked(
    *, text: Path | None, no_quality: bool, calibrate: Path | None, activations: str,
    humaneval: bool, problems: dict[str, Any], svg: Path | None,
) -> None:  # fmt: skip
    """Raise where options do not go together, before anything is made."""
    if text is None and not no_quality:
        raise ParameterError(
            "a price needs a quality: give --text FILE, a text that this model should read well, "
            "or --no-quality for sizes and speeds alone"
        )
    if no_quality and (text is not None or humaneval):
        raise ParameterError("--no-quality leaves out --text and --humaneval: give either")
    if activations not in ACTIVATIONS:
        raise ParameterError(f"--activations is {activations!r}: choose {' or '.join(ACTIVATIONS)}")
    if text is not None and calibrate is not None and text.resolve() == calibrate.resolve():
        raise ParameterError(
            f"--calibrate and --text are both {text}: formats fitted to the text that they are "
            "measured over look better than they are, name another text"
        )
    for flag, value in problems.items():
        if value and not humaneval:
            raise ParameterError(f"{flag} needs --humaneval")
    if svg is None:
        return
    if text is None:
        raise ParameterError("--svg draws prices over KL: give --text FILE, or leave --svg out")
    if not svg.resolve().parent.is_dir():
        raise ParameterError(f"--svg {svg}: there is no folder {svg.parent}: make it first")


def _candidates(
    source: Path, weights: list[str] | None, kv: str, calibrate: Path | None
) -> list[Candidate]:
    """Return all weights beside all KV formats; raises ParameterError for what cannot be made."""
    from paceline.cli.quantize import METHODS
    from paceline.price.candidates import (
        DEFAULT_METHOD,
        DEFAULT_WEIGHTS,
        Candidate,
        parse_kv,
        parse_weights,
    )

    fitted = [method for method in METHODS if method != DEFAULT_METHOD]
    items = [item for part in weights or () for item in part.split(",")]
    if weights is None:
        items = [*DEFAULT_WEIGHTS]
        items += [f"{method}/int4:64" for method in fitted] if calibrate is not None else []
    chosen = parse_weights(items, source, METHODS)
    needing = [w.name for w in chosen if w.path is None and w.method in fitted]
    if needing and calibrate is None:
        raise ParameterError(f"{needing[0]} is fitted to a text: name one with --calibrate FILE")
    if calibrate is not None and not needing:
        raise ParameterError(
            "--calibrate is read by no candidate: name one like gptq/int4:64, or leave it out"
        )
    return [Candidate(weights=w, kv_dtype=dtype) for w in chosen for dtype in parse_kv(kv)]


def _batches(text: str) -> tuple[int, ...]:
    from paceline.cli.bench_offline import MAX_BATCH, read_counts

    return tuple(dict.fromkeys(read_counts(text, "--batch", MAX_BATCH)))


def _report(
    model: str, listed: PriceList, measured: dict[str, Any], *, as_json: bool, svg: Path | None
) -> None:
    from paceline.bench.terminal import report_console
    from paceline.cli.price_text import print_prices
    from paceline.price.report import document_of

    document = document_of(model, listed, measured)
    if svg is not None:
        from paceline.price.svg import draw

        try:
            svg.write_text(draw(document), encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"{svg} cannot be written ({error.strerror}): the figures are kept, name another "
                "--svg and run the same command again"
            ) from None
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        print_prices(document, report_console())
