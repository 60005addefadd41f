"""Several models in one server: who answers, what is loaded, and what is freed."""

import json
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.errors import ModelFormatError
from tests.e2e.live import ServeProcess, wait_until
from tests.e2e.several import SPELT, Reader, SeveralServer, spelling_model
from tests.e2e.test_cli import paceline
from tests.e2e.test_ledger import timeline
from tests.tiny import random_model, write_gguf

NAMES = ("up", "down")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    return [spelling_model(folder, name) for name in NAMES]


@pytest.fixture
def serve(paths):
    """Return what starts a server of "up" and "down"; the test's end stops it."""
    servers = []

    def start(*given, **options):
        servers.append(SeveralServer(*(given or paths), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Gate:
    """Keeps loading models back until it is opened, and counts how often each began."""

    def __init__(self, *, fails=0):
        self.begun = []
        self.open = threading.Event()
        self.fails = fails

    def __call__(self, name, load):
        def load_late(recorder):
            self.begun.append(name)
            if self.begun.count(name) <= self.fails:
                raise ModelFormatError("/some/where/down.gguf is cut short: download it again")
            assert name == NAMES[0] or self.open.wait(30)
            return load(recorder)

        return load_late


def samples(server):
    """{(name, model): value} of the series without other labels."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    names = [family.name for family in families]
    assert len(names) == len(set(names))  # all samples of a family stand together
    return {
        (sample.name, sample.labels["model_name"]): sample.value
        for family in text_string_to_metric_families(server.client.get("/metrics").text)
        for sample in family.samples
        if set(sample.labels) == {"model_name", "engine"}
    }


# ---- who answers ----


def test_models_and_aliases_are_listed_with_what_is_loaded(serve):
    server = serve(aliases=("gpt-4o-mini=down", "default=up"))
    listed = server.client.get("/v1/models").json()["data"]
    assert [(m["id"], m.get("root"), m["loaded"]) for m in listed] == [
        ("up", None, True), ("default", "up", True), ("down", None, False),
        ("gpt-4o-mini", "down", False),
    ]  # fmt: skip
    one = server.client.get("/v1/models/gpt-4o-mini").json()
    assert (one["root"], one["max_model_len"]) == ("down", listed[3]["max_model_len"])
    assert server.spells("gpt-4o-mini", "down")
    assert server.loaded() == ["up", "default", "down", "gpt-4o-mini"]


def test_an_unknown_model_is_a_404_that_names_those_that_are_served(serve):
    server = serve(aliases=("other=down",))
    for refused in (server.ask("gpt-5"), server.client.get("/v1/models/gpt-5")):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (404, "model_not_found")
        assert all(name in error["message"] for name in ("'up'", "'down'", "'other'"))
    assert server.loaded() == ["up"]


def test_each_api_is_answered_by_the_model_that_it_names(serve):
    server = serve(aliases=("alias=down",))
    hello = [{"role": "user", "content": "Hi"}]
    for name in ("up", "down", "alias"):
        own = "up" if name == "up" else "down"
        for path, body in (
            ("/v1/chat/completions", {"messages": hello}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": hello, "max_tokens": 5}),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/cache/prefixes", {"prompt": "a" * 40}),
        ):
            answer = server.client.post(path, json={"model": name, **body})
            assert (answer.status_code, answer.json()["model"]) == (200, own), answer.text
        for path, body in (
            ("/tokenize", {"prompt": "ab"}),
            ("/detokenize", {"tokens": [97]}),
            ("/v1/messages/count_tokens", {"messages": hello}),
        ):
            assert server.client.post(path, json={"model": name, **body}).status_code == 200
        assert server.spells(name, own)
    assert server.client.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]


def test_a_response_can_go_on_with_another_model(serve):
    server = serve()
    first = server.client.post("/v1/responses", json={"model": "up", "input": "Hi"}).json()
    body = {"model": "down", "input": "And?", "previous_response_id": first["id"]}
    second = server.client.post("/v1/responses", json=body).json()
    assert (second["model"], second["previous_response_id"]) == ("down", first["id"])


def test_a_body_without_a_readable_model_is_refused_by_name(serve):
    server = serve()
    for body in (b"{", b'{"prompt": "a"}', b'{"model": 5, "prompt": "a"}', b"[" * 100_000):
        headers = {"content-type": "application/json"}
        refused = server.client.post("/v1/completions", content=body, headers=headers)
        assert refused.status_code == 400
    assert server.loaded() == ["up"]


def test_pins_are_listed_and_dropped_whatever_model_has_them(serve):
    server = serve()
    pins = [
        server.client.post(
            "/v1/cache/prefixes", json={"model": name, "prompt": "a" * 40, "pin": True}
        ).json()
        for name in NAMES
    ]
    listed = server.client.get("/v1/cache/prefixes").json()["data"]
    assert [(pin["id"], pin["model"]) for pin in listed] == [
        (pin["id"], name) for pin, name in zip(pins, NAMES, strict=True)
    ]
    assert server.client.delete(f"/v1/cache/prefixes/{pins[1]['id']}").json()["deleted"]
    assert server.client.delete(f"/v1/cache/prefixes/{pins[1]['id']}").status_code == 404


# ---- loading ----


def test_first_calls_of_a_model_wait_for_one_load_and_streams_go_on_meanwhile(serve):
    gate = Gate()
    server = serve(around_open=gate)
    with Reader(server, "up") as stream, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.spells, "down") for _ in range(4)]
        wait_until(lambda: gate.begun == ["down"])
        assert server.client.get("/health").json()["models"]["down"]["loading"]
        begun = stream.num_tokens
        wait_until(lambda: stream.num_tokens > begun + 50)  # while the other is being loaded
        assert not any(call.done() for call in waiting)
        gate.open.set()
        assert all(call.result(30) for call in waiting)
    assert gate.begun == ["down"]


def test_a_load_that_fails_is_told_to_those_who_waited_and_tried_again(serve):
    gate = Gate(fails=1)
    gate.open.set()
    server = serve(around_open=gate)
    failed = server.ask("down")
    error = failed.json()["error"]
    assert (failed.status_code, error["code"]) == (503, "model_load_failed")
    assert "cut short" in error["message"]
    assert server.spells("up")
    assert server.spells("down")
    assert gate.begun == ["down", "down"]


def test_where_a_model_lies_is_not_told(serve, paths, tmp_path):
    gone = tmp_path / "down.gguf"
    gone.write_bytes(paths[1].read_bytes())
    server = serve(paths[0], gone)
    gone.write_bytes(b"GGUF")
    message = server.ask("down").json()["error"]["message"]
    assert "could not be loaded" in message
    assert str(tmp_path) not in message
    gone.write_bytes(paths[1].read_bytes())
    assert server.spells("down")


def test_a_call_that_waited_for_its_model_has_that_in_its_ledger(serve):
    server = serve()
    answer = server.ask("down", timings=True).json()
    parts = answer["usage"]["paceline"]["parts_ms"]
    assert parts["load"] > 0
    ended = server.client.get(f"/v1/requests/{answer['id']}/timeline").json()
    assert sum(ended["parts_ms"].values()) == pytest.approx(ended["wall_ms"])
    assert "load" not in server.ask("down", timings=True).json()["usage"]["paceline"]["parts_ms"]


# ---- memory ----


def test_a_timeline_has_the_name_that_was_asked_for_whatever_became_of_it(serve):
    server = serve(aliases=("gpt-4=down",))
    for asked, went_to, status in (("gpt-4", "down", 200), ("none", "up", 404)):
        body = {"model": asked, "prompt": "a", "max_tokens": 1}
        response = server.client.post(
            "/v1/completions", json=body, headers={"x-request-id": f"for-{asked}"}
        )
        assert response.status_code == status
        told = timeline(server, f"for-{asked}")
        assert (told["asked_model"], told["model"]) == (asked, went_to)


def test_the_least_recently_used_idle_model_makes_room_and_comes_back(serve, tmp_path):
    third = spelling_model(tmp_path, "up").rename(tmp_path / "third.gguf")
    folder = spelling_model(tmp_path, "down").parent
    server = serve(spelling_model(folder, "up"), folder / "down.gguf", third, fits=2)
    assert server.spells("down")
    assert server.spells("up")
    assert server.spells("third", "up")
    assert server.loaded() == ["up", "third"]  # "down" had been idle for longest
    assert server.spells("down")
    assert server.loaded() == ["down", "third"]
    assert server.spells("up")


def test_a_model_that_answers_is_not_unloaded(serve):
    server = serve(fits=1)
    with Reader(server, "up") as stream:
        refused = server.ask("down")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "model_memory")
        assert "answer calls (up)" in error["message"]
        assert error["message"].startswith("down needs")
        assert int(refused.headers["retry-after"]) >= 1
        length = stream.num_tokens
        wait_until(lambda: stream.num_tokens > length)
    wait_until(lambda: server.ask("down").status_code == 200)
    assert server.loaded() == ["down"]


def test_a_call_that_is_still_being_written_keeps_its_model(serve):
    """The engine may be done with it by then."""
    server = serve(fits=1)
    with server.models.find("up").in_use():
        assert server.models.find("up").served.is_idle
        assert server.ask("down").status_code == 503
    assert server.spells("down")


def test_counters_go_on_where_they_were_when_a_model_comes_back(serve):
    server = serve(fits=1)
    num_tokens = len(SPELT["up"]) + 1
    assert server.spells("up")
    before = samples(server)
    assert before["vllm:generation_tokens_total", "up"] == num_tokens
    assert before["vllm:generation_tokens_total", "down"] == 0
    assert server.spells("down")
    away = samples(server)
    for name in ("vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count",
                 "paceline:step_seconds_count"):  # fmt: skip
        assert away[name, "up"] == before[name, "up"] > 0
    assert (away["paceline:kv_blocks", "up"], away["paceline:model_loaded", "up"]) == (0, 0)
    assert server.spells("up")
    after = samples(server)
    assert after["vllm:generation_tokens_total", "up"] == 2 * num_tokens
    assert after["paceline:step_seconds_count", "up"] > before["paceline:step_seconds_count", "up"]
    assert after["paceline:model_loads_total", "up"] == 2
    steps = server.client.get("/v1/trace", params={"model": "up"}).json()["traceEvents"]
    numbers = [int(e["name"].split()[1]) for e in steps if e["name"].startswith("step ")]
    assert numbers == sorted(set(numbers))


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def own_threads():
    """The names of all threads but those that the event loop lends out, and those that stay."""
    lent = ("asyncio_", "uvloop_", "models_")
    return sorted(t.name for t in threading.enumerate() if not t.name.startswith(lent))


def test_unloading_frees_weights_kv_cache_and_threads(serve, tmp_path):
    model = random_model("llama", hidden=512, layers=4, inner=2048, heads=4, kv_heads=1)
    big = write_gguf(model, tmp_path / "big.gguf")
    server = serve(spelling_model(tmp_path, "down"), big, fits=1)
    assert server.spells("down")
    threads, resident = own_threads(), resident_bytes()
    for number in range(3):
        assert server.ask("big", max_tokens=8).status_code == 200
        loaded = server.models.find("big").served.loaded
        weight_bytes = loaded.weight_bytes
        alive = [weakref.ref(thing) for thing in (loaded.engine, loaded.backend)]
        del loaded
        assert weight_bytes > 32 * 2**20
        assert resident_bytes() > resident + weight_bytes / 2
        assert server.client.post("/v1/embeddings", json={"model": "big", "input": "a"}).is_success
        assert server.spells("down")
        assert [ref() for ref in alive] == [None, None]
        assert str(big) not in Path("/proc/self/maps").read_text()
        wait_until(lambda: own_threads() == threads)
        if number == 0:  # threads that loaded for the first time keep arenas of their allocator
            resident = resident_bytes()
        assert resident_bytes() < resident + weight_bytes / 2


# ---- side by side ----


def test_two_models_that_stream_at_once_both_go_on_and_write_the_same(serve):
    server = serve()
    assert server.spells("down")
    alone = server.ask("up", "0", max_tokens=200).json()["choices"][0]["text"]
    with Reader(server, "up") as one, Reader(server, "down") as other:
        for _ in range(3):
            seen = one.num_tokens, other.num_tokens
            wait_until(lambda seen=seen: one.num_tokens > seen[0] + 20)
            wait_until(lambda seen=seen: other.num_tokens > seen[1] + 20)
        assert server.spells("up")
        assert server.spells("down")
    assert min(len(one.written), len(other.written)) > 60
    long = alone * 100
    assert long.startswith(one.written)
    assert long.startswith(other.written)


def test_a_step_that_fails_ends_the_calls_of_its_model_alone(serve, monkeypatch):
    server = serve()
    assert server.spells("down")
    backend = server.models.find("down").served.loaded.backend

    def fail(step):
        raise RuntimeError("broken")

    with Reader(server, "up") as stream:
        with monkeypatch.context() as patch:
            patch.setattr(backend, "forward", fail)
            refused = server.ask("down")
            assert refused.status_code == 500
            assert "the engine failed" in refused.json()["error"]["message"]
        length = stream.num_tokens
        wait_until(lambda: stream.num_tokens > length)
        assert server.spells("down")


# ---- reports ----


def test_reports_are_each_models_own(serve):
    server = serve()
    assert server.client.get("/v1/trace", params={"model": "down"}).status_code == 404
    assert server.client.get("/v1/paceline/live?model=down").json()["loaded"] is False
    answers = {name: server.ask(name).json() for name in NAMES}
    wait_until(lambda: len(server.calls) == 2)
    assert [call.model for call in server.calls] == list(NAMES)
    for name, answer in answers.items():
        told = server.client.get(f"/v1/requests/{answer['id']}/timeline").json()
        assert told["model"] == name
        assert len(told["choices"][0]["steps"]) > 0
        trace = server.client.get("/v1/trace", params={"model": name}).json()
        assert trace["otherData"]["paceline"]["model"] == name
        assert answer["id"] in str(trace)
        live = server.client.get("/v1/paceline/live", params={"model": name}).json()
        assert (live["model"], live["models"], live["loaded"]) == (name, list(NAMES), True)
        assert [call["model"] for call in live["slowest"]] == [name]
    assert server.client.get("/v1/paceline/live").json()["model"] == "up"
    assert server.client.get("/v1/trace?model=other").status_code == 404
    health = server.client.get("/health").json()
    assert (health["model"], list(health["models"])) == ("up", list(NAMES))
    assert health["engine"] == health["models"]["up"]["engine"]


def explained(server, *arguments):
    return paceline("explain", f"localhost:{server.port}", *arguments)


def test_explain_tells_of_the_model_that_it_is_asked_for(serve, paths):
    server = serve(aliases=("other=down",))
    for name in NAMES:
        assert server.spells(name)
    wait_until(lambda: len(server.calls) == 2)
    for arguments, name in (
        ((), "up"), (("--model", "down"), "down"), (("--model", "other"), "down"),
        (("--model", str(paths[1])), "down"),
    ):  # fmt: skip
        done = explained(server, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["explanation"]["server"]["model"] == name
    refused = explained(server, "--model", "smollm2-135m")
    assert refused.returncode == 1
    assert "does not serve: name one of up, down, other" in " ".join(refused.stderr.split())


# ---- the command ----


def test_the_command_serves_several_and_drains_all(paths, tmp_path):
    log = tmp_path / "calls.jsonl"
    options = ("--alias", "other=down", "--kv-memory", "4M", "--grace", "0.2",
               "--access-log", str(log))  # fmt: skip
    with ServeProcess(paths[0], str(paths[1]), *options) as server:
        body = {"model": "other", "prompt": "a", "temperature": 0}
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == SPELT["down"]
        with Reader(server, "up") as one, Reader(server, "down") as other:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "shutting down" in one.text and "shutting down" in other.text)
        assert server.process.wait(20) in (143, -signal.SIGTERM)
    assert '"model":"down"' in log.read_text()


def test_calls_that_wait_for_a_model_are_told_that_the_server_ends(serve):
    gate = Gate()
    server = serve(around_open=gate)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.ask, "down")
        wait_until(lambda: gate.begun)
        server.models.stop()
        refused = waiting.result(20)
        gate.open.set()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
