"""Staging: the folder OUT.partial, where a result grows until it is whole and takes its place.

A run that ends early leaves it there; the next run of the same work goes on where it stopped. The
journal counts whole tensors only and is written after their bytes are on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from paceline.errors import OutputError, ParameterError
from paceline.lock import Lock

_JOURNAL = "progress.json"
_GGUF = b"GGUF"  # the first bytes of such a file
_KEPT = "kept"  # the folder of tensors that were made out of turn


class Staging:
    """A context: holds OUT.partial for one process. `identity` says which work it is."""

    def __init__(self, out: Path, *, identity: str, force: bool) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.partial")
        self.num_done = 0  # tensors that an earlier run left
        self._identity = identity
        self._force = force
        self._lock = Lock(self.folder, busy=f"another run is writing {out}: wait for its end")

    def __enter__(self) -> Staging:
        refuse_existing(self.out, self._force)
        with _explained(self.out):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        try:
            self.num_done = self._read_journal()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._lock.release()

    def _read_journal(self) -> int:
        """Tensors of the same work that are there; anything else in the folder is cleared."""
        try:
            journal = json.loads((self.folder / _JOURNAL).read_bytes())
            if journal["identity"] == self._identity:
                return int(journal["tensors"])
        except FileNotFoundError:
            if any(self.folder.iterdir()):
                raise OutputError(
                    f"{self.folder} is in the way, and no run of ours made it: move it away"
                ) from None
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a journal that cannot be read is worth nothing
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return 0

    def note(self, num_tensors: int) -> None:
        """Write down that so many tensors are on the disk."""
        text = json.dumps({"identity": self._identity, "tensors": num_tensors})
        beside = self.folder / f"{_JOURNAL}.new"
        beside.write_text(text)
        os.replace(beside, self.folder / _JOURNAL)

    def keep(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        """Keep the bytes of a tensor that was made out of turn, for this run and the next."""
        with _explained(self.out):
            if not (self.folder / _JOURNAL).exists():
                self.note(0)
            path = self._kept_path(name)
            path.parent.mkdir(exist_ok=True)
            beside = path.with_suffix(".new")
            with beside.open("wb") as file:
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)

    def kept(self, name: str, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Return the bytes that were kept of a tensor, mapped; None if there are none."""
        path = self._kept_path(name)
        if not path.exists() or path.stat().st_size != num_bytes:
            return None
        return np.memmap(path, np.uint8, mode="r")

    def _kept_path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode()).hexdigest()  # a name may be no file's name
        return self.folder / _KEPT / f"{digest}.blocks"

    @property
    def num_kept(self) -> int:
        return len(list((self.folder / _KEPT).glob("*.blocks")))

    @contextmanager
    def open_data(self, name: str, *, size: int, total: int) -> Iterator[BufferedRandom]:
        """Yield the file `name`, cut to its first `size` bytes, positioned there.

        Raises OutputError if the disk has no room for `total` bytes, now or later.
        """
        path = self.folder / name
        with _explained(self.out):
            if not (self.folder / _JOURNAL).exists():
                self.note(0)
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(size)
                free = shutil.disk_usage(self.folder).free
                if free < total - size:
                    raise OutputError(
                        f"{self.out} needs {total - size:,} more bytes, the disk has {free:,} "
                        "free: make room and run the same command again"
                    )
                file.seek(size)
                yield file
                file.flush()
                os.fsync(file.fileno())

    def finish(self, data_name: str | None = None) -> None:
        """Put the result in its place: the folder, or its file `data_name` alone."""
        (self.folder / _JOURNAL).unlink()
        shutil.rmtree(self.folder / _KEPT, ignore_errors=True)
        with _explained(self.out):
            if data_name is not None:
                os.replace(self.folder / data_name, self.out)
                self.folder.rmdir()
                return
            old = self.out.with_name(f"{self.out.name}.old-{os.urandom(4).hex()}")
            if self.out.exists():
                os.rename(self.out, old)
            os.rename(self.folder, self.out)
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written: no later run could make a result of it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def refuse_existing(out: Path, force: bool) -> None:
    """Raise ParameterError if `out` is there, unless `force` may replace it."""
    if not out.exists():
        return
    if not force:
        raise ParameterError(f"{out} exists: choose another name, or --force to replace it")
    if out.is_dir():
        is_model = not any(out.iterdir()) or (out / "config.json").exists()
    else:
        with _explained(out), out.open("rb") as file:
            is_model = file.read(len(_GGUF)) == _GGUF
    if not is_model:
        raise ParameterError(
            f"{out} is no model folder and no GGUF file: --force replaces only those"
        )


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turn an OSError into an OutputError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"the disk is full while {out} is written: make room and run the same command "
                "again, it goes on where it stopped"
            ) from error
        reason = error.strerror or str(error)
        raise OutputError(f"{out} cannot be written ({reason}): choose another -o") from error
