"""A tiny random BERT: its folder of safetensors, with a WordPiece tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import encode, safetensors_bytes

WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "on", "mat",
    "ran", "far", "away", "red", "blue", "big", "small", "unbelievable", "un", "##believ",
    "##able", "##s", "##ing", "play", "run", ".", ",", "!", "?", "##er", "token",
]  # fmt: skip


def write_bert(
    folder: Path, *, seed: int = 0, layers: int = 2, heads: int = 4, hidden: int = 64,
    max_positions: int = 50, prefix: str = "", **config: Any,
) -> Path:  # fmt: skip
    """Write a random model; `prefix` goes before the tensors' names, other keywords to config."""
    folder.mkdir(parents=True, exist_ok=True)
    filled = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu",
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "layer_norm_eps": 1e-12,
        "max_position_embeddings": max_positions, "num_attention_heads": heads,
        "num_hidden_layers": layers, "pad_token_id": 0, "position_embedding_type": "absolute",
        "type_vocab_size": 2, "vocab_size": len(WORDS), **config,
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    tensors = {
        prefix + name: encode(_random(rng, name, shape), "f32")
        for name, shape in _shapes(filled).items()
    }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text(json.dumps(filled))
    (folder / "tokenizer.json").write_text(json.dumps(wordpiece_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"})
    )
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    norms = ["embeddings."]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for name, rows, cols in [
            *((f"attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", inner, hidden), ("output.dense", hidden, inner),
        ]:  # fmt: skip
            shapes |= {f"{layer}{name}.weight": (rows, cols), f"{layer}{name}.bias": (rows,)}
        norms += [f"{layer}attention.output.", f"{layer}output."]
    for norm in norms:
        shapes |= {f"{norm}LayerNorm.weight": (hidden,), f"{norm}LayerNorm.bias": (hidden,)}
    return shapes


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("LayerNorm.weight"):
        return 1 + 0.1 * values
    return values * np.float32(0.1 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1]))


def wordpiece_json() -> dict[str, Any]:
    vocab = {word: i for i, word in enumerate(WORDS)}
    special = [word for word in WORDS if word.startswith("[")]
    sentence = [{"Sequence": {"id": "A", "type_id": 0}}]
    cls, sep = ([{"SpecialToken": {"id": name, "type_id": 0}}] for name in ("[CLS]", "[SEP]"))
    return {
        "version": "1.0",
        "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0,
                       "direction": "Right"},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        "added_tokens": [
            {"id": vocab[word], "content": word, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for word in special
        ],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [*cls, *sentence, *sep],
            "pair": [*cls, *sentence, *sep, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [vocab[name]], "tokens": [name]}
                for name in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
    }  # fmt: skip
