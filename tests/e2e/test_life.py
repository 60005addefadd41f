"""The routes around the answers, keys, and how a server ends."""

import signal
import threading
import time

import httpx
import pytest

from tests.e2e.live import ALPHABET, TOKENIZER, ServeProcess, parse_events, wait_until
from tests.e2e.test_cli import paceline

KEY = "sk-a-key-of-the-test"


# ---- other routes ----


def test_ready_and_version_answer(server):
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert server.client.get("/version").json()["version"]


def test_text_is_tokenized_and_comes_back(server):
    answer = server.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert answer == {
        "count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": ["a", "b"]
    }  # fmt: skip
    assert server.post("/detokenize", tokens=[97, 98]).json() == {"prompt": "ab"}
    marker = server.post("/detokenize", tokens=[TOKENIZER.eot_id]).json()["prompt"]
    assert marker == "<|im_end|>"
    typed = server.post("/tokenize", prompt=marker).json()["tokens"]
    assert TOKENIZER.eot_id not in typed


def test_a_conversation_is_tokenized_as_a_chat_would_be(server):
    messages = [{"role": "user", "content": "Hi"}]
    ids = server.post("/tokenize", messages=messages).json()["tokens"]
    assert len(ids) == server.chat("Hi", max_tokens=1)["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}],
                       "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": ["a"]},
                                                      "tokens[0]"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized_is_refused_by_name(server, path, body, param):
    response = server.post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    other = server.client.post(path, json={"model": "other", "prompt": "a", "tokens": []})
    assert other.status_code in (400, 404)


# ---- keys ----


def test_a_server_with_keys_answers_those_who_have_one(script_path, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")
    with ServeProcess(script_path, "--api-keys", str(path), "--kv-memory", "8M") as server:
        refused = server.post("/v1/completions", prompt="a")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert server.client.get("/health").status_code == 200
        server.client.headers["authorization"] = f"Bearer {KEY}"
        assert server.complete("a", temperature=0)["choices"][0]["text"] == ALPHABET[1:]
        assert KEY not in server.log


def test_trace_and_explain_ask_with_a_key(script_path, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")
    with ServeProcess(script_path, "--api-keys", str(path), "--kv-memory", "8M") as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        server.complete("a", temperature=0)
        # It is booked a moment after its last byte.
        wait_until(lambda: "parts_ms" in server.client.get("/v1/trace?last_s=60").text)
        for command in (("explain",), ("trace", "-o", "-")):
            asked = (*command, f"localhost:{server.port}")
            assert paceline(*asked, "--api-key", f"@{path}").returncode == 0
            refused = paceline(*asked)
            assert refused.returncode == 1
            assert "the API key is missing or unknown" in refused.stderr
            assert "--api-key" in refused.stderr
            late = paceline(*asked, "--api-key", KEY, "--last", "1e300")
            assert "last_s is '1e+300'" in late.stderr


def test_a_server_that_everybody_can_reach_warns(script_path):
    with ServeProcess(script_path, "--host", "0.0.0.0", "--kv-memory", "8M") as server:
        wait_until(lambda: "answers everybody" in server.log)
    with ServeProcess(script_path, "--kv-memory", "8M") as server:
        server.survive()
        assert "answers everybody" not in server.log


# ---- the end ----


class Stream:
    """A stream of digits without end, read on a thread."""

    def __init__(self, server):
        self.text = ""
        self._server = server
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: self.text)

    def _read(self):
        body = {"model": "script", "prompt": "0", "stream": True, "temperature": 0}
        url = f"http://127.0.0.1:{self._server.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            for part in response.iter_text():
                self.text += part

    def end(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        return parse_events(self.text.encode())


def test_sigterm_lets_calls_end_and_refuses_new_ones(long_script_path):
    with ServeProcess(long_script_path, "--kv-memory", "64M", "--grace", "1.5") as server:
        stream = Stream(server)
        assert server.client.get("/ready").status_code == 200
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/ready").status_code == 503, timeout_s=1)
        assert server.client.get("/health").status_code == 200
        refused = server.post("/v1/completions", prompt="a")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"
        length = len(stream.text)
        wait_until(lambda: len(stream.text) > length)  # it goes on meanwhile
        events = stream.end()
        assert 1 < time.monotonic() - start < 8
        assert "shutting down" in events[-1]["error"]["message"]
        assert events[-1]["error"]["code"] == "shutting_down"
        assert server.process.wait(10) in (143, -signal.SIGTERM)


def test_a_call_that_ends_in_time_ends_whole_and_the_server_with_it(long_script_path):
    with ServeProcess(long_script_path, "--kv-memory", "64M", "--grace", "60") as server:
        answers = []
        body = {"prompt": "0", "temperature": 0, "max_tokens": 4000}
        caller = threading.Thread(target=lambda: answers.append(server.complete(**body)))
        caller.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
            wait_until(lambda: client.get("/health").json()["engine"]["num_running"])
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        caller.join(30)
        assert answers[0]["usage"]["completion_tokens"] == 4000
        assert server.process.wait(10) in (143, -signal.SIGTERM)
        assert time.monotonic() - start < 40


def test_a_second_signal_ends_at_once(long_script_path):
    with ServeProcess(long_script_path, "--kv-memory", "64M", "--grace", "60") as server:
        stream = Stream(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/ready").status_code == 503, timeout_s=1)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert "shutting down" in stream.end()[-1]["error"]["message"]
        assert server.process.wait(10) in (143, -signal.SIGTERM)
        assert time.monotonic() - start < 8
