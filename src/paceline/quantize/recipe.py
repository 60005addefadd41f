"""Recipe: what each tensor of a model becomes, decided before the first weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from paceline.errors import ParameterError
from paceline.quantize.base import Blocks
from paceline.quantize.formats import Target
from paceline.quantize.source import Source
from paceline.weights.checkpoint import METADATA
from paceline.weights.tensor import BLOCK, F8_FORMATS, FLOAT_FORMATS, StoredTensor

EMBEDDING_CHOICES = ("auto", "same", "keep")


class TensorRecipe(Struct, frozen=True):
    """A tensor and its blocks; None: its bytes stay. `note` says why it is not as asked for."""

    tensor: StoredTensor
    blocks: Blocks | None
    note: str = ""

    @property
    def format(self) -> str:
        return self.tensor.format if self.blocks is None else self.blocks.format

    @property
    def num_bytes(self) -> int:
        weights, block_bytes = BLOCK[self.format]
        count = 1
        for extent in self.tensor.shape:
            count *= extent
        return count // weights * block_bytes


class Recipe(Struct, frozen=True, kw_only=True):
    """A method, a target, and the tensors in the order of the file to write."""

    method: str
    target: Target
    embeddings: str  # auto, same or keep
    is_gguf: bool  # of the result: a GGUF file, else a folder
    tensors: tuple[TensorRecipe, ...]
    settings: dict[str, Any]  # of the method: calibration, …

    def summary(self) -> dict[str, Any]:
        """What config.json and the report say of it."""
        formats: Counter[str] = Counter()
        for tensor in self.tensors:
            formats[tensor.format] += tensor.num_bytes
        return {
            "method": self.method, **asdict(self.target), "embeddings": self.embeddings,
            **self.settings, "bytes_by_format": dict(formats.most_common()),
            "exceptions": {t.tensor.name: [t.format, t.note] for t in self.tensors if t.note},
        }  # fmt: skip


def new_recipe(
    source: Source, out: Path, *, method: str, target: Target, embeddings: str = "auto",
    settings: dict[str, Any] | None = None, rewritten: Collection[str] = (),
    linears: Mapping[str, Target] | None = None,
) -> Recipe:  # fmt: skip
    """Return the recipe for writing `source` to `out`; raises ParameterError if it cannot be.

    `rewritten` are vectors that the method changes: they become f32. `linears` has targets of
    those that do not get `target`.
    """
    if embeddings not in EMBEDDING_CHOICES:
        choices = ", ".join(EMBEDDING_CHOICES)
        raise ParameterError(f"embeddings is {embeddings!r}: choose {choices}", param="embeddings")
    is_gguf = out.suffix.lower() == ".gguf"
    if is_gguf and target.is_grouped:
        raise ParameterError(
            f"a GGUF file cannot hold {target.format}: choose q8_0, q4_k, …, or name a folder with "
            "-o",
            param="out",
        )
    if is_gguf and (source.gguf is None or (source.path / METADATA).exists()):
        raise ParameterError(
            f"{source.path} was quantised from a GGUF file: quantise that file, or name a folder "
            "with -o",
            param="out",
        )
    targets = linears or {}
    tensors = tuple(
        TensorRecipe(tensor, Blocks("f32"))
        if name in rewritten
        else tensor_recipe(source, tensor, targets.get(name, target), embeddings)
        for name, tensor in source.tensors.items()
    )
    return Recipe(
        method=method, target=target, embeddings=embeddings, is_gguf=is_gguf, tensors=tensors,
        settings=settings or {},
    )  # fmt: skip


def tensor_recipe(
    source: Source, tensor: StoredTensor, target: Target, embeddings: str
) -> TensorRecipe:
    """Return what a tensor becomes where `target` is asked for."""
    is_embedding = tensor.name in source.embeddings
    if not is_embedding and tensor.name not in source.linears:
        return TensorRecipe(tensor, None)
    if is_embedding and embeddings == "keep":
        return TensorRecipe(tensor, None, "kept as it was, by --embeddings keep")
    wanted = target.for_embedding() if is_embedding and embeddings == "auto" else target
    blocks, note = wanted.fit(tensor.shape[-1])
    if blocks is None:
        return TensorRecipe(tensor, None, f"kept as it was: {note}")
    if blocks.format == tensor.format and not blocks.by_row:
        return TensorRecipe(tensor, None, "kept: it is in this format already")
    if not note and wanted != target:
        note = "embedding or head: an error there reaches every token"
    return TensorRecipe(tensor, blocks, note)


def lossy_sources(recipe: Recipe) -> dict[str, int]:
    """Formats with few bits that the source has where the recipe rounds once more: tensors each."""
    again = [
        t.tensor.format
        for t in recipe.tensors
        if t.blocks is not None and t.tensor.format not in FLOAT_FORMATS - F8_FORMATS
    ]
    return dict(Counter(again).most_common())
