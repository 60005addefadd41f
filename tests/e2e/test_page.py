"""The page's files and the endpoint that feeds it, over real HTTP."""

import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from unittest.mock import patch

import pytest

from paceline.measure import ceilings
from paceline.measure.ledger import RESIDUAL, UNBOOKED, Part
from paceline.server.page.routes import POLICY, read_files
from tests.e2e.live import LiveServer, ServeProcess, wait_until
from tests.e2e.test_disconnect import send
from tests.e2e.test_ledger import timeline
from tests.unit.proposers import eager_pace

SOURCES = Path(__file__).parents[2] / "src/paceline/server/page/static"
STATIC = files("paceline.server.page").joinpath("static")
SCRIPTS = sorted(file.name for file in STATIC.iterdir() if file.name.endswith(".js"))


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


@pytest.fixture(scope="module")
def page(server):
    response = server.client.get("/")
    assert response.status_code == 200
    return response


# ---- files ----


def test_the_page_and_its_files_come_with_their_types_under_a_strict_policy(server, page):
    responses = {"index.html": page}
    responses |= {name: server.client.get(f"/page/{name}") for name in read_files()}
    types = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    for name, response in responses.items():
        assert response.status_code == 200, name
        assert response.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    assert rules.pop("frame-ancestors") == "'none'"
    assert set(rules.values()) == {"'self'"}


def test_the_package_has_every_file_of_the_page(page):
    assert {file.name for file in SOURCES.iterdir()} <= read_files().keys()
    tags = Tags(page.text).tags
    links = [a.get("src") or a.get("href") for _, a in tags if a.get("src") or a.get("href")]
    imports = [
        f"/page/{name}"
        for script in SCRIPTS
        for name in re.findall(r'from "\./([^"]+)"', STATIC.joinpath(script).read_text())
    ]
    wanted = {link for link in [*links, *imports] if not link.startswith("#")}
    assert {link.removeprefix("/page/") for link in wanted} <= read_files().keys()
    assert {f"/page/{name}" for name in SCRIPTS} <= wanted


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/../app.py", "/page/%2e%2e%2fapp.py", "/page/", "/page/a/b"]
)
def test_other_files_are_not_found(server, path):
    assert server.client.get(path).status_code == 404


def test_the_page_has_no_inline_script_or_style(page):
    for tag, attributes in Tags(page.text).tags:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_never_make_markup_of_text(script):
    source = STATIC.joinpath(script).read_text()
    for way in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
        'setAttribute("style', "DOMParser", "http://", "https://",
    ):  # fmt: skip
        assert way not in source


def test_every_part_of_the_ledger_has_its_words():
    words = STATIC.joinpath("words.js").read_text()
    named = set(re.findall(r"^  (\w+): \[", words, flags=re.MULTILINE))
    assert {part.label for part in Part} | {RESIDUAL, UNBOOKED} <= named


def test_of_several_tokens_of_a_step_all_but_the_last_were_drafted(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not here: apt-get install nodejs")
    module = tmp_path / "steps.mjs"
    module.write_text(STATIC.joinpath("steps.js").read_text())
    step = {"kind": "decode", "num_tokens": 3, "num_drafted": 2, "num_seqs": 2}
    steps = [
        {
            **step,
            "end_ms": 5,
            "new_tokens": 0,
            "step_tokens": {"prefill": 3},
            "kind": "prefill",
            "num_drafted": 0,
        },
        {**step, "end_ms": 10, "new_tokens": 1, "step_tokens": {"decode": 2, "verify": 2}},
        {
            **step,
            "end_ms": 30,
            "new_tokens": 3,
            "step_tokens": {"decode": 1, "verify": 2, "prefill": 64},
        },
    ]
    code = (
        f"import {{ emissions }} from {json.dumps(module.as_uri())};"
        f"console.log(JSON.stringify(emissions({json.dumps(steps)})));"
    )
    command = [node, "--input-type=module", "-e", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    tokens = json.loads(result.stdout)
    assert [token["gap_ms"] for token in tokens] == [None, 20, 0, 0]
    assert [token["isDrafted"] for token in tokens] == [False, True, True, False]
    assert [token["others"] for token in tokens] == [[["decode", 1]]] + [[["prefill", 64]]] * 3
    assert [token["hasPrompts"] for token in tokens] == [False, True, True, True]


def test_no_page_leaves_the_api_alone(script_path):
    with ServeProcess(script_path, "--no-page", "--kv-memory", "8M") as bare:
        assert bare.client.get("/").status_code == 404
        assert bare.client.get("/page/main.js").status_code == 404
        assert bare.client.get("/v1/models").status_code == 200
        assert "its page" not in bare.log


# ---- figures ----


def live(server, **query):
    response = server.client.get("/v1/paceline/live", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_last_minutes_balance_with_what_was_asked(server):
    before = live(server)["seconds"]
    for letter in "pqrst":  # nothing of one prompt is another's prefix
        body = {"prompt": letter * 40, "max_tokens": 30, "ignore_eos": True}
        assert server.post("/v1/completions", **body).status_code == 200
    wait_until(lambda: server.stats().num_running == 0)
    seen = live(server)
    told = {
        name: sum(seen["seconds"][name]) - sum(before[name])
        for name in ("prefill", "recompute", "decode", "new_tokens")
    }
    assert told == {"prefill": 200, "recompute": 0, "decode": 145, "new_tokens": 150}
    assert seen["ledger"] is True
    assert seen["engine"]["num_blocks"] == server.stats().num_blocks
    assert 0 < seen["itl_ms"]["p50"] <= seen["itl_ms"]["p99"]
    assert seen["ttft_ms"]["count"] >= 5
    slowest = [call["wall_ms"] for call in seen["slowest"]]
    assert slowest == sorted(slowest, reverse=True)
    assert all(call["outcome"] == "ok" and call["parts_ms"] for call in seen["slowest"])


def test_tokens_that_drafts_foresaw_are_counted_in_the_step_that_gave_them(script_path):
    options = {"num_threads": 1, "kv_memory_bytes": 2**23, "speculate": "ngram:max=6"}
    with (
        patch("paceline.engine.speculation.speculator.Goodput", eager_pace()),
        LiveServer(script_path, **options) as server,
    ):
        answer = server.complete("0123456789" * 4, temperature=0, max_tokens=60)
        [choice] = timeline(server, answer["id"])["choices"]
        given = [step["new_tokens"] for step in choice["steps"]]
        assert sum(given) == choice["completion_tokens"] == 60
        assert max(given) > 1
        assert max(step["num_drafted"] for step in choice["steps"]) >= max(given) - 1
        seen = live(server)
        assert sum(seen["seconds"]["new_tokens"]) == 60
        assert sum(seen["seconds"]["verify"]) == sum(s["num_drafted"] for s in choice["steps"])
        assert seen["itl_ms"]["count"] == 59


def test_a_reader_that_comes_again_gets_what_is_new(server):
    first = live(server)
    again = live(server, after_s=first["now_s"] - 1)
    assert again["seconds"]["at_s"] == list(range(first["now_s"], again["now_s"] + 1))
    assert {len(column) for column in again["seconds"].values()} == {len(again["seconds"]["at_s"])}


def test_the_running_calls_are_told_with_what_is_booked(long_script_path):
    with LiveServer(long_script_path, kv_memory_bytes=2**26, num_threads=1) as server:
        connection = send(server, headers="X-Request-Id: now\r\n", stream=True)
        wait_until(lambda: server.stats().num_generated_tokens > 20)
        seen = live(server)
        connection.close()
        [call] = seen["running"]
        assert (call["request_id"], call["outcome"]) == ("now", "running")
        assert call["completion_tokens"] >= 20
        assert seen["engine"]["num_running"] == 1
        assert timeline(server, "now")["outcome"] == "aborted"
        assert live(server)["running"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [({"by": "luck"}, "by"), ({"after_s": "x"}, "after_s"), ({"after_s": 2**63}, "after_s")],
)
def test_a_question_that_makes_no_sense_is_refused(server, query, param):
    response = server.client.get("/v1/paceline/live", params=query)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_machines_limits_are_told_where_they_are_known(script_path, monkeypatch):
    peaks = {1: 5e9}
    monkeypatch.setattr(ceilings, "known_int8_macs", lambda threads: peaks.get(threads, 0.0))
    with LiveServer(script_path, num_threads=1, kv_memory_bytes=2**23) as measured:
        limits = live(measured)["limits"]
        assert limits["read_bytes_per_s"] > 1e8
        assert limits["macs_per_s"] == 5e9
    peaks.clear()
    with LiveServer(script_path, num_threads=1, kv_memory_bytes=2**23) as unmeasured:
        assert live(unmeasured)["limits"]["macs_per_s"] is None
        peaks[1] = 7e9  # measured beside the server that runs
        assert live(unmeasured)["limits"]["macs_per_s"] == 7e9


def test_a_peak_that_is_not_known_has_its_help_in_the_metrics_and_no_value(
    script_path, monkeypatch
):
    peaks = {}
    monkeypatch.setattr(ceilings, "known_int8_macs", lambda threads: peaks.get(threads, 0.0))
    name = "paceline:machine_int8_macs_per_second"
    with LiveServer(script_path, num_threads=1, kv_memory_bytes=2**23) as server:
        lines = [x for x in server.client.get("/metrics").text.splitlines() if name in x]
        assert len(lines) == 2
        assert "paceline roofline" in lines[0]
        peaks[1] = 5e9
        assert f'{name}{{engine="0",model_name="{server.name}"}} 5e+09' in (
            server.client.get("/metrics").text
        )


def test_without_a_ledger_the_page_has_the_engines_state_and_no_steps(script_path):
    with LiveServer(script_path, num_threads=1, ledger=False, kv_memory_bytes=2**23) as bare:
        bare.complete("a", temperature=0)
        seen = live(bare)
        assert seen["ledger"] is False
        assert "prefill" not in seen["seconds"]
        assert len(seen["slowest"]) == 1
        assert bare.client.get("/").status_code == 200


def test_looking_again_is_cheap(server):
    live(server)
    begin = time.process_time()
    for _ in range(20):
        live(server, after_s=live(server)["now_s"] - 1)
    assert (time.process_time() - begin) / 40 < 0.02  # seconds of this process, client included
