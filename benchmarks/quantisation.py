"""The price of `paceline quantize`: a model in each format against the model that it was made from.

    python benchmarks/quantisation.py MODEL [--formats int8:64 int4:64 …] [--characters 10000]
        [--calibrate FILE] [--calibrate-from CHARACTER] [--json FILE]

A format is FORMAT, FORMAT:GROUP or FORMAT:GROUP:asym; METHOD/FORMAT… is made by that method, gptq
and awq for the text of --calibrate, or for the prose from --calibrate-from on, which no figure is
measured over. Per format: bytes of the tensors, perplexity (context 512, second half of each window
scored) and its ratio to the source's, mean KL(source || format) and top-1 agreement. Activations
are f32, so the differences are the weights' alone; nothing here depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from quality import CONTEXT, FIRST, PROSE, Score, our_engine

from paceline.backends.native import NativeBackend
from paceline.catalog import resolve
from paceline.cli.quantize import build_method
from paceline.cpu import resolve_num_threads
from paceline.quantize.formats import parse_target
from paceline.quantize.recipe import new_recipe
from paceline.quantize.run import quantize
from paceline.quantize.source import open_source
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint

FORMATS = ("int8:64", "int4:32", "int4:64", "int4:128", "int4:64:asym", "fp8:channel")


def written(source_path: Path, spec: str, out: Path, calibrate: Path | None) -> None:
    name, _, form = spec.rpartition("/")
    fmt, group, kind = [*form.split(":"), "", ""][:3]
    symmetric = {"": None, "sym": True, "asym": False}[kind]
    source, target = open_source(source_path), parse_target(fmt, group or None, symmetric)
    method = build_method(name or "rtn", source, target, calibrate)
    recipe = new_recipe(
        source, out, method=method.name, target=target, settings=method.settings,
        rewritten=method.rewrites(source),
    )  # fmt: skip
    quantize(source, out, recipe, method, num_threads=resolve_num_threads(None)[0])


def windows_of(path: Path, num_characters: int) -> list[list[int]]:
    tokenizer = build_tokenizer(open_checkpoint(path).tokenizer)
    ids = tokenizer.encode(PROSE.read_text()[:num_characters])
    return [ids[i : i + CONTEXT] for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--characters", type=int, default=10_000)
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--calibrate-from", type=int, default=40_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.calibrate_from < args.characters:
        parser.error("--calibrate-from must lie behind --characters: those are measured over")
    source = resolve(args.model)
    windows = windows_of(source, args.characters)

    def all_logits(path: Path) -> list:
        with our_engine(NativeBackend(activations="f32"), open_checkpoint(path), "f16") as engine:
            return [engine(window[:-1]) for window in windows]

    reference = all_logits(source)
    rows = []
    for spec in ("source", *args.formats):
        with tempfile.TemporaryDirectory() as folder:
            path = source
            if spec != "source":
                path = Path(folder) / "model"
                text = args.calibrate
                if text is None:
                    text = Path(folder) / "text"
                    text.write_text(PROSE.read_text()[args.calibrate_from :])
                written(source, spec, path, text)
            score, base = Score(), Score()
            logits = reference if spec == "source" else all_logits(path)
            for window, ours, theirs in zip(windows, logits, reference, strict=True):
                score.add(ours, theirs, window[FIRST + 1 :])
                base.add(theirs, theirs, window[FIRST + 1 :])
            tensors = open_checkpoint(path).tensors.values()
            row = {
                "model": source.name,
                "format": spec,
                "tensor_bytes": sum(tensor.num_bytes for tensor in tensors),
                "num_scored_tokens": len(score.losses),
                **score.against(base),
            }
        rows.append(row)
        print(
            f"{spec:14} {row['tensor_bytes'] / 1e6:8.1f} MB  perplexity {row['perplexity']:.3f}, "
            f"ratio {row['ratio']:.4f} ± {row['ratio_stderr']:.4f}, KL {row['kl_mean']:.5f}, "
            f"top-1 {100 * row['top1_agreement']:.1f} %",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
