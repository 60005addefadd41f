"""Checkpoint: a model on disk, whatever its container, under canonical (HF) tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from paceline.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from paceline.loading import available, load
from paceline.models.base import (
    GGUFSource,
    HFSource,
    ModelConfig,
    build_plan,
    weight_shapes,
)
from paceline.weights.fields import Fields
from paceline.weights.gguf import GGUF, open_gguf
from paceline.weights.safetensors import SINGLE, HFFolder, open_folder, open_safetensors
from paceline.weights.tensor import (
    FLOAT_FORMATS,
    QTensor,
    StoredTensor,
    dequantize,
    from_floats,
)

if TYPE_CHECKING:
    from paceline.weights.quantised.methods import Method

# Control tokens that end an answer in the files of this world, whether or not a key names them.
END_MARKERS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>", "<eos>", "</s>", "<EOT>",
})  # fmt: skip
_CONTROL = 3  # token_type of control tokens
METADATA = "metadata.gguf"  # in a folder quantised from a GGUF file: its metadata, without tensors
QUANT_METHOD = "paceline"  # config.json's quantization_config.quant_method in folders of our own
QUANT_VERSION = 1


class GGUFTokenizerData(Struct, frozen=True, kw_only=True):
    """The `tokenizer.ggml.*` keys. `tokens` and `merges` may be lazy sequences of str."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SPM)
    pre: str | None
    tokens: Sequence[str]
    token_types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    eot_id: int | None
    add_bos: bool | None  # None: the key is absent
    add_eos: bool | None
    add_space_prefix: bool | None
    cache_key: str  # identifies the file, for a cache of the built tokenizer


class HFTokenizerData(Struct, frozen=True, kw_only=True):
    """`tokenizer.json` as bytes and `tokenizer_config.json` as a dict ({} where absent)."""

    json: bytes
    config: Mapping[str, Any]


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """From generation_config.json or the GGUF's keys; None where the file says nothing."""

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


class Checkpoint(Struct, frozen=True, kw_only=True):
    """An opened model. Tensors are views of mapped files until they are used."""

    path: Path
    source: str  # "gguf" or "safetensors"
    name: str
    config: ModelConfig
    tensors: Mapping[str, QTensor]
    tokenizer: GGUFTokenizerData | HFTokenizerData
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default" and named ones
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (any part of a split one), a Hugging Face folder or one of our own.

    Every tensor that the plan reads is checked here, shape and format; none is read. Raises
    ModelNotFoundError, ModelFormatError or UnsupportedModelError.
    """
    if path.is_dir() and (path / METADATA).exists():
        return checkpoint_of_gguf(open_gguf_folder(path), path)
    if path.is_dir():
        return _from_folder(open_folder(path))
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist")
    file = open_gguf(path)
    return checkpoint_of_gguf(file, file.paths[0])


def open_gguf_folder(path: Path) -> GGUF:
    """Open a folder quantised from a GGUF file: its metadata, and tensors under GGUF's names."""
    return replace(open_gguf(path / METADATA), tensors=open_safetensors(path / SINGLE))


class LazyTensors(Mapping[str, QTensor]):
    """Tensors by canonical name; each is made (a view, or a small rewrite) when it is asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], QTensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> QTensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def find_family(attribute: str, name: str, where: str) -> ModuleType:
    known: list[str] = []
    for family in available("models"):
        module = load("models", family)
        names = getattr(module, attribute)
        if name in names:
            return module
        known += names
    raise UnsupportedModelError(
        f"{where}: architecture {name!r} is not supported: {', '.join(sorted(known))} are"
    )


def _needed(
    config: ModelConfig, stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """The tensors of the plan, all there, in the right shape and a format that can be read."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFormatError(
            f"{where}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelFormatError(f"{where}: the head size {config.head_dim} is odd")
    shapes = weight_shapes(build_plan(config), config.vocab_size)
    for name, shape in shapes.items():
        if name not in stored:
            raise ModelFormatError(f"{where}: tensor {name} is missing: the file is incomplete")
        tensor = stored[name].load()
        if tensor.shape != shape:
            raise ModelFormatError(
                f"{where}: tensor {stored[name].name} has shape {list(tensor.shape)}, "
                f"the config asks for {list(shape)}"
            )
        if len(shape) == 1 and tensor.format not in FLOAT_FORMATS:
            raise UnsupportedModelError(
                f"{where}: vector {stored[name].name} is in {tensor.format}: "
                "f32, f16 and bf16 are read"
            )
    return {name: stored[name] for name in shapes}


# ---- GGUF ----


def canonical_name(name: str, parts: Mapping[str, str]) -> str | None:
    """Canonical name of a GGUF tensor, or None for one that no plan reads.

    >>> canonical_name("blk.3.attn_q.weight", {"attn_q": "self_attn.q_proj"})
    'model.layers.3.self_attn.q_proj.weight'
    """
    body, _, suffix = name.rpartition(".")
    prefix = ""
    if body.startswith("blk."):
        _, layer, body = body.split(".", 2) if body.count(".") >= 2 else ("", "", body)
        prefix = f"model.layers.{layer}."
    part = parts.get(body)
    return f"{prefix}{part}.{suffix}" if part and suffix in ("weight", "bias") else None


def checkpoint_of_gguf(file: GGUF, path: Path) -> Checkpoint:
    """Return the checkpoint that an open GGUF holds; `path` is where the model lies."""
    fields = Fields(file.metadata, str(path))
    arch = fields.text("general.architecture")
    family = find_family("GGUF_ARCHITECTURES", arch, str(path))
    divisors = file.tensors.get("rope_freqs.weight")
    source = GGUFSource(
        fields=fields, arch=arch, shapes={n: t.shape for n, t in file.tensors.items()},
        rope_divisors=None if divisors is None else dequantize(divisors.load()).ravel(),
    )  # fmt: skip
    config: ModelConfig = family.config_from_gguf(source)
    names = {canonical_name(name, family.GGUF_NAMES): t for name, t in file.tensors.items()}
    stored = {name: t for name, t in names.items() if name is not None}
    makers: dict[str, Callable[[], QTensor]] = {}
    for name, tensor in _needed(config, stored, str(path)).items():
        interleaved = family.INTERLEAVED_ROPE and ".self_attn." in name
        if interleaved and name.rsplit(".", 2)[1] in ("q_proj", "k_proj"):
            makers[name] = _half_rotation(tensor, config.head_dim)
        else:
            makers[name] = tensor.load
    return Checkpoint(
        path=path, source="safetensors" if path.is_dir() else "gguf",
        name=fields.text("general.name", path.stem), config=config,
        tensors=LazyTensors(makers), tokenizer=_gguf_tokenizer(file, fields),
        chat_templates=_gguf_templates(fields), generation=_gguf_generation(file, fields),
    )  # fmt: skip


def _half_rotation(tensor: StoredTensor, head_dim: int) -> Callable[[], QTensor]:
    """Undo the converter's interleaving: row 2j + h of a q or k head was row h * D/2 + j."""
    rows = np.arange(tensor.shape[0], dtype=np.int32)
    order = np.ascontiguousarray(rows.reshape(-1, head_dim // 2, 2).swapaxes(1, 2)).ravel()
    return lambda: replace(tensor.load(), row_order=order)


def _gguf_tokenizer(file: GGUF, fields: Fields) -> GGUFTokenizerData:
    def token(key: str) -> int | None:
        return fields.optional_integer(f"tokenizer.ggml.{key}")

    def flag(key: str) -> bool | None:
        return fields.optional_flag(f"tokenizer.ggml.{key}")

    def array(key: str) -> Any:
        value = fields.values.get(f"tokenizer.ggml.{key}", ())
        if isinstance(value, str | int | float):
            raise ModelFormatError(f"{fields.where}: tokenizer.ggml.{key} must be an array")
        return value

    stat = file.paths[0].stat()
    return GGUFTokenizerData(
        model=fields.text("tokenizer.ggml.model", ""),
        pre=fields.text("tokenizer.ggml.pre") if fields.has("tokenizer.ggml.pre") else None,
        tokens=array("tokens"), token_types=array("token_type"), scores=array("scores"),
        merges=array("merges"), bos_id=token("bos_token_id"), eos_id=token("eos_token_id"),
        unk_id=token("unknown_token_id"), pad_id=token("padding_token_id"),
        eot_id=token("eot_token_id"), add_bos=flag("add_bos_token"), add_eos=flag("add_eos_token"),
        add_space_prefix=flag("add_space_prefix"),
        cache_key=f"{file.paths[0].resolve()}:{stat.st_size}:{stat.st_mtime_ns}",
    )  # fmt: skip


def _gguf_templates(fields: Fields) -> dict[str, str]:
    templates = {}
    for key, value in fields.values.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            templates["default"] = value
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return templates


def _gguf_generation(file: GGUF, fields: Fields) -> GenerationDefaults:
    """End ids: those the keys name, and control tokens whose text is a known end marker."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [fields.optional_integer(f"tokenizer.ggml.{key}") for key in keys]
    ends = {i for i in named if i is not None}
    types = fields.values.get("tokenizer.ggml.token_type")
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if isinstance(types, np.ndarray) and isinstance(tokens, Sequence):
        control = np.flatnonzero(types[: len(tokens)] == _CONTROL)
        ends |= {i for i in control.tolist() if tokens[i] in END_MARKERS}
    return GenerationDefaults(
        eos_ids=tuple(sorted(ends)),
        temperature=fields.optional_number("general.sampling.temp"),
        top_k=fields.optional_integer("general.sampling.top_k"),
        top_p=fields.optional_number("general.sampling.top_p"),
        repetition_penalty=fields.optional_number("general.sampling.penalty_repeat"),
    )


# ---- Hugging Face ----


def _from_folder(folder: HFFolder) -> Checkpoint:
    from paceline.weights.quantised.methods import refuse_lost_biases, repack_modules

    where = str(folder.path / "config.json")
    fields = Fields(folder.config, where)
    method = _quantization(fields)
    model_type = fields.text("model_type")
    family = find_family("HF_TYPES", model_type, where)
    text = fields.table("text_config")
    if text.values:  # a multimodal model: its text part
        fields = Fields({**folder.config, **text.values, "model_type": model_type}, where)
    stored = {text_name(name): tensor for name, tensor in folder.tensors.items()}
    repacked = repack_modules(stored, method, str(folder.path))
    source = HFSource(
        fields=fields, shapes={name: t.shape for name, t in {**stored, **repacked}.items()}
    )
    config: ModelConfig = family.config_from_hf(source)
    makers: dict[str, Callable[[], QTensor]] = {}
    needed = _needed(config, {**stored, **repacked}, str(folder.path))
    refuse_lost_biases(stored, needed, repacked, str(folder.path))
    for name, tensor in needed.items():
        lacking = family.NORM_OFFSET if name.endswith("norm.weight") else 0.0
        makers[name] = _plus(tensor, lacking) if lacking else tensor.load
    return Checkpoint(
        path=folder.path, source="safetensors", name=folder.path.resolve().name, config=config,
        tensors=LazyTensors(makers),
        tokenizer=HFTokenizerData(json=folder.tokenizer_json, config=folder.tokenizer_config),
        chat_templates=_hf_templates(folder), generation=_hf_generation(folder, fields),
    )  # fmt: skip


def _quantization(fields: Fields) -> Method | None:
    """How others quantised the weights of a folder; None for float weights and our own formats."""
    table = fields.table("quantization_config")
    if table.values.get("quant_method") != QUANT_METHOD:
        from paceline.weights.quantised.methods import find_method

        return find_method(table)
    version = table.integer("version")
    if version > QUANT_VERSION:
        raise UnsupportedModelError(
            f"{fields.where}: quantization_config is of version {version}, this paceline reads up "
            f"to {QUANT_VERSION}: upgrade paceline or quantise the model again"
        )
    return None


def text_name(name: str) -> str:
    """Name of a tensor as the text model alone has it, in a multimodal model or under a head."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.").removeprefix("bert.")


def _plus(tensor: StoredTensor, offset: float) -> Callable[[], QTensor]:
    return lambda: from_floats(dequantize(tensor.load()) + np.float32(offset))


def _hf_templates(folder: HFFolder) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    value = folder.tokenizer_config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if not isinstance(entry, dict) or not all(
                isinstance(entry.get(key), str) for key in ("name", "template")
            ):
                where = folder.path / "tokenizer_config.json"
                raise ModelFormatError(f"{where}: chat_template entries need name and template")
            templates[entry["name"]] = entry["template"]
    if folder.chat_template_file is not None:
        templates["default"] = folder.chat_template_file
    return templates


def _hf_generation(folder: HFFolder, config: Fields) -> GenerationDefaults:
    fields = Fields(folder.generation, str(folder.path / "generation_config.json"))
    source = fields if fields.has("eos_token_id") else config
    value = source.values.get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ends):
        raise ModelFormatError(f"{source.where}: eos_token_id is {value!r}: token ids are expected")
    return GenerationDefaults(
        eos_ids=tuple(sorted(set(ends))),
        temperature=fields.optional_number("temperature"),
        top_k=fields.optional_integer("top_k"),
        top_p=fields.optional_number("top_p"),
        repetition_penalty=fields.optional_number("repetition_penalty"),
    )
