"""The command line as a user meets it: a process of its own."""

import json
import os
import re
import signal
import subprocess
import time

import httpx
import pytest

from tests.e2e.live import ALPHABET, PACELINE, wait_until

ENGINE = ["--kv-memory", "8M", "--threads", "1"]


def paceline(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [*PACELINE, *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, text=True, **options)


def test_run_streams_the_answer_and_tells_its_timings_on_stderr(script_path):
    result = paceline("run", str(script_path), "Hi", "--temperature", "0", *ENGINE)
    assert (result.returncode, result.stdout) == (0, "HELO\n")
    for part in ("queue", "TTFT", "TPOT", "tok/s", "read bandwidth"):
        assert part in result.stderr
    assert result.stderr.count("\n") == 1


def test_run_raw_continues_the_text_without_template(script_path):
    arguments = ("--raw", "-n", "3", "--temperature", "0", *ENGINE)
    assert paceline("run", str(script_path), "a", *arguments).stdout == "bcd\n"


def test_run_reads_the_prompt_from_stdin(script_path):
    arguments = ("--raw", "--temperature", "0", *ENGINE)
    result = paceline("run", str(script_path), "-", *arguments, input="a")
    assert result.stdout == ALPHABET[1:] + "\n"


def test_run_json_is_one_object(script_path):
    arguments = ("--raw", "--json", "-n", "3", "--temperature", "0", *ENGINE)
    result = paceline("run", str(script_path), "a", *arguments)
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish_reason"]) == ("bcd", "length")
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "cached_tokens": 0}
    assert 0 < answer["timings"]["ttft_s"] < answer["timings"]["e2e_s"]
    assert answer["timings"]["bandwidth_fraction"] > 0
    assert result.stderr == ""


def test_a_second_run_finds_the_prompt_of_the_first_on_disk(script_path, tmp_path):
    arguments = ("0" * 40, "--raw", "-n", "3", "--temperature", "0",
                 "--kv-tier", f"disk:path={tmp_path},size=1M", *ENGINE)  # fmt: skip
    first, second = (paceline("run", str(script_path), *arguments) for _ in range(2))
    assert first.stdout == second.stdout == "123\n"
    assert "40 + 3 tokens" in first.stderr
    assert "40 (32 cached) + 3 tokens" in second.stderr


def test_chat_keeps_the_conversation_and_knows_its_commands(script_path):
    typed = "Hi\n/help\n/nonsense\n/reset\nHi again\n/exit\n"
    result = paceline("chat", str(script_path), "--temperature", "0", *ENGINE, input=typed)
    assert (result.returncode, result.stdout) == (0, "HELO\nHELO\n")
    for part in ("/reset", "new conversation", "/nonsense is no command"):
        assert part in result.stderr


def test_chat_says_so_when_the_context_is_full_and_goes_on(script_path):
    typed = "x" * 600 + "\nHi\n"
    result = paceline("chat", str(script_path), "--temperature", "0", *ENGINE, input=typed)
    assert (result.returncode, result.stdout) == (0, "HELO\n")
    assert "512" in result.stderr
    assert "/reset" in result.stderr


def test_info_reads_the_header_alone(script_path):
    result = paceline("info", str(script_path), "--seqs", "3", "--context", "100", "--json")
    facts = json.loads(result.stdout)
    assert (facts["family"], facts["layers"], facts["context"]) == ("llama", 1, 512)
    assert facts["kv_bytes_per_token"] == 2 * 16 * 2
    assert facts["kv_bytes_per_token_by_dtype"] == {
        "f16": 64, "bf16": 64, "f32": 128, "int8": 2 * (16 + 2), "fp8": 2 * (16 + 2),
        "k8v4": (16 + 2) + (8 + 4), "int4": 2 * (8 + 4),
    }  # fmt: skip
    assert facts["memory"]["kv_bytes"] == 3 * 112 * 64
    assert sum(facts["weight_bytes_by_format"].values()) == facts["weight_bytes"]
    shown = paceline("info", str(script_path))
    assert shown.returncode == 0
    assert "KV a token" in shown.stdout


def test_info_tells_of_models_that_are_not_here(script_path):
    shape = ("--shape", "llama-3.1-8b", "--seqs", "8", "--context", "8192", "--kv-dtype", "int8")
    facts = json.loads(paceline("info", *shape, "--json").stdout)
    rows = {row["format"]: row for row in facts["formats"]}
    assert facts["parameters"] == 8_030_261_248
    assert [round(rows[name]["code_bytes"] / 1e9) for name in ("f32", "bf16")] == [32, 16]
    assert [round(rows[name]["code_bytes"] / 1e9) for name in ("int8, 64", "int4, 64")] == [8, 4]
    int4 = rows["int4, 64"]
    assert int4["kv_bytes"] == 8 * 8192 * 65 * 1024
    assert int4["weight_bytes"] == int4["code_bytes"] + int4["extra_bytes"]
    parts = ("weight_bytes", "kv_bytes", "step_bytes")
    assert int4["total_bytes"] == sum(int4[part] for part in parts)
    shown = paceline("info", *shape).stdout
    assert "4.79" in shown
    assert "…" not in shown
    counted = paceline("info", "--parameters", "8e9").stdout
    assert re.search(r"int4, 64 +4\.25 +4\.00 +0\.25 +4\.25", counted)


@pytest.mark.parametrize("command", ["run", "info"])
def test_a_missing_model_is_one_line_and_exit_code_1(tmp_path, command):
    prompt = ["Hi"] if command == "run" else []
    result = paceline(command, str(tmp_path / "none.gguf"), *prompt)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("paceline: ")
    assert "none.gguf" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_cut_file_is_one_line_and_exit_code_1(tmp_path, script_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(script_path.read_bytes()[:-1000])
    result = paceline("run", str(cut), "Hi")
    assert result.returncode == 1
    assert "cut.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_prompt_beyond_the_context_is_one_line_and_exit_code_1(script_path):
    result = paceline("run", str(script_path), "x" * 600, "--raw", *ENGINE)
    assert result.returncode == 1
    assert "600" in result.stderr
    assert "512" in result.stderr


def test_ctrl_c_ends_a_run_with_130_and_no_traceback(long_script_path):
    command = [*PACELINE, "run", str(long_script_path), "0", "--raw", "--temperature", "0"]
    process = subprocess.Popen(
        [*command, "--kv-memory", "64M"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(5) == b"12345"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, b"")


def test_a_reader_that_leaves_ends_a_run_quietly(long_script_path):
    command = [*PACELINE, "run", str(long_script_path), "0", "--raw", "--temperature", "0"]
    process = subprocess.Popen(
        [*command, "--kv-memory", "64M"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(5) == b"12345"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(10) == 1
    process.stderr.close()


@pytest.fixture
def served(script_path):
    command = [*PACELINE, "serve", str(script_path), "--port", "0", *ENGINE]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = ""
    while "serving" not in line:
        line = process.stderr.readline()
        assert line, "the server did not start"
    yield process, line.split()[-1]
    if process.poll() is None:
        process.kill()
        process.wait()
    process.stderr.close()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_and_stops_cleanly(served, stop):
    process, url = served
    body = {"model": "script", "prompt": "a", "temperature": 0}
    wait_until(lambda: is_up(url))
    answer = httpx.post(f"{url}/completions", json=body).json()
    assert answer["choices"][0]["text"] == ALPHABET[1:]
    process.send_signal(stop)
    start = time.monotonic()
    assert process.wait(10) in (130, -stop)
    assert time.monotonic() - start < 8
    log = process.stderr.read()
    assert "Traceback" not in log
    assert "leaked" not in log  # nanobind's complaint of objects that outlive their module


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/models").status_code == 200
    except httpx.TransportError:
        return False


def test_serve_logs_threads_and_kv_size(script_path):
    env = {**os.environ, "PACELINE_LOG": "info"}
    result = paceline("run", str(script_path), "Hi", *ENGINE, env=env)
    assert "1 threads (" in result.stderr
    assert "KV cache 8.0 MiB" in result.stderr


@pytest.mark.parametrize("times", [1, 2])
def test_an_open_stream_ends_with_an_event_and_no_traceback_at_ctrl_c(long_script_path, times):
    command = [*PACELINE, "serve", str(long_script_path), "--port", "0", "--kv-memory", "64M"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = ""
    while "serving" not in line:
        line = process.stderr.readline()
        assert line, "the server did not start"
    body = {"model": "script", "prompt": "0", "stream": True, "temperature": 0}
    text = ""
    with httpx.stream("POST", line.split()[-1] + "/completions", json=body, timeout=20) as answer:
        for part in answer.iter_text():
            if not text:
                process.send_signal(signal.SIGINT)
                if times == 2:
                    time.sleep(0.3)
                    process.send_signal(signal.SIGINT)
            text += part
    log = process.communicate(timeout=10)[1]
    assert process.returncode == 130
    assert "Traceback" not in log
    assert text.rstrip().endswith("[DONE]") or "shutting down" in text


def test_bench_spec_without_speculation_compares_plain_decoding_with_itself(script_path, tmp_path):
    result = paceline(
        "bench", "spec", str(script_path), "--speculate", "off", "--workloads", "chat",
        "--output", "4", "--rounds", "1", "--json", *ENGINE,
        env={**os.environ, "PACELINE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    [row] = told["rows"]
    assert (told["speculate"], row["is_same_text"], row["num_drafted"]) == ("off", True, 0)
    assert row["predicted_speed_up"] is None
