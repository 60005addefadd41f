"""A Q8_0 copy of a GGUF file, for an engine that cannot read a format in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.weights.checkpoint import Checkpoint

_FILE_TYPE = "general.file_type"


def unreadable_formats(checkpoint: Checkpoint, readable: frozenset[str]) -> list[str]:
    """Return the weight formats of `checkpoint` that are not in `readable`, sorted."""
    return sorted({tensor.format for tensor in checkpoint.tensors.values()} - readable)


def write_q8_copy(source: Path, target: Path) -> None:
    """Write `source` again with its matrices in Q8_0 and all else in float32.

    Needs the package `gguf`. Takes about ten seconds for half a billion parameters.
    """
    try:
        import gguf
    except ImportError:
        raise PacelineError(
            f"a Q8_0 copy of {source.name} is needed: pip install gguf to have it made"
        ) from None
    reader = gguf.GGUFReader(source)
    fields: dict[str, Any] = {
        name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    fields.pop(_FILE_TYPE, None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for name, field in fields.items():
        item_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=item_type)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
