"""`paceline roofline` from outside: a tiny model, whose figures are checked against its shape."""

import json
import xml.etree.ElementTree as ET

import httpx
import pytest

from paceline.measure.ceilings import known_ceilings
from tests.e2e.live import LiveServer
from tests.e2e.test_cli import paceline
from tests.tiny import random_model, write_gguf

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tiny = random_model("llama", max_position_embeddings=128)
    return write_gguf(tiny, tmp_path_factory.mktemp("roofline") / "tiny.gguf")


@pytest.fixture(scope="module")
def report(model, tmp_path_factory):
    """The JSON of one run, its SVG, and the folder of its caches."""
    home = tmp_path_factory.mktemp("home")
    svg = home / "picture.svg"
    done = run(home, str(model), "--batch", "3", "--context", "50", "--json", "--svg", str(svg))
    assert done.returncode == 0, done.stderr
    stages = [line.removeprefix("paceline: ") for line in done.stderr.splitlines()[:-1]]
    assert stages == [
        "the machine's ceilings", "the engine around a step", "a prompt of 50 tokens",
        "a decode step of 3 at context 50", "the cost of a step by its tokens",
    ]  # fmt: skip
    return json.loads(done.stdout), svg.read_text(), home


def run(home, *arguments):
    import os

    return paceline(
        "roofline", *arguments, "--threads", "1", env={**os.environ, "PACELINE_HOME": str(home)}
    )


def test_the_machine_alone_has_a_row_for_each_number_of_threads(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["paceline: the machine's ceilings"]
    for word in ("int8", "bf16", "f32", "L1", "memory"):
        assert word in done.stdout
    (kept,) = (tmp_path / "machine").iterdir()
    again = run(tmp_path)
    assert (again.stdout, again.stderr) == (done.stdout, "")
    assert kept.exists()


def test_work_is_that_of_the_models_shape(report):
    found = report[0]["roofline"]
    qkv, out, mlp = 64 * 128, 64 * 64, 3 * 64 * 128
    # Two layers; after the second one's attention only rows with logits go on.
    assert found["token_macs"] == 2 * qkv + out + mlp
    assert found["kv_token_bytes"] == 2 * 2 * 2 * 16 * 2
    decode = found["decode"]
    attention = next(op for op in decode["ops"] if op["kind"] == "attention")
    assert attention["macs"] == 3 * 2 * (2 * 4 * 16) * 51
    assert attention["num_ops"] == 2
    assert decode["macs"] == sum(op["macs"] for op in decode["ops"])


def test_floors_and_ratios_follow_from_the_ceilings(report):
    found = report[0]["roofline"]
    ceilings = found["ceilings"]
    assert ceilings in report[0]["ceilings"]["by_threads"]
    for step in (found["prefill"], found["decode"]):
        assert step["floor_s"] == max(step["compute_s"], step["memory_s"])
    # The model's weights are floats: neither is held against the int8 peak.
    attention = next(op for op in found["decode"]["ops"] if op["kind"] == "attention")
    linear = found["decode"]["macs"] - attention["macs"]
    expected = linear / ceilings["f32_macs_s"] + attention["macs"] / ceilings["f32_macs_s"]
    if ceilings["bf16_macs_s"] is None:
        assert found["decode"]["compute_s"] == pytest.approx(expected)
    for latency in (found["ttft"], found["tpot"]):
        assert latency["ratio"] == pytest.approx(latency["measured_s"] / latency["floor_s"])
        assert latency["measured_s"] > latency["engine_s"] > 0


def test_step_costs_are_measured_as_far_as_the_context_goes(report):
    found = report[0]["roofline"]
    assert [p["num_tokens"] for p in found["step_costs"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    kinds = {(curve["kind"], curve["context"]) for curve in found["table"]["curves"]}
    assert kinds == {("prefill", 0), ("verify", 0), ("decode", 0)}  # 1024 does not fit


def test_what_was_measured_is_kept_for_the_next_run(report, model):
    home = report[2]
    assert sorted(path.name.split("-")[0] for path in (home / "machine").iterdir()) == [
        "ceilings", "steps",
    ]  # fmt: skip
    again = json.loads(run(home, str(model), "--context", "20", "--json").stdout)
    assert again["roofline"]["table"] == report[0]["roofline"]["table"]
    assert again["ceilings"] == report[0]["ceilings"]


def test_the_picture_is_svg_with_a_circle_for_each_kind_of_op(report):
    root = ET.fromstring(report[1])
    titles = [title.text for title in root.iter(f"{SVG}title")]
    for step in (report[0]["roofline"]["prefill"], report[0]["roofline"]["decode"]):
        for op in step["ops"]:
            if op["macs"]:
                assert any(title.startswith(f"{op['kind']}:") for title in titles)
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height


def test_the_table_tells_bounds_and_the_turning_point(report, model):
    done = run(report[2], str(model), "--context", "20")
    assert done.returncode == 0
    for part in ("TTFT of 20 tokens", "TPOT, 1 stream at 20", "gate and up x2", "bound", "drafts"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "128"], "lower --context"),
        (["--kv-dtype", "f8"], "kv_dtype"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_what_cannot_be_done_is_refused(report, model, arguments, message):
    done = run(report[2], str(model), *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--batch", "8"), ("--context", "9"), ("--kv-dtype", "f16")]
)
def test_an_option_of_a_models_steps_needs_a_model(tmp_path, option, value):
    done = run(tmp_path, option, value)
    assert done.returncode == 1
    assert f"{option} {value}" in done.stderr
    assert "name a model" in done.stderr


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(model, tmp_path):
    done = run(tmp_path, str(model), "--svg", str(tmp_path / "none" / "x.svg"))
    assert done.returncode == 1
    assert "--svg" in done.stderr
    assert "its folder does not exist" in done.stderr
    assert not (tmp_path / "machine").exists()


def test_a_picture_needs_a_model(tmp_path):
    done = run(tmp_path, "--svg", str(tmp_path / "x.svg"))
    assert done.returncode == 1
    assert "name a model" in done.stderr


def test_metrics_have_the_int8_peak_once_it_is_known(report, model, monkeypatch, tmp_path):
    def gauge() -> str | None:
        server = LiveServer(model, num_threads=1, kv_memory_bytes=2**20)
        try:
            text = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
        finally:
            server.close()
        lines = [x for x in text.splitlines() if x.startswith("paceline:machine_int8_macs")]
        return lines[0].split()[-1] if lines else None

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert gauge() is None
    monkeypatch.setenv("PACELINE_HOME", str(report[2]))
    known = known_ceilings()
    assert float(gauge()) == known.at(1).int8_macs_s
