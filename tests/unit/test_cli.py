"""The command line without a model: options, help, exit codes."""

import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import main as main_module
from paceline.cli.answer import timing_line
from paceline.cli.loading import load, read_template
from paceline.cli.main import _printable, app, main
from paceline.cli.options import engine_options, sampling_options, with_terminal_defaults
from paceline.cli.pull import ProgressBar
from paceline.cli.run import read_prompt
from paceline.cli.serve import listen
from paceline.completion import Choice
from paceline.config import KV_DTYPES, EngineConfig
from paceline.errors import ModelNotFoundError, ParameterError, UnsupportedModelError
from paceline.types import Timings, Usage

COMMANDS = ("run", "chat", "serve", "embed", "info", "pull", "list", "bench", "quantize", "eval",
            "price")  # fmt: skip


@engine_options
@sampling_options
def command(model: str, *, config: EngineConfig, sampling: dict[str, object]) -> None:
    """Echo what was parsed."""
    typer.echo(repr((model, config, sorted(sampling.items()))))


def parse(*arguments: str):
    echo = typer.Typer()
    echo.command()(command)
    return CliRunner().invoke(echo, ["m", *arguments])


def test_without_options_the_config_is_the_default_and_no_sampling_is_given():
    assert parse().stdout.strip() == repr(("m", EngineConfig(), []))


def test_every_engine_option_reaches_the_config():
    result = parse(
        "--threads", "3", "--kv-memory", "1.5G", "--kv-dtype", "f32", "--block-size", "32",
        "--max-model-len", "100", "--max-num-seqs", "4", "--max-batched-tokens", "64",
        "--policy", "priority", "--seed", "9", "--kv-tier", "disk:path=x,size=1G",
    )  # fmt: skip
    config = EngineConfig(
        num_threads=3, kv_memory_bytes=3 * 2**29, kv_dtype="f32", block_size=32, max_model_len=100,
        max_num_seqs=4, max_batched_tokens=64, policy="priority", seed=9,
        kv_tier="disk:path=x,size=1G",
    )  # fmt: skip
    assert result.stdout.strip() == repr(("m", config, []))


def test_the_prefix_cache_is_on_unless_it_is_turned_off():
    assert EngineConfig().prefix_cache
    config = EngineConfig(prefix_cache=False)
    assert parse("--no-prefix-cache").stdout.strip() == repr(("m", config, []))


def test_only_the_sampling_options_that_were_given_are_passed_on():
    result = parse("-n", "5", "--temperature", "0", "--stop", "a", "--stop", "b")
    expected = [("max_tokens", 5), ("stop", ("a", "b")), ("temperature", 0.0)]
    assert result.stdout.strip() == repr(("m", EngineConfig(), expected))


def test_the_users_sampling_wins_over_the_models_and_ours():
    merged = with_terminal_defaults({"top_p": 0.5}, {"temperature": 0.2})
    assert merged == {"temperature": 0.2, "top_p": 0.5}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"paceline {name}" in result.stdout


@pytest.mark.parametrize(
    ("name", "option"),
    [("run", "--kv-dtype"), ("serve", "--kv-dtype"), ("info", "--kv-dtype"),
     ("roofline", "--kv-dtype"), ("eval", "--kv-dtype"), ("eval", "--against-kv-dtype"),
     ("price", "--kv")],
)  # fmt: skip
def test_the_help_of_an_option_of_kv_formats_lists_all_of_them(name, option):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}).stdout
    text = " ".join(shown.replace("│", " ").split())
    about = text.partition(f" {option} <str> ")[2][:200]
    assert set(KV_DTYPES) <= set(re.findall(r"\w+", about))


def run_main(monkeypatch, capsys, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code, *capsys.readouterr()


def test_version_is_printed(monkeypatch, capsys):
    code, out, _ = run_main(monkeypatch, capsys, "--version")
    assert (code, out.startswith("paceline ")) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("run",), ("run", "m", "p", "--nonsense"), ("run", "m", "p", "-n", "x"),
     ("serve", "m", "--port", "99999")],
)  # fmt: skip
def test_usage_errors_exit_with_2_and_say_what_is_wrong(monkeypatch, capsys, arguments):
    code, out, err = run_main(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelNotFoundError("no model 'x'"), 1, "paceline: no model 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(monkeypatch, capsys, error, code, message):
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    assert run_main(monkeypatch, capsys) == (code, "", message)


def test_a_bad_option_value_is_one_line_and_exit_code_1(monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "run", "m", "p", "--block-size", "17")
    assert code == 1
    assert err == "paceline: block_size is 17: choose a multiple of 16, at most 256\n"


def test_a_bad_log_level_names_the_good_ones(monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_LOG", "loud")
    code, _, err = run_main(monkeypatch, capsys, "list")
    assert code == 1
    assert "debug, info, warning, error" in err


def test_a_prompt_that_is_no_text_is_refused():
    with pytest.raises(ParameterError, match="no UTF-8"):
        read_prompt("\udcff")


def test_a_taken_port_is_told_by_name():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ParameterError, match=f"127.0.0.1:{port}.*--port"):
            listen("127.0.0.1", port)


def test_the_timing_line_leaves_out_what_a_one_token_answer_has_not():
    timings = {"load_s": 0.1, "queue_s": 0.001, "ttft_s": 0.02, "tpot_s": None,
               "tokens_per_s": None, "bandwidth_fraction": None}  # fmt: skip
    choice = Choice(
        index=0, text="a", token_ids=(1,), logprobs=None, finish_reason="length", stop_reason=None,
        usage=Usage(prompt_tokens=3, completion_tokens=1),
        timings=Timings(queue_s=0.001, ttft_s=0.02, tpot_s=None, e2e_s=0.02),
    )  # fmt: skip
    line = timing_line(choice, timings)
    assert line == "3 + 1 tokens · load 100 ms · queue 1.0 ms · TTFT 20.0 ms"
    timings |= {"tpot_s": 0.005, "tokens_per_s": 200.0, "bandwidth_fraction": 0.83}
    assert timing_line(choice, timings).endswith(
        "TPOT 5.00 ms · 200.0 tok/s · 83% of the read bandwidth"
    )


def test_the_help_says_what_a_full_queue_lets_in():
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert "Where nothing waits, a call of any size is let in" in " ".join(
        result.stdout.replace("│", " ").split()
    )


@pytest.mark.parametrize("option", ["--grace", "--queue-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "soon"])
def test_seconds_that_are_none_are_refused_by_name(monkeypatch, capsys, option, value):
    code, _, err = run_main(monkeypatch, capsys, "serve", "m", f"{option}={value}")
    assert code == 2
    assert option in err


def test_an_empty_template_file_is_said_to_be_empty(tmp_path):
    path = tmp_path / "empty.jinja"
    path.write_text(" \n")
    with pytest.raises(ParameterError, match=r"empty\.jinja is empty"):
        read_template(str(path))


def test_a_named_encoder_is_refused_before_it_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    with pytest.raises(UnsupportedModelError, match="use `paceline embed all-minilm-l6-v2 TEXT`"):
        load("All-MiniLM-L6-v2", EngineConfig())
    assert not (tmp_path / "home").exists()


def test_what_a_terminal_would_obey_is_shown_as_text():
    assert _printable("500 \x1b[31mX\x07\nnext é") == r"500 \x1b[31mX\x07" + "\nnext é"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing is named: give one of MODEL, --shape, --parameters"),
        (("m", "--shape", "x"), "MODEL and --shape is named"),
        (("--parameters", "8X"), "'8X' is no number of parameters"),
        (("--parameters", "nan"), "'nan' is no number of parameters"),
        (("--parameters", "8B", "--seqs", "2"), "leave --seqs out"),
        (("--shape", "llama-3.1-8b", "--context", "999999"), "context is 999999"),
        (("--shape", "llama-3.1-8b", "--kv-dtype", "int3"), "kv_dtype is 'int3'"),
    ],
)
def test_info_refuses_what_tells_too_little_or_too_much(arguments, message):
    result = CliRunner().invoke(app, ["info", *arguments])
    assert isinstance(result.exception, ParameterError)
    assert message in str(result.exception)
    assert not result.stdout


def test_a_bar_that_counts_something_else_next_has_the_next_total() -> None:
    """`paceline quantize --method gptq` rounds first, and then writes more than it rounded."""
    with ProgressBar("model") as bar:
        for done, total in ((5, 10), (10, 10), (3, 40), (40, 40)):
            bar.update(done, total)
            [task] = bar._bar.tasks
            assert (task.completed, task.total) == (done, total)
