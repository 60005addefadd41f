"""What `paceline bench` accepts, and what it refuses by name."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.conversation import Turn
from paceline.bench.http import Origin
from paceline.bench.prose import read_corpus
from paceline.bench.target import Target, parse_target
from paceline.bench.traces import read_trace
from paceline.bench.workloads import build_workload
from paceline.cli.bench_offline import check_fits, read_counts, with_room
from paceline.cli.bench_values import (
    check_outputs,
    check_server_options,
    read_fields,
    read_headers,
    read_limits,
    read_loads,
    read_price,
    read_share,
    server_settings,
)
from paceline.cli.main import app
from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.remote import base_address


def limits(**changes):
    given = {"requests": None, "duration": None, "warmup": "0", "drain": "0s", "timeout": "600s"}
    return read_limits(**{**given, **changes}, arrival="poisson", is_search=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("duration", "0s"), ("timeout", "0ms"), ("duration", "99999999h"), ("drain", "soon"),
        ("warmup", "1000001"), ("warmup", "9" * 5000), ("warmup", "-1s"),
    ],
)  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused_by_name(name, text):
    with pytest.raises(ParameterError, match=f"--{name} is "):
        limits(**{name: text})


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1.0])
def test_a_price_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(ParameterError, match="--price is"):
        read_price(value, None)
    with pytest.raises(ParameterError, match="--watts is"):
        read_price(1.0, value)


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        (["X-A: \u20ac"], "--header X-A holds '\u20ac'"),
        (["X-A: a\r\nX-B: b"], "--header X-A holds the control"),
        (["X-A: a\x00"], "--header X-A holds the control"),
        (["X \u20ac: a"], "--header is "),
        (["X-A"], "--header is "),
    ],
)
def test_a_header_that_http_cannot_carry_is_refused_by_name(headers, what):
    with pytest.raises(ParameterError, match=what):
        read_headers(None, headers)


def test_a_key_that_cannot_be_sent_or_read_is_refused_and_not_shown(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe")
    for key, what in (("s\u20ac", "holds"), (f"@{path}", "no UTF-8"), (f"@{path}2", "No such")):
        with pytest.raises(ParameterError, match=f"--api-key.* {what}") as found:
            read_headers(key, [])
        assert "s\u20ac" not in str(found.value)
    assert read_headers("s\u00e9", []) == {"Authorization": "Bearer s\u00e9"}


def test_addresses_that_are_none_are_refused():
    with pytest.raises(ParameterError, match="--target is 'http://\\[::1'"):
        parse_target("http://[::1")
    for url in ("http://[::1", f"http://{'a' * 99}.b", "localhost/\u00fc", "localhost?a=1",
                "http://me:secret@localhost"):  # fmt: skip
        with pytest.raises(ParameterError):
            Origin.parse(url)


def test_options_of_serve_with_an_open_quote_are_refused_by_name():
    with pytest.raises(ParameterError, match=r"--serve-with is .*No closing quotation"):
        server_settings("x", "--host 'a", (), None, 8, 8192)


@pytest.mark.parametrize("option", ["--port 1", "--host=::1", "--tls-key a --tls-cert b"])
def test_an_address_of_a_server_that_the_bench_starts_is_refused_by_name(option):
    with pytest.raises(ParameterError, match=r"--serve-with has --.*, which the bench chooses"):
        server_settings("x", option, (), None, 8, 8192)


def test_a_null_in_the_body_leaves_any_field_out():
    given = '{"max_tokens": null, "stream_options": null, "temperature": null, "top_k": 1}'
    target = Target(
        name="a", origin=Origin.parse("127.0.0.1:1"), model="m", fields=read_fields(given),
        ignores_eos=True,
    )  # fmt: skip
    request = target.request(Turn(messages=(), max_tokens=4), [])
    body = json.loads(request.partition(b"\r\n\r\n")[2])
    assert body == {"model": "m", "stream": True, "messages": [], "ignore_eos": True, "top_k": 1}


def test_trace_takes_the_addresses_that_bench_takes():
    for text in ("localhost:8731", "http://localhost:8731/", "localhost:8731/v1"):
        assert base_address(text) == "http://localhost:8731"
    for text in ("", "ftp://a", "http://[::1", "a:99999"):
        with pytest.raises(ParameterError, match="is no address"):
            base_address(text)


def test_files_that_cannot_be_written_are_refused_before_the_run(tmp_path):
    for path, what in (
        ("", "is empty"),
        (tmp_path, "is a folder"),
        (tmp_path / "a" / "b", "exist"),
    ):
        with pytest.raises(ParameterError, match=f"--html .*{what}"):
            check_outputs(None, Path(path))
    with pytest.raises(ParameterError, match="--log is empty"):
        check_outputs(Path(), None)
    (tmp_path / "same").symlink_to(tmp_path / "a")
    with pytest.raises(ParameterError, match="--log and --html are both"):
        check_outputs(tmp_path / "a", tmp_path / "same")
    check_outputs(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("serve", "peers", "name", "value", "what"),
    [
        (None, None, "--serve-with", "--port 1", "without --serve MODEL"),
        (None, ["openvino"], "--serve-with", "--port 1", "without --serve MODEL"),
        (None, None, "--threads", 2, "without --serve or --peer"),
        (None, None, "--slots", 8, "without --peer"),
        ("m", None, "--context", 8192, "without --peer"),
        ("m", None, "--peer-python", ["openvino=a"], "without --peer"),
        (None, None, "--peer-model", "m", "without --peer"),
        ("m", ["openvino"], "--peer-model", "m", "with --serve"),
    ],
)
def test_options_of_servers_that_are_not_started_are_refused_by_name(
    serve, peers, name, value, what
):
    with pytest.raises(ParameterError, match=f"{name} has no effect {what}"):
        check_server_options(serve, peers, {name: value})
    check_server_options(serve, peers, {name: None})


def test_options_of_servers_that_are_started_are_taken():
    given = {"--serve-with": "--grace 1", "--slots": 4, "--peer-python": ["openvino=a"]}
    check_server_options("m", ["openvino"], given)
    check_server_options("m", None, {"--threads": 2})
    check_server_options(None, ["openvino"], {"--peer-model": "m"})


def test_options_of_the_load_before_a_command_of_its_own_are_refused_by_name():
    for option in ("--target=x", "--json", "--seed=0"):
        refused = CliRunner().invoke(app, ["bench", option, "offline", "m"])
        what = f"{option.partition('=')[0]} has no effect on `bench offline`"
        assert what in str(refused.exception)


def test_a_search_over_a_load_with_its_own_times_is_refused_with_a_remedy_that_works():
    given = ["--target", "x", "--find-rate", "--slo", "ttft=1s", "--arrival", "burst"]
    refused = CliRunner().invoke(app, ["bench", *given])
    assert "leave out --rate, --sweep and --find-rate" in str(refused.exception)


def test_a_share_without_a_search_is_refused():
    assert read_share(None, find_rate=False) == 0.95
    assert read_share("90%", find_rate=True) == 0.9
    with pytest.raises(ParameterError, match="--at-least has no effect"):
        read_share("90%", find_rate=False)


def test_a_ramp_has_an_end_and_neither_a_sweep_nor_a_search():
    with pytest.raises(ParameterError, match="needs to=RATE"):
        read_loads(None, "1", "ramp", None, find_rate=False)
    for sweep, find_rate in (("1,2", False), (None, True)):
        with pytest.raises(ParameterError, match="changes its own rate"):
            read_loads(None, None, "ramp:to=4", sweep, find_rate=find_rate)


def test_offline_refuses_what_does_not_fit():
    for text in ("0", "1,x", "10001", "9" * 5000):
        with pytest.raises(ParameterError, match="--batch is "):
            read_counts(text, "--batch", 10_000)
    assert with_room(EngineConfig(), 64, is_fixed=False).max_num_seqs == 64
    with pytest.raises(ParameterError, match="--max-num-seqs is 4, less than a --batch of 8"):
        with_room(EngineConfig(max_num_seqs=4), 8, is_fixed=True)
    with pytest.raises(ParameterError, match="--threads is 2000"):
        with_room(EngineConfig(num_threads=2000), 8, is_fixed=False)
    check_fits(90, 10, 100)
    with pytest.raises(ParameterError, match="--output 11 do not fit a context of 100"):
        check_fits(90, 11, 100)


def test_offline_does_not_raise_a_max_num_seqs_that_was_given_with_its_default_value(tmp_path):
    arguments = ["bench", "offline", str(tmp_path / "none.gguf"), "--batch", "33"]
    given = ["--max-num-seqs", str(EngineConfig().max_num_seqs)]
    refused = CliRunner().invoke(app, arguments + given)
    assert isinstance(refused.exception, ParameterError)
    assert "--max-num-seqs is 32, less than a --batch of 33" in str(refused.exception)
    assert "--max-num-seqs" not in str(CliRunner().invoke(app, arguments).exception)


@pytest.mark.parametrize("body", ['{"a": NaN}', '{"a": 1e999}', "{", "[1]"])
def test_a_body_that_no_server_could_be_sent_is_refused(body):
    with pytest.raises(ParameterError, match="--body"):
        read_fields(body)


def test_an_arrival_beside_a_closed_loop_is_refused_also_where_it_is_the_default():
    with pytest.raises(ParameterError, match="--concurrency is a closed loop"):
        read_loads(1, None, "poisson", None, find_rate=False)
    assert read_loads(3, None, None, None, find_rate=False)["loads"][0][1].concurrency == 3


def test_options_that_are_there_and_say_nothing_are_refused_by_name():
    for name in ("--serve", "--model", "--tokenizer", "--peer-model", "--arrival"):
        refused = CliRunner().invoke(app, ["bench", "--target", "x", name, ""])
        assert f"{name} is empty" in str(refused.exception)
    with pytest.raises(ParameterError, match="--api-key is empty"):
        read_headers("", [])


@pytest.mark.parametrize(
    "name", ["Host", "content-length", "Transfer-Encoding", "Connection", "Accept-Encoding"]
)
def test_a_header_that_frames_the_request_is_refused_by_name(name):
    with pytest.raises(ParameterError, match=f"--header {name} is set by the bench"):
        read_headers(None, [f"{name}: 1"])


def test_a_rate_that_no_client_can_make_and_one_that_comes_twice_are_refused():
    for rate, arrival, sweep, what in (
        ("1e7", None, None, "--rate is '1e7'"),
        ("1", "ramp:to=1e7", None, "to is '1e7'"),
        (None, None, "1,2,1.0", "--sweep names 1 twice"),
    ):
        with pytest.raises(ParameterError, match=what):
            read_loads(None, rate, arrival, sweep, find_rate=False)


def test_nobody_listens_on_port_0():
    with pytest.raises(ParameterError, match="port 0"):
        Origin.parse("127.0.0.1:0")


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ('{"at_s": 1}\n[1, 2]', "request 2: it is no object"),
        ('{"at_s": 1}\n{"at_s": "soon"}', "request 2: could not convert"),
        ('{"at_s": 1}\n{"at_s": 2, "input_length": -4}', "request 2: input_length is -4"),
        ('{"at_s": 1, "input_length": 3}', "has requests without lengths"),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused_by_its_request(tmp_path, lines, what):
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    with pytest.raises(ParameterError, match=what):
        build_workload(f"trace:file={path}")


def test_files_are_read_past_a_byte_order_mark(tmp_path):
    mark = "\ufeff"
    (tmp_path / "a.csv").write_text(mark + "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.97,7\n")
    (tmp_path / "a.jsonl").write_text(mark + '{"at_s": 3, "input_length": 7}\n')
    (tmp_path / "b.jsonl").write_text(mark + '{"messages": [{"role": "user", "content": "a"}]}')
    (tmp_path / "a.txt").write_text(mark + "text")
    for name in ("a.csv", "a.jsonl"):
        assert [each.input_tokens for each in read_trace(str(tmp_path / name))] == [7]
    assert len(build_workload(f"conversations:file={tmp_path / 'b.jsonl'}").items) == 1
    assert read_corpus(str(tmp_path / "a.txt")) == "text"


def test_a_csv_trace_may_leave_a_length_blank_and_one_that_is_none_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("at_s,input_length,output_length\n0,,4\n")
    (found,) = read_trace(str(path))
    assert (found.input_tokens, found.output_tokens) == (None, 4)
    path.write_text("at_s,x\n0," + "y" * 200_000)
    with pytest.raises(ParameterError, match="cannot be read as a trace"):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("messages", "what"),
    [('"hi"', "no list of objects"), ('["hi"]', "no list of objects"),
     ('[{"role": 5, "content": "x"}]', "a role is 5, no string")],
)  # fmt: skip
def test_a_conversation_that_is_none_is_refused_by_its_line(tmp_path, messages, what):
    path = tmp_path / "talk.jsonl"
    path.write_text(f'{{"messages": {messages}}}')
    with pytest.raises(ParameterError, match=f"talk.jsonl:1 is no conversation .*{what}"):
        build_workload(f"conversations:file={path}")
