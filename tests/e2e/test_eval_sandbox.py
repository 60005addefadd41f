"""The sandbox: what passes, and what it ends."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from paceline.evaluate.sandbox import Limits, isolation, run_program

SHORT = Limits(cpu_s=1, wall_s=300)


def test_a_program_that_ends_by_itself_passes() -> None:
    assert run_program("print('hello')\nassert 1 + 1 == 2").reason == "passed"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended early, code 0"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(8 << 20))", "OSError"),
    ],
)
def test_a_program_that_fails_or_leaves_early_does_not_pass(source: str, reason: str) -> None:
    verdict = run_program(source)
    assert (verdict.has_passed, verdict.reason) == (False, reason)


def test_an_endless_loop_is_ended_by_the_limit_of_cpu_time() -> None:
    assert run_program("while True: pass", SHORT).reason.startswith("ended early")


def test_a_program_that_sleeps_is_ended_by_the_clock() -> None:
    limits = Limits(wall_s=1.5)
    assert run_program("import time\ntime.sleep(600)", limits).reason == "time limit"


def test_the_environment_and_the_folder_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    source = "import os\nassert 'SECRET_KEY' not in os.environ\nassert os.listdir('.') == []"
    assert run_program(source).has_passed


@pytest.mark.parametrize("has_namespaces", [True, False])
def test_a_process_that_it_leaves_behind_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_namespaces: bool
) -> None:
    if not has_namespaces:
        monkeypatch.setattr("paceline.evaluate.sandbox.isolation", tuple)
    marker = tmp_path / "alive"
    source = (
        "import os, time\n"
        "try:\n"
        "    child = os.fork()\n"
        "except OSError:\n"
        "    child = 1\n"  # it may start none: as good
        "if child == 0:\n"
        "    while True:\n"
        f"        open({str(marker)!r}, 'a').write('x')\n"
        "        time.sleep(0.05)\n"
    )
    assert run_program(source).has_passed
    size = marker.stat().st_size if marker.exists() else 0
    time.sleep(0.5)
    assert (marker.stat().st_size if marker.exists() else 0) == size


@pytest.mark.skipif(not isolation(), reason="unshare may make no namespaces here")
def test_the_network_is_cut_where_namespaces_may_be_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert run_program(source).reason in ("OSError", "ConnectionRefusedError")


def test_it_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_program("open('f', 'w').write('x')").has_passed
    assert os.listdir(tmp_path) == []
