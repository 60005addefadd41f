"""The price list without a process: what is asked for, in which order, and what the figures say."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.bench.terminal import report_console
from paceline.cli.price_text import print_prices
from paceline.errors import (
    OutputError,
    PacelineError,
    ParameterError,
    UnsupportedModelError,
)
from paceline.evaluate.state import State
from paceline.price import run as price_run
from paceline.price.candidates import Candidate, disk_bytes, parse_kv, parse_weights
from paceline.price.report import document_of, fronts
from paceline.price.run import Load, PriceList, Quality
from paceline.price.speed import Spec, engine_config
from paceline.price.svg import draw
from tests.tiny import random_model, write_gguf
from tests.tiny_bert import write_bert

METHODS = ("rtn", "gptq")
LOAD = Load(batches=(1, 4), input_tokens=8, output_tokens=4, rounds=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(random_model(vocab_size=320), tmp_path_factory.mktemp("m") / "m.gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "t.txt"
    path.write_text("the cat sat")
    return path


class Children:
    """Stands in for the processes: makes folders, invents figures, and notes what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.read: list[list[str]] = []
        self.timed: list[tuple[str, str]] = []
        self.fails_at: int | None = None
        monkeypatch.setattr(price_run, "run_command", self.run_command)
        monkeypatch.setattr(price_run, "run_speed", self.run_speed)

    def run_command(self, arguments: list[str], what: str) -> dict[str, Any]:
        if arguments[0] == "quantize":
            out = Path(arguments[arguments.index("-o") + 1])
            out.mkdir()
            (out / "model.safetensors").write_bytes(bytes(1000))
            self.made.append(" ".join(arguments[4:]))
            return {}
        self.read.append(arguments)
        kl = 0.2 if "int4" in arguments[1] else 0.001
        figure = {"value": kl, "low": kl / 2, "high": 2 * kl}
        share = {"value": 0.5, "low": 0.25, "high": 0.75}
        read = {"perplexity": figure, "perplexity_ratio": figure, "kl_mean": figure,
                "top1": share, "num_scored": 7}  # fmt: skip
        answers = {"pass_at_1": share, "num_items": 2}
        return {"text": read, "generation": {"model": {"humaneval": answers}}}

    def run_speed(self, spec: str, what: str) -> dict[str, Any]:
        if len(self.timed) == self.fails_at:
            raise PacelineError("the machine went away")
        found = msgspec.json.decode(spec, type=Spec)
        name = "int4" if "int4" in found.path else "source"
        self.timed.append((name, found.kv_dtype))
        speed = {"int4": 200.0, "source": 100.0}[name] + len(self.timed)
        batches = [
            {"batch": size, "ttft_s": 0.5, "prefill_tokens_per_s": 10.0,
             "decode_tokens_per_s": size * speed}
            for size in found.batches
        ]  # fmt: skip
        return {"batches": batches, "resident_bytes": 9000, "weight_bytes": 1000, "kv_bytes": 200,
                "isa": "scalar", "num_threads": 1}  # fmt: skip


def listed(
    source: Path, work: Path, text: Path | None, weights: tuple[str, ...] = ("source", "int4:64"),
    **quality: Any,
) -> PriceList:  # fmt: skip
    candidates = [
        Candidate(weights=w, kv_dtype=kv)
        for w in parse_weights(weights, source, METHODS)
        for kv in ("f16", "int8")
    ]
    return PriceList(
        source, candidates, quality=Quality(text=text, **quality), load=LOAD, calibrate=None,
        work=work,
    )  # fmt: skip


def priced(prices: PriceList) -> dict[str, Any]:
    with State(prices.state_path, prices.identity) as state:
        return document_of("m", prices, prices.run(state, lambda what, done, total: None))


def test_weights_are_formats_methods_and_paths(source: Path) -> None:
    items = ["source", "int4:64:asym", "gptq/int8:128", "q4_k", str(source), "source"]
    found = parse_weights(items, source, METHODS)
    assert [w.name for w in found] == items[:-1]
    assert (found[0].path, found[4].path) == (source, source)
    assert found[1].arguments() == [
        "--method",
        "rtn",
        "--format",
        "int4",
        "--group",
        "64",
        "--asym",
    ]
    assert found[2].arguments() == ["--method", "gptq", "--format", "int8", "--group", "128"]
    assert found[3].arguments() == ["--method", "rtn", "--format", "q4_k"]


def test_a_model_that_is_called_like_a_format_is_that_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "q4_k").mkdir()
    assert parse_weights(["mine/q4_k"], source, METHODS)[0].path == Path("mine/q4_k")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("int5", "'int5' is neither a format nor a model on this disk"),
        ("", "'' is neither"),
        ("awqq/int4", "asks for method 'awqq': choose rtn, gptq"),
        ("int4:100", "group is '100'"),
        ("int4:64:32", "too many parts"),
        ("q4_k:64", "q4_k has groups of its own"),
        ("fp8:64:asym", "fp8 has a sign and no minimum"),
    ],
)
def test_weights_that_cannot_be_made_are_refused_by_name(
    source: Path, item: str, message: str
) -> None:
    with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
        parse_weights([item], source, METHODS)


def test_an_unknown_kv_format_is_refused_and_each_is_taken_once() -> None:
    assert parse_kv("int8, f16,int8") == ["int8", "f16"]
    with pytest.raises(ParameterError, match="KV format is 'int3'"):
        parse_kv("f16,int3")


def test_rounds_go_over_all_candidates_in_turn_and_back(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(monkeypatch)
    priced(listed(source, tmp_path / "work", text))
    first, second = children.timed[:4], children.timed[4:]
    assert first == [("source", "f16"), ("source", "int8"), ("int4", "f16"), ("int4", "int8")]
    assert second == first[::-1]
    assert children.made == ["--method rtn --format int4 --group 64 --json"]


def test_quality_is_against_the_source_over_an_exact_cache(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(monkeypatch)
    prices = listed(source, tmp_path / "work", text, windows=3, humaneval=True, problems=2)
    row = priced(prices)["candidates"][3]
    assert (row["text"]["num_scored"], row["humaneval"]["num_items"]) == (7, 2)
    reading, asking = (" ".join(found) for found in children.read[6:])
    for part in (f"--against {source} --against-kv-dtype f32", "--limit 3", "--kv-dtype int8"):
        assert part in reading
    assert "--humaneval --allow-code-execution --limit 2" in asking
    assert "--kv-dtype int8" in asking


def test_a_run_that_failed_goes_on_and_measures_nothing_twice(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(monkeypatch)
    children.fails_at = 5
    with pytest.raises(PacelineError, match="went away"):
        priced(listed(source, tmp_path / "work", text))
    children.fails_at = None
    priced(listed(source, tmp_path / "work", text))
    assert (len(children.made), len(children.read), len(children.timed)) == (1, 4, 8)


def test_a_candidate_that_is_added_later_is_all_that_is_measured(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(monkeypatch)
    priced(listed(source, tmp_path / "work", text, ("source",)))
    before = len(children.timed)
    document = priced(listed(source, tmp_path / "work", text))
    assert children.timed[before:] == [("int4", dtype) for dtype in ("f16", "int8", "int8", "f16")]
    assert [row["weights"] for row in document["candidates"]] == ["source"] * 2 + ["int4:64"] * 2


def test_figures_are_medians_over_rounds_with_their_ends(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Children(monkeypatch)
    row = priced(listed(source, tmp_path / "work", text))["candidates"][0]
    one, four = row["speed"]
    # The source with an f16 cache is timed first and last, as calls 1 and 8.
    assert one["decode_tokens_per_s"] == {"median": 104.5, "low": 101, "high": 108}
    assert one["tpot_s"]["median"] == pytest.approx((1 / 101 + 1 / 108) / 2)
    assert four["tpot_s"]["median"] == pytest.approx(one["tpot_s"]["median"])
    assert row["memory"]["other_bytes"] == 9000 - 1000 - 200
    assert row["disk_bytes"] == source.stat().st_size


def test_a_front_has_those_that_none_beats_on_both_axes() -> None:
    def row(name: str, speed: float, kl: float | None) -> dict[str, Any]:
        figure = {"median": speed}
        text = None if kl is None else {"kl_mean": {"value": kl}}
        return {"name": name, "text": text, "speed": [{"decode_tokens_per_s": figure}]}

    rows = [
        row("exact", 10, 0.0), row("fast", 30, 0.3), row("slow and bad", 9, 0.1),
        row("as fast, worse", 30, 0.4), row("between", 20, 0.1), row("unread", 99, None),
        row("twin", 20, 0.1),
    ]  # fmt: skip
    speed = fronts(1)[1]
    assert speed.members(rows) == ["exact", "fast", "between", "twin"]


def test_the_table_and_the_picture_name_every_candidate(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    Children(monkeypatch)
    document = priced(listed(source, tmp_path / "work", text, humaneval=True))
    assert Path(document["candidates"][2]["path"]).parent == tmp_path / "work" / "models"
    print_prices(document, report_console())
    shown = capsys.readouterr().out
    for part in (
        "int4:64",
        "decode tok/s at 1/4",
        "50.0 (25.0 to 75.0)",
        "memory, speed",
        "kept in",
    ):
        assert part in shown
    picture = draw(document)
    root = ET.fromstring(picture)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("int4:64") == 4  # two KV formats in two charts
    assert "prefers-color-scheme:dark" in picture


def test_names_are_text_in_the_picture(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Children(monkeypatch)
    document = priced(listed(source, tmp_path / "work", text))
    document["model"] = '<script>"&'
    ET.fromstring(draw(document))


def test_a_model_that_writes_no_text_is_told_before_anything_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(monkeypatch)
    encoder = write_bert(tmp_path / "bert")
    with pytest.raises(UnsupportedModelError, match="bert embeds texts and writes none"):
        listed(encoder, tmp_path / "work", None)
    with pytest.raises(UnsupportedModelError, match="bert embeds texts and writes none"):
        listed(source, tmp_path / "work", None, ("int4:64", str(encoder)))
    assert not children.made


def test_a_disk_without_room_is_told_before_anything_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(monkeypatch)
    monkeypatch.setattr(price_run, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(OutputError, match=r"1 candidates take .* name fewer --weights"):
        priced(listed(source, tmp_path / "work", None))
    assert not children.made


def test_the_pool_holds_the_widest_batch_and_no_more() -> None:
    spec = Spec(
        path="m", kv_dtype="int8", batches=(1, 3), input_tokens=20, output_tokens=13,
        num_threads=None, seed=0,
    )  # fmt: skip
    config = engine_config(spec, block_bytes=100)
    assert (config.kv_memory_bytes, config.max_num_seqs) == (3 * 3 * 100, 3)
    assert (config.max_model_len, config.kv_dtype) == (33, "int8")


def test_disk_bytes_are_of_what_a_model_is_loaded_from(tmp_path: Path) -> None:
    files = {"a.safetensors": 10, "config.json": 3, "paceline.packed": 99, "pytorch_model.bin": 99}
    for name, size in files.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert disk_bytes(tmp_path) == 13
