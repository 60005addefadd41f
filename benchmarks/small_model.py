"""Train a small model of its own, in bf16: for measurements that need weights never rounded before.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb austen
    pip install torch==2.13.0 transformers
    python benchmarks/small_model.py small-bf16 --minutes 4 \\
        austen/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb

A Llama of 3.7 million parameters (hidden 256, 4 layers, 4 heads over 2 of KV, 2,048 tokens of BPE)
for the texts, UTF-8 files or the `Rdata.rdb` of that package; `Northanger Abbey` is left out, since
`tests/data` measures with it. Each run trains for --minutes and keeps `state.pt` in the folder; the
same command goes on from there, until --steps are done. After every run the folder is a model that
`paceline run` reads. Weights are f32 in training and rounded to bf16 once, at the end.
"""

from __future__ import annotations

import argparse
import math
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch  # noqa: TID251
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: TID251

VOCAB, CONTEXT, BATCH = 2048, 512, 4
END = "<|endoftext|>"
HELD_OUT = "NORTHANGER ABBEY"
PEAK_RATE, WARM_UP = 2e-3, 100
SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 768, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
}  # fmt: skip


def novels(data: bytes) -> Iterator[str]:
    """Yield the character vectors of R's lazy-load database, their lines joined."""
    while data:
        stream = zlib.decompressobj()
        raw = stream.decompress(data[4:])  # behind its length
        data = stream.unused_data
        head = raw.index(b"UTF-8") + 5  # then the vector's type and its number of strings
        kind, count = struct.unpack_from(">II", raw, head)
        if kind & 0xFF != 16:
            raise SystemExit("the database holds something other than character vectors")
        lines, at = [], head + 8
        for _ in range(count):
            (size,) = struct.unpack_from(">i", raw, at + 4)
            lines.append(raw[at + 8 : at + 8 + max(size, 0)].decode())
            at += 8 + max(size, 0)
        yield "\n".join(lines)


def read_texts(paths: list[Path]) -> list[str]:
    texts = []
    for path in paths:
        is_r = path.suffix == ".rdb"
        texts += list(novels(path.read_bytes())) if is_r else [path.read_text(encoding="utf-8")]
    return [text for text in texts if HELD_OUT not in text[:200].upper()]


def new_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def learning_rate(step: int, num_steps: int) -> float:
    """A warm-up, then half a cosine down to nothing."""
    done = max(0, step - WARM_UP) / max(1, num_steps - WARM_UP)
    return PEAK_RATE * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * done))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder as Hugging Face does, in bf16."""
    rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = read_texts(args.texts)
    tokenizer_file, state_file = args.folder / "tokenizer.json", args.folder / "state.pt"
    if not state_file.exists():
        new_tokenizer(texts).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(END)
    ids = np.concatenate([[*tokenizer.encode(text).ids, end] for text in texts])

    torch.set_num_threads(1)  # two that wait for each other took four times as long when shared
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, bos_token_id=None, eos_token_id=end, **SHAPE,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    step = 0
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(ids)} tokens, {size} parameters, from step {step}", flush=True)
    losses = []
    while step < args.steps and time.monotonic() < until:
        rng = np.random.default_rng((args.seed, step))  # a run that goes on sees the same batches
        begins = rng.integers(0, len(ids) - CONTEXT, BATCH)
        batch = torch.from_numpy(np.stack([ids[b : b + CONTEXT] for b in begins]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 20 == 0:
            print(f"step {step} of {args.steps}: loss {np.mean(losses[-20:]):.3f}", flush=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, state_file)
    save(model, tokenizer, args.folder)


if __name__ == "__main__":
    main()
