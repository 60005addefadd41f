"""Evaluation without a model: state, intervals, loops, files of tasks, programs from answers."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import OutputError, ParameterError
from paceline.evaluate.figures import clustered_mean, exponential
from paceline.evaluate.humaneval import Problem, program, read_problems
from paceline.evaluate.loops import MIN_TOKENS, loop_period
from paceline.evaluate.needle import haystack, hidden
from paceline.evaluate.state import State, default_path
from paceline.evaluate.tasks import last_number, read_tasks
from paceline.evaluate.text import compare


def test_a_state_gives_back_the_very_floats_and_drops_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.jsonl"
    values = [0.1 + 0.2, 1e-300, 2 / 3]
    with State(path, {"text": "a"}) as state:
        state.put("one", values)
        state.put("two", {"loop": None})
    with path.open("ab") as file:
        file.write(b'{"key": "three", "val')
    with State(path, {"text": "a"}) as state:
        assert state.num_resumed == 2
        assert state["one"] == values
        assert "three" not in state
        state.put("three", 3)
    with State(path, {"text": "a"}) as state:
        assert state["three"] == 3
        state.remove()
    assert not path.exists()


def test_a_state_of_other_work_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    with State(path, {"text": "a", "version": 1}):
        pass
    with (
        pytest.raises(ParameterError, match="differs in text"),
        State(path, {"text": "b", "version": 1}),
    ):
        pass
    for text in ("a book\n", "a book", '{"a": 1}\n{"b"'):
        path.write_text(text)
        with pytest.raises(ParameterError, match="is no state"), State(path, {"text": "a"}):
            pass
        assert path.read_text() == text
    assert default_path({"text": "a"}) != default_path({"text": "b"})


def test_two_runs_do_not_share_a_state(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    with State(path, {}), pytest.raises(OutputError, match="another run"), State(path, {}):
        pass


def test_an_interval_covers_the_truth_where_neighbours_are_alike() -> None:
    """Windows with levels of their own: an interval over single tokens would miss most."""
    rng = np.random.default_rng(0)
    num_covered = 0
    for _ in range(300):
        levels = rng.normal(size=(20, 1))
        groups = (levels + 0.3 * rng.normal(size=(20, 50))).tolist()
        figure = clustered_mean(groups)
        assert figure.low is not None
        assert figure.high is not None
        num_covered += figure.low <= 0 <= figure.high
    assert 270 <= num_covered <= 298


def test_groups_weigh_by_their_tokens_and_one_group_bounds_nothing() -> None:
    assert clustered_mean([[1.0, 1.0, 1.0], [5.0]]).value == 2.0
    alone = exponential(clustered_mean([[0.0, 0.0]]))
    assert (alone.value, alone.low, alone.high) == (1.0, None, None)


def test_figures_of_rows_are_those_of_their_definitions() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]], np.float32))
    model = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]], np.float32))
    rows = compare([model, reference], [0, 2])
    np.testing.assert_allclose(rows["loss"], -np.log([0.25, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(rows["reference_loss"], -np.log([0.5, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(rows["kl"], [0.25 * np.log(2), 0], atol=1e-6)
    assert rows["top1"].tolist() == [0, 1]
    assert sorted(compare([model], [0, 2])) == ["loss"]


def test_top5_is_the_share_of_the_five_best_in_common() -> None:
    reference = np.arange(10, dtype=np.float32)[None]
    model = reference.copy()
    model[0, [0, 9]] = model[0, [9, 0]]
    assert compare([model, reference], [1])["top5"].tolist() == [0.8]


def test_logits_that_are_no_numbers_end_the_evaluation() -> None:
    with pytest.raises(ParameterError, match="no numbers"):
        compare([np.full((1, 4), np.nan, np.float32)], [0])


@pytest.mark.parametrize("period", [1, 3, 8, 20, 64])
def test_a_cycle_at_the_end_is_found_with_its_period(period: int) -> None:
    start = list(range(1000, 1050))
    cycle = list(range(period))
    whole = start + cycle * max(4, -(-MIN_TOKENS // period))
    assert loop_period(whole) == period
    assert loop_period([*whole, *cycle[: period // 2]]) == period
    assert loop_period([*whole, 7777]) is None


def test_text_that_repeats_a_little_is_no_loop() -> None:
    assert loop_period([]) is None
    assert loop_period([5] * (MIN_TOKENS - 1)) is None
    assert loop_period([*range(20)] * 3) is None
    rng = random.Random(0)
    assert loop_period([rng.randrange(4) for _ in range(500)]) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 boxes make 1,234.50 in all.", "1234.50"),
        ("#### -7", "-7"),
        ("so 12, then 8.", "8"),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text_counts(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def write_lines(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_an_answer_is_an_index_a_letter_or_a_choice(tmp_path: Path) -> None:
    item = {"question": "q", "choices": ["x", "y", "z"]}
    lines = [{**item, "answer": answer} for answer in (1, "C", "x")]
    path = write_lines(tmp_path / "t.jsonl", *lines, {"question": "q", "answer": "#### 1,000"})
    found = read_tasks(path, None)
    assert [choice.right for choice in found.choices] == [1, 2, 0]
    assert found.numbers[0].number == 1000
    assert len(read_tasks(path, 2).choices) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"choices": ["a", "b"], "answer": 0}, "'question' is missing"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "answer is 2"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "answer is True"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "two texts or more"),
        ({"question": "q", "answer": "many"}, "it has no number"),
        ({"question": "", "answer": "1"}, "question is ''"),
    ],
)
def test_a_bad_task_is_refused_with_its_line(
    tmp_path: Path, line: dict[str, object], message: str
) -> None:
    good = {"question": "q", "answer": "1"}
    with pytest.raises(ParameterError, match="line 2: ") as caught:
        read_tasks(write_lines(tmp_path / "t.jsonl", good, line), None)
    assert message in str(caught.value)


PROBLEM = Problem(
    prompt="import math\n\n\ndef area(r):\n    '''Area.'''\n",
    entry_point="area",
    test="def check(candidate):\n    assert round(candidate(1), 2) == 3.14\n",
)


@pytest.mark.parametrize(
    ("answer", "is_chat"),
    [
        ("    return math.pi * r * r\n", False),
        ("Here:\n```python\ndef area(r):\n    return math.pi * r * r\n```\nDone.", True),
        ("```python\ndef area(r):\n    return math.pi * r * r\n", True),
        ("```\n    return math.pi * r * r\n```", True),
    ],
)
def test_an_answer_becomes_a_program_that_tests_it(answer: str, is_chat: bool) -> None:
    exec(program(PROBLEM, answer, is_chat=is_chat), {})
    with pytest.raises(AssertionError):
        exec(program(PROBLEM, answer.replace("pi", "e"), is_chat=is_chat), {})


def test_a_file_of_no_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"line 1 is no problem.*entry_point"):
        read_problems(write_lines(tmp_path / "p.jsonl", {"prompt": "def f():"}), None)


def test_a_needle_lies_where_it_is_told() -> None:
    sentences = haystack(random.Random(1), 10)
    assert hidden(sentences, 12345, 0).startswith("The secret number of the lighthouse is 12345.")
    assert hidden(sentences, 12345, 100).endswith("12345.")
    half = hidden(sentences, 12345, 50)
    assert half.index("12345") > half.index(sentences[4])
    assert half.index("12345") < half.rindex(sentences[5])
