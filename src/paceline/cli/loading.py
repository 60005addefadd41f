"""Loading a model from the command line: with a progress bar where it must be pulled first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine.build import LoadedModel


def load(model: str, config: EngineConfig, *, chat_template_file: str | None = None) -> LoadedModel:
    """Return the loaded model; `chat_template_file` replaces its chat template."""
    from paceline.engine.build import load_model

    template = None if chat_template_file is None else read_text(chat_template_file)
    return load_model(model, config, chat_template=template)


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as a template: {error}") from None
