"""Options that several commands share, each defined once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from paceline.config import EngineConfig, parse_bytes

ENGINE = "Engine"
SAMPLING = "Sampling"

Model = Annotated[
    str,
    typer.Argument(
        help="A catalogue name (see `paceline list`), a GGUF file, a folder of HF safetensors, "
        "or a hub id.",
        show_default=False,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        help="Catalogue names (see `paceline list`), GGUF files, folders of HF safetensors, or hub "
        "ids. The first is loaded at the start, others at their first request.",
        show_default=False,
    ),
]
ChatTemplateFile = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="A file with a Jinja chat template that replaces the model's own.",
        rich_help_panel=ENGINE,
    ),
]
Pooling = Annotated[
    str | None,
    typer.Option(
        "--pooling",
        help="Which hidden states of a text its vector is the mean of: mean (all), last (token) or "
        "first (an encoder's). Default: what the model's folder says, else mean.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="An encoder's weights: file, as they are, or q8_0, rounded to int8 as they are "
        "loaded: less to read and a little less exact.",
    ),
]
ServedModel = Annotated[
    str,
    typer.Option(
        "--model", help="Which of a server's models. Default: its first.", show_default=False
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="Bearer token for a server that wants one; @FILE reads it from a file.",
        show_default=False,
    ),
]


def finite(value: float | None) -> float | None:
    """Callback of options that are seconds: click's bounds let NaN pass, and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of seconds: give a finite one")
    return value


_DEFAULTS = EngineConfig()


def _engine(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=ENGINE)


# parameter of the command -> (annotation, default)
_ENGINE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "num_threads": (
        Annotated[
            int | None,
            _engine("--threads", "Threads of the native core. Default: CPU mask and cgroup quota."),
        ],
        None,
    ),
    "kv_memory": (
        Annotated[
            str | None,
            _engine("--kv-memory", "Size of the KV cache, as 512M or 2G. Default: half of what "
                    "is free beside the weights."),
        ],
        None,
    ),
    "kv_dtype": (
        Annotated[
            str,
            _engine("--kv-dtype", "KV cache format: f16, bf16, f32, int8 or fp8 (E4M3): half "
                    "of f16's bytes; k8v4 (int8 keys, values of 4 bits): 0.41; int4: 0.3. At a "
                    "price in quality that depends on the model. Default: bf16 on CPUs that "
                    "multiply it (AVX-512 BF16), else f16."),
        ],
        _DEFAULTS.kv_dtype,
    ),
    "activations": (
        Annotated[
            str,
            _engine("--activations", "What linears over quantised weights read: q8, or f32, exact "
                    "and slower."),
        ],
        _DEFAULTS.activations,
    ),
    "block_size": (
        Annotated[int, _engine("--block-size", "Tokens in a KV block, a multiple of 16.")],
        _DEFAULTS.block_size,
    ),
    "prefix_cache": (
        Annotated[
            bool,
            _engine("--prefix-cache/--no-prefix-cache", "Begin a prompt after what was computed "
                    "of it before: same answers, sooner."),
        ],
        _DEFAULTS.prefix_cache,
    ),
    "kv_tier": (
        Annotated[
            str | None,
            _engine("--kv-tier", "Where blocks of the prefix cache go when the KV cache is full: "
                    "disk:path=DIR,size=4G, where they also stay after the end; "
                    "host:size=2G, other memory; host:…+disk:… for one before the other."),
        ],
        None,
    ),
    "max_model_len": (
        Annotated[
            int | None,
            _engine("--max-model-len", "Longest prompt plus answer, in tokens. Default: the "
                    "model's context."),
        ],
        None,
    ),
    "max_num_seqs": (
        Annotated[int, _engine("--max-num-seqs", "Sequences that run at once.")],
        _DEFAULTS.max_num_seqs,
    ),
    "max_batched_tokens": (
        Annotated[int, _engine("--max-batched-tokens", "Tokens in one step, at most.")],
        _DEFAULTS.max_batched_tokens,
    ),
    "policy": (
        Annotated[
            str,
            _engine("--policy", "Who runs first: fcfs, priority, or slo:step_ms=50 (no step "
                    "longer than that)."),
        ],
        _DEFAULTS.policy,
    ),
    "speculate": (
        Annotated[
            str,
            _engine("--speculate", "Guess tokens ahead and check them in one step, as long as it "
                    "pays; the text stays the same. off; ngram[:max=15]: copy what followed the "
                    "last time that the text ended like this; draft:model=NAME[,max=15,"
                    "window=256,vocab=32768]: a smaller model guesses, which reads at most so "
                    "many tokens of a new text and knows the first ids alone (vocab=all: every "
                    "one); draft+ngram:model=NAME: whichever promises more."),
        ],
        _DEFAULTS.speculate,
    ),
    "seed": (
        Annotated[int, _engine("--seed", "Base of the seeds of requests that bring none.")],
        _DEFAULTS.seed,
    ),
}  # fmt: skip


def _sampling(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=SAMPLING, show_default=False)


_SAMPLING_OPTIONS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (
        Annotated[
            int | None,
            typer.Option("-n", "--max-tokens", help="Tokens of the answer, at most. Default: up "
                         "to the context's end.", rich_help_panel=SAMPLING, show_default=False),
        ],
        None,
    ),
    "temperature": (
        Annotated[
            float | None,
            _sampling("--temperature", "0 is greedy. Default: the model's own, else 0.7."),
        ],
        None,
    ),
    "top_k": (Annotated[int | None, _sampling("--top-k", "Keep the k likeliest tokens.")], None),
    "top_p": (
        Annotated[
            float | None,
            _sampling("--top-p", "Keep the likeliest tokens that sum to p. Default: the model's "
                      "own, else 0.95."),
        ],
        None,
    ),
    "min_p": (
        Annotated[
            float | None,
            _sampling("--min-p", "Keep tokens at least p times as likely as the likeliest."),
        ],
        None,
    ),
    "repetition_penalty": (
        Annotated[
            float | None,
            _sampling("--repetition-penalty", "Above 1: tokens seen in prompt or answer become "
                      "less likely."),
        ],
        None,
    ),
    "stop": (
        Annotated[
            list[str] | None,
            _sampling("--stop", "A string that ends the answer; may be given several times."),
        ],
        None,
    ),
    "ignore_eos": (
        Annotated[bool, _sampling("--ignore-eos", "Go on past the end-of-text token.")],
        False,
    ),
}  # fmt: skip

# What a terminal answer samples with where neither the user nor the model says anything.
_TERMINAL_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(..., config: EngineConfig)` the engine's options."""

    def build(values: dict[str, Any]) -> EngineConfig:
        kv_memory = values.pop("kv_memory")
        return EngineConfig(
            kv_memory_bytes=None if kv_memory is None else parse_bytes(kv_memory), **values
        )

    return _expand(command, "config", _ENGINE_OPTIONS, build)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(..., sampling: dict)` the sampling options: those that the user gave."""

    def build(values: dict[str, Any]) -> dict[str, Any]:
        if values["stop"] is not None:
            values["stop"] = tuple(values["stop"])
        # By identity: 0 is a value that a user gives, and it equals False.
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False
        }

    return _expand(command, "sampling", _SAMPLING_OPTIONS, build)


def with_terminal_defaults(given: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Return `given` over the model's own defaults over those of a terminal answer."""
    return {**_TERMINAL_DEFAULTS, **model, **given}


def _expand(
    command: Callable[..., None],
    parameter: str,
    options: dict[str, tuple[Any, Any]],
    build: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """Replace `parameter` in the command line by `options`, gathered again by `build`.

    Typer reads a command's options from its signature, so the wrapper is given one.
    """
    signature = inspect.signature(command, eval_str=True)
    kept = [p for name, p in signature.parameters.items() if name != parameter]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in options.items()
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        taken = {name: values.pop(name) for name in options}
        command(**values, **{parameter: build(taken)})

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    wrapper.__dict__["__signature__"] = inspect.Signature(keyword_only + added)
    wrapper.__annotations__ = {p.name: p.annotation for p in keyword_only + added}
    del wrapper.__wrapped__
    return wrapper
