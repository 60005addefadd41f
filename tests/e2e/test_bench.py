"""`paceline bench` against FAKE, a server whose every write is known, and against our own."""

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from paceline.bench.packets import both_clocks
from tests.e2e.live import PACELINE, LiveServer
from tests.e2e.test_bench_truth import Truth, arrivals_of
from tests.fake_server import (
    DONE,
    EMPTY,
    FINISH,
    ROLE,
    FakeServer,
    Script,
    Served,
    delta,
    event,
    steady,
    usage,
)

OWN_S = 0.001  # that the client may be wrong beyond what the server knows of its own writes
PROBE_S = 0.025  # between two looks of the client at its own lag


def bench(*arguments: str, code: int = 0, **settings) -> dict:
    command = [*PACELINE, "bench", *arguments, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, **settings)
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def epoch_of(document: dict, stage: dict | None = None) -> float:
    """Return the moment of a stage's `scheduled_s` 0 on the clock that the servers here read.

    Without `stage` it is the document's first.
    """
    now, wall = both_clocks()
    return now + (stage or document["stages"][0])["began_at"] - wall


def assert_true(line: dict, served: Served, steps: Sequence[int], document: dict) -> None:
    """Texts came while the server wrote these steps, as exactly as it knows itself.

    A write happens between its beginning and its end, which a loaded machine pulls apart. Writes
    that the client reads together are one arrival, at the time of the last: but only as far as the
    server was late with the first of them, or the client's event loop was, as it says itself. The
    last text may come together with all that was written after it.
    """
    spans = [(served.begun_at[i], served.written_at[i]) for i in steps]
    spans[-1] = spans[-1][0], served.written_at[-1]
    arrivals = arrivals_of(line, epoch=epoch_of(document))
    assert len(arrivals) <= len(spans)
    seen = Truth().writes_of(arrivals, spans)
    assert seen[-1] == spans[-1]
    for arrival, (begun, written) in zip(arrivals, seen, strict=True):
        assert begun - OWN_S <= arrival <= written + OWN_S
    lag_s = document["stages"][0]["client"]["loop_lag_ms"]["max"] / 1e3
    for (begun, written), (following, _) in itertools.pairwise(spans):
        assert (begun, written) in seen or following - written <= lag_s + PROBE_S


def lines_of(path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["type"] == "summary"
    return [line for line in lines if line["type"] == "request"]


# MET-01. Texts at 500 ms and nine more every 50 ms, told in every way that servers have.
TEXT_MS = [500 + 50 * i for i in range(10)]


def script(texts, *, tokens=None) -> Script:
    """`texts`: the bytes of each text step; a role, comments and an empty delta come first."""
    steps = [(0, ROLE + b": one\n\n: two\n\n"), (100, EMPTY)]
    steps += list(zip(TEXT_MS, texts, strict=False))
    tokens = len(texts) if tokens is None else tokens
    steps.append((steps[-1][0], FINISH + usage(7, tokens) + DONE))
    return Script(tuple(steps))


def cut_in_halves(data: bytes) -> list[bytes]:
    return [data[: len(data) // 2], data[len(data) // 2 :]]


PLAIN = [delta(content=f"w{i}") for i in range(10)]
REASONING = [delta(reasoning_content="hm") for _ in range(4)] + PLAIN[4:]
CRLF = [chunk.replace(b"\n", b"\r\n") for chunk in PLAIN]
NO_BLANK = [chunk.replace(b"data: ", b"data:") for chunk in PLAIN]
SEPARATORS = [delta(content="a\u2028b") for _ in range(10)]
TWO_TOKENS = [delta(content="one two") for _ in range(10)]
# Each packet ends in the middle of the next text's line, which is complete 50 ms later.
SPLIT = [b"".join(pair) for pair in zip(
    [b"", *(cut_in_halves(chunk)[1] for chunk in PLAIN[1:])],
    [PLAIN[0] + cut_in_halves(PLAIN[1])[0],
     *(cut_in_halves(chunk)[0] for chunk in PLAIN[2:]), b""],
    strict=True)]  # fmt: skip
VARIANTS = {
    "plain": script(PLAIN),
    "reasoning first": script(REASONING),
    "CRLF": script(CRLF),
    "no blank after data:": script(NO_BLANK),
    "U+2028 in the text": script(SEPARATORS),
    "two tokens in a chunk": script(TWO_TOKENS, tokens=20),
    "packets end in a line": script(SPLIT),
}
SHORT = {"one token": script(PLAIN[:1]), "no token": script([])}


def test_met_01_every_way_of_telling_the_same_stream_gives_the_same_figures(tmp_path):
    names = [*VARIANTS, *SHORT]
    scripts = {**VARIANTS, **SHORT}
    log = tmp_path / "log.jsonl"
    with FakeServer(lambda number, body: scripts[names[number]]) as server:
        document = bench(
            "--target", server.url, "--rate", "10", "--arrival", "constant",
            "--requests", str(len(names)), "--log", str(log),
        )  # fmt: skip
    lines = {names[line["id"]]: line for line in lines_of(log)}
    assert [line["outcome"] for line in lines.values()] == ["ok"] * len(names)
    planned = [lines[name]["scheduled_s"] for name in names]
    assert planned == pytest.approx([i / 10 for i in range(len(names))])
    for name, served in zip(VARIANTS, server.served, strict=False):
        line = lines[name]
        assert_true(line, served, range(2, 12), document)
        tokens = 20 if name == "two tokens in a chunk" else 10
        assert line["output_tokens"] == tokens
        mean_ms = sum(line["gaps_ms"]) / (tokens - 1)
        assert line["tpot_ms"] == pytest.approx(mean_ms, abs=0.01), name  # as it is rounded
    assert (lines["one token"]["tpot_ms"], lines["one token"]["gaps_ms"]) == (None, [])
    assert (lines["no token"]["ttft_ms"], lines["no token"]["output_tokens"]) == (None, 0)
    stage = document["stages"][0]
    assert stage["latency_ms"]["ttft"]["count"] == len(names) - 1
    assert stage["latency_ms"]["tpot"]["count"] == len(VARIANTS)
    gaps = [gap for line in lines.values() for gap in line["gaps_ms"]]
    assert stage["latency_ms"]["itl"]["count"] == len(gaps)
    assert stage["requests"]["empty"] == 1
    tokens = stage["tokens"]
    assert tokens["output_from"] == {"usage": len(names)}
    assert (tokens["cached_input"], tokens["unread_events"]) == (0, 0)
    assert (tokens["input"]["min"], tokens["input"]["max"]) == (7, 7)
    assert (tokens["output"]["min"], tokens["output"]["max"]) == (0, 20)


GOOD = steady(ttft_ms=100, gap_ms=5, tokens=5)
SLOW = steady(ttft_ms=2000, gap_ms=5, tokens=5)
FAILING = Script(((0, b'{"error":{"message":"planned"}}'),), status=500,
                 headers=(("Content-Type", "application/json"),))  # fmt: skip
HANGING = Script(((0, ROLE), (50, delta(content="a"))), end="hang")
STRADDLING = steady(ttft_ms=600, gap_ms=100, tokens=10)  # 4 tokens before the window, 6 within


def test_met_03_warm_up_failures_and_cut_requests_each_count_where_they_should(tmp_path):
    kinds = [GOOD] * 40 + [SLOW] * 10 + [FAILING] * 10 + [HANGING] * 5
    order = [kinds[(17 * i) % len(kinds)] for i in range(len(kinds))]
    trace = tmp_path / "trace.jsonl"
    at_s = [0.0] * 5 + [1.2 + 0.05 * i for i in range(len(kinds))]
    trace.write_text("".join(json.dumps({"at_s": at}) + "\n" for at in at_s))
    scripts = [STRADDLING] * 5 + order
    with FakeServer(lambda number, body: scripts[number]) as server:
        document = bench(
            "--target", server.url, "--arrival", f"replay:file={trace}", "--warmup", "1s",
            "--duration", "6s", "--slo", "ttft=500ms",
        )  # fmt: skip
    stage = document["stages"][0]
    requests = stage["requests"]
    assert requests["warmup"] == 5
    assert {name: requests[name] for name in ("measured", "ok", "error", "cut", "broken")} == {
        "measured": 65, "ok": 50, "error": 10, "cut": 5, "broken": 0,
    }  # fmt: skip
    goodput = stage["goodput"]
    assert (goodput["met"], goodput["missed"], goodput["cut"]) == (40, 20, 5)
    assert goodput["attainment"]["value"] == pytest.approx(40 / 60)
    assert goodput["attainment_if_cut_missed"] == pytest.approx(40 / 65)
    assert goodput["requests_per_s"] == pytest.approx(40 / 6, rel=1e-3)  # the window is measured
    assert stage["latency_ms"]["e2e"]["count"] == 50  # neither failures nor cut ones
    assert stage["latency_ms"]["ttft"]["max"] == pytest.approx(2000, abs=100)
    tokens = 50 * 5 + 5 * 1 + 5 * 6  # of good, slow and cut ones, and the warm-up's late ones
    assert stage["throughput"]["output_tokens"] == pytest.approx(tokens, abs=5)
    assert stage["errors"][0] == {"what": "error: HTTP 500: planned", "count": 10}
    owners = stage["throughput"]["output_tokens_of"]  # the report states which are counted
    assert {name: owners[name] for name in ("ok", "cut")} == {"ok": 250, "cut": 5}
    assert owners["warmup"] == pytest.approx(30, abs=5)
    assert owners.keys() == {"ok", "cut", "warmup"}


ENDINGS = {
    "ok": GOOD,
    "refused": Script(((0, b'{"error":{"message":"full"}}'),), status=429,
                      headers=(("Content-Type", "application/json"), ("Retry-After", "7"))),
    "error": Script(((0, ROLE), (20, delta(content="a")),
                     (40, event(error={"message": "out of memory", "code": 500}) + DONE))),
    "broken": Script(((0, ROLE), (20, delta(content="a"))), end="reset"),
    "timeout": Script(((0, ROLE), (20, delta(content="a"))), end="hang"),
}  # fmt: skip


def test_each_way_to_fail_is_told_apart_and_none_leaves_the_denominator(tmp_path):
    log = tmp_path / "log.jsonl"
    scripts = list(ENDINGS.values())
    with FakeServer(lambda number, body: scripts[number]) as server:
        document = bench(
            "--target", server.url, "--rate", "20", "--arrival", "constant", "--requests", "5",
            "--timeout", "1s", "--slo", "e2e=10s", "--log", str(log),
        )  # fmt: skip
    by_id = sorted(lines_of(log), key=lambda line: line["id"])
    assert [line["outcome"] for line in by_id] == list(ENDINGS)
    assert by_id[1]["retry_after_s"] == 7
    assert by_id[2]["error"] == "out of memory"
    assert by_id[4]["e2e_ms"] == pytest.approx(1000, abs=100)
    assert document["stages"][0]["goodput"]["attainment"]["value"] == 1 / 5


def named_error(data: bytes) -> Script:
    """A server that says by the name of an event, and by nothing else, that it failed."""
    texts = (0, ROLE), (20, delta(content="a"))
    return Script((*texts, (40, b"event: error\ndata: " + data + b"\n\n" + FINISH + DONE)))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_an_event_that_is_an_error_by_its_name_is_an_error_within_a_stream(endpoint):
    told = b'{"error": {"message": "out of memory"}}', b'{"message": "no slot"}', b"gone"
    scripts = [GOOD, *map(named_error, told)]
    with FakeServer(lambda number, body: scripts[number]) as server:
        document = bench("--target", server.url, "--requests", "4", "--endpoint", endpoint)
    stage = document["stages"][0]
    assert (stage["requests"]["ok"], stage["requests"]["error"]) == (1, 3)
    counts = {error["what"]: error["count"] for error in stage["errors"]}
    assert counts == {"error: out of memory": 1, "error: no slot": 1, "error: gone": 1}


def test_a_stall_shows_as_one_long_gap_and_a_burst_as_none(tmp_path):
    log = tmp_path / "log.jsonl"
    texts = [0, 10, 20, 420, 430]
    steps = [(100 + at, delta(content="x")) for at in texts]
    stalling = Script((*steps, (540, usage(3, 5) + DONE)))
    four = b"".join(delta(content="x") for _ in range(4))
    burst = Script(((100, four), (200, four + FINISH + DONE)))
    scripts = [stalling, burst]
    with FakeServer(lambda number, body: scripts[number]) as server:
        document = bench("--target", server.url, "--rate", "20", "--arrival", "constant",
                         "--requests", "2", "--log", str(log))  # fmt: skip
    stalled, bursting = sorted(lines_of(log), key=lambda line: line["id"])
    assert_true(stalled, server.served[0], range(len(texts)), document)
    assert_true(bursting, server.served[1], range(2), document)
    before, after = server.served[0].written_at[2], server.served[0].begun_at[3]
    assert max(stalled["gaps_ms"]) >= 1e3 * (after - before - 2 * OWN_S)
    assert (bursting["output_tokens"], bursting["output_tokens_from"]) == (8, "events")


def test_a_server_that_stalls_cannot_hide_the_wait_of_those_behind(tmp_path):
    """Coordinated omission: with one connection at a time, latency still counts from the plan."""
    log = tmp_path / "log.jsonl"
    with FakeServer(lambda number, body: steady(ttft_ms=0, gap_ms=0, tokens=1)) as server:
        document = bench("--target", server.url, "--rate", "50", "--arrival", "constant",
                         "--requests", "20", "--log", str(log))  # fmt: skip
    lines = sorted(lines_of(log), key=lambda line: line["id"])
    assert [line["scheduled_s"] for line in lines] == pytest.approx([i / 50 for i in range(20)])
    # What is reported of the sending is before the server knows of it, and the text's time after.
    sent = [epoch_of(document) + line["scheduled_s"] + line["lag_ms"] / 1e3 for line in lines]
    came = sorted(served.came_at for served in server.served)
    assert all(at <= seen + OWN_S for at, seen in zip(sorted(sent), came, strict=True))
    texts = sorted(arrivals_of(line, epoch=epoch_of(document))[0] for line in lines)
    wrote = sorted(served.begun_at[1] for served in server.served)
    assert all(at >= begun - OWN_S for at, begun in zip(texts, wrote, strict=True))


def test_ctrl_c_reports_what_was_measured(tmp_path):
    with FakeServer(lambda number, body: GOOD) as server:
        command = [*PACELINE, "bench", "--target", server.url, "--duration", "60s", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while len(server.served) < 5:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    document = json.loads(out)
    assert document["interrupted"]
    assert document["stages"][0]["requests"]["ok"] >= 3


def test_a_burst_sends_all_at_once_and_no_more():
    with FakeServer(lambda number, body: SLOW) as server:
        document = bench("--target", server.url, "--arrival", "burst", "--requests", "20")
        came = [served.came_at for served in server.served]
        answered = [served.begun_at[1] for served in server.served]
    assert len(came) == 20
    assert max(came) < min(answered)  # nobody waited for anybody
    assert document["stages"][0]["requests"]["ok"] == 20


def test_the_rate_that_holds_is_found(tmp_path):
    """A server whose TTFT jumps above 8 requests in the last second: the search finds about 8."""
    came: list[float] = []

    def choose(number, body):
        came.append(time.perf_counter())
        recent = sum(at > came[-1] - 1 for at in came)
        return steady(ttft_ms=300 if recent > 8 else 10, gap_ms=1, tokens=2)

    with FakeServer(choose) as server:
        document = bench(
            "--target", server.url, "--find-rate", "--arrival", "constant", "--rate", "4",
            "--duration", "3s", "--slo", "ttft=150ms", "--at-least", "90%",
        )  # fmt: skip
    search = document["searches"][0]
    assert 7 <= search["rate"] <= 9.5
    assert search["held_not_at"] > search["rate"]
    assert len(search["stages"]) == len(document["stages"])


def test_a_sweep_shows_where_the_server_no_longer_keeps_up():
    """It serves ten a second. On a busy machine it is late with a few of 24: its stamps tell."""
    busy_until = [0.0]

    def choose(number, body):  # 0.1 s of service each, one after the other
        now = time.perf_counter()
        busy_until[0] = max(busy_until[0], now) + 0.1
        return steady(ttft_ms=1e3 * (busy_until[0] - now), gap_ms=0, tokens=1)

    with FakeServer(choose) as server:
        document = bench("--target", server.url, "--sweep", "4,8,20", "--arrival", "constant",
                         "--duration", "3s", "--drain", "3s")  # fmt: skip
    stages = document["stages"]
    assert [stage["rate"] for stage in stages] == [4, 8, 20]
    served, kept = iter(server.served), [None]
    e2e_s = stages[0]["latency_ms"]["e2e"]["p50"]["value"] / 1e3
    for stage in stages:
        end = epoch_of(document, stage) + 3
        num_due = round(3 * stage["rate"])
        ended = [each.ended_at or math.inf for each in itertools.islice(served, num_due)]
        if sum(at <= end for at in ended) < 0.95 * num_due * (1 - e2e_s / 3):
            break
        kept.append(stage["rate"])
    assert next(iter(document["knees"].values())) == kept[-1]
    assert kept[-1] != 20


def test_targets_get_the_same_requests_in_rounds_and_a_verdict_where_it_is_due():
    quick, slow = (steady(ttft_ms=ttft, gap_ms=10, tokens=4) for ttft in (40, 120))
    with FakeServer(lambda n, body: quick) as first, FakeServer(lambda n, body: slow) as second:
        document = bench(
            "--target", f"a={first.url}", "--target", f"b={second.url}", "--requests", "6",
            "--concurrency", "3", "--rounds", "4",
        )  # fmt: skip
        bodies = [sorted(s.body["messages"][0]["content"] for s in server.served)
                  for server in (first, second)]  # fmt: skip
    assert len(bodies[0]) == 24
    assert bodies[0] == bodies[1]
    assert len(set(bodies[0])) == 24  # no cache of an earlier round can answer
    assert [stage["target"] for stage in document["stages"]] == ["a", "b", "b", "a"] * 2
    rows = {row["metric"]: row for row in document["comparison"]}
    is_late = rows["TTFT p50"]["runs_with_a_late_client"] > 0  # then it judges nobody
    assert rows["TTFT p50"]["verdict"] == (None if is_late else "a")
    assert rows["TTFT p50"]["ratio"]["value"] == pytest.approx(1 / 3, rel=0.3)
    tpot = rows["TPOT mean"]["ratio"]
    assert tpot["low"] < 1.1
    assert tpot["high"] > 0.9


def test_the_html_report_stands_alone_and_text_in_it_is_no_markup(tmp_path):
    evil = Script(((0, b'{"error":{"message":"</script><img src=x>"}}'),), status=500,
                  headers=(("Content-Type", "application/json"),))  # fmt: skip
    path = tmp_path / "report.html"
    with FakeServer(lambda number, body: evil if number == 1 else GOOD) as server:
        bench("--target", server.url, "--requests", "4", "--html", str(path))
    page = path.read_text()
    assert "<img src=x>" not in page
    assert "uPlot" in page
    assert page.count("</script>") == 3
    for outside in ('src="http', 'href="http', "@import", "fetch("):
        assert outside not in page


def test_the_terminal_report_names_what_matters(tmp_path):
    with FakeServer(lambda number, body: FAILING if number == 2 else GOOD) as server:
        command = [*PACELINE, "bench", "--target", server.url, "--requests", "6",
                   "--slo", "ttft=1s", "--price", "3.6", "--watts", "36"]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    for part in ("TTFT", "TPOT", "ITL", "E2E", "p99", "HTTP 500: planned", "5 of 6 = 83.3 %",
                 "cost per million", "wh per million", "output tok/s"):  # fmt: skip
        assert part in result.stdout


def test_a_report_comes_even_where_its_files_cannot_be_written():
    with FakeServer(lambda number, body: GOOD) as server:
        command = [*PACELINE, "bench", "--target", server.url, "--requests", "2",
                   "--log", "/dev/full"]  # fmt: skip
        log = subprocess.run(command, capture_output=True, text=True, timeout=60)
        command[-2] = "--html"
        html = subprocess.run(command, capture_output=True, text=True, timeout=60)
    for result, name in ((log, "--log"), (html, "--html")):
        assert result.returncode == 1
        assert "2 ok" in result.stdout
        assert result.stderr.startswith(f"paceline: {name} /dev/full")
        assert result.stderr.count("\n") == 1


def test_a_run_without_one_answer_is_reported_and_fails():
    with FakeServer(lambda number, body: FAILING) as server:
        document = bench("--target", server.url, "--requests", "2", code=1)
    assert document["stages"][0]["requests"]["error"] == 2


def test_a_run_that_is_interrupted_before_its_first_answer_fails():
    with FakeServer(lambda number, body: HANGING) as server:
        command = [*PACELINE, "bench", "--target", server.url, "--duration", "60s", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not server.served:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.endswith(b"interrupted before one complete answer: 1 still open at its end\n")
    assert json.loads(out)["stages"][0]["requests"]["cut"] == 1


@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_ends_a_bench_whose_server_says_nothing_and_a_second_one_ends_any(num_signals):
    """One, before anything was measured; two, while a request is open."""
    with (
        ExitStack() as stack,
        socket.create_server(("127.0.0.1", 0)) as silent,
        FakeServer(lambda *_: HANGING) as server,
    ):
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        url = silent_url if num_signals == 1 else server.url
        command = [*PACELINE, "bench", "--target", url, "--duration", "60s", "--timeout", "60s"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if num_signals == 1:
            stack.enter_context(silent.accept()[0])
        while num_signals == 2 and not server.served:
            time.sleep(0.01)
        for _ in range(num_signals):
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    # The second signal may come when the run has already ended, as the first one asked.
    assert process.returncode == 130 or (num_signals == 2 and b"interrupted before one" in err)
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no server is named"),
        (("--target", "http://127.0.0.1:1"), "does not answer"),
        (("--target", "x", "--rate", "0"), "--rate is '0'"),
        (("--target", "x", "--concurrency", "2", "--rate", "1"), "closed loop"),
        (("--target", "x", "--find-rate"), "needs an objective"),
        (("--target", "x", "--arrival", "burst"), "needs --requests"),
        (("--target", "x", "--arrival", "burst", "--requests", "2", "--sweep", "1,2"), "own times"),
        (("--target", "a=x", "--target", "a=y"), "one name"),
        (("--target", "x", "--workload", "nope"), "no workload is called 'nope'"),
        (("--target", "x", "--body", "{"), "which is no JSON"),
        (("--target", "x", "--slo", "ttft=fast"), "no duration"),
        (("--target", "x", "--slo", "long:ttft=1s"), "which the workload does not have"),
        (("--target", "x", "--slots", "4"), "--slots has no effect"),
        (("--target", "x", "--at-least", "90%"), "--at-least has no effect"),
        (("--target", "x", "--find-rate", "--slo", "ttft=1s", "--rounds", "2"), "--rounds has no"),
        (("--target", "x", "--price", "nan"), "--price is nan"),
        (("--target", "x", "--html", ""), "--html is empty"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(arguments, message):
    result = subprocess.run([*PACELINE, "bench", *arguments], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_our_own_server_is_measured(server: LiveServer):
    document = bench(
        "--target", f"http://127.0.0.1:{server.port}", "--workload", "synthetic:input=4,output=6",
        "--requests", "8", "--concurrency", "4", "--endpoint", "completions",
        env={**os.environ, "PACELINE_LOG": "error"},
    )  # fmt: skip
    stage = document["stages"][0]
    assert stage["requests"]["ok"] == 8
    assert stage["throughput"]["output_tokens"] == pytest.approx(8 * 6, abs=8)
    assert stage["tokens"]["output_from"] == {"usage": 8}
    assert document["config"]["models"] == {f"127.0.0.1:{server.port}": server.name}
