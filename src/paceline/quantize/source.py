"""Source: the tensors of a model as its files name them, and what each is to the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from paceline.errors import UnsupportedModelError
from paceline.loading import load
from paceline.models.base import EMBEDDING, HEAD, build_plan
from paceline.quantize.as_gguf import as_gguf
from paceline.weights.checkpoint import (
    METADATA,
    QUANT_METHOD,
    Checkpoint,
    canonical_name,
    find_family,
    open_checkpoint,
    open_gguf_folder,
    text_name,
)
from paceline.weights.gguf import GGUF, open_gguf
from paceline.weights.safetensors import open_folder
from paceline.weights.tensor import BLOCK, StoredTensor


def _refuse_quantised(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a folder that others quantised: its weights lie in parts, and were rounded before."""
    method = (config.get("quantization_config") or {}).get("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise UnsupportedModelError(
            f"{path} is quantised with {method} already, and runs as it is: give the model's float "
            "weights to quantise it otherwise"
        )


class Source(Struct, frozen=True, kw_only=True):
    """An opened model. `linears` and `embeddings` are stored names of the matrices of each kind.

    `canonical` maps stored names to the plan's.
    """

    path: Path
    checkpoint: Checkpoint
    tensors: dict[str, StoredTensor]
    canonical: dict[str, str]
    linears: frozenset[str]
    embeddings: frozenset[str]
    gguf: GGUF | None  # None: a folder of Hugging Face files, under their own names
    norm_offset: float  # what its norm weights lack


def open_source(path: Path, *, to_gguf: bool = False) -> Source:
    """Open a GGUF file or a folder. Raises as `open_checkpoint`; no matrix is read.

    `to_gguf`: a folder of Hugging Face files has the names and the metadata of a GGUF file, or is
    refused (`as_gguf`).
    """
    checkpoint = open_checkpoint(path)
    gguf, norm_offset = None, 0.0
    if path.is_file():
        gguf = open_gguf(path)
    elif (path / METADATA).exists():
        gguf = open_gguf_folder(path)
    elif to_gguf:
        folder = open_folder(path)
        _refuse_quantised(folder.config, path)
        gguf, checkpoint = as_gguf(folder, checkpoint)
    if gguf is None:  # what the model does not read (a vision tower, say) is left out
        norm_offset = load("models", checkpoint.config.family).NORM_OFFSET
        needed = checkpoint.tensors.keys()
        folder = open_folder(path)
        _refuse_quantised(folder.config, path)
        stored = folder.tensors
        canonical = {name: text_name(name) for name in stored if text_name(name) in needed}
    else:
        stored = gguf.tensors
        arch = str(gguf.metadata["general.architecture"])
        parts = find_family("GGUF_ARCHITECTURES", arch, str(path)).GGUF_NAMES
        canonical = {name: canonical_name(name, parts) or "" for name in stored}
    plan = build_plan(checkpoint.config)
    linears = {name for op in plan.ops if op.name == "linear" for name in op.weights}
    tables = {EMBEDDING, HEAD}
    for name in canonical:
        if stored[name].format not in BLOCK:
            raise UnsupportedModelError(
                f"tensor {name!r} is in format {stored[name].format}, which cannot be read"
            )
    return Source(
        path=path, checkpoint=checkpoint, gguf=gguf, norm_offset=norm_offset,
        tensors={name: stored[name] for name in canonical},
        canonical=canonical,
        linears=frozenset(n for n, known in canonical.items() if known in linears - tables),
        embeddings=frozenset(n for n, known in canonical.items() if known in tables),
    )  # fmt: skip
