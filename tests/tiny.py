"""Tiny models made on the spot, each as a GGUF file and as a Hugging Face folder.

`successor_model` follows scripted chains whatever the context; `context_free_model` has one fixed
distribution; `random_model` is a decoder of any family with random weights. Writers are our own, so
that a test can write what no sane writer would.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.weights.tensor import BLOCK, F8_FORMATS, SCALE_OFFSETS, QTensor, from_floats

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("hello", "Ġworld", "Ġone", "Ġtwo", "Ġthree", "Ġthe", "Ġcat", "Ġsat", "stop", "Ġend")
CONTROL = ("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
GGML_TYPE = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10,
    "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip


# ---- tokenizer ----


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


@dataclass(frozen=True)
class TinyTokenizer:
    """Byte-level BPE: ids 0-255 are bytes, then words with their prefixes, then control tokens."""

    words: tuple[str, ...] = WORDS
    control: tuple[str, ...] = CONTROL
    add_bos: bool | None = False

    @property
    def merges(self) -> list[tuple[str, str]]:
        pairs = [(w[:i], w[i]) for w in self.words for i in range(1, len(w))]
        return list(dict.fromkeys(pairs))

    @property
    def tokens(self) -> list[str]:
        return [*byte_characters(), *(a + b for a, b in self.merges), *self.control]

    def id(self, token: str) -> int:
        """Id of a word, a control token, or one ASCII character."""
        return self.tokens.index(token)

    def byte_ids(self, text: str | bytes) -> list[int]:
        """The ids of the text's UTF-8 bytes, one token a byte."""
        return list(text.encode() if isinstance(text, str) else text)

    @property
    def bos_id(self) -> int:
        return self.id("<s>")

    @property
    def eos_id(self) -> int:
        return self.id("<|endoftext|>")

    @property
    def eot_id(self) -> int:
        return self.id("<|im_end|>")

    def gguf_metadata(self) -> dict[str, Any]:
        num_normal = len(self.tokens) - len(self.control)
        meta: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": ("i32", [1] * num_normal + [3] * len(self.control)),
            "tokenizer.ggml.merges": [f"{a} {b}" for a, b in self.merges],
            "tokenizer.ggml.bos_token_id": self.bos_id,
            "tokenizer.ggml.eos_token_id": self.eos_id,
            "tokenizer.ggml.eot_token_id": self.eot_id,
        }
        if self.add_bos is not None:
            meta["tokenizer.ggml.add_bos_token"] = self.add_bos
        return meta

    def hf_json(self) -> dict[str, Any]:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        added = [
            {"id": self.id(t), "content": t, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for t in self.control
        ]  # fmt: skip
        template = None
        if self.add_bos:
            single = [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ]
            pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
            special = {"<s>": {"id": "<s>", "ids": [self.bos_id], "tokens": ["<s>"]}}
            template = {"type": "TemplateProcessing", "single": single, "pair": pair}
            template["special_tokens"] = special
        vocab = {t: i for i, t in enumerate(self.tokens) if t not in self.control}
        return {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": template,
            "decoder": {**byte_level, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": [list(m) for m in self.merges]},
        }


# ---- models ----


@dataclass(frozen=True)
class TinyModel:
    """A model in HF terms: config.json, float32 tensors under HF names, tokenizer, template."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokenizer: TinyTokenizer = field(default_factory=TinyTokenizer)
    chat_template: str | None = CHATML
    eos_ids: tuple[int, ...] = ()

    def with_tensor(self, name: str, value: np.ndarray) -> TinyModel:
        return replace(self, tensors={**self.tensors, name: np.asarray(value, np.float32)})

    def without(self, *names: str) -> TinyModel:
        return replace(self, tensors={k: v for k, v in self.tensors.items() if k not in names})

    def with_config(self, **fields: Any) -> TinyModel:
        return replace(self, config={**self.config, **fields})


def _config(family: str, tokenizer: TinyTokenizer, **fields: Any) -> dict[str, Any]:
    architecture = {
        "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    }  # fmt: skip
    config = {
        "architectures": [architecture[family]], "model_type": family, "torch_dtype": "float32",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "hidden_act": "silu", "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, **fields,
    }  # fmt: skip
    if family == "gemma3_text":
        config = {
            "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16,
            "sliding_window_pattern": 2, "rope_local_base_freq": 5000.0,
            "query_pre_attn_scalar": config["head_dim"], **config,
        }  # fmt: skip
    return config


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of all tensors of a config; norms end in `norm.weight`."""
    family = config["model_type"]
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows, cols in [
            ("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ]:  # fmt: skip
            shapes[f"{layer}{name}.weight"] = (rows, cols)
            if name[-6:] in ("q_proj", "k_proj", "v_proj") and (
                family == "qwen2" or config["attention_bias"]
            ):
                shapes[f"{layer}{name}.bias"] = (rows,)
        for norm in norms:
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        if family in ("qwen3", "gemma3_text"):
            shapes[f"{layer}self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (dim,)
    return shapes


def random_model(
    family: str = "llama", *, seed: int = 0, vocab_size: int | None = None, hidden: int = 64,
    layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, inner: int = 128,
    tokenizer: TinyTokenizer | None = None, **config: Any,
) -> TinyModel:  # fmt: skip
    """Return a random decoder (RAND); its logits depend on every earlier token.

    `family` is an HF model type: llama, mistral, qwen2, qwen3, gemma3_text. Other keywords go to
    config.json, e.g. `tie_word_embeddings=True, sliding_window=8`.
    """
    tokenizer = tokenizer or TinyTokenizer()
    filled = _config(
        family, tokenizer, vocab_size=vocab_size or len(tokenizer.tokens), hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, intermediate_size=inner, **config,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(filled).items():
        if name.endswith("norm.weight"):
            center = 0.0 if family == "gemma3_text" else 1.0
            value = center + 0.1 * rng.standard_normal(shape)
        else:
            value = rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1]))
        tensors[name] = value.astype(np.float32)
    ends = (tokenizer.eos_id, tokenizer.eot_id)
    return TinyModel(filled, tensors, tokenizer, eos_ids=ends)


def _scripted(head: np.ndarray, tokenizer: TinyTokenizer, **config: Any) -> TinyModel:
    """Llama whose residual stream is the one-hot embedding to the end; `head` decides all."""
    size = head.shape[0]
    model = random_model(
        "llama", vocab_size=size, hidden=size, layers=1, heads=2, kv_heads=1, head_dim=16, inner=32,
        tokenizer=tokenizer, **config,
    )  # fmt: skip
    layer = "model.layers.0."
    for name, value in {
        "model.embed_tokens.weight": np.eye(size),
        "model.norm.weight": np.ones(size),
        f"{layer}self_attn.o_proj.weight": np.zeros((size, 32)),
        f"{layer}mlp.down_proj.weight": np.zeros((size, 32)),
        "lm_head.weight": head,
    }.items():
        model = model.with_tensor(name, value)
    return model


def _padded(tokenizer: TinyTokenizer) -> int:
    return -(-len(tokenizer.tokens) // 32) * 32


def successor_model(
    *chains: Sequence[int], margin: float = 20.0, tokenizer: TinyTokenizer | None = None,
    **config: Any,
) -> TinyModel:  # fmt: skip
    """Return SUCC: greedy decoding walks each chain of distinct tokens; other tokens end the text.

    The head is padded to a multiple of 32 rows, so it has ids beyond the tokenizer.
    """
    tokenizer = tokenizer or TinyTokenizer()
    size = _padded(tokenizer)
    head = np.zeros((size, size), np.float32)
    successor = dict.fromkeys(range(size), tokenizer.eos_id)
    for chain in chains:
        for token, following in itertools.pairwise(chain):
            if successor[token] not in (tokenizer.eos_id, following):
                raise ValueError(f"token {token} has two successors")
            successor[token] = following
    for token, following in successor.items():
        head[following, token] = margin / np.sqrt(size)
    return _scripted(head, tokenizer, **config)


def context_free_model(
    logits: Mapping[int, float], *, other: float = -20.0, tokenizer: TinyTokenizer | None = None,
    **config: Any,
) -> TinyModel:  # fmt: skip
    """Return SUCC with equal head columns: every step has these logits, whatever came before."""
    tokenizer = tokenizer or TinyTokenizer()
    size = _padded(tokenizer)
    column = np.full(size, other)
    for token, value in logits.items():
        column[token] = value
    # The final norm turns a one-hot row into 1 / sqrt(1/size + eps).
    head = np.repeat(column[:, None] * np.sqrt(1 / size + 1e-6), size, axis=1)
    return _scripted(head, tokenizer, **config)


# ---- quantised bytes ----


def random_blocks(rng: np.random.Generator, fmt: str, shape: tuple[int, ...]) -> QTensor:
    """Random but finite weights of any format, around 0.05 in size."""
    if fmt == "f32":
        return from_floats(rng.standard_normal(shape) * 0.05)
    if fmt in ("f16", "bf16"):
        return encode(rng.standard_normal(shape) * 0.05, fmt)
    weights, size = BLOCK[fmt]
    if shape[-1] % weights:
        raise ValueError(f"{shape[-1]} columns are no multiple of {weights}, the block of {fmt}")
    data = rng.integers(0, 256, (int(np.prod(shape)) // weights, size), dtype=np.uint8)
    if fmt in F8_FORMATS:
        data[data & 0x7F == 0x7F] = 0  # NaN
    for at in SCALE_OFFSETS[fmt]:
        scale = rng.uniform(0.0005, 0.005, (len(data), 1)).astype("<f2")
        data[:, at : at + 2] = scale.view(np.uint8)
    return QTensor(fmt, shape, data.reshape(*shape[:-1], -1))


def encode(values: np.ndarray, fmt: str, seed: int = 0) -> QTensor:
    """Floats as `fmt`; formats that the gguf package cannot write get random blocks instead."""
    values = np.ascontiguousarray(values, np.float32)
    if fmt == "f32":
        return from_floats(values)
    if fmt == "f16":
        return QTensor(fmt, values.shape, values.astype("<f2").view(np.uint8))
    if fmt == "bf16":
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        return QTensor(fmt, values.shape, rounded.view(np.uint8))
    if fmt in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
        import gguf

        kind = gguf.GGMLQuantizationType[fmt.upper()]
        return QTensor(fmt, values.shape, gguf.quants.quantize(values, kind))
    return random_blocks(np.random.default_rng(seed), fmt, values.shape)


# ---- GGUF ----

_SCALAR = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8,
           "array": 9, "u64": 10, "i64": 11, "f64": 12}  # fmt: skip
_PACK = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f",
         "bool": "?", "u64": "Q", "i64": "q", "f64": "d"}  # fmt: skip


def _kind(value: Any) -> str:
    for kind, types in (("bool", bool), ("u32", int), ("f32", float), ("str", (str, bytes))):
        if isinstance(value, types):
            return kind
    return "array"


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """Type and payload. A pair ("i32", value) fixes the type; else it follows from Python's."""
    kind = None
    if isinstance(value, tuple):
        kind, value = value
    if isinstance(value, list):
        kind = kind or (_kind(value[0]) if value else "u32")
        return struct.pack("<II", 9, _SCALAR[kind]) + _array_body(kind, value)
    kind = kind or _kind(value)
    body = _string(value) if kind == "str" else struct.pack("<" + _PACK[kind], value)
    return struct.pack("<I", _SCALAR[kind]) + body


def _array_body(kind: str, values: list[Any]) -> bytes:
    count = struct.pack("<Q", len(values))
    if kind == "str":
        return count + b"".join(map(_string, values))
    if kind == "array":
        return count + b"".join(gguf_value(v)[4:] for v in values)
    return count + struct.pack(f"<{len(values)}{_PACK[kind]}", *values)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, QTensor], *, version: int = 3,
    alignment: int = 32,
) -> bytes:  # fmt: skip
    """A whole GGUF file. Shapes are written in ggml's order (innermost first)."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [_string(key) + gguf_value(value) for key, value in metadata.items()]
    data: list[bytes] = []
    size = 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        head.append(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        head.append(struct.pack("<IQ", GGML_TYPE[tensor.format], size))
        raw = tensor.data.tobytes()
        raw += bytes(-len(raw) % alignment)
        data.append(raw)
        size += len(raw)
    header = b"".join(head)
    return b"".join([header, bytes(-len(header) % alignment), *data])


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
ARCHITECTURE = {"mistral": "llama", "gemma3_text": "gemma3"}


def gguf_metadata(model: TinyModel) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes it."""
    config = model.config
    arch = ARCHITECTURE.get(config["model_type"], config["model_type"])
    meta: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
    }
    if arch == "llama":
        meta["llama.rope.dimension_count"] = config["head_dim"]
    if config.get("sliding_window"):
        meta[f"{arch}.attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma3":
        meta["gemma3.attention.sliding_window_pattern"] = config["sliding_window_pattern"]
        meta["gemma3.rope.freq_base_swa"] = config["rope_local_base_freq"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        meta[f"{arch}.rope.scaling.type"] = scaling["rope_type"]
        meta[f"{arch}.rope.scaling.factor"] = scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        original = scaling["original_max_position_embeddings"]
        meta[f"{arch}.rope.scaling.original_context_length"] = original
    meta |= model.tokenizer.gguf_metadata()
    if model.chat_template is not None:
        meta["tokenizer.chat_template"] = model.chat_template
    return meta


def gguf_tensors(
    model: TinyModel, fmt: str = "f32", formats: Mapping[str, str] | None = None
) -> dict[str, QTensor]:
    """Tensors under GGUF names: matrices in `fmt` (or `formats[HF name]`), vectors in f32.

    Llama's q and k rows are interleaved and gemma's norms hold 1 + weight, as the converter does.
    """
    config, out = model.config, {}
    family = config["model_type"]
    names = GEMMA_NAMES if family == "gemma3_text" else GGUF_NAMES
    for index, (name, value) in enumerate(model.tensors.items()):
        body, suffix = name.rsplit(".", 1)
        prefix = ""
        if body.startswith("model.layers."):
            _, _, layer, body = body.split(".", 3)
            prefix = f"blk.{layer}."
        if family in ("llama", "mistral") and body[-6:] in ("q_proj", "k_proj"):
            halves = value.reshape(-1, 2, config["head_dim"] // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if family == "gemma3_text" and body.endswith("norm"):
            value = value + 1
        kind = (formats or {}).get(name, fmt if value.ndim == 2 else "f32")
        out[f"{prefix}{names[body]}.{suffix}"] = encode(value, kind, seed=index)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = from_floats(_llama3_divisors(config, scaling))
    return out


def _llama3_divisors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> np.ndarray:
    """What the converter stores for llama 3: the divisor of each frequency."""
    dim = config["head_dim"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def write_gguf(
    model: TinyModel, path: Path, *, fmt: str = "f32", formats: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None, shards: int = 1, version: int = 3,
) -> Path:  # fmt: skip
    """Write the model; `overrides` sets metadata fields, None removes one (MUT).

    With `shards` > 1 the files are `<stem>-00001-of-0000N.gguf`; the first one's path is returned.
    """
    meta = gguf_metadata(model) | dict(overrides or {})
    meta = {key: value for key, value in meta.items() if value is not None}
    tensors = gguf_tensors(model, fmt, formats)
    if shards == 1:
        path.write_bytes(gguf_bytes(meta, tensors, version=version))
        return path
    names = list(tensors)
    paths = [path.with_name(f"{path.stem}-{i + 1:05}-of-{shards:05}.gguf") for i in range(shards)]
    for i, shard in enumerate(paths):
        split = {
            "split.no": ("u16", i),
            "split.count": ("u16", shards),
            "split.tensors.count": ("i32", len(tensors)),
        }
        part = {name: tensors[name] for name in names[i::shards]}
        shard.write_bytes(gguf_bytes((meta if i == 0 else {}) | split, part, version=version))
    return paths[0]


# ---- Hugging Face ----

_DTYPE = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def safetensors_bytes(tensors: Mapping[str, QTensor]) -> bytes:
    """A whole safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.num_bytes
        header[name] = {
            "dtype": _DTYPE[tensor.format], "shape": list(tensor.shape), "data_offsets": [at, end]
        }  # fmt: skip
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(t.data.tobytes() for t in tensors.values())


def write_hf(
    model: TinyModel, folder: Path, *, fmt: str = "f32", shards: int = 1,
    template_file: bool = False,
) -> Path:  # fmt: skip
    """Write the folder: config, generation config, tokenizer, weights (sharded with an index)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = model.tokenizer
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
        "eos_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if tokenizer.add_bos is not None:
        tokenizer_config["add_bos_token"] = tokenizer.add_bos
    if model.chat_template is not None and template_file:
        (folder / "chat_template.jinja").write_text(model.chat_template)
    elif model.chat_template is not None:
        tokenizer_config["chat_template"] = model.chat_template
    generation = {"bos_token_id": tokenizer.bos_id}
    generation["eos_token_id"] = list(model.eos_ids) if model.eos_ids else tokenizer.eos_id
    for name, content in {
        "config.json": model.config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer.hf_json(),
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(content))
    tensors = {name: encode(value, fmt) for name, value in model.tensors.items()}
    _write_shards(folder, tensors, shards)
    return folder


def _write_shards(folder: Path, tensors: Mapping[str, QTensor], shards: int) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    names: Iterable[str] = list(tensors)
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(names)
    }
    for shard in sorted(set(weight_map.values())):
        part = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        (folder / shard).write_bytes(safetensors_bytes(part))
    total = sum(t.num_bytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
