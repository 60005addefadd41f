"""The HTML report in a real browser, where one is installed."""

import shutil
import subprocess

import pytest

from tests.e2e.test_bench import GOOD, HANGING, bench
from tests.fake_server import FakeServer


@pytest.fixture(scope="module")
def browser() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no browser is here: apt-get install chromium")
    return found


def page_of(browser, path) -> str:
    """Return the report as the browser has it once its scripts are done."""
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={path.with_suffix('')}", "--virtual-time-budget=3000", "--dump-dom",
        path.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in result.stderr, result.stderr
    return result.stdout


def test_the_report_draws_every_plot_and_logs_no_error(tmp_path, browser):
    path = tmp_path / "report.html"
    with FakeServer(lambda number, body: HANGING if number == 3 else GOOD) as server:
        bench("--target", server.url, "--sweep", "4,8", "--duration", "2s", "--timeout", "1s",
              "--slo", "ttft=1s", "--drain", "2s", "--html", str(path))  # fmt: skip
    page = page_of(browser, path)
    # Four against the rate, four curves, and two over time for each of two stages.
    assert page.count("<canvas") == 4 + 4 + 2 * 2
    for part in (
        "Goodput against rate",
        "Slowest requests",
        "within objective",
        "no end within 1 s",
    ):
        assert part in page
    assert page.count('class="part"') >= 2 * 12


def test_the_report_names_a_load_that_has_its_own_times(tmp_path, browser):
    path = tmp_path / "report.html"
    with FakeServer(lambda number, body: GOOD) as server:
        bench("--target", server.url, "--arrival", "burst", "--requests", "2", "--html", str(path))
    assert "open loop, burst" in page_of(browser, path)
