"""The folder reader: shards, their index, and the ways they break."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import (
    ModelFormatError,
    ModelNotFoundError,
    PacelineError,
    UnsupportedModelError,
)
from paceline.weights.safetensors import INDEX, open_folder, open_safetensors
from paceline.weights.tensor import dequantize, from_floats
from tests.tiny import encode, random_model, safetensors_bytes, write_hf

TENSORS = {
    "a": from_floats(np.arange(6).reshape(2, 3)),
    "b": encode(np.array([0.5, -2.0], np.float32), "f16"),
    "c": encode(np.array([[3.0]], np.float32), "bf16"),
}


def raw_file(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def test_every_dtype_is_read_back_as_a_view(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(TENSORS))
    tensors = open_safetensors(path)
    assert set(tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        got = tensors[name].load()
        np.testing.assert_array_equal(dequantize(got), dequantize(expected))
        assert not got.data.flags.owndata


def test_a_short_file_names_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    whole = safetensors_bytes(TENSORS)
    path.write_bytes(whole)
    for length in range(len(whole) - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(ModelFormatError, match=r"m\.safetensors"):
            open_safetensors(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelFormatError, match=rf"has {len(whole) - 1} bytes.*{len(whole)}"):
        open_safetensors(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 1 << 62) + b"{}", "header takes"),
        (raw_file(b"{nonsense"), "broken JSON"),
        (raw_file(b"[" * 100_000), "broken JSON"),
        (raw_file([1]), "object is expected"),
        (raw_file({"t": 3}), "needs dtype"),
        (raw_file({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "needs dtype"),
        (raw_file({"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "impossible"),
        (raw_file({"t": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}), "impossible"),
        (
            raw_file({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
            "takes 8 bytes, its offsets span 4",
        ),
        (
            raw_file({"t": {"dtype": "F32", "shape": [1 << 61], "data_offsets": [0, 1 << 61]}}),
            "its offsets span",
        ),
        (
            raw_file(
                {
                    "t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "u": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
                },
                bytes(8),
            ),
            "'t' and 'u' overlap",
        ),
    ],
)
def test_a_broken_header_is_a_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        open_safetensors(path)


def test_a_dtype_we_cannot_read_fails_only_when_wanted(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        raw_file({"t": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    )
    with pytest.raises(UnsupportedModelError, match="tensor 't' is in format I64"):
        open_safetensors(path)["t"].load()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bits_never_do_worse_than_a_typed_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(safetensors_bytes(TENSORS))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(PacelineError):
        for tensor in open_safetensors(path).values():
            tensor.load()


def test_a_sharded_folder_is_read_whole(tmp_path: Path) -> None:
    model = random_model()
    folder = open_folder(write_hf(model, tmp_path, shards=3))
    assert set(folder.tensors) == set(model.tensors)
    assert folder.config == model.config
    assert folder.tokenizer_json.startswith(b"{")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf(random_model(), tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_folder(tmp_path)


def test_a_tensor_that_no_shard_has_is_named(tmp_path: Path) -> None:
    write_hf(random_model(), tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"no tensor 'ghost\.weight'"):
        open_folder(tmp_path)


def test_a_stray_tensor_does_not_replace_the_one_the_index_assigns(tmp_path: Path) -> None:
    model = random_model()
    write_hf(model, tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = "model.norm.weight"
    other = next(shard for shard in index.values() if shard != index[name])
    strays = {n: t.load() for n, t in open_safetensors(tmp_path / other).items()}
    strays[name] = from_floats(np.full(64, 9.0))
    content = safetensors_bytes(strays)
    (tmp_path / other).unlink()  # the old file stays mapped
    (tmp_path / other).write_bytes(content)
    tensor = open_folder(tmp_path).tensors[name].load()
    np.testing.assert_array_equal(dequantize(tensor), model.tensors[name])


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_cannot_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    write_hf(random_model(), tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(ModelFormatError, match="is no file name"):
        open_folder(tmp_path)


def test_a_folder_without_config_or_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="the weights are missing"):
        open_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs\nsize 5\n")
    with pytest.raises(ModelFormatError, match="Git LFS pointer"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"a":')
    with pytest.raises(ModelFormatError, match=r"config\.json: broken JSON"):
        open_folder(tmp_path)
