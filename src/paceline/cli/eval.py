"""`paceline eval`: what a model's answers are worth, alone and beside a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Model, engine_options
from paceline.config import ACTIVATIONS, KV_DTYPES, EngineConfig
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.evaluate.run import Source, Work

GENERATION = "Greedy answers"
REFERENCE = "Reference"
WARNING = (
    "paceline: --allow-code-execution runs programs that the model wrote, as you: time, memory and "
    "files have limits, {network}, but they can read and delete what you can. Use a container."
)
# Options of the engine that a text, read by the model alone, has nothing to do with.
_ENGINE_ONLY = ("kv_memory", "prefix_cache", "kv_tier", "max_model_len", "max_num_seqs",
                "max_batched_tokens", "policy", "speculate", "seed")  # fmt: skip


def _answers(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=GENERATION, show_default=False)


def _reference(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=REFERENCE, show_default=False)


@engine_options
def evaluate(
    ctx: typer.Context,
    model: Model,
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            help="Read a UTF-8 text: perplexity, and beside a reference KL and agreement.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=4, help="Tokens of a window of the text.")
    ] = 512,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            help="Tokens that the window moves on by; every token is "
            "scored once. Default: half of --context.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        _reference(
            "--against",
            "A model of the same vocabulary to compare with. Engine options "
            "apply to it too. Default: MODEL, if --against-… says how it differs.",
        ),
    ] = None,
    against_kv_dtype: Annotated[
        str | None,
        _reference(
            "--against-kv-dtype",
            "The reference's KV cache format: f16, bf16, f32, int8, fp8, k8v4 or int4.",
        ),
    ] = None,
    against_activations: Annotated[
        str | None, _reference("--against-activations", "The reference's activations: q8 or f32.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        _answers(
            "--tasks",
            "JSONL of {question, choices, answer}, scored by log-likelihood, or "
            "{question, answer}, answered greedily, the last number counts. Repeatable.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        _answers("--prompts", "JSONL of {prompt}: the share of answers that end in a loop."),
    ] = None,
    humaneval: Annotated[
        bool,
        _answers(
            "--humaneval",
            "HumanEval pass@1: runs programs that the model writes, so it "
            "needs --allow-code-execution.",
        ),
    ] = False,
    humaneval_file: Annotated[
        str | None,
        _answers("--humaneval-file", "Problems in HumanEval's form. Default: the 164, fetched."),
    ] = None,
    allow_code_execution: Annotated[
        bool,
        _answers(
            "--allow-code-execution",
            "Run what the model wrote, in a sandbox that bounds "
            "time, memory and files, not what you may read or delete.",
        ),
    ] = False,
    needle: Annotated[
        str | None,
        _answers(
            "--needle",
            "Prompt lengths in tokens, as 500,1000,2000: a number is hidden in "
            "each and asked for. For KV formats.",
        ),
    ] = None,
    depths: Annotated[
        str,
        typer.Option(
            "--depths",
            help="Where needles lie, in percent of the text.",
            rich_help_panel=GENERATION,
        ),
    ] = "0,25,50,75,100",
    max_tokens: Annotated[
        int,
        typer.Option(
            "-n",
            "--max-tokens",
            min=1,
            help="Tokens of an answer, at most.",
            rich_help_panel=GENERATION,
        ),
    ] = 256,
    is_chat: Annotated[
        bool | None,
        _answers(
            "--chat/--raw",
            "Ask through the chat template, or as plain text. Default: chat "
            "where the model has a template.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="Only the first N windows, items and prompts of each set.",
            show_default=False,
        ),
    ] = None,
    state_file: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help="Where results are kept until the end. Default: a file in "
            "PACELINE_HOME that belongs to this very evaluation.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: EngineConfig,
) -> None:
    """Measure what a model's answers are worth, alone or against a reference.

    All figures are deterministic and have 95 % intervals. A run that was killed goes on with the
    same command and ends with the figures of a run that was not.

    **Examples**

    - `paceline eval smollm2-135m --text book.txt --kv-dtype int8 --against-kv-dtype f32`

    - `paceline eval ./model-int4 --text book.txt --against ./model --json`

    - `paceline eval qwen2.5-coder-0.5b --tasks questions.jsonl --prompts prompts.jsonl`

    - `paceline eval qwen2.5-coder-0.5b --humaneval --allow-code-execution`

    - `paceline eval smollm2-135m --needle 500,1000,2000 --kv-dtype int4 --against-kv-dtype f16`
    """
    from paceline.cli.eval_text import print_facts
    from paceline.cli.stages import show_stages
    from paceline.evaluate.run import Evaluation, Work
    from paceline.evaluate.state import State, default_path

    if (humaneval_file is not None or allow_code_execution) and not humaneval:
        raise ParameterError("--humaneval-file and --allow-code-execution need --humaneval")
    if humaneval:
        consent(allow_code_execution)
    work = Work(
        text=text, context=context, stride=context // 2 if stride is None else stride,
        limit=limit, **_read_files(tasks, prompts, limit), lengths=_integers(needle, "--needle"),
        depths=_integers(None if needle is None else depths, "--depths", high=100),
        max_tokens=max_tokens, is_chat=is_chat,
        problems=_problems(humaneval_file, limit) if humaneval else (),
    )  # fmt: skip
    _check_asked(ctx, work)
    sources = _sources(
        model, against, config, kv_dtype=against_kv_dtype, activations=against_activations
    )
    evaluation = Evaluation(sources, work)
    identity = evaluation.identity
    with State(state_file or default_path(identity), identity) as state:
        with show_stages() as stages:
            facts = evaluation.run(state, stages.show)
        if as_json:
            print(json.dumps(facts, ensure_ascii=False))
        else:
            print_facts(facts)
        state.remove()


def consent(is_allowed: bool) -> None:
    """Warn of what --humaneval does; raise where nobody has agreed to it."""
    from paceline.evaluate.sandbox import isolation

    if not is_allowed:
        raise ParameterError(
            "--humaneval runs programs that the model wrote, with your rights: read "
            "docs/evaluate.md, and add --allow-code-execution if that is what you want"
        )
    network = "the network is cut" if isolation() else "THE NETWORK IS OPEN (no unshare here)"
    typer.echo(WARNING.format(network=network), err=True)


def _read_files(
    tasks: list[str] | None, prompts: str | None, limit: int | None
) -> dict[str, tuple[Any, ...]]:
    from paceline.evaluate.prompts import read_prompts
    from paceline.evaluate.tasks import read_tasks

    paths = tasks or []
    if len(set(paths)) < len(paths):
        raise ParameterError("--tasks names a file twice: name each once")
    return {
        "tasks": tuple(read_tasks(path, limit) for path in paths),
        "prompts": () if prompts is None else tuple(read_prompts(prompts, limit)),
    }


def _problems(path: str | None, limit: int | None) -> tuple[Any, ...]:
    from paceline.evaluate.humaneval import read_problems

    return tuple(read_problems(path, limit))


def _integers(text: str | None, what: str, high: int = 1 << 20) -> tuple[int, ...]:
    from paceline.bench.units import parse_integer

    found = [] if text is None else [parse_integer(part, what, 0, high) for part in text.split(",")]
    return tuple(dict.fromkeys(found))


def _check_asked(ctx: typer.Context, work: Work) -> None:
    """Raise where nothing is asked, or options are given that nothing asked for reads."""
    if work.text is None and not work.generates:
        raise ParameterError(
            "nothing is asked: give --text, --tasks, --prompts, --needle or --humaneval"
        )
    unread: list[str] = []
    if work.text is None:
        unread += ["context", "stride"]
    if not work.generates:
        unread += [*_ENGINE_ONLY, "max_tokens", "is_chat"]
    if not work.lengths:
        unread += ["depths"]
    for name in unread:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = "--chat/--raw" if name == "is_chat" else f"--{name.replace('_', '-')}"
            raise ParameterError(f"{flag} means nothing to what is asked here: leave it out")


def _sources(
    model: str, against: str | None, config: EngineConfig, *, kv_dtype: str | None,
    activations: str | None,
) -> list[Source]:  # fmt: skip
    from msgspec.structs import replace

    from paceline.cli.loading import find_model, refuse_encoder
    from paceline.evaluate.run import Source

    refuse_encoder(model)
    sources = [Source(role="model", model=model, path=find_model(model), config=config)]
    changes = {"kv_dtype": kv_dtype, "activations": activations}
    given = {name: value for name, value in changes.items() if value is not None}
    for name, choices in (("kv_dtype", KV_DTYPES), ("activations", ACTIVATIONS)):
        if name in given and given[name] not in choices:
            raise ParameterError(
                f"--against-{name.replace('_', '-')} is {given[name]!r}: choose one of "
                f"{', '.join(choices)}",
                param=f"against_{name}",
            )
    if against is None and not given:
        return sources
    other = against or model
    refuse_encoder(other)
    reference = replace(config, **given)
    sources.append(Source(role="reference", model=other, path=find_model(other), config=reference))
    return sources
