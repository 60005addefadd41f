"""Where models lie on disk, and the lock that lets one process at a time change that."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.catalog.entries import ENTRIES, Entry
from paceline.errors import PullError

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def home() -> Path:
    """Return PACELINE_HOME, or `paceline` in the user's cache folder."""
    chosen = os.environ.get("PACELINE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "paceline"


def folder_of(entry: Entry) -> Path:
    return home() / "models" / entry.name


def model_path(entry: Entry) -> Path:
    """Return what a loader opens: the file of a one-file model, else the folder."""
    folder = folder_of(entry)
    return folder / entry.files[0].name if len(entry.files) == 1 else folder


def is_installed(entry: Entry) -> bool:
    """True where every file is there in its full size."""
    folder = folder_of(entry)
    try:
        return all((folder / file.name).stat().st_size == file.size for file in entry.files)
    except OSError:
        return False


def installed() -> list[tuple[Entry, Path]]:
    """Return the catalogue's models that are on this disk, with their paths."""
    return [(entry, model_path(entry)) for entry in ENTRIES if is_installed(entry)]


@contextmanager
def locked(entry: Entry) -> Iterator[None]:
    """Hold the model's lock; a second process waits here until the first has finished."""
    path = folder_of(entry).with_name(f".{entry.name}.lock")
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process is fetching %s: waiting for it", entry.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a PullError with the remedy."""
    try:
        yield
    except OSError as error:
        raise disk_error(folder, error) from error


def disk_error(folder: Path, error: OSError) -> PullError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return PullError(
            f"the disk is full ({reason}) while writing to {folder}: free some space, or set "
            "PACELINE_HOME to a folder on a larger disk"
        )
    return PullError(
        f"cannot write to {folder} ({reason}): make it writable, or set PACELINE_HOME to a folder "
        "that is"
    )
