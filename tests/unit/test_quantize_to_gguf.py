"""A GGUF file quantised from a Hugging Face folder says what the folder says, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.quantize import build_method
from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.quantize import gguf_tokenizer, run
from paceline.quantize.base import row_runs
from paceline.quantize.formats import parse_target
from paceline.quantize.gguf_tokenizer import SAMPLES
from paceline.quantize.recipe import new_recipe
from paceline.quantize.run import Result, quantize
from paceline.quantize.source import open_source
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf import open_gguf
from paceline.weights.tensor import dequantize, from_floats
from tests.tiny import (
    TinyModel,
    TinyTokenizer,
    random_model,
    safetensors_bytes,
    write_gguf,
    write_hf,
)
from tests.tiny_bert import write_bert
from tests.tokenizers import CORPUS, hf_spm_data

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 8}), "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3-linear": ("qwen3", {"rope_scaling": LINEAR}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "gemma3-linear": ("gemma3_text", {"rope_scaling": LINEAR, "sliding_window_pattern": 6}),
    "gemma3-by-type": ("gemma3_text", {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "llama3-parameters": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
}  # fmt: skip


def model_of(case: str, **options: Any) -> TinyModel:
    family, config = FAMILIES[case]
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "inner": 512}
    return random_model(family, **sizes, **config, **options)


def write(
    folder: Path, out: Path, fmt: str = "q8_0", *, method: str = "rtn", embeddings: str = "auto",
    calibrate: Path | None = None, to_gguf: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Result:  # fmt: skip
    source, target = open_source(folder, to_gguf=to_gguf), parse_target(fmt, None, None)
    chosen = build_method(method, source, target, calibrate, 256 if calibrate else None)
    recipe = new_recipe(
        source, out, method=method, target=target, embeddings=embeddings,
        settings=chosen.settings, rewritten=chosen.rewrites(source),
    )  # fmt: skip
    return quantize(source, out, recipe, chosen, num_threads=1, progress=progress)


@pytest.mark.parametrize("case", FAMILIES)
def test_the_file_holds_the_folders_model(case: str, tmp_path: Path) -> None:
    folder = write_hf(model_of(case), tmp_path / "hf", fmt="bf16", shards=2)
    write(folder, tmp_path / "m.gguf", embeddings="keep")
    write(folder, tmp_path / "made", to_gguf=False)
    hf, gguf, made = map(open_checkpoint, (folder, tmp_path / "m.gguf", tmp_path / "made"))
    assert gguf.config.family == hf.config.family
    np.testing.assert_allclose(gguf.config.rope[-1].inv_freq, hf.config.rope[-1].inv_freq, 1e-6)
    assert gguf.config.window == hf.config.window
    assert gguf.chat_templates == hf.chat_templates
    assert gguf.generation.eos_ids == hf.generation.eos_ids
    assert gguf.tensors.keys() == hf.tensors.keys()
    for name, tensor in gguf.tensors.items():
        is_kept = tensor.format in ("f32", "bf16")
        expected = (hf if is_kept else made).tensors[name]
        np.testing.assert_array_equal(dequantize(tensor), dequantize(expected), name)


@pytest.mark.parametrize("case", ["llama", "llama3", "qwen2", "qwen3", "gemma3"])
def test_names_keys_and_order_are_those_of_the_converter(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    folder = write_hf(model, tmp_path / "hf", fmt="f32")
    write(folder, tmp_path / "ours.gguf")
    theirs = open_gguf(write_gguf(model, tmp_path / "theirs.gguf"))
    ours = open_gguf(tmp_path / "ours.gguf")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        mine, wanted = (dequantize(t.load()) for t in (ours.tensors[name], tensor))
        assert np.abs(mine - wanted).max() <= np.abs(wanted).max() / 127, name
    for key, value in theirs.metadata.items():
        if key not in ("general.name", "gemma3.attention.sliding_window_pattern"):
            mine = ours.metadata[key]
            assert list(mine) == list(value) if np.ndim(value) else mine == pytest.approx(value)


def test_rows_in_another_order_come_in_runs_as_in_one_piece(tmp_path: Path) -> None:
    folder = write_hf(model_of("llama"), tmp_path / "hf", fmt="bf16")
    tensor = open_source(folder, to_gguf=True).tensors["blk.0.attn_q.weight"].load()
    np.testing.assert_array_equal(
        np.concatenate([part.data for _, part in row_runs(tensor)]), tensor.data
    )


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SYNC_BYTES", 0)
    folder = write_hf(model_of("llama"), tmp_path / "hf", fmt="bf16")
    write(folder, tmp_path / "whole.gguf")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(folder, tmp_path / "m.gguf", progress=stop)
    assert not (tmp_path / "m.gguf").exists()
    assert write(folder, tmp_path / "m.gguf").num_resumed > 3
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_folder_of_ours_is_written_where_gguf_has_its_formats(tmp_path: Path) -> None:
    folder = write_hf(model_of("llama"), tmp_path / "hf", fmt="bf16")
    for fmt in ("q8_0", "int4"):
        source = open_source(folder)
        recipe = new_recipe(
            source, tmp_path / fmt, method="rtn", target=parse_target(fmt, None, None)
        )
        quantize(source, tmp_path / fmt, recipe, build_method("rtn", source, recipe.target),
                 num_threads=1)  # fmt: skip
    write(tmp_path / "q8_0", tmp_path / "m.gguf")
    hf, gguf = open_checkpoint(tmp_path / "q8_0"), open_checkpoint(tmp_path / "m.gguf")
    for name, tensor in hf.tensors.items():
        np.testing.assert_array_equal(dequantize(gguf.tensors[name]), dequantize(tensor), name)
    with pytest.raises(UnsupportedModelError, match="is in i8_g64, which a GGUF file cannot hold"):
        write(tmp_path / "int4", tmp_path / "other.gguf")


# ---- tokenizers ----


def _same_ids(a: Path, b: Path) -> None:
    ours, theirs = (build_tokenizer(open_checkpoint(path).tokenizer) for path in (a, b))
    markers = "".join(f"x{text} y" for text in theirs.special_tokens)
    for text in (*SAMPLES, "hello world the cat", CORPUS, markers):
        for parse in (False, True):
            ids = theirs.encode(text, parse_special=parse)
            assert ours.encode(text, parse_special=parse) == ids, text
            assert ours.decode(ids) == theirs.decode(ids)


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_bytes())
    for key, value in changes.items():
        if isinstance(value, dict) and key == "model":
            value = {**spec["model"], **value}
        spec[key] = value
    path.write_text(json.dumps(spec))
    return folder


def _split(*patterns: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                  "trim_offsets": True}  # fmt: skip
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level]}


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True},
    ],
}


@pytest.mark.parametrize(
    ("changes", "pre"),
    [
        ({}, "gpt-2"), ({"pre_tokenizer": DIGITS}, "smollm"),
        ({"pre_tokenizer": _split(CL100K % ""), "normalizer": {"type": "NFC"}}, "qwen2"),
        ({"pre_tokenizer": _split(CL100K % "{1,3}"), "model": {"ignore_merges": True}}, "llama3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("add_bos", [False, True])
def test_a_byte_level_tokenizer_gives_the_same_ids(
    changes: dict[str, Any], pre: str, add_bos: bool, tmp_path: Path
) -> None:
    model = model_of("qwen2", tokenizer=TinyTokenizer(add_bos=add_bos), vocab_size=320)
    folder = edited(write_hf(model, tmp_path / "hf"), **changes)
    write(folder, tmp_path / "m.gguf")
    metadata = open_gguf(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == pre
    assert len(metadata["tokenizer.ggml.tokens"]) == 320
    assert metadata["tokenizer.ggml.tokens"][319] == "[PAD319]"
    _same_ids(tmp_path / "m.gguf", folder)


def _spm_folder(path: Path, **changes: Any) -> Path:
    spec = json.loads(hf_spm_data().json)
    size = len(spec["model"]["vocab"])
    folder = write_hf(model_of("gemma3", vocab_size=size), path)
    (folder / "tokenizer.json").write_text(json.dumps({**spec, **changes}))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    "pre_tokenizer": {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
        "invert": False,
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize(("changes", "adds_space"), [({}, True), (GEMMA, False)])
def test_a_tokenizer_of_characters_gives_the_same_ids(
    changes: dict[str, Any], adds_space: bool, tmp_path: Path
) -> None:
    folder = _spm_folder(tmp_path / "hf", **changes)
    write(folder, tmp_path / "m.gguf")
    metadata = open_gguf(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is adds_space
    _same_ids(tmp_path / "m.gguf", folder)


def test_a_tokenizer_that_reads_back_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _spm_folder(tmp_path / "hf")
    scores = gguf_tokenizer._scores
    monkeypatch.setattr(gguf_tokenizer, "_scores", lambda *arguments: -scores(*arguments))
    with pytest.raises(UnsupportedModelError, match="is cut into tokens"):
        write(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


TRIMMING = {"id": 2, "content": "x", "special": True, "lstrip": True, "rstrip": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
        ({"pre_tokenizer": _split(r"\w+|\W+")}, "no known pre-tokenizer has the patterns"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True,
          "trim_offsets": True}}, "the pre-tokenizer ByteLevel"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix '</w>'"),
        ({"added_tokens": [{**TRIMMING, "single_word": False, "normalized": False}]},
         "lstrip of the token 'x'"),
    ],
)  # fmt: skip
def test_tokenizers_without_a_word_in_gguf_are_refused_and_leave_no_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edited(write_hf(model_of("qwen2"), tmp_path / "hf"), **changes)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        write(folder, tmp_path / "m.gguf")
    assert "name a folder with -o" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_gguf_has_no_key_for_is_refused_by_name(tmp_path: Path) -> None:
    odd = model_of("gemma3").with_config(query_pre_attn_scalar=77)
    with pytest.raises(UnsupportedModelError, match="no word for this model's attention_scale"):
        write(write_hf(odd, tmp_path / "hf"), tmp_path / "m.gguf")
    model = model_of("qwen2").with_config(
        use_sliding_window=True, max_window_layers=1, sliding_window=16
    )
    with pytest.raises(UnsupportedModelError, match="no word for this model's window"):
        write(write_hf(model, tmp_path / "other"), tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m.gguf*"))


def test_an_encoder_is_refused_by_its_family(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert")
    with pytest.raises(UnsupportedModelError, match="of the family bert, which is not written"):
        write(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_the_text_part_of_a_multimodal_folder_is_written(tmp_path: Path) -> None:
    model = model_of("gemma3")
    folder = write_hf(model, tmp_path / "hf", fmt="bf16")
    tensors = {
        name.replace("model.", "model.language_model.", 1): from_floats(value)
        for name, value in model.tensors.items()
    }
    tensors["model.vision_tower.patch.weight"] = from_floats(np.ones((4, 32)))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = {"model_type": "gemma3", "text_config": model.config}
    (folder / "config.json").write_text(json.dumps(config))
    write(folder, tmp_path / "m.gguf")
    theirs = open_gguf(write_gguf(model, tmp_path / "theirs.gguf"))
    assert open_gguf(tmp_path / "m.gguf").tensors.keys() == theirs.tensors.keys()


def test_nan_in_a_norm_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    model = model_of("llama").with_tensor(name, np.full(256, np.nan))
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_norm\.weight holds NaN"):
        write(write_hf(model, tmp_path / "hf"), tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_command_writes_a_file_from_a_folder(tmp_path: Path) -> None:
    folder = write_hf(model_of("qwen3"), tmp_path / "hf", fmt="bf16")
    command = [sys.executable, "-m", "paceline", "quantize", str(folder), "--format", "q4_k"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "m.gguf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert open_gguf(tmp_path / "m.gguf").metadata["general.file_type"] == 15
