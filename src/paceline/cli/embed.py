"""`paceline embed`: vectors of texts, and how near they are to each other."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import Model, Pooling, Weights
from paceline.config import EngineConfig
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.backends.base import F32


def embed(
    model: Model,
    texts: Annotated[
        list[str],
        typer.Argument(help="Texts; `-` reads one a line from stdin.", show_default=False),
    ],
    *,
    pooling: Pooling = None,
    weights: Weights = "file",
    num_threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads. Default: CPU mask and cgroup quota."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the vectors.")
    ] = False,
) -> None:
    """Embed texts: show how near each is to the first, or the vectors themselves.

    A vector has length 1, so the product of two is their cosine: 1 for the same direction, about 0
    for texts that have nothing in common.

    **Examples**

    - `paceline embed all-minilm-l6-v2 "A cat sat." "A feline rested." "Stocks fell."`

    - `paceline embed all-minilm-l6-v2 - --json < lines.txt | jq '.embeddings | length'`

    - `paceline embed smollm2-135m "Hello" "Hi there" --pooling last`
    """
    from paceline.cli.loading import find_model
    from paceline.embedding.build import load_embedding_model

    config = EngineConfig(num_threads=num_threads)
    given = _read(texts)
    path = find_model(model)
    loaded = load_embedding_model(model, config, path=path, pooling=pooling, weights=weights)
    ids = [loaded.encode(text, param=f"text {number}") for number, text in enumerate(given, 1)]
    num_tokens = [len(i) for i in ids]
    vectors = loaded.open().embed(ids)
    if as_json:
        result = {
            "model": loaded.name, "pooling": loaded.pooling, "dimensions": loaded.dim,
            "num_tokens": num_tokens, "embeddings": vectors.tolist(),
        }  # fmt: skip
        print(json.dumps(result))
        return
    _print(given, num_tokens, vectors)


def _read(texts: list[str]) -> list[str]:
    if "-" not in texts:
        return texts
    if len(texts) > 1:
        raise ParameterError("`-` reads all texts from stdin: leave the others out")
    try:
        lines = [line for line in sys.stdin.buffer.read().decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ParameterError(f"stdin is no UTF-8 text: {error}") from None
    if not lines:
        raise ParameterError("stdin holds no text: write one a line")
    return lines


def _print(texts: list[str], num_tokens: list[int], vectors: F32) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("cosine to the first", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    for text, count, cosine in zip(texts, num_tokens, vectors @ vectors[0], strict=True):
        table.add_row(f"{cosine:.3f}", str(count), text)
    Console(markup=False, emoji=False, highlight=False).print(table)
