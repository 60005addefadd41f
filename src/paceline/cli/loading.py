"""Loading a model from the command line: with a progress bar where it must be pulled first."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine.build import LoadedModel


def load(model: str, config: EngineConfig, *, chat_template_file: str | None = None) -> LoadedModel:
    """Return the loaded model; `chat_template_file` replaces its chat template."""
    with without_gc():
        from paceline.engine.build import load_model

        refuse_encoder(model)
        template = None if chat_template_file is None else read_template(chat_template_file)
        return load_model(model, config, path=find_model(model), chat_template=template)


@contextmanager
def without_gc() -> Iterator[None]:
    """While inside, nothing is collected; what has been made by the end is never walked again.

    Imports and loading make objects that nearly all stay. Collecting meanwhile would cost a tenth
    of the start, and walking them later would stall the streams.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def refuse_encoder(model: str) -> None:
    """Raise UnsupportedModelError for a named model that writes no text, before it is fetched."""
    from paceline.catalog import find
    from paceline.engine.build import embeds_only

    entry = find(model)
    if entry is not None and entry.embeds:
        raise UnsupportedModelError(embeds_only(entry.name))


def find_model(model: str) -> Path:
    """Return the model's path; one that is not on this disk is pulled with a progress bar."""
    from paceline.catalog import find, resolve
    from paceline.catalog.store import is_installed

    entry = find(model)
    if entry is None or is_installed(entry):
        return resolve(model)
    from paceline.cli.pull import ProgressBar

    with ProgressBar(entry.name) as bar:
        return resolve(model, progress=bar.update)


def read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as a template: {error}") from None
    if not text.strip():
        raise ParameterError(
            f"the chat template file {path} is empty: write a template into it, or leave out "
            "--chat-template for the model's own"
        )
    return text
