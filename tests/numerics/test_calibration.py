"""`--method gptq` and `awq` on tiny models: what they read, keep, write, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.reference import ReferenceBackend
from paceline.cli.quantize import build_method
from paceline.errors import ModelFormatError, ParameterError
from paceline.measure.quality import compare_logits, limits_for, sequence_logits
from paceline.models.base import build_plan
from paceline.quantize import run
from paceline.quantize.calibration import read_calibration
from paceline.quantize.formats import parse_target
from paceline.quantize.recipe import new_recipe
from paceline.quantize.run import Result, quantize
from paceline.quantize.source import open_source
from paceline.quantize.walk import sites
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.encode import encode
from paceline.weights.tensor import dequantize
from tests.tiny import TinyModel, random_model, write_gguf, write_hf

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def model(family: str = "qwen2", **options: Any) -> TinyModel:
    return random_model(
        family, hidden=128, heads=4, kv_heads=2, head_dim=32, inner=160, vocab_size=307, **options
    )


def with_large_inputs(plain: TinyModel) -> TinyModel:
    """The model with a few channels of every normed input far above the others."""
    for name in [n for n in plain.tensors if n.endswith("layernorm.weight")]:
        weight = plain.tensors[name].copy()
        weight[[3, 50, 77]] += 12
        plain = plain.with_tensor(name, weight)
    return plain


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text("".join(rng.choice(list("abcdefgh the cat sat"), 3000)))
    return path


def write(
    source: Path, out: Path, text: Path, fmt: str = "int4", *, method: str = "gptq",
    progress: Callable[[int, int], None] | None = None, **options: Any,
) -> Result:  # fmt: skip
    opened, target = open_source(source), parse_target(fmt, None, None)
    calibrate = None if method == "rtn" else text
    chosen = build_method(method, opened, target, calibrate, 512, **options)
    recipe = new_recipe(
        opened, out, method=method, target=target, settings=chosen.settings,
        rewritten=chosen.rewrites(opened),
    )  # fmt: skip
    return quantize(opened, out, recipe, chosen, num_threads=2, progress=progress)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {name: dequantize(t) for name, t in open_checkpoint(path).tensors.items()}


def logits(path: Path, tokens: tuple[int, ...]) -> np.ndarray:
    checkpoint, backend = open_checkpoint(path), ReferenceBackend()
    kv, limits = limits_for(len(tokens), block_size=16)
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
    pieces = sequence_logits(backend, tokens, kv=kv, limits=limits)
    return np.concatenate([piece.copy() for piece in pieces])


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_the_model_stays_nearer_to_its_source_than_with_nearest_codes(
    tmp_path: Path, text: Path, family: str, method: str
) -> None:
    source = write_hf(with_large_inputs(model(family)), tmp_path / "source", fmt="bf16")
    write(source, tmp_path / method, text, method=method)
    write(source, tmp_path / "rtn", text, method="rtn")
    tokens = read_calibration(text, open_source(source)).windows[0][:128]
    wanted = logits(source, tokens)
    ours, near = (
        compare_logits(wanted, logits(tmp_path / name, tokens)).kl_mean for name in (method, "rtn")
    )
    assert 0 < ours < 0.8 * near


def test_linears_are_rounded_anew_and_all_else_as_rtn_does_it(tmp_path: Path, text: Path) -> None:
    source = write_hf(model(tie_word_embeddings=True), tmp_path / "source", fmt="bf16")
    result = write(source, tmp_path / "gptq", text)
    write(source, tmp_path / "rtn", text, method="rtn")
    ours, theirs = tensors(tmp_path / "gptq"), tensors(tmp_path / "rtn")
    assert (ours[EMBED] == theirs[EMBED]).all()
    assert (ours[NORM] == theirs[NORM]).all()
    assert (ours[DOWN] != theirs[DOWN]).any()
    assert result.num_bytes == (tmp_path / "gptq" / "model.safetensors").stat().st_size
    assert not (tmp_path / "gptq" / "kept").exists()
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    settings = [config[key] for key in ("method", "damping", "act_order")]
    assert settings == ["gptq", 0.01, True]
    assert config["calibration"]["windows"] >= 1
    assert config["exceptions"][DOWN] == ["q4_0", "160 columns are no multiple of 64"]


def test_awq_keeps_what_takes_up_scales_in_floats_and_all_else_as_rtn_does_it(
    tmp_path: Path, text: Path
) -> None:
    source = write_hf(
        with_large_inputs(model(tie_word_embeddings=True)), tmp_path / "source", fmt="bf16"
    )
    result = write(source, tmp_path / "awq", text, method="awq")
    write(source, tmp_path / "rtn", text, method="rtn")
    ours, theirs = tensors(tmp_path / "awq"), tensors(tmp_path / "rtn")
    layer = "model.layers.1."
    for name in (EMBED, NORM, f"{layer}self_attn.q_proj.bias"):
        assert (ours[name] == theirs[name]).all()
    opened = open_checkpoint(tmp_path / "awq").tensors
    for name in (f"{layer}input_layernorm.weight", f"{layer}self_attn.v_proj.bias"):
        assert opened[name].format == "f32"
    assert (
        ours[f"{layer}input_layernorm.weight"] != theirs[f"{layer}input_layernorm.weight"]
    ).any()
    assert result.num_bytes == (tmp_path / "awq" / "model.safetensors").stat().st_size
    assert not (tmp_path / "awq" / "kept").exists()
    config = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    assert config["method"] == "awq"
    assert len(config["exponents"]) == 20
    assert config["exceptions"][DOWN] == ["q4_0", "160 columns are no multiple of 64"]


def test_awq_leaves_a_scale_out_where_a_linear_stays_as_it_is(tmp_path: Path, text: Path) -> None:
    """40 columns have no format: down stays, so nothing may scale up's rows."""
    odd = random_model("llama", hidden=128, heads=4, kv_heads=2, head_dim=32, inner=40)
    source = write_hf(with_large_inputs(odd), tmp_path / "source", fmt="f32")
    write(source, tmp_path / "awq", text, method="awq")
    write(source, tmp_path / "rtn", text, method="rtn")
    ours, theirs = tensors(tmp_path / "awq"), tensors(tmp_path / "rtn")
    assert (ours[DOWN] == theirs[DOWN]).all()
    tokens = read_calibration(text, open_source(source), num_tokens=512).windows[0][:128]
    wanted = logits(source, tokens)
    kl, near = (
        compare_logits(wanted, logits(tmp_path / name, tokens)).kl_mean for name in ("awq", "rtn")
    )
    assert kl < near


def test_gptq_leaves_a_linear_whose_columns_no_format_divides(tmp_path: Path, text: Path) -> None:
    odd = random_model("llama", hidden=128, heads=4, kv_heads=2, head_dim=32, inner=40)
    source = write_hf(odd, tmp_path / "source", fmt="f32")
    write(source, tmp_path / "gptq", text)
    write(source, tmp_path / "rtn", text, method="rtn")
    ours, theirs = tensors(tmp_path / "gptq"), tensors(tmp_path / "rtn")
    assert (ours[DOWN] == tensors(source)[DOWN]).all()
    up = DOWN.replace("down", "up")
    assert (ours[up] != theirs[up]).any()


@pytest.mark.parametrize("fmt", ["fp8", "q5_0", "q4_k"])
def test_awq_writes_formats_that_gptq_does_not(tmp_path: Path, text: Path, fmt: str) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    write(source, tmp_path / "out", text, fmt, method="awq")
    expected = {"fp8": "f8_g64", "q5_0": "q5_0", "q4_k": "q5_0"}[fmt]  # 128 columns
    up = "model.layers.0.mlp.up_proj.weight"
    assert open_checkpoint(tmp_path / "out").tensors[up].format == expected


def test_what_a_linear_reads_comes_from_rounded_linears_before_it(
    tmp_path: Path, text: Path
) -> None:
    source = open_source(write_hf(model(), tmp_path / "source", fmt="bf16"))
    recipe = new_recipe(
        source, tmp_path / "out", method="gptq", target=parse_target("int4", None, None)
    )
    grams: dict[str, np.ndarray] = {}
    for site in sites(source, recipe, read_calibration(text, source)):
        for reader in site.readers:
            weight = dequantize(reader.planned.tensor.load())
            grams[reader.name] = site.curvature.gram
            zeros = encode(np.zeros_like(weight), reader.blocks.format, name=reader.name)
            site.replace(reader, zeros)
    layer = "model.layers.0."
    assert grams[f"{layer}self_attn.q_proj.weight"] is grams[f"{layer}self_attn.v_proj.weight"]
    assert (grams[f"{layer}mlp.gate_proj.weight"] != 0).any()
    assert (grams[f"{layer}mlp.down_proj.weight"] == 0).all()  # gate and up give 0 now
    assert grams.keys() == source.linears


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_gguf_with_rows_in_another_order_gives_the_weights_of_the_folder(
    tmp_path: Path, text: Path, method: str
) -> None:
    write_hf(model("llama"), tmp_path / "folder", fmt="f32")
    file = write_gguf(model("llama"), tmp_path / "m.gguf", fmt="f32")
    for source, out in ((tmp_path / "folder", "a"), (file, "b")):
        write(source, tmp_path / out, text, method=method)
    first, second = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    for name in first.keys() & second.keys():
        assert (np.abs(first[name] - second[name]) < 1e-6).mean() > 0.99, name


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_gguf_file_can_be_written(tmp_path: Path, text: Path, method: str) -> None:
    source = write_gguf(model(), tmp_path / "m.gguf", fmt="f16")
    write(source, tmp_path / "out.gguf", text, "q4_0", method=method)
    assert open_checkpoint(tmp_path / "out.gguf").tensors[DOWN].format == "q4_0"
    assert not (tmp_path / "out.gguf.partial").exists()


class Stop(Exception):
    """What ends a run in a test."""


def stop_at(call: int) -> Callable[[int, int], None]:
    calls = iter(range(call))

    def progress(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise Stop

    return progress


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("call", [0, 5, 12])
def test_a_run_that_was_stopped_goes_on_with_what_it_kept(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, call: int, method: str
) -> None:
    """Linears of 8 inputs are prepared, then all tensors written: it stops in either."""
    monkeypatch.setattr(run, "SYNC_BYTES", 0)
    source = write_hf(with_large_inputs(model()), tmp_path / "source", fmt="bf16")
    write(source, tmp_path / "whole", text, method=method)
    with pytest.raises(Stop):
        write(source, tmp_path / "out", text, method=method, progress=stop_at(call))
    assert not (tmp_path / "out").exists()
    resumed = write(source, tmp_path / "out", text, method=method).num_resumed
    assert resumed >= min(call + 1, 14)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_text_begins_again(tmp_path: Path, text: Path) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    with pytest.raises(Stop):
        write(source, tmp_path / "out", text, progress=stop_at(3))
    text.write_text(text.read_text()[::-1])
    assert write(source, tmp_path / "out", text).num_resumed == 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_nan_is_refused_by_the_tensors_name_and_nothing_is_left(
    tmp_path: Path, text: Path, method: str
) -> None:
    for name, message in (
        (DOWN, f"tensor {DOWN} holds NaN"),
        (NORM.replace("norm", "layers.0.input_layernorm"), "q_proj.weight are not finite"),
    ):
        broken = model()
        value = broken.tensors[name].copy()
        value.flat[3] = np.nan
        source = write_hf(broken.with_tensor(name, value), tmp_path / "source", fmt="f32")
        with pytest.raises(ModelFormatError, match=message):
            write(source, tmp_path / "out", text, method=method)
        assert not list(tmp_path.glob("out*"))


def test_windows_are_spread_over_the_text(tmp_path: Path, text: Path) -> None:
    source = open_source(write_hf(model(), tmp_path / "source"))
    ids = build_tokenizer(source.checkpoint.tokenizer).encode(text.read_text())
    size = min(512, source.checkpoint.config.max_context)
    windows = read_calibration(text, source, num_tokens=2 * size + 5).windows
    assert windows == (tuple(ids[:size]), tuple(ids[-size:]))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read as text"), (b"\xff\xfe\x00", "cannot be read as text"),
     (b"too short", "calibration needs")],
)  # fmt: skip
def test_texts_that_calibrate_nothing_are_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    source = open_source(write_hf(model(), tmp_path / "source"))
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ParameterError, match=message):
        read_calibration(tmp_path / "text", source)


@pytest.mark.parametrize("fmt", ["fp8", "q5_0", "q4_k"])
def test_formats_that_gptq_does_not_write_are_refused(tmp_path: Path, text: Path, fmt: str) -> None:
    source = write_hf(model(), tmp_path / "source")
    with pytest.raises(ParameterError, match=f"gptq does not write {fmt}: choose int4"):
        write(source, tmp_path / "out", text, fmt)
