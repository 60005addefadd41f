"""`--mixed`: what is measured, what is chosen within a budget, what is written, what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.quantize import build_method, check_method
from paceline.errors import ParameterError
from paceline.quantize.calibration import Calibration, read_calibration
from paceline.quantize.formats import Target, parse_target
from paceline.quantize.mixed import Mix, Option, candidates, choose, mix, parse_budget
from paceline.quantize.recipe import new_recipe
from paceline.quantize.run import quantize
from paceline.quantize.source import open_source
from paceline.quantize.walk import sites
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.encode import encode
from paceline.weights.tensor import QTensor, dequantize
from tests.tiny import TinyModel, random_model, write_gguf, write_hf

LOW, HIGH = Target("int4"), Target("int8")
COMMAND = (sys.executable, "-c", "from paceline.cli.main import main; main()", "quantize")


def model() -> TinyModel:
    return random_model("qwen2", hidden=256, heads=4, kv_heads=2, head_dim=64, inner=256,
                        vocab_size=307)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text("".join(rng.choice(list("abcdefgh the cat sat"), 2000)))
    return path


def mixed(source: Path, text: Path, budget: str, fmt: str = "int4") -> tuple[Mix, Calibration]:
    opened = open_source(source)
    calibration = read_calibration(text, opened, num_tokens=512)
    recipe = new_recipe(
        opened, source.parent / "out", method="rtn", target=candidates(Target(fmt))[0]
    )
    return mix(opened, recipe, parse_budget(budget), calibration, num_threads=2), calibration


def options(seed: int, linears: int, formats: int) -> dict[str, tuple[Option, ...]]:
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(linears):
        sizes = np.sort(rng.choice(np.arange(10, 99), formats, replace=False))
        errors = np.sort(rng.random(formats))[::-1]
        found[f"w{i}"] = tuple(
            Option(LOW, int(size), float(error)) for size, error in zip(sizes, errors, strict=True)
        )
    return found


def totals(chosen: Any) -> tuple[int, float]:
    return sum(option.num_bytes for option in chosen), sum(option.error for option in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_as_many_bytes_has_less_error(seed: int) -> None:
    """All 3⁵ choices: none that fits into the bytes which ours spends is better."""
    found = options(seed, linears=5, formats=3)
    every = [totals(combination) for combination in itertools.product(*found.values())]
    least, most = min(size for size, _ in every), max(size for size, _ in every)
    for room in np.linspace(least, most, 9).astype(int):
        size, error = totals(choose(found, int(room)).values())
        assert size <= room
        bound = min(e for s, e in every if s <= room)
        step = max(
            o.error - p.error for of in found.values() for o, p in itertools.combinations(of, 2)
        )
        assert bound <= error + 1e-12
        assert error <= bound + step
    size, error = totals(choose(found, most).values())
    assert error == pytest.approx(min(e for _, e in every))
    assert totals(choose(found, least).values())[0] == least


def test_a_format_that_another_outdoes_is_never_chosen() -> None:
    found = {"w": (Option(LOW, 10, 1.0), Option(LOW, 20, 0.9), Option(HIGH, 21, 0.1))}
    assert choose(found, 20)["w"].num_bytes == 10
    assert choose(found, 21)["w"].num_bytes == 21
    worse = {"w": (Option(LOW, 10, 0.5), Option(HIGH, 20, 0.6))}
    assert choose(worse, 99)["w"].num_bytes == 10


def test_a_small_linear_still_gets_what_a_large_one_leaves() -> None:
    found = {
        "large": (Option(LOW, 100, 10.0), Option(HIGH, 200, 0.0)),
        "small": (Option(LOW, 10, 0.2), Option(HIGH, 20, 0.0)),
    }
    chosen = choose(found, 150)
    assert (chosen["large"].num_bytes, chosen["small"].num_bytes) == (100, 20)


def test_what_is_measured_is_the_output_error_of_the_nearest_codes(
    tmp_path: Path, text: Path
) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="f32")
    found, calibration = mixed(source, text, "6")
    opened = open_source(source)
    recipe = new_recipe(opened, tmp_path / "out", method="rtn", target=LOW)
    for site in sites(opened, recipe, calibration):
        x = np.concatenate(site.values).astype(np.float64)
        for reader in site.readers:
            w = dequantize(reader.planned.tensor.load())
            for option, fmt in zip(found.options[reader.name], ("i4_g64", "i8_g64"), strict=True):
                data = encode(w, fmt, name="w")
                off = dequantize(QTensor(fmt, w.shape, data)) - w
                error = (np.linalg.norm(x @ off.T) / np.linalg.norm(x @ w.T)) ** 2
                assert option.error == pytest.approx(error, rel=1e-3)
                assert option.num_bytes == data.size


@pytest.mark.parametrize("budget", ["4.25", "5", "6.5", "8.25"])
def test_a_budget_of_bits_is_kept_and_used(tmp_path: Path, text: Path, budget: str) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    summary = mixed(source, text, budget)[0].summary()
    largest = 4 * 256 * 256 / (256 * 256 * 10)  # bits that a step of the widest linear takes
    assert float(budget) - largest <= summary["bits"] <= float(budget)
    kinds = set(summary["formats"].values())
    expected = {"4.25": {"int4"}, "8.25": {"int8"}}
    assert kinds == expected.get(budget, {"int4", "int8"})


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_every_method_writes_the_chosen_formats(tmp_path: Path, text: Path, method: str) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    found, _ = mixed(source, text, "6")
    opened, out = open_source(source), tmp_path / "out"
    calibrate = None if method == "rtn" else text
    chosen = build_method(method, opened, LOW, calibrate, 512 if calibrate else None)
    recipe = new_recipe(
        opened, out, method=method, target=LOW, settings={"mixed": found.summary()},
        rewritten=chosen.rewrites(opened), linears=found.targets,
    )  # fmt: skip
    quantize(opened, out, recipe, chosen, num_threads=2)
    tensors = open_checkpoint(out).tensors
    names = {"int4": "i4_g64", "int8": "i8_g64"}
    for name, option in found.chosen.items():
        assert tensors[name].format == names[option.target.format]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["mixed"]["formats"] == found.summary()["formats"]


def test_k_quants_are_mixed_too_and_written_into_a_gguf_file(tmp_path: Path, text: Path) -> None:
    source = write_gguf(model(), tmp_path / "m.gguf", fmt="f16")
    found, _ = mixed(source, text, "5.4", "q5_k")
    assert set(found.summary()["formats"].values()) == {"q4_k", "q5_k", "q6_k"}
    opened, out = open_source(source), tmp_path / "out.gguf"
    recipe = new_recipe(opened, out, method="rtn", target=Target("q4_k"), linears=found.targets)
    quantize(opened, out, recipe, build_method("rtn", opened, Target("q4_k")), num_threads=2)
    formats = {t.format for t in open_checkpoint(out).tensors.values()}
    assert {"q4_k", "q5_k", "q6_k"} <= formats


def test_a_linear_that_has_a_format_already_costs_nothing_there(tmp_path: Path, text: Path) -> None:
    source = write_gguf(model(), tmp_path / "m.gguf", fmt="q6_k")
    found, _ = mixed(source, text, "5", "q4_k")
    assert all(of[2].error == 0 < of[0].error for of in found.options.values())


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("4.2", r"mixed is 4.2 bits a weight, the least possible is 4.250"),
        ("100K", r"mixed is 100K, 102,400 bytes; the least possible is [0-9,]+, of which [0-9,]+"),
        ("0", "mixed is '0': give bits"), ("nan", "mixed is 'nan': give bits"),
        ("much", "'much' is no size"),
    ],
)  # fmt: skip
def test_budgets_that_cannot_be_met_are_refused(
    tmp_path: Path, text: Path, budget: str, message: str
) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    with pytest.raises(ParameterError, match=message):
        mixed(source, text, budget)


def test_the_least_possible_is_possible(tmp_path: Path, text: Path) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    with pytest.raises(ParameterError) as refused:
        mixed(source, text, "100K")
    least = str(refused.value).split("least possible is ")[1].split(", of")[0].replace(",", "")
    found, _ = mixed(source, text, least)
    assert set(found.summary()["formats"].values()) == {"int4"}
    with pytest.raises(ParameterError):
        mixed(source, text, str(int(least) - 1))


@pytest.mark.parametrize("fmt", ["fp8", "q4_0", "q8_0"])
def test_formats_that_are_not_mixed_are_refused(fmt: str) -> None:
    with pytest.raises(ParameterError, match=f"not beside {fmt}: name one"):
        candidates(parse_target(fmt, None, None))


def test_mixed_needs_a_text() -> None:
    with pytest.raises(ParameterError, match="mixed measures what rounding costs for a text"):
        check_method("rtn", None, None, None, is_mixed=True)
    check_method("rtn", Path("text"), 512, None, is_mixed=True)


def test_a_dry_run_lists_the_choice_and_writes_nothing(tmp_path: Path, text: Path) -> None:
    source = write_hf(model(), tmp_path / "source", fmt="bf16")
    arguments = [*COMMAND, str(source), "--format", "int4", "--mixed", "6", "--calibrate",
                 str(text), "--dry-run", "-o", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run([*arguments, "--json"], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["is_dry_run"]
    assert facts["mixed"]["bits"] <= 6
    assert facts["mixed"]["formats"].keys() == facts["mixed_errors"].keys()
    told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert "would have" in told
    assert "bits a weight on average" in told
    assert "model.layers.*.self_attn.v_proj.weight" in told
    assert not list(tmp_path.glob("out*"))
