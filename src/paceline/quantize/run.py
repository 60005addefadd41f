"""Quantising a model: one tensor after the other from mapped files to OUT, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from paceline.errors import ModelFormatError, ParameterError
from paceline.quantize.base import U8, Method, float_rows
from paceline.quantize.recipe import Recipe, TensorRecipe
from paceline.quantize.source import Source
from paceline.quantize.staging import Staging
from paceline.weights.checkpoint import METADATA, QUANT_METHOD, QUANT_VERSION
from paceline.weights.gguf_writer import DEFAULT_ALIGNMENT, gguf_head, metadata_of
from paceline.weights.mapped_file import drop_pages
from paceline.weights.repack import source_fingerprint
from paceline.weights.safetensors import INDEX, SINGLE
from paceline.weights.safetensors_writer import safetensors_head
from paceline.weights.tensor import BLOCK, QTensor, is_finite

ENCODER_VERSION = 1  # raise it when the same weights get other bits: no run goes on over that
_COPY_BYTES = 1 << 23
SYNC_BYTES = 1 << 26  # at most so much is written again after a kill
# Files beside the weights that a folder needs; others (weights in other formats) are left behind.
_CARRIED = (".json", ".jinja", ".txt", ".model")


class Result(Struct, frozen=True, kw_only=True):
    path: Path
    num_bytes: int
    source_bytes: int  # of the tensors
    num_resumed: int  # tensors that an earlier run had written


def quantize(
    source: Source, out: Path, recipe: Recipe, method: Method, *, num_threads: int,
    force: bool = False, progress: Callable[[int, int], None] | None = None,
) -> Result:  # fmt: skip
    """Write `source` to `out` as `recipe` says. `progress(done, total)` counts bytes written.

    `out` appears only when it is whole. A run that was killed is continued by the next one with
    the same arguments, and the result has the bits of one that was not. Holds a few chunks of
    rows in floats, and what the method needs to prepare, for which `progress` counts first.
    """
    if out.exists() and out.resolve() == source.path.resolve():
        raise ParameterError(f"{out} is the source itself: choose another -o", param="out")
    name, (head, sizes) = _layout(source, out, recipe)
    total = len(head) + sum(sizes)
    identity = _identity(source, recipe, head)
    with Staging(out, identity=identity, force=force) as staging:
        resumed = staging.num_done
        num_resumed = max(resumed, staging.num_kept)
        done = len(head) + sum(sizes[:resumed]) if resumed else 0
        try:
            if resumed < len(sizes):
                method.prepare(source, recipe, staging, num_threads=num_threads, progress=progress)
            with staging.open_data(name, size=done, total=total) as file:
                if not resumed:
                    file.write(head)
                safe = done
                for i in range(resumed, len(sizes)):
                    start = file.tell()
                    for data in _data_of(recipe.tensors[i], method, staging, num_threads):
                        file.write(data.data)
                        if progress is not None:
                            progress(file.tell(), total)
                    file.write(bytes(start + sizes[i] - file.tell()))
                    if file.tell() - safe >= SYNC_BYTES:
                        safe = file.tell()
                        file.flush()
                        os.fsync(file.fileno())
                        staging.note(i + 1)
        except ModelFormatError:
            staging.discard()
            raise
        if not recipe.is_gguf:
            _write_rest(source, staging.folder, recipe)
        staging.finish(name if recipe.is_gguf else None)
    before = sum(t.tensor.load().num_bytes for t in recipe.tensors)
    return Result(path=out, num_bytes=total, source_bytes=before, num_resumed=num_resumed)


def _layout(source: Source, out: Path, recipe: Recipe) -> tuple[str, tuple[bytes, list[int]]]:
    """Name of the file of weights, its head, and the bytes that each tensor takes in it."""
    entries = [(t.tensor.name, t.format, t.tensor.shape) for t in recipe.tensors]
    if not recipe.is_gguf or source.gguf is None:
        return SINGLE, safetensors_head(entries)
    metadata = metadata_of(source.gguf.raw, recipe.target.format)
    alignment = int(source.gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    return out.name, gguf_head(metadata, entries, alignment=alignment)


def _identity(source: Source, recipe: Recipe, head: bytes) -> str:
    """A hash of all that the result's bytes depend on."""
    files = source.gguf.paths if source.gguf is not None else ()
    if source.path.is_dir():
        files = tuple(sorted(source.path.glob("*.safetensors")))
    digest = hashlib.sha256(source_fingerprint(files).encode())
    digest.update(json.dumps([ENCODER_VERSION, recipe.summary()], sort_keys=True).encode())
    digest.update(head)
    return digest.hexdigest()


def _data_of(
    recipe: TensorRecipe, method: Method, staging: Staging, num_threads: int
) -> Iterator[U8]:
    """Bytes of a tensor in the result, piece by piece."""
    source, blocks, name = recipe.tensor.load(), recipe.blocks, recipe.tensor.name
    if blocks is None:
        size = BLOCK[source.format][1]
        for part in _pieces(source.data, _COPY_BYTES // size * size):
            if not is_finite(QTensor(source.format, (), part)):
                raise ModelFormatError(
                    f"tensor {name} holds NaN or infinity: weights must be finite; download or "
                    "convert the model again"
                )
            yield part
    elif (kept := staging.kept(name, recipe.num_bytes)) is not None:
        yield from _pieces(kept, _COPY_BYTES)
    else:
        for first, weight in float_rows(source):
            data = method.quantize(name, weight, blocks, num_threads=num_threads, first_row=first)
            yield data.reshape(-1)


def _pieces(data: U8, size: int) -> Iterator[U8]:
    """Yield runs of `size` bytes of mapped `data`; the pages of one that was used are dropped."""
    flat = data.reshape(-1)
    for start in range(0, len(flat), size):
        yield flat[start : start + size]
        drop_pages(flat[start : start + size])


def _write_rest(source: Source, folder: Path, recipe: Recipe) -> None:
    """Write config.json and what else the folder needs beside the weights."""
    config: dict[str, Any] = {}
    if source.gguf is not None:
        head, _ = gguf_head(metadata_of(source.gguf.raw, None), [])
        (folder / METADATA).write_bytes(head)
    if source.path.is_dir():
        for path in _carried(source.path):
            to = folder / path.relative_to(source.path)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, to)
        config = json.loads((source.path / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD, "version": QUANT_VERSION, **recipe.summary(),
    }  # fmt: skip
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _carried(folder: Path) -> Iterator[Path]:
    """Files of a folder that belong to the model and are no weights."""
    for path in sorted(folder.iterdir()):
        is_wanted = path.suffix in _CARRIED or path.name.startswith("LICENSE")
        if is_wanted and path.name != INDEX and path.is_file():
            yield path
    yield from sorted(folder.glob("[0-9]_*/config.json"))  # the steps of a sentence encoder
