"""The price of our arithmetic: native against the float32 reference on 100 kB of prose.

    python benchmarks/quality.py MODEL... [--characters 100000] [--kv-dtype f16]
        [--activations q8] [--llama-cpp] [--json FILE]

MODEL is anything `paceline run` takes. Per model: perplexity (context 512, second half of each
window scored, as llama.cpp does), its ratio to the reference's, mean KL(reference || engine) and
top-1 agreement. The reference interprets the family's plan in NumPy, in float32, over dequantised
weights and a float32 KV cache. It takes minutes for models above 0.5 B. `--llama-cpp` asks
llama-cpp-python, if installed, for its logits of the same windows of the same GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend
from paceline.catalog import resolve
from paceline.config import KV_DTYPES
from paceline.measure.quality import compare_logits, limits_for, sequence_logits
from paceline.models.base import build_plan
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import Checkpoint, open_checkpoint

PROSE = Path(__file__).parents[1] / "tests" / "data" / "northanger_abbey.txt"
CONTEXT = 512
FIRST = CONTEXT // 2  # the first row whose prediction is scored

Logits = npt.NDArray[np.float32]
Engine = Callable[[Sequence[int]], Logits]  # tokens of a window -> logits of rows FIRST and later


@contextmanager
def our_engine(
    backend: NativeBackend | ReferenceBackend, checkpoint: Checkpoint, kv_dtype: str
) -> Iterator[Engine]:
    kv, limits = limits_for(CONTEXT, block_size=16, rows=FIRST)
    spec = replace(kv, dtype=kv_dtype)
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=spec, limits=limits)

    def logits(window: Sequence[int]) -> Logits:
        pieces = sequence_logits(backend, window, kv=kv, limits=limits, first=FIRST)
        return np.concatenate([piece.copy() for piece in pieces])

    yield logits
    backend.close()


@contextmanager
def llama_cpp_engine(path: Path) -> Iterator[Engine]:
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, verbose=False)

    def logits(window: Sequence[int]) -> Logits:
        llama.reset()
        llama.eval(list(window))
        return np.array(llama.scores[FIRST : len(window)])

    yield logits
    llama.close()


class Score:
    """What one engine's logits are worth over all windows so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._kl: list[float] = []
        self._agreement: list[float] = []

    def add(self, logits: Logits, reference: Logits, targets: Sequence[int]) -> None:
        shifted = logits - logits.max(axis=1, keepdims=True)
        picked = shifted[np.arange(len(targets)), list(targets)]
        total = np.exp(shifted).sum(axis=1, dtype=np.float64)
        self.losses += (np.log(total) - picked).tolist()
        fidelity = compare_logits(reference, logits)
        self._kl.append(fidelity.kl_mean)  # all windows are of one length
        self._agreement.append(fidelity.top1_agreement)

    def against(self, reference: Score) -> dict[str, float]:
        difference = np.subtract(self.losses, reference.losses)
        ratio = math.exp(float(difference.mean()))
        return {
            "perplexity": math.exp(float(np.mean(self.losses))),
            "ratio": ratio,
            "ratio_stderr": float(difference.std() / math.sqrt(len(difference))),
            "kl_mean": float(np.mean(self._kl)),
            "top1_agreement": float(np.mean(self._agreement)),
        }


def measure(
    model: str, num_characters: int, kv_dtype: str, activations: str, *, has_llama_cpp: bool
) -> list[dict[str, object]]:
    """Return a row an engine: all engines see the same windows."""
    started = time.monotonic()
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    token_ids = build_tokenizer(checkpoint.tokenizer).encode(PROSE.read_text()[:num_characters])
    native = NativeBackend(activations=activations)
    with ExitStack() as stack:
        engines = {
            "reference": stack.enter_context(our_engine(ReferenceBackend(), checkpoint, "f32")),
            "native": stack.enter_context(our_engine(native, checkpoint, kv_dtype)),
        }
        if has_llama_cpp:
            engines["llama.cpp"] = stack.enter_context(llama_cpp_engine(path))
        isa = native.isa
        scores = {name: Score() for name in engines}
        for start in range(0, len(token_ids) - CONTEXT + 1, CONTEXT):
            window = token_ids[start : start + CONTEXT]
            logits = {name: engine(window[:-1]) for name, engine in engines.items()}
            for name, score in scores.items():
                score.add(logits[name], logits["reference"], window[FIRST + 1 :])
    return [
        {
            "model": Path(model).name,
            "engine": name,
            "isa": isa,
            "kv_dtype": kv_dtype,
            "activations": activations,
            "num_scored_tokens": len(score.losses),
            **score.against(scores["reference"]),
            "seconds": time.monotonic() - started,
        }
        for name, score in scores.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--kv-dtype", default="f16", choices=KV_DTYPES)
    parser.add_argument("--activations", default="q8", choices=("q8", "f32"))
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        found = measure(
            model,
            args.characters,
            args.kv_dtype,
            args.activations,
            has_llama_cpp=args.llama_cpp,
        )
        rows += found
        for row in found:
            print(
                f"{row['model']}: {row['engine']}: perplexity {row['perplexity']:.4f}, ratio "
                f"{row['ratio']:.5f} ± {row['ratio_stderr']:.5f}, KL {row['kl_mean']:.5f}, "
                f"top-1 {100 * float(str(row['top1_agreement'])):.2f} %, "
                f"{row['num_scored_tokens']} tokens",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
