"""Every parameter of a chat, alone and beside others: it works, or a 400 names it."""

import pytest

from tests.e2e.live import parse_events
from tests.e2e.test_tools import HI, WEATHER

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
BESIDE = {
    "alone": {}, "stream": {"stream": True}, "n": {"n": 2}, "tools": {"tools": [WEATHER]},
    "schema": {"response_format": FORMAT},
}  # fmt: skip
# What is sent, and the field that a refusal may name where the model cannot do it.
PARAMETERS = {
    "n": {"n": 2}, "stop": {"stop": ["L", "x", "y", "z", "q"]},
    "stop_token_ids": {"stop_token_ids": [76]},
    "max_tokens": {"max_tokens": 3}, "max_completion_tokens": {"max_completion_tokens": 3},
    "temperature": {"temperature": 0.5}, "top_p": {"top_p": 0.5}, "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.1}, "typical_p": {"typical_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5}, "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"76": -1}}, "bad_words": {"bad_words": ["LO"]},
    "seed": {"seed": 1},
    "logprobs": {"logprobs": True}, "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "stream_options": {"stream_options": {"include_usage": True}},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a{1,3}"}},
    "tools": {"tools": [WEATHER]}, "tool_choice": {"tools": [WEATHER], "tool_choice": NAMED},
    "parallel_tool_calls": {"parallel_tool_calls": False}, "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 2}, "deadline_ms": {"deadline_ms": 60_000},
    "user": {"user": "u"}, "metadata": {"metadata": {"a": "b"}},
    "service_tier": {"service_tier": "flex"}, "priority": {"priority": 1},
    "prompt_cache_key": {"prompt_cache_key": "k"}, "cache_salt": {"cache_salt": "s"},
    "reasoning_effort": {"reasoning_effort": "none"}, "timings": {"timings": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "skip_special_tokens": {"skip_special_tokens": False},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "temprature": {"temprature": 1},
}  # fmt: skip
REFUSED = {"chat_template_kwargs", "thinking_token_budget", "temprature"}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_works_or_is_refused_by_its_name(server, name, beside):
    body = {"max_tokens": 12, "messages": HI, **BESIDE[beside], **PARAMETERS[name]}
    if "max_completion_tokens" in body:
        del body["max_tokens"]
    response = server.post(CHAT, **body)
    if name in REFUSED or (beside == "alone" and name != "stream_options"):
        assert response.status_code == (400 if name in REFUSED else 200), response.text
    if response.status_code == 400:
        named = response.json()["error"]["param"]
        assert named is not None
        assert named.split(".")[0].split("[")[0] in (name, *body)
        return
    assert response.status_code == 200, response.text
    if body.get("stream"):
        events = parse_events(response.content)
        assert events[-1] == "[DONE]"
        assert not any("error" in event for event in events[:-1])
    else:
        assert len(response.json()["choices"]) == body.get("n", 1)


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, "HELO"), ({"stop": ["x", "y", "z", "q", "LO"]}, "HE"), ({"max_tokens": 3}, "HEL"),
        ({"max_completion_tokens": 2}, "HE"), ({"stop_token_ids": [ord("L")]}, "HE"),
        ({"stop": "L", "include_stop_str_in_output": True}, "HEL"),
        ({"structured_outputs": {"regex": "HEL"}}, "HEL"),
        ({"logit_bias": {str(ord("E")): -100}, "structured_outputs": {"choice": ["HE", "HX"]}},
         "HX"),
        ({"bad_words": ["X"], "structured_outputs": {"choice": ["HY", "HX"]}}, "HY"),
    ],
)  # fmt: skip
def test_a_parameter_has_its_effect_whole_and_streamed(server, fields, content):
    body = {"temperature": 0, **fields}
    for n in (1, 2):
        answer = server.chat(n=n, **body)
        assert [c["message"]["content"] for c in answer["choices"]] == [content] * n
    events = server.stream(CHAT, messages=HI, **body)
    pieces = [choice["delta"].get("content", "") for e in events[:-1] for choice in e["choices"]]
    assert "".join(pieces) == content
