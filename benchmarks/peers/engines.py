"""The engines that can be compared, their options, and whether they are installed."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import Cell

from paceline.weights.checkpoint import Checkpoint

HERE = Path(__file__).parent
Options = Mapping[str, tuple[Any, ...]]  # name -> values to try; the first is the start


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine. `module` is its adapter in this folder, `package` what pip calls it."""

    name: str
    module: str
    package: str
    weights_factor: float  # memory beside the file's own pages, in sizes of the weights
    bytes_per_parameter: float = 0.0
    formats: frozenset[str] | None = None  # of weights that it can read; None: all that we do
    kinds: frozenset[str] = frozenset({"prefill", "decode", "server", "burst", "start"})
    options: Mapping[str, Options] = field(default_factory=dict)  # by kind of cell

    def options_for(self, cell: Cell) -> Options:
        """Return what is to be tried for a cell; several streams have options of their own."""
        kind = "batch" if cell.kind == "decode" and cell.num_streams > 1 else cell.kind
        return self.options.get(kind, {})

    def memory_bytes(self, weight_bytes: int, num_parameters: int) -> float:
        return self.weights_factor * weight_bytes + self.bytes_per_parameter * num_parameters


_REPACK = {"use_extra_bufts": (True, False)}
_FLASH = {"flash_attn": (True, False)}
_HAS_BF16 = " avx512_bf16 " in Path("/proc/cpuinfo").read_text()
_DTYPE = {"dtype": ("bfloat16", "float32") if _HAS_BF16 else ("float32", "bfloat16")}
_SDPA = {"attn_implementation": ("sdpa", "eager")}
# What its CPU plugin offers beside its defaults: activations quantised or not, an f16 KV cache.
_OPENVINO = {
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": (None, "0", "32"),
    "KV_CACHE_PRECISION": (None, "f16"),
}

ENGINES = (
    EngineSpec(
        name="paceline",
        module="engine_paceline",
        package="paceline",
        weights_factor=0.0,
        # A bound on the step is what the policy is for; elsewhere the defaults are measured.
        options={"burst": {"policy": ("slo:step_ms=50",)}},
    ),
    EngineSpec(
        name="llama.cpp",
        module="engine_llama_cpp",
        package="llama-cpp-python",
        weights_factor=1.0,  # the repacked copy
        options={
            "prefill": _REPACK | _FLASH | {"n_ubatch": (512, 2048)},
            "decode": _REPACK | _FLASH,
            "batch": _REPACK | _FLASH | {"kv_unified": (False, True)},
            "server": _REPACK | _FLASH | {"n_batch": (2048, 512), "kv_unified": (True, False)},
            "burst": _REPACK | _FLASH | {"n_batch": (128, 512), "kv_unified": (True, False)},
            "start": {"use_extra_bufts": (False, True)},
        },
    ),
    EngineSpec(
        name="openvino",
        module="engine_openvino",
        package="openvino-genai",
        weights_factor=3.0,  # the graph's own copy, and room to build it
        formats=frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q4_k", "q6_k", "q8_0"}),
        options={
            "prefill": _OPENVINO | {"max_num_batched_tokens": (512, 8192)},
            "decode": _OPENVINO,
            "batch": _OPENVINO,
            "server": _OPENVINO | {"max_num_batched_tokens": (512, 256)},
            "burst": _OPENVINO | {"max_num_batched_tokens": (128, 512)},
        },
    ),
    EngineSpec(
        name="transformers",
        module="engine_transformers",
        package="transformers",
        weights_factor=0.0,
        bytes_per_parameter=4.0,
        kinds=frozenset({"prefill", "decode", "start"}),
        options=dict.fromkeys(("prefill", "decode", "batch"), _DTYPE | _SDPA) | {"start": _DTYPE},
    ),
)


def _python_says(python: str, code: str) -> str | None:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def installed_version(spec: EngineSpec, python: str) -> str | None:
    """Return the version of the engine's package in `python`, None where there is none."""
    code = f"import importlib.metadata as m; print(m.version({spec.package!r}))"
    return _python_says(python, code)


def num_parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
