"""From a model's name to an engine that is ready to run it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from paceline.backends.base import KVSpec
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.memory import KVSize, available_memory, format_bytes, size_kv
from paceline.engine.step import step_limits
from paceline.errors import (
    ParameterError,
    PromptTooLongError,
    TemplateError,
    UnsupportedModelError,
)
from paceline.models.base import build_plan
from paceline.text.tools import ToolStyle, described, tool_style
from paceline.weights.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.engine.speculation.base import Proposer
    from paceline.engine.speculation.draft_load import DraftWeights
    from paceline.engine.speculation.load import Speculation
    from paceline.engine.turns import Turns
    from paceline.measure.recorder import StepRecorder
    from paceline.structured.grammar import Grammar
    from paceline.structured.grammars import Grammars
    from paceline.text.chat_template import ChatTemplate
    from paceline.text.tokenizer import Tokenizer
    from paceline.types import SamplingParams

logger = logging.getLogger(__name__)

_MIN_CACHED_BYTES = 16 * 2**20  # smaller models are packed faster than a cache file is opened
_SPLIT_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


class LoadedModel(Struct, frozen=True, kw_only=True):
    """A model that is ready to run, and what was decided on the way. `config` has no None left."""

    name: str
    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate | None
    engine: Engine
    grammars: Grammars
    backend: Backend
    recorder: StepRecorder | None  # None: no ledger is kept
    config: EngineConfig
    isa: str
    threads_reason: str
    weight_bytes: int
    kv: KVSize
    load_s: float
    aliases: tuple[str, ...] = ()  # other names that it answers to

    @property
    def default_params(self) -> dict[str, Any]:
        """Sampling parameters that the model's own files recommend."""
        generation = self.checkpoint.generation
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        given = {name: getattr(generation, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt, with the begin token where the model wants it.

        A begin marker that the text itself starts with is that token, and no second one is added.
        """
        self._check_fits(text, param="prompt")
        bos_id = self.tokenizer.bos_id
        marker = "" if bos_id is None else self.tokenizer.token_text(bos_id)
        ids = self.tokenizer.encode(text.removeprefix(marker))
        if bos_id is not None and marker and text.startswith(marker) and ids[:1] != [bos_id]:
            return [bos_id, *ids]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        on_rendered: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's turn.

        A template that knows no tools gets a conversation in which all about them is words.
        `variables` are what else it reads, as `enable_thinking`.
        `on_rendered` is called between the template's work and the tokenizer's.
        """
        if self.template is None:
            raise TemplateError(
                f"{self.name} has no chat template: use plain completions "
                "(paceline run --raw, /v1/completions) or give one with --chat-template",
                param="messages",
            )
        self._check_fits([messages, tools], param="messages")
        told, listed = list(messages), list(tools)
        if tool_style(self.template.source) is ToolStyle.DESCRIBED:
            told, listed = described(told, listed, template=self.template.source), []
        return self.template.encode(
            told, self.tokenizer, tools=listed or None, variables=variables,
            on_rendered=on_rendered,
        )  # fmt: skip

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return `params.structured` compiled, None if it is None. May take a second.

        Raises ParameterError saying what is wrong in it.
        """
        return None if params.structured is None else self.grammars.compile(params.structured)

    def _check_fits(self, texts: object, *, param: str) -> None:
        """Refuse a text that no tokenizer could fit into the context, before it is encoded."""
        max_model_len = self.engine.max_model_len
        limit = max_model_len * self.tokenizer.max_token_chars
        num_chars = _num_chars(texts)
        if num_chars > limit:
            raise PromptTooLongError(
                f"the prompt has {num_chars} characters, a context of {max_model_len} tokens holds "
                f"at most {limit}: shorten it or, if the model's context is longer, raise "
                "--max-model-len or --kv-memory",
                param=param,
            )


def _num_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, Sequence) else 0


def load_model(
    model: str,
    config: EngineConfig,
    *,
    path: Path | None = None,
    chat_template: str | None = None,
    available_bytes: int | None = None,
    turns: Turns | None = None,
    recorder: StepRecorder | None = None,
) -> LoadedModel:
    """Load `model` (catalogue name, GGUF file, folder or hub id; pulled if need be).

    `path` is where it lies, if that is known already. `chat_template` is a Jinja source that
    replaces the model's own. The tokenizer is built in a second thread while the weights are
    mapped and packed.

    Beside other models in a process it has `available_bytes` instead of all that is free, takes
    `turns`, and goes on with the `recorder` of its engine before.
    """
    start = time.monotonic()
    _check_tier(config)
    speculation = _parse_speculation(config)
    draft = None if speculation is None else _open_draft(speculation, config)
    if path is None:
        from paceline.catalog import resolve

        path = resolve(model)
    checkpoint = open_checkpoint(path)
    if not checkpoint.config.is_causal:
        raise UnsupportedModelError(embeds_only(display_name(model)))
    with ThreadPoolExecutor(max_workers=1) as pool:
        text = pool.submit(_build_text, checkpoint, chat_template)
        weight_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        kv = size_kv(
            checkpoint.config,
            config,
            weight_bytes=weight_bytes + (0 if draft is None else draft.weight_bytes),
            available_bytes=available_memory() if available_bytes is None else available_bytes,
        )
        num_draft_blocks = 0
        if draft is not None:
            kv, num_draft_blocks = draft.split(kv)
        backend, resolved = _load_backend(checkpoint, config, kv, weight_bytes)
        tokenizer, template = text.result()
    proposer = None
    if speculation is not None:
        proposer = _new_proposer(speculation, draft, num_draft_blocks, tokenizer)
    from paceline.engine.known_costs import known_costs
    from paceline.structured.grammars import Grammars

    if recorder is None and config.ledger:
        recorder = _new_recorder(checkpoint, config)
    isa = str(getattr(backend, "isa", config.backend))
    engine = Engine(
        backend=backend,
        tokenizer=tokenizer,
        config=resolved,
        max_model_len=kv.max_model_len,
        num_blocks=kv.num_blocks,
        vocab_size=checkpoint.config.vocab_size,
        eos_ids=checkpoint.generation.eos_ids,
        recorder=recorder,
        proposer=proposer,
        costs=known_costs(path, resolved),
        identity=_kv_identity(checkpoint, config, isa),
        turns=turns,
    )
    loaded = LoadedModel(
        name=display_name(model),
        path=path,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        template=template,
        engine=engine,
        grammars=Grammars(
            tokenizer,
            vocab_size=checkpoint.config.vocab_size,
            eos_ids=checkpoint.generation.eos_ids,
        ),
        backend=backend,
        recorder=recorder,
        config=resolved,
        isa=isa,
        threads_reason=str(getattr(backend, "num_threads_reason", "it has one")),
        weight_bytes=weight_bytes,
        kv=kv,
        load_s=time.monotonic() - start,
    )
    logger.info(describe(loaded))
    return loaded


def _check_tier(config: EngineConfig) -> None:
    """Refuse a spec that makes no sense before a model is pulled and read."""
    if config.kv_tier is not None:
        from paceline.engine.kv_tier import parse_tier

        parse_tier(config.kv_tier)


def _parse_speculation(config: EngineConfig) -> Speculation | None:
    if config.speculate == "off":
        return None
    from paceline.engine.speculation.load import parse_speculate

    return parse_speculate(config.speculate)


def _open_draft(speculation: Speculation, config: EngineConfig) -> DraftWeights | None:
    from paceline.engine.speculation.load import open_draft

    return open_draft(speculation, config)


def _new_proposer(
    speculation: Speculation, draft: DraftWeights | None, num_blocks: int, tokenizer: Tokenizer
) -> Proposer | None:
    from paceline.engine.speculation.load import load_proposer

    model = None if draft is None else draft.load(num_blocks, tokenizer)
    return load_proposer(speculation, model)


def _new_recorder(checkpoint: Checkpoint, config: EngineConfig) -> StepRecorder:
    from paceline.measure.recorder import StepRecorder
    from paceline.measure.work import step_work

    return StepRecorder(step_work(checkpoint.config, checkpoint.tensors, config.kv_dtype))


def _kv_identity(checkpoint: Checkpoint, config: EngineConfig, isa: str) -> str:
    """Return what the bits of a KV block depend on, besides its tokens."""
    from paceline import _native
    from paceline.backends.evening import SCALED_DTYPES, VERSION
    from paceline.weights.repack import source_fingerprint

    path = checkpoint.path
    files = [*source_files(path), Path(_native.__file__)]
    if path.is_dir():
        files.append(path / "config.json")
    source = source_fingerprint(files)
    formats = f"{config.kv_dtype} {config.block_size} {config.activations}"
    if checkpoint.config.attention_bias and config.kv_dtype in SCALED_DTYPES:
        formats += f" {VERSION}"
    return f"{source} {formats} {config.backend} {isa}"


def embeds_only(name: str) -> str:
    """Return what to tell who wants `name`, an encoder, to write."""
    return (
        f"{name} embeds texts and writes none: use `paceline embed {name} TEXT`, or "
        f"`paceline serve {name}` and its /v1/embeddings"
    )


def display_name(model: str) -> str:
    """Return the name a model is served under: a file's stem, a folder's name, else `model`."""
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def describe(loaded: LoadedModel) -> str:
    """Return one line: instruction set, threads and why, KV size."""
    config, kv = loaded.config, loaded.kv
    return (
        f"{loaded.name}: loaded in {loaded.load_s:.2f} s, weights "
        f"{format_bytes(loaded.weight_bytes)}, ISA {loaded.isa}, "
        f"{config.num_threads} threads ({loaded.threads_reason}), KV cache "
        f"{format_bytes(kv.num_bytes)} {config.kv_dtype} = {kv.num_blocks} blocks of "
        f"{config.block_size} tokens, context {kv.max_model_len}"
    )


def _build_text(
    checkpoint: Checkpoint, chat_template: str | None
) -> tuple[Tokenizer, ChatTemplate | None]:
    from paceline.text.chat_template import ChatTemplate
    from paceline.text.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(checkpoint.tokenizer)
    source = chat_template
    if source is None:
        source = checkpoint.chat_templates.get("default")
    if source is None:
        return tokenizer, None
    return tokenizer, ChatTemplate(source)


def _load_backend(
    checkpoint: Checkpoint, config: EngineConfig, kv: KVSize, weight_bytes: int
) -> tuple[Backend, EngineConfig]:
    """Return the loaded backend, and the config with every choice made."""
    backend, num_threads = new_backend(checkpoint.path, config, weight_bytes)
    resolved = replace(
        config,
        max_model_len=kv.max_model_len,
        kv_memory_bytes=kv.num_bytes,
        num_threads=num_threads,
    )
    backend.load(
        build_plan(checkpoint.config),
        checkpoint.tensors,
        kv=KVSpec(num_blocks=kv.num_blocks, block_size=config.block_size, dtype=config.kv_dtype),
        limits=step_limits(resolved, kv.max_model_len, kv.num_blocks),
    )
    return backend, resolved


def new_backend(path: Path, config: EngineConfig, weight_bytes: int) -> tuple[Backend, int]:
    """Return the backend that the config names, unloaded, and its number of threads."""
    if config.backend == "native":
        from paceline.backends.native import NativeBackend
        from paceline.weights.repack import source_fingerprint

        cache_path, fingerprint = None, ""
        if weight_bytes >= _MIN_CACHED_BYTES:
            cache_path = packed_cache_path(path)
            config_file = [path / "config.json"] if path.is_dir() else []  # says how to read them
            fingerprint = source_fingerprint([*source_files(path), *config_file])
        native = NativeBackend(
            num_threads=config.num_threads,
            cache_path=cache_path,
            fingerprint=fingerprint,
            activations=config.activations,
        )
        return native, native.num_threads
    if config.backend == "reference":
        from paceline.backends.reference import ReferenceBackend

        return ReferenceBackend(), 1
    raise ParameterError(
        f"backend is {config.backend!r}: choose native or reference", param="backend"
    )


def packed_cache_path(path: Path) -> Path:
    """Return where the packed weights of the model at `path` are kept: beside it."""
    return path / "paceline.packed" if path.is_dir() else path.with_name(f"{path.name}.packed")


def source_files(path: Path) -> list[Path]:
    """Return all weight files of the model: a folder's, or every part of a split GGUF."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    part = _SPLIT_PART.search(path.name)
    if part is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: part.start()]}-*-of-{part[1]}.gguf"))
