"""`paceline serve` tells of its calls: access log, OpenTelemetry spans; `paceline trace`."""

import http.server
import json
import re
import subprocess
import threading

import pytest

from tests.e2e.live import PACELINE, ServeProcess, script_model, wait_until


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return script_model(tmp_path_factory.mktemp("observers"))


def paceline(*arguments):
    return subprocess.run([*PACELINE, *arguments], capture_output=True, text=True, timeout=60)


def test_the_access_log_and_the_trace_of_a_server(script, tmp_path):
    log, trace = tmp_path / "calls.jsonl", tmp_path / "trace.json"
    with ServeProcess(script, "--access-log", str(log), "--kv-memory", "8M") as server:
        answer = server.complete("a", temperature=0)
        assert server.post("/v1/completions", prompt="a", bogus=1).status_code == 400
        wait_until(lambda: len(log.read_text().splitlines()) == 2)
        result = paceline("trace", f"http://127.0.0.1:{server.port}", "-o", str(trace))
    ok, refused = map(json.loads, log.read_text().splitlines())
    assert (ok["id"], ok["outcome"], ok["client"]) == (answer["id"], "ok", "127.0.0.1")
    assert (refused["outcome"], refused["status"]) == ("refused", 400)
    for line in (ok, refused):
        assert sum(line["parts_ms"].values()) == pytest.approx(line["wall_ms"])
    assert result.returncode == 0, result.stderr
    assert "26 steps" in result.stderr
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("step ") for name in names) == 26
    assert "text_completion ok" in names


def test_trace_says_where_it_found_nobody():
    result = paceline("trace", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "http://127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr
    assert "http://localhost:9/v1/trace" in paceline("trace", "localhost:9").stderr
    assert "is no address" in paceline("trace", "ftp://localhost").stderr


def test_spans_go_where_the_environment_says(script):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    bodies = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    collector = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
    prefix = ("env", *(f"{name}={value}" for name, value in environment.items()))
    options = ("--otel", "--kv-memory", "8M", "--alias", f"gpt-4o-mini={script}")
    with ServeProcess(script, *options, prefix=prefix) as server:
        body = {"model": "gpt-4o-mini", "prompt": "a", "temperature": 0}
        answer = server.client.post("/v1/completions", json=body).json()
    collector.shutdown()  # the server is down: what it had to send it has sent
    collector.server_close()
    sent = b"".join(bodies)
    assert answer["id"].encode() in sent
    assert b"gen_ai.usage.output_tokens" in sent
    # OTLP: a key is followed by its value, here of one byte of length each.
    assert re.search(rb"gen_ai\.request\.model.{1,6}gpt-4o-mini", sent, re.DOTALL)
    assert re.search(rb"gen_ai\.response\.model.{1,6}script", sent, re.DOTALL)


def test_an_access_log_that_cannot_be_written_is_told_before_the_model_is_loaded(script):
    result = paceline("serve", str(script), "--port", "0", "--access-log", "/proc/nowhere")
    assert result.returncode == 1
    assert "--access-log" in result.stderr
