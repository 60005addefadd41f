"""`paceline explain` on servers that are slow in one known way: it must find that one.

The models are sized so that the planted cause outweighs the rest by far; what is found comes from
the ledgers, so that a busy machine makes everything longer and changes no answer.
"""

import json

import pytest

from paceline.cpu import default_num_threads
from paceline.explain.causes import find
from paceline.explain.sources import from_server
from tests.e2e.live import wait_until
from tests.e2e.planted import (
    PatientServer,
    ask,
    at_once,
    bound_of,
    expected_of,
    explained,
    huge_prompts_beside_streams,
    lowers,
    prompt,
    read_slowly,
    under_one_system_prompt,
)
from tests.e2e.test_cli import paceline
from tests.e2e.test_ledger import SmallBuffers
from tests.tiny import random_model, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Large enough that a step's arithmetic outweighs its Python: 1,000 tokens take 0.1 s."""
    tiny = random_model(
        "llama", hidden=192, inner=768, layers=3, heads=3, kv_heads=1, head_dim=64,
        max_position_embeddings=8192,
    )  # fmt: skip
    return write_gguf(tiny, tmp_path_factory.mktemp("explain") / "tiny.gguf")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _caches_of_our_own(home, monkeypatch):
    """Ceilings that are measured beside other tests are not for the user's cache."""
    monkeypatch.setenv("PACELINE_HOME", str(home))


def test_a_tiny_budget_is_told_by_its_many_small_steps(model):
    with PatientServer(model, max_batched_tokens=4, kv_memory_bytes=2**24) as server:
        for i in range(4):
            ask(server, 400, 8, seed=i)
        found = explained(server)
    first = found.advice[0]
    assert first.lever == "max-batched-tokens"
    assert first.change == {"--max-batched-tokens": "512"}
    assert "4 tokens a step" in first.why
    assert bound_of(found, "ttft", 50).bound in ("bandwidth", "overhead")
    effect = expected_of(first, "ttft", 50)
    assert effect.after_ms < 0.7 * effect.before_ms


def test_a_tiny_kv_pool_is_told_by_the_waits_for_memory(model):
    # One block a 16 tokens; the pool holds two of the eight calls.
    token_bytes = 2 * 3 * 64 * 2
    with PatientServer(model, kv_memory_bytes=700 * token_bytes) as server:
        at_once(server, 8, 200, 120)
        found = explained(server)
    assert bound_of(found, "ttft", 99).bound == "KV memory"
    assert found.advice[0].lever == "kv-memory"
    effect = expected_of(found.advice[0], "ttft", 99)
    assert effect.after_ms < 0.6 * effect.before_ms


def test_one_seat_is_told_by_the_queue_and_the_seats(model):
    with PatientServer(model, max_num_seqs=1, kv_memory_bytes=2**24) as server:
        at_once(server, 8, 20, 150)
        found = explained(server)
    assert bound_of(found, "ttft", 99).bound == "queue"
    assert found.advice[0].lever == "max-num-seqs"
    assert int(found.advice[0].change["--max-num-seqs"]) >= 4


@pytest.mark.skipif(default_num_threads()[0] < 2, reason="there is one core")
def test_one_thread_is_told_by_the_cores_that_are_idle(model):
    with PatientServer(model, num_threads=1, kv_memory_bytes=2**24) as server:
        for i in range(3):
            ask(server, 800, 30, seed=i)
        found = explained(server)
    assert bound_of(found, "ttft", 50).cause == "prefill"
    assert found.advice[0].lever == "threads"
    assert found.advice[0].change == {"--threads": str(default_num_threads()[0])}


def test_a_huge_prompt_beside_streams_is_told_by_what_it_cost_them(model):
    with PatientServer(model, kv_memory_bytes=2**26) as server:
        huge_prompts_beside_streams(server, 6000, 150)
        found = explained(server)
    bound = bound_of(found, "tpot", 50)
    assert (bound.bound, bound.cause) == ("interference", "others_prefill")
    first = next(advice for advice in found.advice if lowers(advice, "tpot"))
    assert first.lever == "policy"
    assert first.change["--policy"].startswith("slo:step_ms=")


def test_a_slow_reader_is_told_by_the_sending_and_nothing_is_advised_for_it(model):
    with PatientServer(model, kv_memory_bytes=2**24, protocol=SmallBuffers) as server:
        read_slowly(server, 300)
        found = explained(server)
    assert bound_of(found, "tpot", 50).bound == "slow reader"
    assert any("read slowly" in note for note in found.notes)
    moved = [e for advice in found.advice for e in advice.expected if e.metric == "tpot"]
    assert all(e.after_ms > 0.5 * e.before_ms for e in moved)


def test_a_long_system_prompt_repeated_is_told_by_what_prompts_share(model):
    with PatientServer(model, kv_memory_bytes=2**25, prefix_cache=False) as server:
        under_one_system_prompt(server, 1024)
        found = explained(server)
    assert bound_of(found, "ttft", 50).cause == "prefill"
    assert found.repeated_share == pytest.approx(4 * 1024 / (5 * 1064))
    assert any("repeat how an earlier prompt began" in note for note in found.notes)
    assert found.advice[0].lever == "prefix-cache"


def test_choices_beyond_the_seats_are_told_by_the_queue_and_not_by_memory(model):
    with PatientServer(model, max_num_seqs=2, kv_memory_bytes=2**25, prefix_cache=False) as server:
        for i in range(2):
            body = {"max_tokens": 60, "ignore_eos": True, "n": 8, "temperature": 1.0}
            server.complete(prompt(300, seed=i), **body)
        found = explained(server)
    bound = bound_of(found, "tpot", 50)
    assert (bound.bound, bound.cause) == ("queue", "queue")
    assert "kv_memory" not in bound.causes
    assert {"max-num-seqs", "prefix-cache"} <= {advice.lever for advice in found.advice}


def test_system_prompts_that_push_each_other_out_are_told_by_memory_that_would_keep_them(model):
    token_bytes = 2 * 3 * 64 * 2
    with PatientServer(model, kv_memory_bytes=1600 * token_bytes) as server:  # of 3 x 1,040, 1
        for i in range(9):
            shared, own = prompt(1024, seed=77 + i % 3), prompt(16, seed=i)
            server.complete(shared + own, max_tokens=2, ignore_eos=True, temperature=0)
        found = explained(server)
    assert found.repeated_share > 0.3
    assert found.advice[0].lever == "kv-memory for prefixes"
    effect = expected_of(found.advice[0], "ttft", 50)
    assert effect.after_ms < 0.5 * effect.before_ms


def test_a_prompt_that_was_found_in_the_cache_is_no_repeat(model):
    with PatientServer(model, kv_memory_bytes=2**25) as server:
        under_one_system_prompt(server, 1024)
        found = explained(server)
    assert found.repeated_share < 0.05
    assert all(advice.lever != "prefix-cache" for advice in found.advice)


def test_what_differs_in_its_first_tokens_is_no_repeat(model):
    with PatientServer(model, kv_memory_bytes=2**25) as server:
        for i in range(3):
            server.complete([40 + i, *prompt(600)], max_tokens=2, temperature=0)
        found = explained(server)
    assert found.repeated_share == 0
    assert not any("repeat" in note for note in found.notes)


# ---- the command ----


@pytest.fixture(scope="module")
def trace(model, tmp_path_factory):
    """What a server with one seat did, saved by `paceline trace`."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with PatientServer(model, max_num_seqs=1, kv_memory_bytes=2**24) as server:
        at_once(server, 4, 20, 400)
        explained(server)
        done = paceline("trace", f"localhost:{server.port}", "-o", str(path))
        assert done.returncode == 0, done.stderr
        live = paceline("explain", f"localhost:{server.port}", "--json")
    return path, json.loads(live.stdout)


def test_a_saved_trace_tells_the_same_as_the_server(trace):
    path, live = trace
    saved = json.loads(paceline("explain", str(path), "--json").stdout)
    for explanation in (live["explanation"], saved["explanation"]):
        del explanation["source"]
    assert saved == live


def test_the_text_names_cause_lever_and_price(trace):
    done = paceline("explain", str(trace[0]))
    assert done.returncode == 0, done.stderr
    for part in ("TTFT p99", "waiting for a seat", "1. --max-num-seqs", "Price:", "4 calls"):
        assert part in done.stdout


def test_a_change_is_verified_by_replaying_the_load(trace, model):
    arguments = ("--model", str(model), "--verify", "--rounds", "1", "--json")
    done = paceline("explain", str(trace[0]), *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["explanation"]["bounds"][0]["floor_ms"] > 0
    found = report["verification"]
    assert (found["lever"], found["rounds"], found["num_calls"]) == ("max-num-seqs", 1, 4)
    tail = next(
        o for o in found["outcomes"] if (o["metric"], o["percentile"]) == ("ttft", 99)
    )  # fmt: skip
    # With a seat each nobody waits for another's whole answer any more.
    assert tail["predicted_ms"] < tail["before_ms"]
    assert tail["measured_ms"] < tail["before_ms"]


def test_a_workload_is_run_and_explained(model, tmp_path):
    work = tmp_path / "work.jsonl"
    lines = [{"prompt": prompt(30, seed=i), "max_tokens": 60} for i in range(4)]
    work.write_text("\n".join(map(json.dumps, lines)))
    done = paceline(
        "explain", str(work), "--model", str(model), "--serve", "--max-num-seqs 1", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["explanation"]
    assert (found["num_calls"], found["server"]["max_num_seqs"]) == (4, 1)
    assert done.stderr.splitlines()[0] == f"paceline: 4 requests of {work}"
    assert found["advice"][0]["lever"] == "max-num-seqs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:1"], "is the server up"),
        (["WORK"], "--model"),
        (["TRACE", "--verify"], "--model"),
        (["TRACE", "--serve", "--threads 1"], "--serve is for a workload"),
        (["WORK", "--model", "MODEL", "--serve", "--threads"], "needs a number"),
        (["TRACE", "--model", "OTHER"], "name the same model"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments, message, trace, model, script_path,
                                             tmp_path):  # fmt: skip
    work = tmp_path / "work.jsonl"
    work.write_text(json.dumps({"prompt": "a"}))
    names = {"TRACE": trace[0], "WORK": work, "MODEL": model, "OTHER": script_path}
    done = paceline("explain", *(str(names.get(a, a)) for a in arguments))
    assert done.returncode == 1
    assert message in done.stderr


def test_a_server_without_calls_has_nothing_to_explain(model):
    with PatientServer(model, kv_memory_bytes=2**24) as server:
        done = paceline("explain", f"localhost:{server.port}")
    assert done.returncode == 1
    assert "no answered call" in done.stderr


def test_an_access_log_is_explained_without_levers(model, tmp_path):
    from paceline.server.access_log import AccessLog

    path = tmp_path / "calls.jsonl"
    with PatientServer(model, kv_memory_bytes=2**24) as server:
        ask(server, 50, 8)
        wait_until(lambda: server.calls)
        log = AccessLog(str(path))
        log.write(server.calls[0])
        log.close()
        live = find(from_server(f"http://127.0.0.1:{server.port}", 60).calls, "ttft", 50)
    report = json.loads(paceline("explain", str(path), "--json").stdout)["explanation"]
    bound = report["bounds"][0]
    assert live is not None
    assert (bound["value_ms"], bound["cause"]) == (live.value_ms, live.main)
    assert report["advice"] == []
    assert any("paceline trace" in note for note in report["notes"])


@pytest.mark.parametrize("form", ["--json", "--log"])
def test_what_a_bench_wrote_is_explained(model, tmp_path, form):
    path = tmp_path / "bench"
    arguments = ["--concurrency", "4", "--requests", "12", "--server-timings", "--workload",
                 "synthetic:input=2,output=40", "--endpoint", "completions"]  # fmt: skip
    with PatientServer(model, max_num_seqs=1, kv_memory_bytes=2**24) as server:
        arguments += ["--target", f"localhost:{server.port}"]
        arguments += ["--log", str(path)] if form == "--log" else ["--json"]
        done = paceline("bench", *arguments)
    assert done.returncode == 0, done.stderr
    if form == "--json":
        path.write_text(done.stdout)
    found = json.loads(paceline("explain", str(path), "--json").stdout)["explanation"]
    assert (found["num_calls"], found["num_failed"]) == (12, 0)
    ttft = [bound["bound"] for bound in found["bounds"] if bound["metric"] == "ttft"]
    assert ttft == ["queue"] * 3
    figures = ("wall", "ttft", "tpot")
    named = {name for bound in found["bounds"] for name in bound["overhead"]}
    assert named
    assert all("." not in name and name not in figures for name in named)
    assert any("estimate" in note for note in found["notes"]) == (form == "--json")
