"""What is wrong with a body is told by field, value and remedy."""

import pytest

from paceline.server.errors import ApiError
from paceline.server.messages.schema import MessageRequest
from paceline.server.schema import ChatRequest, CompletionRequest, converted

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
         "a key of logit_bias: it must be an integer"),
        (ChatRequest, {**CHAT, "logit_bias": {"5": "x"}},
         "logit_bias[...]: it must be a number"),
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
