"""Asking a running server: keys, refusals, and what goes into an address."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from paceline.cli.trace import trace
from paceline.errors import PacelineError, ParameterError
from paceline.remote import fetch_trace, send

KEY = {"Authorization": "Bearer secret"}


class _Server(BaseHTTPRequestHandler):
    seen: list

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.command, self.headers["Content-Type"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        url = urlsplit(self.path)
        self.seen.append((url.path, parse_qs(url.query), self.headers.get("Authorization")))
        if url.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        status = {"/401": 401, "/html": 500, "/none": 404}.get(url.path, 200)
        self.send_response(status)
        self.end_headers()
        said = b'{"error": {"message": "the key is\\u001b[31m unknown"}}'
        self.wfile.write(said if status == 401 else b"<html>")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    _Server.seen = []
    http = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_refusal_is_told_in_the_servers_words_and_with_the_remedy(server):
    with pytest.raises(PacelineError) as refused:
        send(f"{server}/401", {})
    said = str(refused.value)
    assert said.endswith("401: the key is\\x1b[31m unknown; give the server's key with --api-key")
    with pytest.raises(PacelineError, match=r"answers 500: Internal Server Error$"):
        send(f"{server}/html", {})


def test_what_a_404_means_is_for_the_caller_to_say(server):
    with pytest.raises(PacelineError, match=r"404: Not Found$"):
        send(f"{server}/none", {})
    with pytest.raises(PacelineError, match=r"404: Not Found; look elsewhere$"):
        send(f"{server}/none", {}, missing="look elsewhere")


def test_a_body_goes_as_json(server):
    send(f"{server}/x", KEY, body={"a": [1]})
    assert _Server.seen == [("POST", "application/json", {"a": [1]})]


def test_a_key_goes_to_the_server_and_not_to_where_it_sends_us(server):
    send(f"{server}/moved", KEY)
    assert [(path, key) for path, _, key in _Server.seen] == [
        ("/moved", "Bearer secret"), ("/elsewhere", None),
    ]  # fmt: skip


def test_the_seconds_of_a_trace_arrive_as_they_are(server):
    fetch_trace(server, 1e300, {})
    assert _Server.seen == [("/v1/trace", {"last_s": ["1e+300"]}, None)]


def test_a_trace_that_cannot_be_written_is_refused_before_the_server_is_asked(tmp_path):
    with pytest.raises(ParameterError, match=r"--output .* its folder does not exist"):
        trace("http://127.0.0.1:1", output=tmp_path / "none" / "x.json")
