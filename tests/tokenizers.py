"""Small tokenizers for tests, trained on the spot by the `tokenizers` library."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from paceline.weights.checkpoint import GGUFTokenizerData, HFTokenizerData

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Don't panic: it's 42, not 1234!\n\n"
    "def main():\n    return [x ** 2 for x in range(10)]\n"
    "naïve café 日本語 日本 текст текста 😀😀 the then there these  two  spaces\t\ttabs\n"
) * 3


@functools.cache
def _trained(level: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (tokens, merges) of a BPE with `level` "bytes" or "spaces" as its alphabet."""
    tokenizer = Tokenizer(models.BPE())
    alphabet: list[str] = []
    text = CORPUS
    if level == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        text = CORPUS.replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    spec = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].__getitem__)
    return tuple(tokens), tuple(" ".join(pair) for pair in spec["merges"])


def bpe_data(
    *,
    pre: str | None = "gpt-2",
    extra: Mapping[str, int] = SPECIAL,
    **changes: Any,
) -> GGUFTokenizerData:
    """Return a byte-level BPE: `extra` tokens with their types first, then the trained ones."""
    tokens, merges = _trained("bytes")
    fields: dict[str, Any] = {
        "model": "gpt2", "pre": pre, "tokens": [*extra, *tokens],
        "token_types": [*extra.values(), *[1] * len(tokens)], "scores": (), "merges": merges,
        "bos_id": 1, "eos_id": 2, "unk_id": None, "pad_id": None, "eot_id": None,
        "add_bos": None, "add_eos": None, "add_space_prefix": None, "cache_key": "",
    }  # fmt: skip
    return GGUFTokenizerData(**{**fields, **changes})


def spm_data(*, extra: Mapping[str, int] = {}, **changes: Any) -> GGUFTokenizerData:
    """Return a SentencePiece BPE: unk, bos, eos, `extra`, bytes, merged pieces, characters."""
    tokens, merges = _trained("spaces")
    merged = [merge.replace(" ", "") for merge in merges]
    chars = [token for token in tokens if len(token) == 1]
    head = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, **extra}
    names = [*head, *[f"<0x{byte:02X}>" for byte in range(256)]]
    types = [*head.values(), *[BYTE] * 256]
    taken = {text.replace(" ", "\u2581") for text in extra}
    pieces = [piece for piece in dict.fromkeys([*merged, *chars]) if piece not in taken]
    fields: dict[str, Any] = {
        "model": "llama", "pre": "default", "tokens": [*names, *pieces],
        "token_types": [*types, *[1] * len(pieces)],
        "scores": [*[0.0] * len(names), *[-float(i) for i in range(len(pieces))]], "merges": (),
        "bos_id": 1, "eos_id": 2, "unk_id": 0, "pad_id": None, "eot_id": None,
        "add_bos": None, "add_eos": None, "add_space_prefix": None, "cache_key": "",
    }  # fmt: skip
    return GGUFTokenizerData(**{**fields, **changes})


def hf_data(data: GGUFTokenizerData, config: Mapping[str, Any] | None = None) -> HFTokenizerData:
    """Return the tokenizer.json that equals a byte-level `bpe_data`, GPT-2 pre-tokenizer."""
    from tokenizers import AddedToken, decoders

    vocab = {token: i for i, token in enumerate(data.tokens)}
    merges = [tuple(merge.split(" ")) for merge in data.merges]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(data.tokens, data.token_types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            added = AddedToken(text, special=kind == CONTROL, normalized=False)
            tokenizer.add_tokens([added])
    return HFTokenizerData(json=tokenizer.to_str().encode(), config=config or {})


def hf_spm_data() -> HFTokenizerData:
    """Return a tokenizer.json in the manner of Llama 2: spaces as signs, bytes, a begin token."""
    from tokenizers import AddedToken, decoders, normalizers, processors

    tokens, merges = _trained("spaces")
    head = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    vocab = {token: i for i, token in enumerate([*head, *tokens])}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    model = models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in head[:3]])
    return HFTokenizerData(json=tokenizer.to_str().encode(), config={"bos_token": "<s>"})
