"""Named models: `resolve` turns what a user calls a model into a path, pulling it if need be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from paceline.catalog.entries import ENTRIES, Entry, find
from paceline.catalog.store import home, installed, is_installed, model_path
from paceline.errors import ModelNotFoundError, PullError

__all__ = ["ENTRIES", "Entry", "find", "home", "installed", "resolve"]

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf))?")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")


def resolve(
    model: str, *, pull: bool = True, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Return the path of `model`: a catalogue name, a file or folder, or a hub id.

    A hub id is "org/name" (a folder of safetensors) or "org/name/file.gguf". `pull=False` uses
    only what is on this disk.
    """
    entry = find(model)
    if entry is not None:
        return _resolve_entry(entry, pull, progress)
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # no folder of that user; too long; not to be entered
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelNotFoundError(f"cannot read {model[:80]!r}: {reason}") from None
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id and not path.is_absolute() and hub_id[1].split("/")[0] not in (".", ".."):
        return _resolve_hub(hub_id[1], hub_id[2], pull)
    raise _unknown(model)


def _unknown(model: str) -> ModelNotFoundError:
    import difflib

    names = [entry.name for entry in ENTRIES]
    close = difflib.get_close_matches(model.lower(), names, n=2, cutoff=0.4)
    hint = f": did you mean {' or '.join(close)}?" if close else "."
    return ModelNotFoundError(
        f"no model is called {model!r} and no such file exists{hint} The catalogue has "
        f"{', '.join(names)}; a GGUF file, a folder of safetensors and a hub id (org/name) work too"
    )


def _resolve_entry(entry: Entry, pull: bool, progress: Callable[[int, int], None] | None) -> Path:
    if is_installed(entry):
        return model_path(entry)
    if not pull:
        raise ModelNotFoundError(
            f"{entry.name} is not on this disk: fetch it with `paceline pull {entry.name}`"
        )
    from paceline.catalog.pull import pull as fetch

    return fetch(entry, progress=progress)


def _resolve_hub(repo: str, file: str | None, pull: bool) -> Path:
    """Return the local path of a hub repository, or of one file of it."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelNotFoundError(
            f"{repo!r} is no file here; to fetch it from the hub, `pip install 'paceline[hub]'`"
        ) from None
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, local_files_only=not pull))
        return Path(
            huggingface_hub.snapshot_download(
                repo, allow_patterns=list(_HUB_FILES), local_files_only=not pull
            )
        )
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors or ValueErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PullError(
            f"{repo!r} could not be fetched from the hub ({reason}): check the name, the network "
            "and, for a gated model, `hf auth login`"
        ) from error
