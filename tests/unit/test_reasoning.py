"""What a model thinks is told apart from what it says, however its text is cut."""

import json
import random

import numpy as np
import pytest

from paceline.server.errors import ApiError
from paceline.server.reasoning import template_variables
from paceline.server.schema import ChatRequest
from paceline.structured.reasoned import ReasonedState
from paceline.text.reasoning import Opening, ThinkTokens, ThoughtCount, ThoughtReader, opening_of

MAY_BEGIN, BEGUN, OVER = Opening.MAY_BEGIN, Opening.BEGUN, Opening.OVER
SWITCHED = "{{ enable_thinking }}</think>"
ALWAYS = "</think>"
PLAIN = "no thinking"


class Letters:
    """A character a token."""

    def token_bytes(self, token_id, *, skip_special=True):
        return chr(token_id).encode()

    def decode(self, ids, *, skip_special=True):
        return "".join(map(chr, ids))


def read(opening, pieces, *, is_cut=False):
    reader = ThoughtReader(opening)
    told = [reader.feed(piece) for piece in pieces] + [reader.finish(is_cut=is_cut)]
    return "".join(t for t, _ in told), "".join(s for _, s in told)


@pytest.mark.parametrize(
    ("opening", "text", "expected"),
    [
        (MAY_BEGIN, "<think>\nhm\n</think>\n\nYes.\n", ("hm", "Yes.\n")),
        (MAY_BEGIN, " \n<think>hm</think>Yes", ("hm", "Yes")),
        (MAY_BEGIN, "Yes <think>no</think>", ("", "Yes <think>no</think>")),
        (MAY_BEGIN, "\n\nYes", ("", "\n\nYes")),
        (MAY_BEGIN, "<thin air", ("", "<thin air")),
        (MAY_BEGIN, "<thi", ("", "<thi")),
        (MAY_BEGIN, "<think>\n\n</think>\n\nYes", ("", "Yes")),
        (MAY_BEGIN, "<think>a\n\nb </thin> < </think", ("a\n\nb </thin> < </think", "")),
        (BEGUN, "\nhm\n\n</think>\n\n</think>Yes", ("hm", "</think>Yes")),
        (BEGUN, "hm\n", ("hm", "")),
        (BEGUN, "", ("", "")),
        (OVER, "<think>\nhm</think>", ("", "<think>\nhm</think>")),
    ],
)
def test_thinking_and_words_are_the_same_however_the_text_is_cut(opening, text, expected):
    assert read(opening, [text]) == expected
    assert read(opening, text) == expected
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(opening, pieces) == expected


def test_half_a_marker_at_a_cut_is_in_neither():
    assert read(BEGUN, "hm </thi", is_cut=True) == ("hm ", "")
    assert read(BEGUN, "a <", is_cut=True) == ("a <", "")
    assert read(MAY_BEGIN, "<thi", is_cut=True) == ("", "")


def test_words_come_as_soon_as_they_are_no_marker():
    reader = ThoughtReader(BEGUN)
    assert reader.feed("a<") == ("a", "")
    assert reader.feed("b") == ("<b", "")
    assert reader.feed("</think>c") == ("", "c")
    assert reader.feed("d") == ("", "d")


@pytest.mark.parametrize(
    ("opening", "text", "num_tokens"),
    [(MAY_BEGIN, "<think>é</think>Yes", 16), (MAY_BEGIN, "Yes", 0), (MAY_BEGIN, "<thi", 0),
     (BEGUN, "hm</think>\nYes", 10), (BEGUN, "hm", 2), (OVER, "hm", 0)],
)  # fmt: skip
def test_tokens_of_a_block_are_counted_with_its_markers(opening, text, num_tokens):
    count = ThoughtCount(opening, Letters())
    for char in text:
        count.feed([ord(char)])
    assert count.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Hi\n", MAY_BEGIN), ("<think>\n", BEGUN), ("<think>\n\n</think>\n\n", OVER),
     ("a <think> b\n", MAY_BEGIN), ("", MAY_BEGIN)],
)  # fmt: skip
def test_the_end_of_a_prompt_says_where_its_answer_begins(prompt, expected):
    assert opening_of([ord(char) for char in "x" * 40 + prompt], Letters()) is expected


# ---- what is asked ----


def variables(template, **fields):
    return template_variables(ChatRequest(model="m", messages=[], **fields), template)


def test_thinking_is_switched_by_the_templates_variable():
    assert variables(SWITCHED, chat_template_kwargs={"enable_thinking": True}) == {
        "enable_thinking": True
    }
    assert variables(SWITCHED, reasoning_effort="none") == {"enable_thinking": False}
    assert variables(SWITCHED) == {}
    assert variables("reasoning_effort", reasoning_effort="high") == {"reasoning_effort": "high"}


def test_what_a_model_does_anyway_is_accepted():
    assert variables(PLAIN, reasoning_effort="none") == {}
    assert variables(PLAIN, chat_template_kwargs={"enable_thinking": False}) == {}
    assert variables(ALWAYS, chat_template_kwargs={"enable_thinking": True}) == {}
    assert variables(ALWAYS, thinking_token_budget=5) == {}


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (ALWAYS, {"reasoning_effort": "none"}, "reasoning_effort"),
        (SWITCHED, {"reasoning_effort": "high"}, "reasoning_effort"),
        (PLAIN, {"reasoning_effort": "low"}, "reasoning_effort"),
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": True}},
         "chat_template_kwargs.enable_thinking"),
        (ALWAYS, {"chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs.enable_thinking"),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": 1}},
         "chat_template_kwargs.enable_thinking"),
        (SWITCHED, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
         "reasoning_effort"),
        (PLAIN, {"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_refused_by_name(template, fields, param):
    with pytest.raises(ApiError) as caught:
        variables(template, **json.loads(json.dumps(fields)))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value).startswith(param)


# ---- structures ----


class Inner:
    """Allows token 5 alone, which ends it."""

    def fill(self, mask):
        mask[:] = 0
        mask[0] |= 1 << 5

    def forced(self, limit):
        return [5]

    def commit(self, token_id):
        return token_id == 5


def allowed(state, size=64):
    mask = np.zeros(size // 32, np.uint32)
    state.fill(mask)
    return {i for i in range(size) if mask[i // 32] >> (i % 32) & 1}


def reasoned(opening, *, inner=True, budget=None):
    return ReasonedState(
        Inner() if inner else None, opening, ThinkTokens(40, 41), np.asarray([7]), budget
    )


def test_a_structure_binds_behind_the_thinking_alone():
    state = reasoned(MAY_BEGIN)
    assert allowed(state) == {5, 40}
    assert state.forced(4) == []
    assert not state.commit(40)
    assert allowed(state) == set(range(64)) - {7}
    assert not state.commit(5)
    assert state.forced(4) == []
    assert not state.commit(41)
    assert allowed(state) == {5}
    assert state.forced(4) == [5]
    assert state.commit(5)


def test_an_answer_that_begins_with_words_is_bound_at_once():
    assert reasoned(MAY_BEGIN).commit(5)
    assert allowed(reasoned(BEGUN)) == set(range(64)) - {7}


def test_a_budget_closes_the_block():
    state = reasoned(BEGUN, inner=False, budget=2)
    for token_id in (1, 2):
        assert allowed(state) == set(range(64)) - {7}
        assert not state.commit(token_id)
    assert allowed(state) == {41}
    assert not state.commit(41)
    assert allowed(state) == set(range(64))
    assert not state.commit(7)
