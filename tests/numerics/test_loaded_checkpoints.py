"""Models that others quantised: their logits are those of the float weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.native import NativeBackend
from paceline.models.base import build_plan
from paceline.weights.checkpoint import open_checkpoint
from tests.conftest import reference_logits
from tests.numerics.program_cases import Runner
from tests.quantised import (
    Codes,
    Parts,
    awq,
    gptq,
    packed,
    plain_fp8,
    plain_int8,
    quantise,
    write_quantised,
)
from tests.tiny import TinyModel, random_model, write_hf

TOKENS = np.random.default_rng(1).integers(0, 280, 40).tolist()


def compressed(fmt: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": None, "format": fmt
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def of_codes(pack: Callable[[Codes], Parts], *args: Any, **options: Any) -> Any:
    """weight -> (tensors, the weight that they stand for)."""

    def made(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes = quantise(weight, *args, **options)
        return pack(codes), codes.weight()

    return made


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
# name -> (family, quantization_config, weight -> tensors and their meaning, whether it is exact)
CASES: dict[str, tuple[str, dict[str, Any], Any, bool]] = {
    "gptq, act-order": ("qwen2", GPTQ, of_codes(gptq, 4, 32, act_order=3), True),
    "gptq, 8 bits": (
        "llama", GPTQ | {"bits": 8, "group_size": -1}, of_codes(gptq, 8, -1), True,
    ),
    "awq": (
        "llama", {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        of_codes(awq, 4, 64, symmetric=False), False,
    ),
    "w4a16": (
        "qwen3", compressed("pack-quantized", num_bits=4, strategy="group", group_size=64),
        of_codes(packed, 4, 64, scales="BF16"), True,
    ),
    "w8a8": (
        "llama", compressed("int-quantized", num_bits=8, strategy="channel"),
        of_codes(plain_int8, 8, -1, scales="BF16"), True,
    ),
    "fp8": (
        "gemma3_text", compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 64]
        ),
        lambda weight: plain_fp8(weight, (32, 64)), True,
    ),
}  # fmt: skip


def write_both(name: str, folder: Path) -> tuple[Path, Path]:
    """(the quantised model, the same in the float weights that it stands for)."""
    family, config, make, _ = CASES[name]
    model = random_model(
        family, hidden=128, inner=256, heads=4, kv_heads=2, head_dim=32, layers=2, seed=4
    )
    dense: TinyModel = model

    def parts(module: str, weight: np.ndarray) -> Parts:
        nonlocal dense
        stored, meaning = make(weight)
        dense = dense.with_tensor(f"{module}.weight", meaning)
        return stored

    quantised = write_quantised(model, folder / "quantised", config, parts)
    return quantised, write_hf(dense, folder / "dense")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_weights_it_stands_for(name: str, tmp_path: Path) -> None:
    quantised, dense = write_both(name, tmp_path)
    got = reference_logits(open_checkpoint(quantised), TOKENS)
    want = reference_logits(open_checkpoint(dense), TOKENS)
    if CASES[name][3]:
        np.testing.assert_array_equal(got, want)
    else:  # minimums are rounded to f16
        assert np.abs(got - want).max() < 5e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_the_native_backend_runs_it_from_its_blocks(name: str, tmp_path: Path) -> None:
    quantised, _ = write_both(name, tmp_path)
    checkpoint = open_checkpoint(quantised)
    want = reference_logits(checkpoint, TOKENS)
    for activations, off in (("f32", 1e-4), ("q8", 5e-2)):
        backend = NativeBackend(num_threads=2, activations=activations)
        plan = build_plan(checkpoint.config)
        runner = Runner.load(backend, plan, checkpoint.tensors, kv_dtype="f32", block_size=16)
        got = runner.step([(0, TOKENS)])[0]
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < off, activations
        gathers = [op for op in backend.plan.ops if op.name == "gather"]
        assert len(gathers) == (8 if "act-order" in name else 0)


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
@pytest.mark.filterwarnings("default")  # transformers' own
def test_logits_equal_transformers_with_the_package_of_the_format(
    name: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    quantised, _ = write_both(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        quantised, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].numpy()
    got = reference_logits(open_checkpoint(quantised), TOKENS)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
