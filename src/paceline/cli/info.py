"""`paceline info`: what a model file holds and what it will take to run it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Annotated, Any

import typer

from paceline.cli.options import Model


def info(
    model: Model,
    *,
    seqs: Annotated[int, typer.Option("--seqs", min=1, help="Sequences to reckon memory for.")] = 1,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Tokens of each. Default: the model's context."),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="KV cache format: f16, bf16, f32, int8 or fp8.")
    ] = "f16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show architecture, size by weight format, and memory for N sequences of C tokens.

    Reads the file's header only: nothing is loaded. A named model is fetched if it is not here.

    **Examples**

    - `paceline info smollm2-135m`

    - `paceline info ./model.gguf --seqs 8 --context 4096`

    - `paceline info ./model.gguf --json | jq .kv_bytes_per_token`
    """
    from paceline.cli.loading import find_model
    from paceline.config import EngineConfig
    from paceline.weights.checkpoint import open_checkpoint

    config = EngineConfig(kv_dtype=kv_dtype)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(find_model(model))
    facts = describe(checkpoint, config, seqs=seqs, context=context)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def describe(checkpoint: Any, config: Any, *, seqs: int, context: int | None) -> dict[str, Any]:
    """Return the facts of a checkpoint, from its header alone."""
    from paceline.config import KV_DTYPES
    from paceline.engine.memory import kv_token_bytes
    from paceline.errors import ParameterError

    model = checkpoint.config
    context = context or model.max_context
    if context > model.max_context:
        raise ParameterError(
            f"context is {context}, the model's is {model.max_context} tokens: lower --context"
        )
    formats: Counter[str] = Counter()
    num_parameters = 0
    for tensor in checkpoint.tensors.values():
        formats[tensor.format] += tensor.num_bytes
        num_parameters += math.prod(tensor.shape)
    token_bytes = kv_token_bytes(model, config.kv_dtype)
    blocks = -(-context // config.block_size)
    kv_bytes = seqs * blocks * config.block_size * token_bytes
    weight_bytes = sum(formats.values())
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "source": checkpoint.source,
        "family": model.family,
        "parameters": num_parameters,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "context": model.max_context,
        "tied_embeddings": model.tie_embeddings,
        "chat_template": "default" in checkpoint.chat_templates,
        "weight_bytes": weight_bytes,
        "weight_bytes_by_format": dict(formats.most_common()),
        "kv_dtype": config.kv_dtype,
        "kv_bytes_per_token": token_bytes,
        "kv_bytes_per_token_by_dtype": {name: kv_token_bytes(model, name) for name in KV_DTYPES},
        "memory": {
            "seqs": seqs,
            "context": context,
            "kv_bytes": kv_bytes,
            "total_bytes": weight_bytes + kv_bytes,
        },
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.engine.memory import format_bytes

    memory = facts["memory"]
    rows = [
        ("name", facts["name"]),
        ("file", f"{facts['path']} ({facts['source']})"),
        ("architecture", f"{facts['family']}, {facts['layers']} layers of {facts['hidden_size']}, "
         f"{facts['heads']} heads ({facts['kv_heads']} KV) of {facts['head_dim']}, "
         f"MLP {facts['intermediate_size']}"),
        ("parameters", f"{facts['parameters'] / 1e6:,.1f} M"),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"
         + (", embeddings tied" if facts["tied_embeddings"] else "")),
        ("context", f"{facts['context']:,} tokens"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
        ("weights", format_bytes(facts["weight_bytes"])),
        *((f"  {name}", format_bytes(count))
          for name, count in facts["weight_bytes_by_format"].items()),
        ("KV a token", f"{format_bytes(facts['kv_bytes_per_token'])} ({facts['kv_dtype']})"),
        *((f"  {name}", format_bytes(count))
          for name, count in facts["kv_bytes_per_token_by_dtype"].items()
          if name != facts["kv_dtype"]),
        (f"{memory['seqs']} x {memory['context']:,} tokens",
         f"{format_bytes(memory['kv_bytes'])} KV + weights = "
         f"{format_bytes(memory['total_bytes'])}"),
    ]  # fmt: skip
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console(soft_wrap=True, markup=False, emoji=False, highlight=False).print(table)
