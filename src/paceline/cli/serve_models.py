"""The models of `paceline serve`: their names and aliases, and how each is opened."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from paceline.config import EngineConfig, parse_bytes
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.engine.turns import Turns
    from paceline.measure.recorder import StepRecorder
    from paceline.server.admission import Limits
    from paceline.server.models.entry import Open, Opened
    from paceline.server.models.models import Models

logger = logging.getLogger(__name__)


class Wanted(Struct, frozen=True, kw_only=True):
    """What is to be served, and how. `models` are as given, each with its other names."""

    models: Mapping[str, tuple[str, ...]]
    config: EngineConfig
    limits: Limits
    num_tenants: int
    pooling: str | None
    weights: str  # of those that embed alone
    chat_template: str | None
    memory: str | None


def read_aliases(models: Sequence[str], aliases: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the other names of each model, given as NAME=MODEL. Raises ParameterError."""
    from paceline.engine.build import display_name

    given = {display_name(model): model for model in models}
    if len(given) < len(models):
        raise ParameterError(
            f"the models {', '.join(models)} do not have a name each: name each once, and rename a "
            "file where two have the same"
        )
    found: dict[str, list[str]] = {model: [] for model in models}
    taken = set(given)
    for text in aliases:
        name, _, target = text.partition("=")
        model = given.get(target, target)
        if not name or model not in found:
            raise ParameterError(
                f"--alias {text!r} names no model that is served: write NAME=MODEL, MODEL one of "
                f"{', '.join(given)}"
            )
        if name in taken:
            raise ParameterError(f"--alias {text!r}: {name!r} is taken, choose another name")
        taken.add(name)
        found[model].append(name)
    return {model: tuple(names) for model, names in found.items()}


def open_models(wanted: Wanted) -> Models:
    """Return the models of a server, the first of them loaded."""
    return _open_one(wanted) if len(wanted.models) == 1 else _open_several(wanted)


def _open_one(wanted: Wanted) -> Models:
    from paceline.cli.loading import load
    from paceline.embedding.build import embeddings_of
    from paceline.server.embeddings import Embeddings
    from paceline.server.models.entry import Entry
    from paceline.server.models.models import Models

    [(model, aliases)] = wanted.models.items()
    if wanted.memory is not None:
        raise ParameterError("--model-memory is for several models: use --kv-memory for one")
    _refuse_weights(wanted)
    loaded = load(model, wanted.config, chat_template_file=wanted.chat_template)
    loaded = structs.replace(loaded, aliases=aliases)
    max_waiting = wanted.limits.max_tokens
    embeddings = Embeddings(embeddings_of(loaded, wanted.pooling), max_waiting=max_waiting)
    entry = Entry.of(loaded, embeddings)
    return Models([entry], limits=wanted.limits, num_tenants=wanted.num_tenants)


def _open_several(wanted: Wanted) -> Models:
    from paceline.cli.loading import find_model, without_gc
    from paceline.embedding.build import is_encoder
    from paceline.engine.build import display_name
    from paceline.engine.memory import available_memory, format_bytes
    from paceline.engine.turns import Turns
    from paceline.server.models.entry import Entry
    from paceline.server.models.models import Models
    from paceline.server.models.needs import plan_needs

    if wanted.chat_template is not None:
        raise ParameterError("--chat-template is of one model: serve it by itself")
    if wanted.config.kv_tier is not None:
        raise ParameterError("--kv-tier is of one model: serve it by itself, or leave it out")
    paths = {model: find_model(model) for model in wanted.models}
    encoders = {model for model, path in paths.items() if is_encoder(path)}
    if not encoders:
        _refuse_weights(wanted)
    memory_bytes = available_memory() if wanted.memory is None else parse_bytes(wanted.memory)
    needs = plan_needs(paths, wanted.config, memory_bytes=memory_bytes)
    turns = Turns()
    entries = []
    for model, aliases in wanted.models.items():
        need = needs[model]
        opening: Open = (
            partial(_open_encoder, model, paths[model], wanted, turns)
            if model in encoders
            else partial(_open, model, paths[model], wanted, need.available_bytes, turns)
        )
        entries.append(Entry(
            display_name(model), aliases=aliases, need=need, config=wanted.config,
            path=paths[model], open=opening, is_encoder=model in encoders,
        ))  # fmt: skip
    models = Models(
        entries, limits=wanted.limits, num_tenants=wanted.num_tenants, memory_bytes=memory_bytes
    )
    assert models.first.open is not None
    with without_gc():
        models.first.opened = models.first.open(None)
    logger.info(
        "%s for models: %s", format_bytes(memory_bytes),
        ", ".join(f"{e.name} needs {format_bytes(e.need.num_bytes)}" for e in entries),
    )  # fmt: skip
    return models


def _refuse_weights(wanted: Wanted) -> None:
    if wanted.weights != "file":
        raise ParameterError("--weights is for models that embed and write none: leave it out")


def _open_encoder(
    model: str, path: Path, wanted: Wanted, turns: Turns, recorder: StepRecorder | None
) -> Opened:
    """Load an encoder, which has no engine: no recorder goes on with it."""
    from paceline.embedding.build import load_encoder_beside
    from paceline.server.embeddings import Embeddings

    loaded = load_encoder_beside(
        model, wanted.config, path=path, pooling=wanted.pooling, weights=wanted.weights,
        turns=turns,
    )  # fmt: skip
    loaded = structs.replace(loaded, aliases=wanted.models[model])
    return Embeddings(loaded, max_waiting=wanted.limits.max_tokens)


def _open(
    model: str,
    path: Path,
    wanted: Wanted,
    available_bytes: int,
    turns: Turns,
    recorder: StepRecorder | None,
) -> Opened:
    from paceline.embedding.build import embeddings_of
    from paceline.engine.build import load_model
    from paceline.server.embeddings import Embeddings

    loaded = load_model(
        model, wanted.config, path=path, available_bytes=available_bytes, turns=turns,
        recorder=recorder,
    )  # fmt: skip
    loaded = structs.replace(loaded, aliases=wanted.models[model])
    model_of_vectors = embeddings_of(loaded, wanted.pooling, turns=turns)
    return loaded, Embeddings(model_of_vectors, max_waiting=wanted.limits.max_tokens)
