"""Our GPTQ and AWQ beside GPTQModel's and AutoAWQ's own code, on single layers.

    pip install torch==2.13.0 transformers==5.24.0 accelerate datasets defuser device-smi logbar \\
        pillow pypcre requests threadpoolctl tokenicer torchao .
    pip install --no-deps gptqmodel==7.7.0 autoawq==0.2.9   # they ask for another torch
    python benchmarks/published_quantisers.py [--seeds 3] [--json FILE]

Each row is |X (W - Q)ᵀ|² of ours over theirs for the same weights and inputs, whose columns are
heavy-tailed and move together; median and worst over the seeds. With --json, rows that FILE has are
not run again. GPTQ: damping 1 %, columns as they stand, or act-order that keeps groups (theirs:
`act_group_aware`), beside their range scales and those of their search (`mse` 2). `alike` compares
the algorithm alone: both with their range scales, shortened and chosen when a group's turn comes,
with their codes and their order of groups. AWQ: the scale of the input and cuts for one linear
behind a norm (theirs: `_search_best_scale`, `_compute_best_clip`), beside their rounding, and
beside their searches over our rounding to the nearest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch  # noqa: TID251
from awq.quantize.quantizer import AwqQuantizer
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.gptq import GPTQ
from gptqmodel.quantization.quantizer import Quantizer

import paceline.quantize.gptq as our_gptq
from paceline.plan.plan import Value
from paceline.quantize import curvature
from paceline.quantize.base import F32, Blocks
from paceline.quantize.curvature import DAMPING
from paceline.quantize.fold import Fold
from paceline.quantize.grid import Grid
from paceline.quantize.recipe import TensorRecipe
from paceline.quantize.scaling import choose, rounded
from paceline.quantize.walk import Reader, Site
from paceline.weights.encode import encode
from paceline.weights.tensor import QTensor, StoredTensor, dequantize

SHAPES = ((64, 256), (128, 512))  # AutoAWQ cuts 64 rows at a time
GRIDS = ((4, True), (4, False), (8, True))  # bits, symmetric
NUM_TOKENS = 1024


def layer(seed: int, rows: int, cols: int) -> tuple[F32, F32]:
    """Return weights [N, K] and inputs [T, K]."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((cols // 4, cols)) * rng.lognormal(0, 1, cols)
    x = rng.standard_t(4, (NUM_TOKENS, cols // 4)) @ mix + 0.3 * rng.standard_t(
        3, (NUM_TOKENS, cols)
    )
    w = 0.02 * rng.standard_t(5, (rows, cols))
    return w.astype(np.float32), x.astype(np.float32)


def blocks_of(bits: int, group: int, symmetric: bool) -> Blocks:
    return Blocks(f"i{bits}{'' if symmetric else 'm'}_g{group}")


def dense(data: Any, blocks: Blocks, shape: tuple[int, ...]) -> F32:
    return dequantize(QTensor(blocks.format, shape, data))


def nearest(w: F32, blocks: Blocks) -> F32:
    return dense(encode(w, blocks.format, name="w"), blocks, w.shape)


def error(w: F32, q: F32, x: F32) -> float:
    return float(np.square(x.astype(np.float64) @ (w - q).T.astype(np.float64)).sum())


def config(bits: int, group: int, symmetric: bool, act_order: bool, mse: float) -> QuantizeConfig:
    return QuantizeConfig(
        bits=bits, group_size=group, sym=symmetric, damp_percent=DAMPING, desc_act=False,
        act_group_aware=act_order, mse=mse, offload_to_disk=False,
    )  # fmt: skip


class ShortQuantizer(Quantizer):
    """GPTQModel's scales in seven digits: scale and zero * scale are exact in our f16 fields."""

    def find_params(self, x: torch.Tensor, weight: bool = False) -> None:
        super().find_params(x, weight=weight)
        mantissa, exponent = torch.frexp(self.scale)
        self.scale = torch.ldexp(torch.round(mantissa * 128) / 128, exponent)


def their_gptq(w: F32, x: F32, settings: QuantizeConfig, *, alike: bool = False) -> F32:
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = torch.from_numpy(w.copy())
    task = GPTQ(linear, settings)
    if alike:
        task.quantizer = ShortQuantizer(settings)
    task.quantizer.configure(perchannel=True)
    inputs = torch.from_numpy(x)[None]
    task.add_batch(inputs, linear(inputs))
    # Scales are chosen at the start of a run of columns: in runs of a group, none is out of date.
    return task.quantize(blocksize=settings.group_size if alike else 128)[0].detach().numpy()


def range_scales(settings: QuantizeConfig) -> Callable[..., tuple[F32, F32]]:
    """Return a `fit` that gives GPTQModel's scales."""

    def fit(weight: F32, *_: Any, **__: Any) -> tuple[F32, F32]:
        quantizer = ShortQuantizer(settings)
        quantizer.configure(perchannel=True)
        quantizer.find_params(torch.from_numpy(weight.copy()), weight=True)
        d, zero = (t.numpy()[:, 0] for t in (quantizer.scale, quantizer.zero))
        m = np.zeros_like(d) if settings.sym else -zero * d
        return d, m

    return fit


def by_largest(squares: Any, width: int) -> Any:
    """GPTQModel's order: groups by their largest mean square input, and columns within them."""
    groups = squares.reshape(-1, width)
    inner = np.argsort(-groups, axis=1, kind="stable")
    outer = np.argsort(-groups.max(axis=1), kind="stable")
    return (inner + np.arange(len(groups))[:, None] * width)[outer].reshape(-1)


def gptq_ratios(w: F32, x: F32, bits: int, group: int, symmetric: bool, act_order: bool) -> dict:
    blocks = blocks_of(bits, group, symmetric)
    settings = config(bits, group, symmetric, act_order, 0.0)

    def ours() -> float:
        seen = curvature.Curvature([x], name="w")
        data = our_gptq.gptq(w, seen, blocks, name="w", act_order=act_order)
        return error(w, dense(data, blocks, w.shape), x)

    own = ours()
    with (
        patch.object(our_gptq, "fit", range_scales(settings)),
        patch.object(curvature, "_by_size", by_largest),
        patch.dict(our_gptq.GRIDS, {f"i8_g{group}": Grid(-128, 127)}),  # ours go down to -127
    ):
        alike = ours() / error(w, their_gptq(w, x, settings, alike=True), x)
    theirs = error(w, their_gptq(w, x, settings), x)
    searched = their_gptq(w, x, config(bits, group, symmetric, act_order, 2.0))
    return {
        "beside_theirs": own / theirs,
        "beside_their_search": own / error(w, searched, x),
        "alike": alike,
        "nearest_beside_theirs": error(w, nearest(w, blocks), x) / theirs,
    }


class OurRounding(AwqQuantizer):
    """AutoAWQ's searches over our rounding to the nearest."""

    def pseudo_quantize_tensor(self, w: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        flat = w.reshape(w.shape[0], -1).contiguous()  # cuts come as [N, 1, groups, group]
        values = nearest(flat.numpy(), blocks_of(self.w_bit, self.group_size, not self.zero_point))
        return torch.from_numpy(values).reshape(w.shape), None, None


@torch.no_grad()
def their_awq(
    w: F32, x: F32, bits: int, group: int, symmetric: bool, kind: type[AwqQuantizer] = AwqQuantizer
) -> F32:
    """Return the weights [N, K] as the undivided input meets them."""
    quantizer = kind.__new__(kind)  # its __init__ wants a whole model
    vars(quantizer).update(
        w_bit=bits, group_size=group, zero_point=not symmetric, duo_scaling=True,
        n_parallel_calib_samples=None, max_chunk_memory=1 << 30,
    )  # fmt: skip
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False).requires_grad_(False)
    linear.weight.data = torch.from_numpy(w.copy())
    norm, inputs = torch.nn.LayerNorm(w.shape[1]), torch.from_numpy(x)
    _, _, scale = quantizer._search_best_scale(
        torch.nn.Sequential(norm, linear), norm, [linear], inputs
    )
    scaled = torch.from_numpy(w) * scale
    limit = quantizer._compute_best_clip(scaled, inputs / scale)
    cut = torch.clamp(scaled.reshape(*limit.shape[:2], -1), -limit, limit).reshape(w.shape)
    return (quantizer.pseudo_quantize_tensor(cut)[0] / scale).numpy()


def awq_ratios(w: F32, x: F32, bits: int, group: int, symmetric: bool) -> dict:
    blocks = blocks_of(bits, group, symmetric)
    stored = StoredTensor("w", "f32", w.shape, w.reshape(-1).view(np.uint8))
    walk: Any = SimpleNamespace(values={0: [x]})
    site = Site(walk, Value(0, w.shape[1]), (Reader(TensorRecipe(stored, blocks), blocks, "w"),))
    (choice,) = choose(site, Fold(vectors=("norm",)), num_threads=1)
    data = rounded(w, blocks, choice, name="w", num_threads=1)
    own = error(w, dense(data, blocks, w.shape) / choice.columns, x)
    theirs = error(w, their_awq(w, x, bits, group, symmetric), x)
    same = error(w, their_awq(w, x, bits, group, symmetric, OurRounding), x)
    return {
        "beside_theirs": own / theirs, "same_rounding": own / same,
        "nearest_beside_theirs": error(w, nearest(w, blocks), x) / theirs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [
        (method, shape, bits, symmetric, group)
        for method in ("gptq", "gptq, act-order", "awq")
        for shape in SHAPES
        for bits, symmetric in GRIDS
        for group in (64, 128)
    ]
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for method, shape, bits, symmetric, group in cases:
        key = {
            "method": method, "shape": list(shape), "bits": bits, "symmetric": symmetric,
            "group": group, "num_seeds": args.seeds,
        }  # fmt: skip
        row = next((row for row in rows if key.items() <= row.items()), None)
        if row is None:
            results = []
            for seed in range(args.seeds):
                w, x = layer(seed, *shape)
                if method == "awq":
                    results.append(awq_ratios(w, x, bits, group, symmetric))
                else:
                    results.append(gptq_ratios(w, x, bits, group, symmetric, method != "gptq"))
            row = key.copy()
            for name in results[0]:
                values = [result[name] for result in results]
                row[name] = {"median": float(np.median(values)), "worst": max(values)}
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
        kind = "sym" if symmetric else "asym"
        ratios = {name: value for name, value in row.items() if name not in key}
        told = [f"{name} {v['median']:.3f} (worst {v['worst']:.3f})" for name, v in ratios.items()]
        print(f"{method} {shape} int{bits}:{group}:{kind}", *told, sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
