"""Pooling: which rows of a text's hidden states its vector is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ModelFormatError, ParameterError, UnsupportedModelError

Pooling = Literal["mean", "last", "first"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "first")

# What a sentence-transformers folder says in 1_Pooling/config.json, and our name for it.
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}
_STEPS = frozenset({"Transformer", "Pooling", "Normalize"})
_MAX_BYTES = 1 << 20


def choose_pooling(asked: str | None, path: Path, *, is_causal: bool) -> Pooling:
    """Return the pooling that was asked for, else that of the model's folder, else mean."""
    if asked == "first" and is_causal:
        raise ParameterError(
            "pooling is 'first', but this model's first token sees no other: choose mean or last",
            param="pooling",
        )
    if asked is None:
        return folder_pooling(path) or "mean"
    for name in POOLINGS:
        if asked == name:
            return name
    raise ParameterError(
        f"pooling is {asked!r}: choose one of {', '.join(POOLINGS)}", param="pooling"
    )


def folder_pooling(path: Path) -> Pooling | None:
    """Return what a sentence-transformers folder asks for, None where `path` is no such folder.

    Raises UnsupportedModelError for steps that no vector of ours goes through.
    """
    modules = _read(path / "modules.json")
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        if kind.rsplit(".", 1)[-1] not in _STEPS:
            raise UnsupportedModelError(
                f"{path / 'modules.json'}: the step {kind!r} is not supported: "
                f"{', '.join(sorted(_STEPS))} are"
            )
    config = _read(path / "1_Pooling" / "config.json")
    if not isinstance(config, dict):
        return None
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{path / '1_Pooling' / 'config.json'}: {' and '.join(modes) or 'no pooling'} is not "
            f"supported: one of {', '.join(_MODES)} is; choose with --pooling"
        )
    return _MODES[modes[0]]


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFormatError(f"{path} is larger than {_MAX_BYTES} bytes")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from None
