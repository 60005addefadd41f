"""`benchmarks/peers`: its arithmetic on planted numbers, its processes on a scripted engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from paceline.measure.floors import floor_s, prefill_work
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.tensor import dequantize
from tests.tiny import random_model, write_gguf
from tests.unit.test_floors import CEILINGS, COSTS, ceilings

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.insert(0, str(FOLDER))  # its modules import each other as scripts do

import load  # noqa: E402
import q8_copy  # noqa: E402
import run  # noqa: E402
from arguments import parse_arguments  # noqa: E402
from cells import CELLS, Cell, Figure, fit, trial  # noqa: E402
from engines import ENGINES  # noqa: E402
from figures import Outcome, Sample, advantage, configurations, rows, table  # noqa: E402
from processes import EngineError, Server, Worker, first_output_s, free_port  # noqa: E402
from rounds import cell_floor_s, choose, fit_together  # noqa: E402
from worker import random_prompt  # noqa: E402

sys.path.remove(str(FOLDER))

SPEED = Figure(name="speed", unit="tok/s", is_rate=True)
DELAY = Figure(name="delay", unit="s", is_rate=False)

# A prompt takes 50 ms and a decode 5 ms; a context of 13 cannot be loaded. Upper bounds of what is
# measured are wide: they must hold on a machine that others use.
SCRIPTED = """
import time
class Engine:
    num_ids = 30000
    def __init__(self, model, *, num_threads, context, num_streams, **options):
        print("library noise on stdout")
        if context == 13:
            raise ValueError(f"{model} is no model of mine")
        self.streams = {}
    def submit(self, stream, token_ids):
        self.streams[stream] = 0
    def step(self):
        if self.streams:
            time.sleep(0.05 if 0 in self.streams.values() else 0.005)
        for stream in self.streams:
            self.streams[stream] += 1
        return list(self.streams)
    def drop(self, streams):
        for stream in streams:
            del self.streams[stream]
"""
OPTIONS = {"num_threads": 1, "context": 64, "num_streams": 4}


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an adapter module that worker processes can import."""
    (tmp_path / "engine_scripted.py").write_text(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "engine_scripted"


def state_of(worker: Worker) -> str:
    """The letter by which the kernel names the process's state; T is stopped."""
    stat = Path(f"/proc/{worker._process.pid}/stat").read_text()
    return stat.rsplit(")", 1)[1].split()[0]


def cell(name: str) -> Cell:
    return next(c for c in CELLS if c.name == name)


# ---- floors ----


def test_a_kept_stream_is_held_against_the_context_it_has_reached():
    long = cell("decode-1@2000")
    assert long.mean_context(0) == 2000 + 1 + 16
    assert long.mean_context(2) == 2000 + 1 + 2 * 33 + 16
    assert cell("decode-8").mean_context(2) == 32 + 1 + 16  # fresh streams in every round
    first = cell_floor_s(COSTS, long, CEILINGS, num_before=0)
    assert cell_floor_s(COSTS, long, CEILINGS, num_before=4) > first
    expected = floor_s(prefill_work(COSTS, 512), CEILINGS)
    assert cell_floor_s(COSTS, cell("prefill-512"), CEILINGS, num_before=0) == expected


# ---- rows ----


def test_rows_hold_medians_spreads_ratios_and_shares():
    outcomes = {
        "paceline": Outcome(
            samples=[Sample(values=(v,), share=s) for v, s in ((90, 0.5), (100, 0.6), (130, 0.7))]
        ),
        "llama.cpp": Outcome(
            config={"flash_attn": True},
            samples=[Sample(values=(v,), share=0.2) for v in (20, 30, 50)],
        ),
        "openvino": Outcome(note="cannot read Q5_0"),
    }
    one = Cell(name="speed", kind="prefill", figures=(SPEED,), num_prompt=8)
    ours, llama, openvino = rows(one, "tiny", outcomes)
    assert (ours.median, ours.spread, ours.ratio, ours.share) == (100, (90, 130), 1.0, 0.6)
    assert (llama.median, llama.spread, llama.share) == (30, (20, 50), 0.2)
    assert llama.ratio == pytest.approx(100 / 30)
    assert (openvino.median, openvino.spread, openvino.ratio, openvino.share) == (None,) * 4
    text = table([ours, llama, openvino], list(outcomes))
    assert "| speed [tok/s] | 100 (90.0–130), 60% | 30.0 (20.0–50.0), 20%, **3.33x** |" in text
    assert "cannot read Q5_0" in text
    assert configurations([ours, llama, openvino]) == "- llama.cpp, tiny: flash_attn=True (speed)"


def test_a_ratio_above_one_always_means_that_we_are_ahead():
    assert advantage(SPEED, 20.0, 10.0) == 2.0
    assert advantage(DELAY, 0.1, 0.4) == pytest.approx(4.0)
    assert advantage(SPEED, 20.0, None) is None
    assert advantage(SPEED, 20.0, 0.0) is None  # a rate that was never met has no multiple


def test_a_cell_of_two_figures_gives_two_rows():
    outcomes = {"paceline": Outcome(samples=[Sample(values=(60.0, 5.0))])}
    found = rows(cell("long-prompt"), "tiny", outcomes)
    assert [(row.cell, row.unit, row.median) for row in found] == [
        ("long-prompt gap", "ms", 60.0),
        ("long-prompt TTFT", "s", 5.0),
    ]


def test_a_ceiling_that_is_missing_once_is_left_out_of_the_summary():
    more = ceilings(int8_macs_s=3e9, bf16_macs_s=1e9, f32_macs_s=2e9, bytes_s=5e9)
    less = ceilings(int8_macs_s=1e9, bf16_macs_s=None, f32_macs_s=2e9, bytes_s=5e9)
    summary = run.ceilings_summary([more, less])
    assert summary["int8_gmac_s"] == {"median": 2.0, "spread": [1.0, 3.0]}
    assert set(summary) == {"int8_gmac_s", "f32_gmac_s", "read_gb_s"}


# ---- cells and configurations ----


def test_a_prompt_is_shortened_a_little_to_fit_and_else_left_out():
    long = cell("prefill-8192")
    fitted = fit(long, max_context=8192, rounds=5)
    assert fitted is not None
    assert fitted.context(5) == 8192
    assert fit(long, max_context=4096, rounds=5) is None
    assert fit(cell("prefill-512"), max_context=8192, rounds=5) == cell("prefill-512")
    assert trial(long).num_prompt == 1024


def test_the_best_configuration_is_found_one_option_at_a_time():
    options = {"repack": (True, False), "batch": (512, 2048, 64)}
    scores = {(True, 512): 1.0, (False, 512): 2.0, (False, 2048): 3.0, (False, 64): 2.9}
    assert choose(options, lambda c: scores[c["repack"], c["batch"]]) == {
        "repack": False, "batch": 2048
    }  # fmt: skip


def test_noise_does_not_change_a_configuration():
    assert choose({"a": (1, 2)}, lambda c: {1: 1.0, 2: 1.01}[c["a"]]) == {"a": 1}
    assert choose({"a": (1, 2)}, lambda c: {1: -1.0, 2: -0.9}[c["a"]]) == {"a": 2}


def test_a_configuration_that_fails_is_left_out_unless_all_do():
    def score(config: dict[str, object]) -> float:
        if config["a"] == 1:
            raise EngineError("no memory")
        return 1.0

    assert choose({"a": (1, 2)}, score) == {"a": 2}
    with pytest.raises(EngineError, match="no memory"):
        choose({"a": (1, 1)}, score)


def test_options_of_one_value_are_taken_without_a_trial():
    def score(config: dict[str, object]) -> float:
        raise AssertionError

    assert choose({"policy": ("slo",)}, score) == {"policy": "slo"}


def test_engines_that_need_too_much_memory_take_turns():
    assert fit_together([3e9, 4e9], 10e9)
    assert not fit_together([4e9, 5e9], 10e9)


def test_every_engine_starts_from_options_of_its_adapter():
    for spec in ENGINES:
        assert (FOLDER / f"{spec.module}.py").exists()
        for one in CELLS:
            assert all(len(values) > 0 for values in spec.options_for(one).values())
    llama = next(spec for spec in ENGINES if spec.name == "llama.cpp")
    assert "kv_unified" in llama.options_for(cell("decode-8"))
    assert "kv_unified" not in llama.options_for(cell("decode-1"))


def test_a_missing_peer_is_named():
    pythons = {spec.name: sys.executable for spec in ENGINES}
    pythons["llama.cpp"] = "/bin/false"
    specs, versions, absent = run.find_engines(["paceline", "llama.cpp"], pythons)
    assert [spec.name for spec in specs] == list(versions) == ["paceline"]
    assert absent == ["llama.cpp"]


def test_a_python_for_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_arguments("", ["--python", "vllm=/usr/bin/python"])
    assert "vllm" in capsys.readouterr().err


def test_a_q8_copy_holds_the_same_model_in_a_format_that_all_read(tmp_path: Path):
    source = write_gguf(random_model(), tmp_path / "tiny.gguf", fmt="q5_0")
    assert q8_copy.unreadable_formats(open_checkpoint(source), frozenset({"f32"})) == ["q5_0"]
    q8_copy.write_q8_copy(source, tmp_path / "copy.gguf")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "copy.gguf")
    assert after.config == before.config
    assert list(after.tokenizer.tokens) == list(before.tokenizer.tokens)
    assert {tensor.format for tensor in after.tensors.values()} == {"f32", "q8_0"}
    for name, tensor in before.tensors.items():
        values, copied = dequantize(tensor), dequantize(after.tensors[name])
        assert abs(values - copied).max() <= 0.005 * abs(values).max()


# ---- loads ----


def test_percentiles_are_by_nearest_rank():
    values = [float(v) for v in range(1, 21)]
    assert load.percentile(values, 0.95) == 19.0
    assert load.percentile([3.0], 0.95) == 3.0


def test_one_late_request_of_twenty_is_allowed_and_two_are_not():
    good, late = [0.1] * 19, 0.9
    assert load.meets([*good, late], [0.02] * 20)
    assert not load.meets([*good[:18], late, late], [0.02] * 20)
    assert not load.meets([*good, late], [0.02] * 18 + [0.06] * 2)


@pytest.mark.parametrize("limit", [0.11, 0.9, 1.0, 4.3, 30.0])
def test_the_search_finds_the_highest_rate_within_ten_percent(limit: float):
    for start, factor in ((1.0, 2.0), (limit * 1.1, 1.2), (limit / 1.1, 1.2)):
        found = load.highest_rate(lambda rate: rate <= limit, start=start, factor=factor)
        assert limit / 1.1 <= found <= limit


def test_a_server_that_never_meets_the_limits_has_rate_zero():
    assert load.highest_rate(lambda rate: False, start=1.0) == 0.0


def test_a_gap_counts_if_it_touches_the_wait_even_when_still_open():
    stamps = [0.0, 1.0, 4.0, 4.5]
    assert load.longest_gap(stamps, start=2.0, end=5.0) == 3.0  # 1.0 to 4.0, begun before
    assert load.longest_gap(stamps, start=4.2, end=9.0) == 4.5  # none since 4.5
    assert load.longest_gap(stamps, start=4.2, end=4.6) == 0.5


# ---- processes ----


def test_prompts_are_the_same_for_all_engines_and_differ_between_seeds():
    assert random_prompt(1, 64, 49152) == random_prompt(1, 64, 151936)
    assert random_prompt(1, 64, 49152) != random_prompt(2, 64, 49152)


def test_a_worker_times_prompts_and_steps(scripted: str):
    with Worker(sys.executable, scripted, "m.gguf", OPTIONS) as worker:
        assert 0.05 <= worker.call("prefill", seed=1, num_prompt=8) < 2
        load_of = {"num_prompt": 8, "num_streams": 4, "num_tokens": 10}
        for keep in (False, True, True):
            seconds = worker.call("decode", seed=2, keep=keep, **load_of)
            assert 0.05 <= seconds < 3


def test_a_paused_worker_does_nothing_until_it_is_resumed(scripted: str):
    with Worker(sys.executable, scripted, "m.gguf", OPTIONS) as worker:
        worker.pause()
        end = time.monotonic() + 5
        while state_of(worker) != "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert state_of(worker) == "T"
        worker.resume()
        assert worker.call("prefill", seed=1, num_prompt=8) >= 0.05


def test_an_engine_that_cannot_load_says_why(scripted: str):
    with pytest.raises(EngineError, match=r"m\.gguf is no model of mine"):
        Worker(sys.executable, scripted, "m.gguf", {**OPTIONS, "context": 13})


def test_a_step_engine_is_served_over_http(scripted: str):
    port = free_port()
    script = str(FOLDER / "serve_steps.py")
    options = '{"num_threads": 1, "context": 1024, "num_streams": 2}'
    command = [sys.executable, script, scripted, "m.gguf", str(port), options]
    prompts = [[1, 2, 3]] * 3
    with Server(command, port) as server:
        client = load.Client(server.port, "m")
        assert 0.05 <= load.ttft_alone(client, prompts, 4) < 2
        assert load.passes_at(client, 4.0, prompts, num_tokens=12, seed=0)
        assert load.throughput(client, prompts, 4) > 0.5
        gap_s, ttft_s = load.long_prompt_beside(client, prompts[:1], prompts[1])
        assert 0.02 <= gap_s < 2  # 50 ms, less what a stamp before it was late
        assert 0.05 <= ttft_s < 2


def test_a_load_that_is_too_late_ends_early(scripted: str):
    port = free_port()
    script = str(FOLDER / "serve_steps.py")
    options = '{"num_threads": 1, "context": 128, "num_streams": 1}'
    command = [sys.executable, script, scripted, "m.gguf", str(port), options]
    with Server(command, port) as server:
        client = load.Client(server.port, "m")
        start = time.perf_counter()
        prompts = [[1, 2, 3]] * 40  # 0.55 s each, one at a time: 22 s if all ran
        assert not load.passes_at(client, 100.0, prompts, num_tokens=100, seed=0)
        client.settle(prompts[0])  # what was cancelled is not worked off first
        assert time.perf_counter() - start < 10


def test_the_first_byte_of_a_process_is_what_is_timed():
    code = "import time; time.sleep(0.2); print('x', flush=True); time.sleep(1)"
    assert 0.2 <= first_output_s([sys.executable, "-c", code]) < 1.2
    with pytest.raises(EngineError, match="boom"):
        first_output_s([sys.executable, "-c", "raise SystemExit('boom')"])
