"""Module: the tensors that one quantised linear of a Hugging Face folder is stored in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.weights.tensor import StoredTensor

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

# dtype of a safetensors file, or the format it is known under -> NumPy's; bf16 is widened by hand
_DTYPES = {
    "I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1", "F8_E4M3": "u1",
    "f32": "<f4", "f16": "<f2", "bf16": "<u2",
}  # fmt: skip
FLOATS = ("f16", "bf16", "f32")
DAMAGED = "download the checkpoint again"


class Module(Struct, frozen=True):
    """A linear by its name. Every error names the folder `where` and the tensor."""

    name: str
    where: str
    stored: Mapping[str, StoredTensor]  # all tensors of the model, by canonical name

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.stored

    def label(self, part: str) -> str:
        return f"{self.where}: tensor {self.name}.{part}"

    def tensor(self, part: str) -> StoredTensor:
        tensor = self.stored.get(f"{self.name}.{part}")
        if tensor is None:
            raise ModelFormatError(
                f"{self.label(part)} is missing: the checkpoint is incomplete, {DAMAGED}"
            )
        return tensor

    def matrix(self, part: str, *dtypes: str) -> npt.NDArray[Any]:
        """The part, of two dimensions and one of `dtypes`, as a view of the file."""
        shape = self.tensor(part).shape
        if len(shape) != 2:
            raise ModelFormatError(
                f"{self.label(part)} has shape {list(shape)}: a matrix is expected, {DAMAGED}"
            )
        return self.array(part, shape, *dtypes)

    def array(self, part: str, shape: tuple[int, ...], *dtypes: str) -> npt.NDArray[Any]:
        """The part, of this shape and one of `dtypes`, as a view of the file."""
        tensor = self.tensor(part)
        if tensor.format not in dtypes:
            raise UnsupportedModelError(
                f"{self.label(part)} is {tensor.format}: {' or '.join(dtypes)} is read: {DAMAGED}, "
                "or quantise the model again"
            )
        dtype = np.dtype(_DTYPES[tensor.format])
        num_bytes = 0 if tensor.data is None else tensor.data.nbytes
        if tensor.shape != shape or num_bytes != math.prod(shape) * dtype.itemsize:
            raise ModelFormatError(
                f"{self.label(part)} has shape {list(tensor.shape)} in {num_bytes} bytes, the "
                f"others ask for {list(shape)} of {dtype.itemsize} bytes each: {DAMAGED}"
            )
        assert tensor.data is not None
        return tensor.data.view(dtype).reshape(shape)

    def shaped(
        self, part: str, shapes: Sequence[tuple[int, ...]], *dtypes: str
    ) -> npt.NDArray[Any]:
        """The part, of one of `shapes`, as a view of the file."""
        shape = self.tensor(part).shape
        return self.array(part, shape if shape in shapes else shapes[0], *dtypes)

    def floats(self, part: str, *shapes: tuple[int, ...]) -> npt.NDArray[Any]:
        return self.shaped(part, shapes, *FLOATS)


def as_f32(values: npt.NDArray[Any]) -> F32:
    """Floats as `Module.floats` gives them, in f32: exact."""
    if values.dtype == np.dtype("<u2"):
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def unpack(words: I32, bits: int) -> U8:
    """Fields of `bits` bits of int32 [n, m], lowest first, each 8 bits wide -> [n, m * 32/bits]."""
    bytes_ = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return bytes_
    out = np.empty((len(bytes_), bytes_.shape[1], 2), np.uint8)
    np.bitwise_and(bytes_, 15, out=out[..., 0])
    np.right_shift(bytes_, 4, out=out[..., 1])
    return out.reshape(len(bytes_), -1)


def all_fields_are(words: npt.NDArray[Any], value: int, bits: int) -> bool:
    """Whether each field of `bits` bits of int32 words is `value`: a look at whole words."""
    word = sum(value << shift for shift in range(0, 32, bits))
    return bool((words.view(np.uint32) == np.uint32(word)).all())
