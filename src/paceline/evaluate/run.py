"""An evaluation: what is asked of a model, and of a reference beside it, from start to figures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from paceline import __version__
from paceline.config import EngineConfig
from paceline.engine.build import display_name, load_model, source_files
from paceline.errors import ParameterError
from paceline.evaluate.generation import Show, Subject
from paceline.evaluate.humaneval import Problem, run_humaneval
from paceline.evaluate.needle import run_needles
from paceline.evaluate.prompts import run_prompts
from paceline.evaluate.state import State
from paceline.evaluate.tasks import TaskFile, run_choices, run_numbers
from paceline.evaluate.text import Reading, open_reader, read, read_text, summarise
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.repack import source_fingerprint


class Source(Struct, frozen=True, kw_only=True):
    """One model as it is to run; `role` is "model" or "reference"."""

    role: str
    model: str
    path: Path
    config: EngineConfig

    @property
    def name(self) -> str:
        """Return the model's name with the formats that it runs in."""
        config = self.config
        return (
            f"{display_name(self.model)} (KV {config.kv_dtype}, activations {config.activations})"
        )


class Work(Struct, frozen=True, kw_only=True):
    """What is asked. `limit` bounds the windows of the text; other lists are bounded already."""

    text: Path | None = None
    context: int = 512
    stride: int = 256
    limit: int | None = None
    tasks: tuple[TaskFile, ...] = ()
    prompts: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    lengths: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    max_tokens: int = 256
    is_chat: bool | None = None  # None: where the model has a template

    @property
    def generates(self) -> bool:
        """True where the engine is needed, and not a model alone."""
        return bool(self.tasks or self.prompts or self.problems or self.lengths)


class Evaluation:
    """Opened models and their work. Raises ParameterError where they do not go together."""

    def __init__(self, sources: Sequence[Source], work: Work) -> None:
        self._sources = sources
        self._work = work
        self._checkpoints = [open_checkpoint(source.path) for source in sources]
        self._reading: Reading | None = None
        if work.text is not None:
            tokenizers = [build_tokenizer(c.tokenizer) for c in self._checkpoints]
            _check_vocabularies(sources, self._checkpoints, tokenizers)
            self._reading = read_text(
                work.text, tokenizers[0], context=work.context, stride=work.stride
            )

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that the figures depend on; threads are no part of it (law 1)."""
        asked = msgspec.json.encode(replace(self._work, text=None))
        identity: dict[str, Any] = {
            "version": __version__,
            "asked": hashlib.sha256(asked).hexdigest(),
            "text": None if self._reading is None else self._reading.sha256,
        }
        for source in self._sources:
            config = msgspec.to_builtins(replace(source.config, num_threads=None))
            files = source_fingerprint(source_files(source.path))
            identity[source.role] = {"files": files, **config}
        return identity

    def run(self, state: State, show: Show) -> dict[str, Any]:
        """Return all figures; what the state knows is not computed again."""
        facts: dict[str, Any] = {source.role: source.name for source in self._sources}
        if self._reading is not None:
            facts["text"] = {"file": str(self._work.text), **self._run_text(state, show)}
        if self._work.generates:
            facts["generation"] = {
                source.role: self._run_generation(source, state, show) for source in self._sources
            }
        facts["resumed_items"] = state.num_resumed
        return facts

    def _run_text(self, state: State, show: Show) -> dict[str, Any]:
        assert self._reading is not None
        with ExitStack() as stack:
            readers = [
                stack.enter_context(open_reader(checkpoint, source.config, self._reading.context))
                for source, checkpoint in zip(self._sources, self._checkpoints, strict=True)
            ]
            found = read(readers, self._reading, state, show, limit=self._work.limit)
        return summarise(self._reading, found)

    def _run_generation(self, source: Source, state: State, show: Show) -> dict[str, Any]:
        work, out = self._work, dict[str, Any]()
        with _subject(source, work, state, show) as subject:
            for file in work.tasks:
                parts = out.setdefault("tasks", {}).setdefault(file.name, {})
                if file.choices:
                    parts["choices"] = run_choices(subject, file.name, file.choices)
                if file.numbers:
                    parts["numbers"] = run_numbers(
                        subject, file.name, file.numbers, work.max_tokens
                    )
            if work.prompts:
                out["prompts"] = run_prompts(subject, work.prompts, work.max_tokens)
            if work.problems:
                out["humaneval"] = run_humaneval(subject, work.problems, work.max_tokens)
            if work.lengths:
                out["needles"] = run_needles(
                    subject, work.lengths, work.depths, seed=source.config.seed
                )
        return out


@contextmanager
def _subject(source: Source, work: Work, state: State, show: Show) -> Iterator[Subject]:
    show(f"loading {source.name}", 0, 1)
    loaded = load_model(source.model, source.config, path=source.path)
    try:
        has_template = loaded.template is not None
        if work.is_chat and not has_template:
            raise ParameterError(f"{loaded.name} has no chat template: leave out --chat")
        is_chat = has_template if work.is_chat is None else work.is_chat
        yield Subject(role=source.role, loaded=loaded, state=state, show=show, is_chat=is_chat)
    finally:
        loaded.engine.stop(timeout_s=5.0)


def _check_vocabularies(
    sources: Sequence[Source], checkpoints: Sequence[Checkpoint], tokenizers: Sequence[Tokenizer]
) -> None:
    sizes = [checkpoint.config.vocab_size for checkpoint in checkpoints]
    if len(set(sizes)) > 1 or not all(t.has_ids_of(tokenizers[0]) for t in tokenizers[1:]):
        raise ParameterError(
            f"{sources[0].model} and {sources[1].model} have different vocabularies "
            f"({sizes[0]} and {sizes[1]} tokens): their logits cannot be compared, take a "
            "reference of the same family",
            param="against",
        )
