"""`paceline quantize`: what is written, what is kept, how it ends early, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.quantize import check_method
from paceline.errors import (
    ModelFormatError,
    OutputError,
    ParameterError,
    UnsupportedModelError,
)
from paceline.quantize import run, staging
from paceline.quantize.formats import parse_target
from paceline.quantize.recipe import lossy_sources, new_recipe
from paceline.quantize.rtn import RoundToNearest
from paceline.quantize.run import Result, quantize
from paceline.quantize.source import open_source
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import open_gguf
from paceline.weights.safetensors import open_safetensors
from paceline.weights.tensor import dequantize
from tests.tiny import TinyModel, random_model, write_gguf, write_hf

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight"


def model(**options: Any) -> TinyModel:
    return random_model(
        "qwen2", hidden=256, heads=4, kv_heads=2, head_dim=64, inner=384, vocab_size=307, **options
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(model(), tmp_path / "source", fmt="bf16", shards=2)


@pytest.fixture
def noting_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have less than a run writes between two entries of the journal."""
    monkeypatch.setattr(run, "SYNC_BYTES", 0)


def write(
    source: Path, out: Path, fmt: str, group: str | None = None, symmetric: bool | None = None, *,
    embeddings: str = "auto", force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Result:  # fmt: skip
    opened = open_source(source, to_gguf=out.suffix == ".gguf")
    target = parse_target(fmt, group, symmetric)
    recipe = new_recipe(opened, out, method="rtn", target=target, embeddings=embeddings)
    return quantize(
        opened, out, recipe, RoundToNearest(), num_threads=2, force=force, progress=progress
    )


def formats(path: Path) -> dict[str, str]:
    return {name: tensor.format for name, tensor in open_checkpoint(path).tensors.items()}


def relative_error(path: Path, source: Path, name: str) -> float:
    ours, theirs = (dequantize(open_checkpoint(p).tensors[name]) for p in (path, source))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize(
    ("fmt", "group", "symmetric", "expected", "error"),
    [
        ("int8", "32", True, "q8_0", 0.006), ("int8", "64", True, "i8_g64", 0.008),
        ("int8", "128", False, "i8m_g128", 0.008), ("int8", "channel", True, "i8_g128", 0.01),
        ("int4", "32", False, "q4_1", 0.08), ("int4", "64", True, "i4_g64", 0.11),
        ("int4", "128", False, "i4m_g128", 0.12), ("int4", "channel", False, "i4m_g128", 0.16),
        ("fp8", "channel", None, "f8_g128", 0.03), ("q4_0", None, None, "q4_0", 0.1),
    ],
)  # fmt: skip
def test_a_folder_gets_the_format_that_was_asked_for_and_keeps_its_floats(
    folder: Path, tmp_path: Path, fmt: str, group: str, symmetric: bool, expected: str, error: float
) -> None:
    out = tmp_path / "out"
    result = write(folder, out, fmt, group, symmetric)
    assert formats(out)[DOWN] == expected
    assert 0 < relative_error(out, folder, DOWN) < error
    assert formats(out)[NORM] == "bf16"
    assert relative_error(out, folder, NORM) == 0
    assert relative_error(out, folder, "model.layers.0.self_attn.q_proj.bias") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert open_checkpoint(out).chat_templates == open_checkpoint(folder).chat_templates
    assert result.num_bytes == (out / "model.safetensors").stat().st_size
    assert result.num_bytes < result.source_bytes * (0.65 if "4" in fmt else 0.75)


def test_the_steps_of_a_sentence_encoder_come_along_and_other_weights_do_not(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "pytorch_model.bin").write_bytes(b"old")
    write(folder, tmp_path / "out", "int8")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "1_Pooling", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_config_json_tells_how_a_folder_was_made(folder: Path, tmp_path: Path) -> None:
    write(folder, tmp_path / "out", "int4", "128", False)
    table = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {key: table[key] for key in ("quant_method", "method", "format", "group")} == {
        "quant_method": "paceline", "method": "rtn", "format": "int4", "group": "128",
    }  # fmt: skip
    assert table["symmetric"] is False


def test_a_folder_from_a_gguf_has_its_tokenizer_and_its_rows_in_order(tmp_path: Path) -> None:
    llama = random_model("llama", hidden=64, inner=128)
    source = write_gguf(llama, tmp_path / "m.gguf", fmt="f16", shards=2)
    write(source, tmp_path / "out", "int8", "32")
    ours, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    assert ours.config == theirs.config
    assert list(ours.tokenizer.tokens) == list(theirs.tokenizer.tokens)  # type: ignore[union-attr]
    assert (ours.chat_templates, ours.generation) == (theirs.chat_templates, theirs.generation)
    for part in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert 0 < relative_error(tmp_path / "out", source, name) < 0.006


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_a_gguf_carries_all_metadata_over_and_the_gguf_package_reads_it(
    tmp_path: Path, fmt: str
) -> None:
    gguf = pytest.importorskip("gguf")
    source = write_gguf(model(tie_word_embeddings=False), tmp_path / "m.gguf", fmt="f16", shards=2)
    out = tmp_path / "out.gguf"
    write(source, out, fmt)
    ours, theirs = open_gguf(out), open_gguf(source)
    changed = {"general.file_type", "general.quantization_version"}
    kept = {k: v.tobytes() for k, v in theirs.raw.items() if not k.startswith("split.")}
    assert {k: v.tobytes() for k, v in ours.raw.items() if k not in changed} == {
        k: v for k, v in kept.items() if k not in changed
    }
    reader = gguf.GGUFReader(out)
    kinds = {t.name: t.tensor_type.name.lower() for t in reader.tensors}
    assert kinds["blk.1.attn_q.weight"] == fmt
    assert kinds == {t.name: t.format for t in ours.tensors.values()}
    for tensor in reader.tensors:
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        mine = dequantize(ours.tensors[tensor.name].load())
        np.testing.assert_array_equal(read.reshape(mine.shape), mine)
        source_tensor = dequantize(theirs.tensors[tensor.name].load())
        assert np.linalg.norm(mine - source_tensor) <= 0.12 * np.linalg.norm(source_tensor)


def test_embedding_and_head_get_eight_bits_unless_asked_otherwise(tmp_path: Path) -> None:
    source = write_hf(model(tie_word_embeddings=False), tmp_path / "m", fmt="bf16")
    expected = {"auto": ("i8_g64", "i8_g64"), "same": ("i4_g64",) * 2, "keep": ("bf16", "bf16")}
    for choice, (embed, head) in expected.items():
        write(source, tmp_path / choice, "int4", embeddings=choice)
        found = formats(tmp_path / choice)
        assert (found[EMBED], found[HEAD], found[DOWN]) == (embed, head, "i4_g64")


def test_a_tied_embedding_is_written_once_and_stays_the_head(tmp_path: Path) -> None:
    source = write_hf(model(tie_word_embeddings=True), tmp_path / "m", fmt="bf16")
    write(source, tmp_path / "out", "int4")
    assert formats(tmp_path / "out")[EMBED] == "i8_g64"
    stored = open_safetensors(tmp_path / "out" / "model.safetensors")
    assert HEAD not in stored
    assert open_checkpoint(tmp_path / "out").config.tie_embeddings


def test_columns_that_a_format_cannot_divide_get_a_named_other_one(tmp_path: Path) -> None:
    odd = random_model("qwen2", hidden=96, heads=3, kv_heads=1, head_dim=32, inner=40)
    source = open_source(write_hf(odd, tmp_path / "m"))

    def recipe(fmt: str, group: str | None = None) -> dict[str, list[str]]:
        target = parse_target(fmt, group, None)
        summary = new_recipe(source, tmp_path / "out", method="rtn", target=target).summary()
        found: dict[str, list[str]] = summary["exceptions"]
        return found

    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert recipe("int4", "128")[up] == ["q4_0", "96 columns are no multiple of 128"]
    assert recipe("q4_k")[up] == ["q5_0", "96 columns are no multiple of 256"]
    kept = ["f32", "kept as it was: 40 columns are no multiple of 32"]
    assert recipe("int8")[down] == recipe("q6_k")[down] == kept
    assert up not in recipe("int4", "channel")


class Stop(Exception):
    """Ends a run as a kill would: nothing of ours handles it."""


def stop_after(share: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > share * total:
            raise Stop

    return progress


@pytest.mark.usefixtures("noting_each")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_a_run_that_was_stopped_goes_on_and_its_result_has_the_same_bytes(
    tmp_path: Path, name: str, share: float
) -> None:
    source = write_gguf(model(), tmp_path / "m.gguf", fmt="f16")
    whole, out = tmp_path / f"whole-{name}", tmp_path / name
    write(source, whole, "q8_0")
    with pytest.raises(Stop):
        write(source, out, "q8_0", progress=stop_after(share))
    assert not out.exists()
    half_done = next((tmp_path / f"{name}.partial").glob("[om]*"))
    with half_done.open("ab") as file:
        file.write(b"torn")  # a tensor that the journal does not know of
    result = write(source, out, "q8_0")
    assert (result.num_resumed > 0) == (share > 0)
    assert not (tmp_path / f"{name}.partial").exists()
    if out.is_file():
        assert out.read_bytes() == whole.read_bytes()
        return
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    for path in names:
        assert (out / path).read_bytes() == (whole / path).read_bytes()


@pytest.mark.usefixtures("noting_each")
def test_work_of_another_kind_or_a_changed_source_begins_again(tmp_path: Path) -> None:
    source = write_gguf(model(), tmp_path / "m.gguf", fmt="f16")
    with pytest.raises(Stop):
        write(source, tmp_path / "out", "q8_0", progress=stop_after(0.5))
    assert write(source, tmp_path / "out", "q5_0").num_resumed == 0
    with pytest.raises(Stop):
        write(source, tmp_path / "two", "q8_0", progress=stop_after(0.5))
    write_gguf(model(seed=1), source, fmt="f16")
    assert write(source, tmp_path / "two", "q8_0").num_resumed == 0


def test_two_runs_do_not_write_the_same_result(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        staging.Staging(out, identity="x", force=False),
        pytest.raises(OutputError, match="another run is writing"),
    ):
        write(folder, out, "int8")


def test_what_exists_is_replaced_only_by_force_and_only_if_it_is_a_model(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(folder, out, "int8")
    with pytest.raises(ParameterError, match="out exists: choose another name, or --force"):
        write(folder, out, "int4")
    write(folder, out, "int4", force=True)
    assert formats(out)[DOWN] == "i4_g64"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    letter = tmp_path / "home" / "letter.txt"
    for path in (tmp_path / "home", letter):
        with pytest.raises(ParameterError, match="no model folder and no GGUF file"):
            write(folder, path, "int8", force=True)
    assert letter.read_text() == "dear"
    with pytest.raises(ParameterError, match="is the source itself"):
        write(folder, folder, "int8", force=True)
    assert relative_error(folder, folder, DOWN) == 0


def test_a_folder_of_that_name_that_no_run_made_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("x")
    with pytest.raises(OutputError, match="no run of ours made it"):
        write(folder, tmp_path / "out", "int8")
    assert (tmp_path / "out.partial" / "mine").read_text() == "x"


def test_nan_is_refused_by_the_tensors_name_and_nothing_is_left(tmp_path: Path) -> None:
    good = model()
    bad = good.tensors[DOWN].copy()
    bad[3, 5] = np.nan
    source = write_hf(good.with_tensor(DOWN, bad), tmp_path / "m")
    with pytest.raises(ModelFormatError, match=f"{DOWN} holds NaN"):
        write(source, tmp_path / "out", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_nan_in_a_tensor_that_stays_as_it_is_is_refused_too(tmp_path: Path, fmt: str) -> None:
    """A norm always stays; an embedding does so where --embeddings is keep."""
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        good = model()
        bad = good.tensors[name].copy()
        bad.flat[-1] = np.inf
        source = write_hf(good.with_tensor(name, bad), tmp_path / "m", fmt=fmt)
        with pytest.raises(ModelFormatError, match=f"{name} holds NaN or infinity"):
            write(source, tmp_path / "out", "int8", embeddings="keep")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_disk_without_room_is_told_before_anything_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(OutputError, match="the disk has 100 free: make room"):
        write(folder, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("noting_each")
def test_a_disk_that_fills_up_is_told_and_the_run_can_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def note(self: staging.Staging, num_tensors: int) -> None:
        nonlocal written
        written = num_tensors
        if num_tensors == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, num_tensors)

    original = staging.Staging.note
    monkeypatch.setattr(staging.Staging, "note", note)
    with pytest.raises(OutputError, match=r"the disk is full .* it goes on where it stopped"):
        write(folder, tmp_path / "out", "int8")
    monkeypatch.setattr(staging.Staging, "note", original)
    assert written == 5
    assert write(folder, tmp_path / "out", "int8").num_resumed == 4
    write(folder, tmp_path / "whole", "int8")
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("int3", None, None), "format is 'int3': choose int4, int8, fp8"),
        (("int4", "100", None), "group is '100': choose 32, 64, 128, channel"),
        (("q4_k", "64", None), "q4_k has groups of its own"),
        (("q8_0", None, True), "leave --sym and --asym out"),
        (("fp8", None, False), "fp8 has a sign and no minimum"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        parse_target(*options)


def test_a_method_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="'magic': choose rtn, gptq, awq"):
        check_method("magic", None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rtn", Path("text"), None, None), "method rtn has no --calibrate:"),
        (("rtn", None, 512, None), "method rtn has no --calibrate-tokens"),
        (("rtn", None, None, False), "method rtn has no --act-order"),
        (("awq", Path("text"), None, True), "method awq has no --act-order: .*--method gptq"),
        (("gptq", None, None, None), "name one with --calibrate FILE"),
        (("awq", None, None, None), "name one with --calibrate FILE"),
    ],
)
def test_options_that_a_method_does_not_have_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        check_method(*options)


def test_a_gguf_is_written_in_its_own_formats_and_not_from_a_folder_made_of_one(
    tmp_path: Path,
) -> None:
    source = write_gguf(model(), tmp_path / "m.gguf")
    write(source, tmp_path / "made", "q8_0")
    with pytest.raises(ParameterError, match="was quantised from a GGUF file: quantise that file"):
        write(tmp_path / "made", tmp_path / "out.gguf", "q8_0")
    with pytest.raises(ParameterError, match="a GGUF file cannot hold int4"):
        write(source, tmp_path / "out.gguf", "int4")


@pytest.mark.parametrize("method", ["hqq", "aqlm", "quip", "eetq"])
def test_weights_that_others_quantised_are_refused_by_the_methods_name(
    tmp_path: Path, method: str
) -> None:
    other = model().with_config(quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=f"weights quantised with '{method}'"):
        open_checkpoint(write_hf(other, tmp_path / "m"))


def test_a_folder_of_a_later_version_is_refused(folder: Path, tmp_path: Path) -> None:
    write(folder, tmp_path / "out", "int8")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["version"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="of version 2, this paceline reads up to 1"):
        open_checkpoint(tmp_path / "out")


def test_blocks_that_do_not_fill_their_bytes_are_refused(folder: Path, tmp_path: Path) -> None:
    write(folder, tmp_path / "out", "int8")
    path = tmp_path / "out" / "model.safetensors"
    whole = path.read_bytes()
    for old, new, error in (
        (b'i8_g64\\"', b'q4_k\\"  ', "cannot be blocks of q4_k"),
        (b'i8_g64\\"', b'i9_g64\\"', "holds weights in 'i9_g64'"),
    ):
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises((ModelFormatError, UnsupportedModelError), match=error):
            open_safetensors(path)


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_a_second_rounding_is_told(folder: Path, tmp_path: Path, fmt: str) -> None:
    write(folder, tmp_path / "first", fmt)
    again = new_recipe(
        open_source(tmp_path / "first"), tmp_path / "second", method="rtn",
        target=parse_target("int4", None, None),
    )  # fmt: skip
    assert lossy_sources(again)
