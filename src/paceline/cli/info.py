"""`paceline info`: what a model holds, and the memory that it takes in each format."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.models.base import ModelConfig


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A catalogue name, a GGUF file, a folder of HF safetensors, a hub id; or a "
            "config.json, or a folder that has no more.",
            show_default=False,
        ),
    ] = None,
    *,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Instead of MODEL: a known model that is not here, as llama-3.1-8b. An unknown "
            "name lists them.",
            show_default=False,
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(
            "--parameters",
            help="Instead of MODEL: only its number of parameters, as 8e9 or 8B.",
            show_default=False,
        ),
    ] = None,
    seqs: Annotated[
        int | None,
        typer.Option("--seqs", min=1, help="Sequences to reckon memory for. Default: 1."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Tokens of each. Default: the model's context."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="KV cache format: f16, bf16, f32, int8, fp8, k8v4 or int4. Default: the engine's.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show architecture, size by weight format, and memory for N sequences of C tokens.

    Reads headers only: nothing is loaded, and a config.json, the name of a known shape or a number
    of parameters will do. A named model of the catalogue is fetched if it is not here.

    **Examples**

    - `paceline info smollm2-135m`

    - `paceline info ./model.gguf --seqs 8 --context 4096`

    - `paceline info --shape llama-3.1-8b --seqs 8 --context 8192`

    - `paceline info --parameters 8e9`

    - `paceline info ./config.json --json | jq .formats`
    """
    from paceline.cli.info_text import print_facts

    given = {"MODEL": model, "--shape": shape, "--parameters": parameters}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ParameterError(
            f"{' and '.join(named) or 'nothing'} is named: give one of {', '.join(given)}"
        )
    if parameters is not None:
        options = {"--seqs": seqs, "--context": context, "--kv-dtype": kv_dtype}
        unread = [name for name, value in options.items() if value is not None]
        if unread:
            raise ParameterError(
                f"a number of parameters says nothing about a KV cache: leave {unread[0]} out, or "
                "name a --shape or a config.json"
            )
        facts = describe_count(_count(parameters))
    else:
        facts = _facts(model, shape, seqs=seqs or 1, context=context, kv_dtype=kv_dtype)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print_facts(facts)


def _facts(
    model: str | None, shape: str | None, *, seqs: int, context: int | None, kv_dtype: str | None
) -> dict[str, Any]:
    from paceline.catalog.shapes import config_file, named_shape, read_shape
    from paceline.config import EngineConfig

    config = EngineConfig()
    if kv_dtype is not None:
        config = replace(config, kv_dtype=kv_dtype)
    if shape is not None:
        return describe_shape(named_shape(shape), shape, config, seqs=seqs, context=context)
    assert model is not None
    only_config = config_file(Path(model).expanduser())
    if only_config is not None:
        found = read_shape(only_config)
        return describe_shape(found, str(only_config), config, seqs=seqs, context=context)
    from paceline.cli.loading import find_model
    from paceline.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(find_model(model))
    return describe(checkpoint, config, seqs=seqs, context=context)


def _count(text: str) -> int:
    """Return the number that "8e9", "8B", "135M" or "8030261248" means; raises ParameterError."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
    body = text.strip().upper()
    unit = units.get(body[-1:], 1)
    try:
        count = float(body if unit == 1 else body[:-1]) * unit
    except ValueError:
        count = -1.0
    if not 1 <= count < 1e15:
        raise ParameterError(
            f"{text!r} is no number of parameters: write for example 8e9, 8B or 135M"
        )
    return round(count)


def describe_count(count: int) -> dict[str, Any]:
    """Return what so many parameters take in each format: weights alone."""
    from paceline.measure.footprint import FORMATS, counted_size

    sizes = [counted_size(count, name) for name in FORMATS]
    return {
        "parameters": count,
        "formats": [
            {
                "format": size.format, "bits_per_weight": size.bits(count),
                "code_bytes": size.code_bytes, "extra_bytes": size.extra_bytes,
                "weight_bytes": size.weight_bytes,
            }
            for size in sizes
        ],
    }  # fmt: skip


def describe_shape(
    model: ModelConfig, name: str, config: Any, *, seqs: int, context: int | None
) -> dict[str, Any]:
    """Return the facts of a model that has no weights here."""
    from paceline.measure.footprint import num_parameters

    context = _checked(model, context)
    return {
        "name": name,
        "parameters": num_parameters(model),
        **_architecture(model),
        **_memory(model, config, seqs=seqs, context=context),
    }


def describe(checkpoint: Any, config: Any, *, seqs: int, context: int | None) -> dict[str, Any]:
    """Return the facts of a checkpoint, from its header alone."""
    model = checkpoint.config
    context = _checked(model, context)
    formats: Counter[str] = Counter()
    num_parameters = 0
    for tensor in checkpoint.tensors.values():
        formats[tensor.format] += tensor.num_bytes
        num_parameters += math.prod(tensor.shape)
    weight_bytes = sum(formats.values())
    facts = {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "source": checkpoint.source,
        "parameters": num_parameters,
        **_architecture(model),
        "chat_template": "default" in checkpoint.chat_templates,
        "weight_bytes": weight_bytes,
        "weight_bytes_by_format": dict(formats.most_common()),
        **_memory(model, config, seqs=seqs, context=context),
    }
    memory = facts["memory"]
    memory["total_bytes"] = weight_bytes + memory["kv_bytes"]
    return facts


def _checked(model: ModelConfig, context: int | None) -> int:
    if context is not None and context > model.max_context:
        raise ParameterError(
            f"context is {context}, the model's is {model.max_context} tokens: lower --context"
        )
    return context or model.max_context


def _architecture(model: ModelConfig) -> dict[str, Any]:
    return {
        "family": model.family,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "context": model.max_context,
        "tied_embeddings": model.tie_embeddings,
    }


def _memory(model: ModelConfig, config: Any, *, seqs: int, context: int) -> dict[str, Any]:
    """Return KV bytes by format, and what weights, cache and steps take by format of the weights.

    An encoder keeps nothing of a text and is not quantised: it has no formats.
    """
    from paceline.config import KV_DTYPES
    from paceline.engine.memory import kv_token_bytes
    from paceline.measure.footprint import FORMATS, kv_sizes, num_parameters, step_size, weight_size

    kv = kv_sizes(model, seqs=seqs, context=context)
    held = kv[config.kv_dtype]
    rows = []
    for name in FORMATS if model.is_causal else ():
        size = weight_size(model, name)
        step = step_size(model, name, seqs=seqs, context=context)
        step_bytes = step.activation_bytes + step.table_bytes
        rows.append({
            "format": name, "bits_per_weight": size.bits(num_parameters(model)),
            "code_bytes": size.code_bytes, "extra_bytes": size.extra_bytes,
            "weight_bytes": size.weight_bytes, "kv_bytes": held, "step_bytes": step_bytes,
            "total_bytes": size.weight_bytes + held + step_bytes,
        })  # fmt: skip
    return {
        "kv_dtype": config.kv_dtype,
        "kv_bytes_per_token": kv_token_bytes(model, config.kv_dtype),
        "kv_bytes_per_token_by_dtype": {name: kv_token_bytes(model, name) for name in KV_DTYPES},
        "memory": {
            "seqs": seqs, "context": context, "kv_bytes": held, "kv_bytes_by_dtype": kv,
        },
        "formats": rows,
    }  # fmt: skip
