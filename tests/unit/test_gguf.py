"""The GGUF reader: every value type, and every way a file can be broken."""

from __future__ import annotations

import contextlib
import os
import struct
import time
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
from paceline.weights.gguf import StringArray, open_gguf
from paceline.weights.tensor import QTensor, dequantize, from_floats
from tests.tiny import (
    encode,
    gguf_bytes,
    gguf_tensors,
    random_blocks,
    random_model,
    write_gguf,
)

VALUES: dict[str, Any] = {
    "u8": ("u8", 255), "i8": ("i8", -128), "u16": ("u16", 65535), "i16": ("i16", -32768),
    "u32": ("u32", 2**32 - 1), "i32": ("i32", -(2**31)), "u64": ("u64", 2**64 - 1),
    "i64": ("i64", -(2**63)), "f32": ("f32", 1.5), "f64": ("f64", 0.1), "yes": True, "no": False,
    "text": "grüße 🙂", "empty": "",
}  # fmt: skip
ARRAYS: dict[str, Any] = {
    "ints": ("i32", [1, -2, 3]), "floats": ("f64", [0.5, 1e300]), "bools": [True, False],
    "words": ["a", "", "日本"], "none": ("str", []), "no_ints": ("u8", []),
    "nested": ("array", [("u8", [1, 2]), ["x"]]),
}  # fmt: skip


def small_file(**kw: Any) -> bytes:
    rng = np.random.default_rng(0)
    tensors = {
        "a": random_blocks(rng, "q4_0", (3, 64)),
        "b": from_floats(np.arange(5)),
        "c": random_blocks(rng, "q6_k", (2, 256)),
    }
    return gguf_bytes({**VALUES, **ARRAYS}, tensors, **kw)


def write(tmp_path: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def set_key(data: bytes, key: bytes, value: bytes) -> bytes:
    """Overwrite the payload of a scalar key in place."""
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read_back(tmp_path: Path, version: int) -> None:
    file = open_gguf(write(tmp_path, small_file(version=version)))
    expected = {k: v[1] if isinstance(v, tuple) else v for k, v in VALUES.items()}
    assert {k: file.metadata[k] for k in expected} == expected
    assert type(file.metadata["yes"]) is bool
    assert file.metadata["ints"].tolist() == [1, -2, 3]
    assert file.metadata["floats"].tolist() == [0.5, 1e300]
    assert file.metadata["bools"].tolist() == [True, False]
    assert list(file.metadata["words"]) == ["a", "", "日本"]
    assert list(file.metadata["none"]) == []
    assert len(file.metadata["no_ints"]) == 0
    first, second = file.metadata["nested"]
    assert (first.tolist(), list(second)) == ([1, 2], ["x"])


def test_tensors_are_views_of_the_file_with_their_rows_split(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path, small_file()))
    tensor = file.tensors["a"].load()
    assert (tensor.format, tensor.shape, tensor.data.shape) == ("q4_0", (3, 64), (3, 36))
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable
    np.testing.assert_array_equal(dequantize(file.tensors["b"].load()), np.arange(5))


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_gguf(random_model("qwen3"), tmp_path / "m.gguf", fmt="q8_0")
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert list(mine.shape) == tensor.shape.tolist()[::-1]
        assert mine.load().data.tobytes() == tensor.data.tobytes()
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            contents = field.contents()
            assert (list(value) if isinstance(contents, list) else value) == contents


def test_string_arrays_index_slice_and_survive_bad_utf8(tmp_path: Path) -> None:
    words: list[Any] = ["zero", b"\xff\xfe", "two"]
    file = open_gguf(write(tmp_path, gguf_bytes({"w": words}, {})))
    array = file.metadata["w"]
    assert isinstance(array, StringArray)
    assert (array[0], array[-1], array[1:]) == ("zero", "two", ["\ufffd\ufffd", "two"])
    assert list(array) == array[:]
    with pytest.raises(IndexError):
        array[3]


def test_a_file_with_150000_tokens_opens_in_milliseconds(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(150_000)]
    path = write(tmp_path, gguf_bytes({"tokens": tokens, "merges": tokens}, {}))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        file = open_gguf(path)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1  # 300,000 strings read one by one take longer at any time
    assert file.metadata["merges"][149_999] == "token 149999"


def test_every_truncation_is_a_clear_error(tmp_path: Path) -> None:
    data = small_file()
    path = tmp_path / "cut.gguf"
    header = data.index(struct.pack("<Q", 1) + b"a") + 100  # where the tensors' entries end, about
    path.write_bytes(data)
    for length in [*range(len(data) - 1, header, -16), *range(header, -1, -1)]:
        os.truncate(path, length)
        if length >= len(data) - 31 and data[length:].count(0) == len(data) - length:
            continue  # padding after the last tensor may be missing
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            open_gguf(path)


def test_a_cut_in_the_data_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    data = small_file()[:-200]
    with pytest.raises(ModelFormatError, match=rf"tensor 'c' needs bytes up to \d+.*{len(data)}"):
        open_gguf(write(tmp_path, data))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bits_never_do_worse_than_a_typed_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(small_file())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(PacelineError):
        file = open_gguf(write(tmp_path, bytes(raw)))
        for value in file.metadata.values():
            if isinstance(value, StringArray):
                list(value)
        for tensor in file.tensors.values():
            tensor.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "begins with b'GGML'"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big endian"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], "announces"),
        (lambda d: d[:16] + struct.pack("<Q", 1 << 60) + d[24:], "announces"),
        (lambda d: set_key(d, b"text", struct.pack("<Q", 1 << 62)), "key 'text' counts"),
        (lambda d: set_key(d, b"words", struct.pack("<IQ", 8, 1 << 40)), "key 'words' counts"),
        (lambda d: set_key(d, b"ints", struct.pack("<IQ", 5, 1 << 61)), "key 'ints' counts"),
        (lambda d: set_key(d, b"ints", struct.pack("<I", 99)), "element type 99"),
        (lambda d: set_key(d, b"yes", b"\x02"), "key 'yes' is a bool"),
        (lambda d: d.replace(b"yes", b"\xff\xff\xff"), "not UTF-8"),
        (lambda d: d.replace(b"\x02\0\0\0\0\0\0\0u8", b"\x02\0\0\0\0\0\0\0i8"), "repeats"),
    ],
)  # fmt: skip
def test_a_broken_header_is_named(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        open_gguf(write(tmp_path, change(small_file())))


def with_tensor(
    dims: list[int], kind: int, offset: int, *, name: str = "t", data: int = 64
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    entries = [(b"first", [8], 0, 0), (name.encode(), dims, kind, offset)]
    for text, shape, code, at in entries:
        head += struct.pack("<Q", len(text)) + text
        head += struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", code, at)
    return head + bytes(-len(head) % 32 + data)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (with_tensor([8], 0, 32, name="first"), "repeats the name 'first'"),
        (with_tensor([], 0, 32), "has 0 dimensions"),
        (with_tensor([1] * 5, 0, 32), "has 5 dimensions"),
        (with_tensor([0], 0, 32), r"shape \[0\]"),
        (with_tensor([33], 2, 32), r"shape \[33\], which q4_0"),
        (with_tensor([1 << 32, 1 << 32, 4], 0, 32), "needs bytes up to"),
        (with_tensor([8], 0, 33), "no multiple of 32"),
        (with_tensor([8], 0, 1 << 63), "needs bytes up to"),
        (with_tensor([8], 0, 0), "'first' and 't' overlap"),
        (with_tensor([8], 77, 32), "unknown type 77"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path: Path, entry: bytes, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(write(tmp_path, entry))


def test_a_tensor_in_a_format_we_cannot_read_fails_only_when_wanted(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path, with_tensor([256], 16, 32)))
    with pytest.raises(UnsupportedModelError, match="tensor 't' is in format iq2_xxs"):
        file.tensors["t"].load()


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 30])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: int) -> None:
    data = gguf_bytes({"general.alignment": alignment}, {})
    with pytest.raises(ModelFormatError, match=r"general\.alignment"):
        open_gguf(write(tmp_path, data))


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    tensors = {"a": from_floats([1.0]), "b": from_floats([2.0])}
    path = write(tmp_path, gguf_bytes({"general.alignment": 128}, tensors, alignment=128))
    assert dequantize(open_gguf(path).tensors["b"].load()) == 2


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    value: Any = ("u8", [1])
    for _ in range(50):
        value = ("array", [value])
    with pytest.raises(ModelFormatError, match="nests arrays"):
        open_gguf(write(tmp_path, gguf_bytes({"deep": value}, {})))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n",
            "Git LFS pointer.*98362432 bytes",
        ),
        (b"<!DOCTYPE html><html>not found</html>", "is a web page"),
        (b"PK\x03\x04 a zip", "is no GGUF file"),
    ],
)
def test_files_that_are_no_model_are_told_apart(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(write(tmp_path, content))


def test_an_absent_file_and_a_folder_are_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="cannot read"):
            open_gguf(path)


def test_any_shard_opens_the_whole_split_model(tmp_path: Path) -> None:
    model = random_model()
    first = write_gguf(model, tmp_path / "m.gguf", shards=3)
    for i in (1, 2, 3):
        file = open_gguf(first.with_name(f"m-{i:05}-of-00003.gguf"))
        assert set(file.tensors) == set(gguf_tensors(model))
        assert file.metadata["general.architecture"] == "llama"
        assert len(file.paths) == 3


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    first = write_gguf(random_model(), tmp_path / "m.gguf", shards=3)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelFormatError, match=r"1 of 3 parts missing: m-00002-of-00003\.gguf"):
        open_gguf(first)


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write_gguf(random_model(), tmp_path / "m.gguf", shards=2)
    second = tmp_path / "m-00002-of-00002.gguf"
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(ModelFormatError, match="one of 2 parts but is not named"):
        open_gguf(renamed)
    original = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelFormatError, match="does not say that it is part 2 of 2"):
        open_gguf(first)
    second.write_bytes(set_key(original, b"split.tensors.count", struct.pack("<i", 99)))
    first.write_bytes(set_key(first.read_bytes(), b"split.tensors.count", struct.pack("<i", 99)))
    with pytest.raises(ModelFormatError, match="tensors, not 99"):
        open_gguf(first)


def test_encode_rounds_bf16_to_nearest_even() -> None:
    tensor: QTensor = encode(np.array([1.0, 1.00390625, 1.01171875], np.float32), "bf16")
    np.testing.assert_array_equal(dequantize(tensor), [1.0, 1.0, 1.015625])
