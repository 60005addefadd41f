"""Methods: which folders that others quantised are read, and their linears as blocks of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.models.base import EMBEDDING, HEAD
from paceline.weights.fields import Fields
from paceline.weights.quantised.awq import read_awq
from paceline.weights.quantised.compressed import read_compressed
from paceline.weights.quantised.fp8 import read_fp8
from paceline.weights.quantised.gptq import read_gptq
from paceline.weights.quantised.grouped import Grouped
from paceline.weights.quantised.module import Module
from paceline.weights.tensor import BLOCK, QTensor, StoredTensor, dequantize

_REMEDY = "give the model's float weights to `paceline quantize`, or use a GGUF file"


class Method(Protocol):
    """A method with what config.json says of it: opens one linear, reading little of it."""

    def open(self, module: Module) -> Grouped: ...


_METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": read_awq, "gptq": read_gptq, "compressed-tensors": read_compressed, "fp8": read_fp8,
}  # fmt: skip


class Repacked(StoredTensor, frozen=True):
    """A weight that lies in the file in several parts, and the tensor that they make."""

    tensor: QTensor

    def load(self) -> QTensor:
        return self.tensor


def find_method(table: Fields) -> Method | None:
    """The method of a `quantization_config`; None where there is none.

    Raises UnsupportedModelError, naming it, for one that is not read.
    """
    if not table.values:
        return None
    name = table.text("quant_method", "")
    if name not in _METHODS:
        what = repr(name) if name else "an unnamed method"
        if name == "bitsandbytes" or any(table.values.get(f"load_in_{n}bit") for n in (4, 8)):
            what = "bitsandbytes"
        raise UnsupportedModelError(
            f"{table.where}: weights quantised with {what} are not supported: {_REMEDY}; "
            f"{', '.join(_METHODS)} are read"
        )
    return _METHODS[name](table)


def repack_modules(
    stored: Mapping[str, StoredTensor], method: Method | None, where: str
) -> dict[str, Repacked]:
    """The quantised weights of the text model by canonical name; their bytes are made when wanted.

    Raises ModelFormatError or UnsupportedModelError, naming the tensor, for parts that are missing
    or do not fit each other.
    """
    repacked: dict[str, Repacked] = {}
    for module in dict.fromkeys(filter(None, map(_module_of, stored.values(), stored))):
        name = f"{module}.weight"
        if method is None:
            raise ModelFormatError(
                f"{where}: {module} is quantised, but config.json has no quantization_config: "
                "copy it from the model's page, or from quantize_config.json with its quant_method"
            )
        tensor = method.open(Module(module, where, stored)).tensor()
        if name == EMBEDDING and tensor.column_order is not None:
            raise UnsupportedModelError(
                f"{where}: {name} is quantised in activation order, which an embedding cannot be: "
                f"{_REMEDY}"
            )
        repacked[name] = Repacked(name, tensor.format, tensor.shape, None, tensor)
    return repacked


def _module_of(tensor: StoredTensor, name: str) -> str | None:
    """The linear of the text model that this is the main part of, if it is quantised."""
    if not (name.startswith("model.layers.") or name in _parts(HEAD) or name in _parts(EMBEDDING)):
        return None
    module, _, part = name.rpartition(".")
    is_main = part in ("qweight", "weight_packed") or (
        part == "weight" and tensor.format not in BLOCK
    )
    return module if is_main else None


def _parts(weight: str) -> tuple[str, ...]:
    module = weight.removesuffix(".weight")
    return (weight, f"{module}.qweight", f"{module}.weight_packed")


def refuse_lost_biases(
    stored: Mapping[str, StoredTensor],
    needed: Iterable[str],
    repacked: Iterable[str],
    where: str,
) -> None:
    """Refuse a bias that the model has no place for, unless all of it is 0.

    Older GPTQ tools wrote biases of zeros beside every linear.
    """
    read = set(needed)
    for name in repacked:
        bias = f"{name.removesuffix('.weight')}.bias"
        is_lost = name in read and bias in stored and bias not in read
        if is_lost and np.any(dequantize(stored[bias].load())):
            raise UnsupportedModelError(
                f"{where}: tensor {bias} is not zero, and this family has no such bias: {_REMEDY}"
            )
