"""Each field of a message has a meaning, asks for nothing, or is refused by its path."""

import pytest

from paceline.server.conversation import check_messages
from paceline.server.errors import ApiError

THINKING = "{{ message.reasoning_content }}"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(**fields):
    return {"role": "user", "content": "Hi", **fields}


def assistant(**fields):
    return {"role": "assistant", "content": "Hello", **fields}


def refused(*messages, template=""):
    with pytest.raises(ApiError) as caught:
        check_messages(messages, template=template)
    assert caught.value.status == 400
    assert str(caught.value).startswith(str(caught.value.param))
    return caught.value


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (user(foo=1), "foo"),
        (user(tool_call_id="1"), "tool_call_id"),
        (user(tool_calls=[CALL]), "tool_calls"),
        (user(name=5), "name"),
        ({"role": "system", "content": "x", "weight": 0}, "weight"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "tool", "content": "x", "is_error": False}, "is_error"),
        (assistant(refusal="No."), "refusal"),
        (assistant(annotations=[{"type": "url_citation"}]), "annotations"),
        (assistant(audio={"id": "a"}), "audio"),
        (assistant(function_call={"name": "f", "arguments": "{}"}), "function_call"),
        (assistant(reasoning="Hm."), "reasoning"),
        (assistant(reasoning_content="Hm."), "reasoning_content"),
        (assistant(reasoning_content=["Hm."]), "reasoning_content"),
        (assistant(prefix=True), "prefix"),
        (assistant(tool_calls=[{**CALL, "custom": {}}]), "tool_calls[0].custom"),
        (assistant(tool_calls=[CALL, {**CALL, "type": "custom"}]), "tool_calls[1].type"),
        (assistant(tool_calls=[{**CALL, "function": {"name": "f", "x": 1}}]),
         "tool_calls[0].function.x"),
        (user(content=[{"type": "text", "text": "a", "detail": "low"}]), "content[0].detail"),
        (user(content=[{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "a", "b": 1}]),
         "content[1].b"),
        (user(content=[{"type": "text", "text": "a", "cache_control": {"type": "forever"}}]),
         "content[0].cache_control.type"),
        (user(content=[{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}]),
         "content[0].prompt_cache_breakpoint.mode"),
    ],
)  # fmt: skip
def test_a_field_without_a_meaning_is_refused_by_its_path(message, field):
    assert refused(user(), message).param == f"messages[1].{field}"


@pytest.mark.parametrize(
    "message",
    [
        user(name="Ann", foo=None),
        {"role": "developer", "content": "x", "name": "ops"},
        {"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"},
        assistant(
            refusal=None, annotations=[], audio=None, function_call=None, tool_calls=[],
            reasoning_content="", reasoning=None, provider_specific_fields={}, images=[],
        ),
        assistant(content=None, tool_calls=[{**CALL, "index": 0}]),
        assistant(parsed={"a": 1}, tool_calls=[
            {**CALL, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
        ]),
        user(content=["a", {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
        assistant(content=[{"type": "output_text", "text": "a", "annotations": [],
                            "logprobs": []}]),
        user(content=[{"type": "input_text", "text": "a",
                       "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}]),
    ],
)  # fmt: skip
def test_what_clients_send_back_of_replies_is_accepted(message):
    check_messages([user(), message], template="")


def test_thinking_is_accepted_where_the_template_reads_it():
    message = assistant(reasoning_content="Hm.")
    check_messages([message], template=THINKING)
    assert refused(message).code == "unsupported_parameter"


@pytest.mark.parametrize("message", [{}, {"role": "bogus", "x": 1}, {"role": [1]}, user(content=5)])
def test_what_templates_refuse_is_left_to_them(message):
    check_messages([message], template="")
