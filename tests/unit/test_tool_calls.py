"""Calls found in what models write, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.tool_calls import CallArguments, CallBegun, Content, ToolReader
from paceline.text.tools import ToolStyle, arguments_key, call_grammar, described, tool_style

TAGGED, BARE = ToolStyle.TAGGED, ToolStyle.BARE
CALL = '{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": 2}]}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": 2}]}'

CASES = [
    # style, text, content, calls, has_only_whole_calls
    (TAGGED, "hello world \n", "hello world \n", [], False),
    (TAGGED, f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)], True),
    (TAGGED, f"<tool_call>{CALL}", "", [("f", ARGUMENTS)], True),
    (TAGGED, f"I will.\n<tool_call>{CALL}</tool_call>\n<tool_call>"
     '{"arguments":{"x":1},"name":"g"}</tool_call>\n', "I will.",
     [("f", ARGUMENTS), ("g", '{"x":1}')], True),
    (TAGGED, '<tool_call>{"name":"h","arguments":{}}</tool_call>',
     '<tool_call>{"name":"h","arguments":{}}</tool_call>', [], False),
    (TAGGED, "<tool_call>nonsense</tool_call> ok", "<tool_call>nonsense</tool_call> ok", [], False),
    (TAGGED, '<tool_call>{"name":"f","arguments":{"a": "lon', "", [("f", '{"a": "lon')], False),
    (TAGGED, f'<tool_call>{CALL}</tool_call><tool_call>{{"name":"g","arg', "",
     [("f", ARGUMENTS), ("g", "")], False),
    (TAGGED, '<tool_call>{"na', '<tool_call>{"na', [], False),
    (TAGGED, "a <tool_ca", "a <tool_ca", [], False),
    (TAGGED, '<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")], True),
    (TAGGED, '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "",
     [("f", '{"a":1}')], True),
    (TAGGED, '<tool_call>{"id": null, "name":"f","arguments":5}</tool_call>tail', "tail",
     [("f", "")], False),
    (BARE, '{"name": "f", "parameters": {"x": "é😀"}}', "", [("f", '{"x": "é😀"}')], True),
    (BARE, ' \n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a":1}}', "",
     [("f", "{}"), ("g", '{"a":1}')], True),
    (BARE, '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a":1}}]', "",
     [("f", "{}"), ("g", '{"a":1}')], True),
    (BARE, '{"answer": 5}', '{"answer": 5}', [], False),
    (BARE, "[1, 2]", "[1, 2]", [], False),
    (BARE, 'no {"name":"f"}', 'no {"name":"f"}', [], False),
]  # fmt: skip


def read(style, parts, max_calls=16):
    reader = ToolReader(style, frozenset("fg"), max_calls=max_calls)
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [[piece.name, ""] for piece in pieces if isinstance(piece, CallBegun)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    indices = [piece.index for piece in pieces if isinstance(piece, CallBegun)]
    assert indices == list(range(len(calls)))
    return content, [tuple(call) for call in calls], reader.has_only_whole_calls


@pytest.mark.parametrize(("style", "text", "content", "calls", "is_whole"), CASES)
def test_calls_and_words_are_told_apart(style, text, content, calls, is_whole):
    assert read(style, [text]) == (content, calls, is_whole)
    assert read(style, text) == (content, calls, is_whole)  # character by character


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_pieces_are_the_same_however_the_text_is_cut(data):
    style, text, *expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert read(style, parts) == tuple(expected)


def test_arguments_are_passed_on_before_the_call_is_over():
    reader = ToolReader(TAGGED, frozenset("f"), max_calls=1)
    assert reader.feed('Hm. <tool_call>{"name": "f", "arguments": {"te') == [
        Content("Hm."), CallBegun(0, "f"), CallArguments(0, '{"te'),
    ]  # fmt: skip
    assert reader.feed("xt") == [CallArguments(0, "xt")]


def test_no_more_calls_are_read_than_are_wanted():
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert read(TAGGED, [text], max_calls=1) == ("", [("f", ARGUMENTS)], True)


@pytest.mark.parametrize(
    ("style", "is_bound", "text", "content"),
    [(TAGGED, False, "Hm. <tool_ca", "Hm. "), (TAGGED, False, '<tool_call>{"na', ""),
     (TAGGED, True, "<", ""), (TAGGED, False, "a <", "a <"), (BARE, True, '{"na', ""),
     (BARE, False, '{"na', '{"na'), (TAGGED, False, "a b ", "a b ")],
)  # fmt: skip
def test_the_head_of_a_call_that_was_cut_is_no_content(style, is_bound, text, content):
    for parts in ([text], list(text)):
        reader = ToolReader(style, frozenset("f"), max_calls=1, is_bound=is_bound)
        pieces = [piece for part in parts for piece in reader.feed(part)]
        pieces += reader.finish(is_cut=True)
        assert "".join(piece.text for piece in pieces) == content


def test_a_cut_behind_a_whole_call_leaves_the_call():
    reader = ToolReader(TAGGED, frozenset("f"), max_calls=2, is_bound=True)
    pieces = reader.feed(f"<tool_call>{CALL}</tool_call>\n<tool")
    assert reader.finish(is_cut=True) == []
    assert "".join(p.text for p in pieces if isinstance(p, CallArguments)) == ARGUMENTS


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("template", "style", "key"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ToolStyle.DESCRIBED, "arguments"),
        ("{% if tools %}<tool_call>{% endif %}", TAGGED, "arguments"),
        ("{% if tools %}{{ '<|python_tag|>' }}{% endif %}", BARE, "parameters"),
        ("{% for t in tools %}{{ t }}{% endfor %}", BARE, "arguments"),
    ],
)
def test_the_template_tells_how_calls_are_written(template, style, key):
    assert (tool_style(template), arguments_key(template)) == (style, key)


def test_a_template_without_tools_is_told_of_them_in_words():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]  # fmt: skip
    system, user, assistant, result = described(messages, TOOLS, template="")
    assert system["role"] == "system"
    assert json.dumps(TOOLS[0]) in system["content"]
    assert user == messages[0]
    assert assistant == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert (result["role"], "5" in result["content"]) == ("user", True)
    assert messages[1]["tool_calls"]  # what the caller gave is left as it was


def test_a_template_that_writes_calls_itself_is_left_to_it():
    messages = [{"role": "tool", "tool_call_id": "1", "content": "5"}]
    template = "{% if message.role == 'tool' %}{{ message.content }}{% endif %}"
    assert described(messages, [], template=template) == messages
    assert described(messages, [], template="")[0]["role"] == "user"


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_system_turn_is_kept_and_added_to(content):
    [system] = described([{"role": "system", "content": content}], TOOLS, template="")
    text = content if isinstance(content, str) else content[0]["text"]
    added = system["content"]
    assert (added if isinstance(added, str) else added[0]["text"]).startswith(text)
    assert '"name": "f"' in (added if isinstance(added, str) else added[1]["text"])


def test_a_call_grammar_keeps_to_the_form_that_the_model_writes():
    tagged = call_grammar({"f": {}}, "tools <tool_call>", options={}, max_calls=2, must_call=True)
    assert '"<tool_call>"' in tagged
    bare = call_grammar({"f": {}}, "tools python_tag", options={}, max_calls=2, must_call=True)
    assert ("<tool_call>" in bare, '\\"parameters\\"' in bare) == (False, True)
