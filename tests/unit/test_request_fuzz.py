"""Whatever a body holds, reading it ends in a request or in an error that has a name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ParameterError
from paceline.server.door import Life
from paceline.server.errors import ApiError
from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.messages.translate import read_count, read_message
from paceline.server.params import check_stream_options, priority, sampling_params, split_prompts
from paceline.server.responses.background import Background
from paceline.server.responses.schema import ResponseRequest
from paceline.server.responses.store import ResponseStore
from paceline.server.responses.translate import read_response
from paceline.server.schema import INFORMATIONAL, ChatRequest, CompletionRequest, parse
from paceline.server.tokens import DetokenizeRequest, TokenizeRequest
from paceline.server.tools import tool_use

WORDS = st.sampled_from([
    "type", "function", "name", "parameters", "json_schema", "schema", "json_object", "auto",
    "none", "required", "text", "role", "content", "tool_use", "tool_result", "input_schema",
    "user", "any", "tool",
    "input_text", "function_call", "function_call_output", "call_id",
    "regex", "choice", "grammar", "include_usage", "97", "strict",
])  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def fields_of(kind):
    noted = getattr(kind, "noted", INFORMATIONAL)
    return sorted({*kind.__struct_fields__, *getattr(kind, "neutral", ()), *noted})


READERS = {
    CountRequest: read_count,
    MessageRequest: read_message,
    ResponseRequest: lambda body: read_response(body, ResponseStore(), "", Background(Life())),
}


def read(body: bytes, kind: type) -> None:
    reader = READERS.get(kind)
    request = parse(body, kind) if reader is None else reader(body).request
    if isinstance(request, ChatRequest):
        tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
    if isinstance(request, CompletionRequest):
        split_prompts(request.prompt)
    if isinstance(request, ChatRequest | CompletionRequest):
        check_stream_options(request)
        sampling_params(request, {})
        priority(request)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
        (CompletionRequest, {"model": "m", "prompt": "Hi"}),
        (TokenizeRequest, {"prompt": "Hi"}),
        (DetokenizeRequest, {"tokens": [1]}),
        (CountRequest, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
        (ResponseRequest, {"model": "m", "input": "Hi"}),
        (
            MessageRequest,
            {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]},
        ),
    ],
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_odd_fields_are_refused_with_a_message(kind, needed, data):
    names = st.sampled_from(fields_of(kind))
    odd = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    refusal = None
    try:
        read(json.dumps({**needed, **odd}).encode(), kind)
    except (ApiError, ParameterError) as error:
        refusal = error
    assert refusal is None or (str(refusal) and getattr(refusal, "status", 400) == 400)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_odd_bytes_are_refused_with_a_message(body):
    for kind in (ChatRequest, CompletionRequest, DetokenizeRequest, *READERS):
        with pytest.raises(ApiError):
            read(body, kind)
