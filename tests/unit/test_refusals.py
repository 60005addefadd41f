"""What is wrong with a body is told by field, value and remedy."""

import json

import pytest

from paceline.server.errors import ApiError
from paceline.server.messages.schema import MessageRequest
from paceline.server.responses.schema import ResponseRequest
from paceline.server.schema import ChatRequest, CompletionRequest, converted, parse
from paceline.server.texts import split_texts

CHAT = {"model": "m", "messages": []}
MESSAGE = {"model": "m", "messages": [], "max_tokens": 5}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ChatRequest, {**CHAT, "service_tier": "gold"},
         "service_tier is 'gold': it must be one of auto, default, flex, priority"),
        (ChatRequest, {**CHAT, "tool_choice": "some"},
         "tool_choice is 'some': it must be one of auto, none, required"),
        (ChatRequest, {**CHAT, "response_format": {"type": "xml"}},
         "response_format.type is 'xml': it must be one of text, json_object, json_schema"),
        (ChatRequest, {**CHAT, "response_format": "xml"},
         "response_format is 'xml': it must be an object or null"),
        (ChatRequest, {**CHAT, "tools": [{"type": "code", "function": {"name": "f"}}]},
         "tools[0].type is 'code': it must be 'function'"),
        (ChatRequest, {**CHAT, "stop": ["x"] * 65},
         "stop is a list of 65: it must be a list of at most 64 items"),
        (ChatRequest, {**CHAT, "cache_salt": ""},
         "cache_salt is '': it must be a string of at least 1 characters"),
        (ChatRequest, {**CHAT, "deadline_ms": 0},
         "deadline_ms is 0: it must be a number above 0"),
        (ChatRequest, {**CHAT, "logit_bias": {"x": 1}},
         "logit_bias has the key 'x': it must be an integer"),
        (ChatRequest, {**CHAT, "logit_bias": {"5": "x"}},
         "logit_bias.5 is 'x': it must be a number"),
        (ChatRequest, {**CHAT, "logit_bias": {"5": 1, "6": True}},
         "logit_bias.6 is true: it must be a number"),
        (ChatRequest, {**CHAT, "deadline_ms": 10**400},
         f"deadline_ms is 1{'0' * 79}: it must be a number below 1.8e308 in size"),
        (ChatRequest, {**CHAT, "": 1}, "the body has a field without a name: leave it out"),
        (ChatRequest, {**CHAT, "stream_options": {"": 1}},
         "stream_options has a field without a name: leave it out"),
        (ResponseRequest, {"model": "m", "input": "a", "metadata": {"a": "b", "c": 5}},
         "metadata.c is 5: it must be a string"),
        (ResponseRequest, {"model": "m", "input": "a",
                           "metadata": dict.fromkeys("abcdefghijklmnopq", "")},
         "metadata is an object of 17: it must be an object of at most 16 fields"),
        (ChatRequest, {**CHAT, "structured_outputs": {"choice": []}},
         "structured_outputs.choice is a list of 0: it must be a list of at least 1 items"),
        (ChatRequest, {**CHAT, "n": True}, "n is true: it must be an integer or null"),
        (ChatRequest, [], "the body is a list of 0: it must be an object"),
        (CompletionRequest, {"model": "m", "prompt": {}},
         "prompt is an object: it must be a string or a list"),
        (MessageRequest, {**MESSAGE, "max_tokens": 0},
         "max_tokens is 0: it must be an integer of at least 1"),
        (MessageRequest, {**MESSAGE, "messages": [{"role": "tool", "content": "x"}]},
         "messages[0].role is 'tool': it must be one of assistant, system, user"),
        (MessageRequest, {**MESSAGE, "tools": [{"name": "a b", "input_schema": {}}]},
         "tools[0].name is 'a b': it must be a string that matches ^[a-zA-Z0-9_-]{1,128}$"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_what_it_must_be(kind, fields, message):
    with pytest.raises(ApiError) as refused:
        converted(fields, kind)
    assert str(refused.value) == message


def test_a_value_is_shown_by_its_beginning_and_named_within_the_body():
    with pytest.raises(ApiError) as refused:
        converted("x" * 10_000, int, within="metadata")
    assert refused.value.param == "metadata"
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("store", True, "store is true, which this server does not support: leave it out, or send "
         "false"),
        ("function_call", {"name": "f"}, "is an object, which this server does not support: leave "
         'it out, or send "none" or "auto"'),
        ("modalities", ["audio"], 'is a list of 1, which this server does not support: leave it '
         'out, or send ["text"]'),
        ("prediction", {}, "is an object, which this server does not support: leave it out"),
    ],
)  # fmt: skip
def test_a_neutral_field_is_told_with_the_values_that_it_may_have(field, value, remedy):
    with pytest.raises(ApiError) as refused:
        parse(json.dumps({**CHAT, field: value}).encode(), ChatRequest)
    assert str(refused.value).endswith(remedy)
    assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("reasoning", [{}, {"effort": "none"}, {"effort": None, "summary": None}],
         [{"effort": "most"}, {"effort": "none", "summary": "auto"}, "none", []]),
        ("top_logprobs", [0], [False, 1, ""]),
    ],
)  # fmt: skip
def test_a_neutral_value_is_one_that_asks_for_nothing(field, good, bad):
    def read(value):
        return parse(
            json.dumps({"model": "m", "input": "a", field: value}).encode(), ResponseRequest
        )

    for value in good:
        read(value)
    for value in bad:
        with pytest.raises(ApiError):
            read(value)


def test_a_number_beyond_the_floats_is_no_broken_json():
    for number in ("1e400", "1" + "0" * 5000):
        with pytest.raises(ApiError, match="too large: send numbers below"):
            parse(b'{"model": "m", "messages": [], "temperature": %b}' % number.encode(),
                  ChatRequest)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([5, "a"], "prompt[1] is 'a': it must be a token id, as prompt[0] is"),
        ([5, True], "prompt[1] is true: it must be a token id, as prompt[0] is"),
        (["a", 5], "prompt[1] is 5: it must be a string or a list of token ids"),
        ([[5, "a"]], "prompt[0] is a list of 2: it must be a string or a list of token ids"),
        (["a", []], "prompt[1] is empty: send text or token ids"),
        ([], "prompt is empty: send text or token ids"),
        (["a"] * 4, "prompt holds 4 texts: send at most 3"),
    ],
)  # fmt: skip
def test_texts_that_are_none_are_told_by_their_place(given, message):
    with pytest.raises(ApiError) as refused:
        split_texts(given, param="prompt", most=3)
    assert (str(refused.value), refused.value.param) == (message, "prompt")
