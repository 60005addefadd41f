"""Anthropic's Messages API: what is read, what is refused by name, and what is written."""

import json

import pytest

from paceline.completion import ChoiceBuilder
from paceline.errors import ParameterError
from paceline.server.dialect import Frame
from paceline.server.errors import ApiError, anthropic_error_body, error_response
from paceline.server.messages.partial import whole_members
from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.messages.translate import read_count, read_message
from paceline.server.messages.writer import MessageWriter
from paceline.server.params import sampling_params
from paceline.text.tool_calls import ToolReader
from paceline.text.tools import ToolStyle
from paceline.types import Delta, SamplingParams, Timings, Usage

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "clock", "description": "The time", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "é"}}


def read(**fields):
    body = {"model": "m", "max_tokens": 9, "messages": HI, **fields}
    return read_message(json.dumps(body).encode())


def refusal(**fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def text(*texts):
    return [{"type": "text", "text": t} for t in texts]


# ---- reading ----


def test_the_fields_become_those_of_a_chat():
    asked = read(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a"], stream=True, seed=4,
        deadline_ms=50, timings=True, priority=2, cache_salt="s", metadata={"user_id": "u"},
        service_tier="auto", thinking={"type": "disabled"}, speed="standard",
        cache_control={"type": "ephemeral", "ttl": "1h"},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    params = sampling_params(asked.request, {})
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 3)
    assert (params.stop, params.seed) == (("a",), 4)
    assert params.structured.json_schema == {"type": "object"}
    request = asked.request
    assert (request.stream, request.deadline_ms, request.timings) == (True, 50, True)
    assert (request.priority, request.cache_salt) == (2, "s")


@pytest.mark.parametrize("system", ["Be brief.", text("Be ", "brief.")])
def test_the_system_is_the_first_message(system):
    assert read(system=system).request.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    ]  # fmt: skip


def test_blocks_are_one_text_and_turns_of_one_side_are_one_turn():
    asked = read(messages=[
        {"role": "user", "content": text("a", "b")},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [*text("e"), USE]},
        {"role": "user", "content": [
            *text("f"), {"type": "tool_result", "tool_use_id": "t1", "content": text("g", "h")}]},
    ])  # fmt: skip
    call = {"id": "t1", "type": "function",
            "function": {"name": "clock", "arguments": '{"zone": "é"}'}}  # fmt: skip
    assert asked.request.messages == [
        {"role": "user", "content": "ab\n\nc"},
        {"role": "assistant", "content": "d\n\ne", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "name": "clock", "content": "gh"},
        {"role": "user", "content": "f"},
    ]
    assert asked.names.messages == (
        ["messages[0]", "messages[2]", "messages[4].content[1]", "messages[4]"]
    )  # fmt: skip


def test_a_result_of_a_failed_tool_says_so_and_one_without_content_is_empty():
    results = [{"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "gone"},
               {"type": "tool_result", "tool_use_id": "t1"}]  # fmt: skip
    messages = [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": results}]
    contents = [m["content"] for m in read(messages=messages).request.messages]
    assert contents == ["Hi", "", "Error: gone", ""]


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
    ],
)
def test_choices_of_tools_are_those_of_a_chat(choice, expected, is_parallel):
    request = read(tools=[TOOL], tool_choice=choice).request
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, is_parallel)
    assert request.tools[0].function.parameters == {"type": "object"}


def test_a_named_tool_is_the_only_one_that_may_be_called():
    request = read(tools=[TOOL], tool_choice={"type": "tool", "name": "clock"}).request
    assert request.tool_choice.function.name == "clock"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"), ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": text("a"), "name": "x"}]}, "messages[0].name"),
        ({"messages": [*HI, {"role": "assistant", "content": "He"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "document"}]}]}]},
         "messages[0].content[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 1}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"speed": "fast"}, "speed"), ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"stop_sequences": "a"}, "stop_sequences"), ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields, param):
    error = refusal(**fields)
    assert error.param == param
    assert param in anthropic_error_body(error, None)["error"]["message"]


def test_errors_about_the_chat_name_the_fields_of_the_body():
    asked = read(system="s", messages=[*HI, *HI, {"role": "assistant", "content": "x"}, *HI])
    for param, expected in (
        ("messages[1].content", "messages[0].content"), ("messages[3]", "messages[3]"),
        ("messages[0]", "system"), ("stop", "stop_sequences"), ("prompt", "messages"),
        ("tools[2].function.parameters", "tools[2].input_schema"),
        ("response_format", "output_config.format"), (None, None),
    ):  # fmt: skip
        error = asked.in_its_words(ApiError(429, "full", param=param, code="c", retry_after_s=2))
        assert (error.param, error.status, error.code, error.retry_after_s) == (
            expected, 429, "c", 2
        )  # fmt: skip
    error = asked.in_its_words(ParameterError("stop is '': wrong", param="stop"))
    assert (error.status, str(error)) == (400, "stop_sequences is '': wrong")


def test_a_count_has_the_fields_of_a_prompt_and_no_others():
    body = {"model": "m", "messages": HI, "system": "s", "tools": [TOOL]}
    assert len(read_count(json.dumps(body).encode()).request.messages) == 2
    with pytest.raises(ApiError) as caught:
        read_count(json.dumps({**body, "max_tokens": 4}).encode())
    assert caught.value.param == "max_tokens"
    assert set(CountRequest.__struct_fields__) <= set(MessageRequest.__struct_fields__)


# ---- errors ----


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
     (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
     (503, "overloaded_error"), (504, "timeout_error"), (405, "invalid_request_error")],
)  # fmt: skip
def test_errors_have_anthropics_shape_on_its_paths_alone(status, kind):
    error = ApiError(status, "no", param="top_k", retry_after_s=1.5)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = error_response(error, {"x-request-id": "r"}, path=path)
        assert (reply.status_code, reply.headers["retry-after"]) == (status, "2")
        assert json.loads(reply.body) == {
            "type": "error", "error": {"type": kind, "message": "top_k: no"}, "request_id": "r"
        }  # fmt: skip
        assert reply.headers["request-id"] == "r"
    assert json.loads(error_response(error, path="/v1/models").body)["error"]["param"] == "top_k"


# ---- writing ----


def frame(*, max_tokens=50, tools=()):
    reader = (lambda: ToolReader(ToolStyle.TAGGED, tools, max_calls=4)) if tools else None
    return Frame(answer_id="msg_1", model="m", tokenizer=None, num_prompt_tokens=7,
                 params=SamplingParams(max_tokens=max_tokens), new_reader=reader)  # fmt: skip


def deltas(words, *, reason="stop", stop=None, tokens=5):
    usage = Usage(prompt_tokens=7, completion_tokens=tokens, cached_tokens=4)
    timings = Timings(queue_s=0, ttft_s=0, tpot_s=None, e2e_s=0)
    *rest, last = words
    return [
        *(Delta(request_id="r", index=0, text=word) for word in rest),
        Delta(request_id="r", index=0, text=last, finish_reason=reason, stop_reason=stop,
              usage=usage, timings=timings),
    ]  # fmt: skip


def whole(news, **options):
    builder = ChoiceBuilder(0)
    for delta in news:
        builder.add(delta)
    return json.loads(MessageWriter(frame(**options)).whole([builder.choice()], 1))


def streamed(news, **options):
    """Return the events of a stream; each one's name is its type."""
    writer = MessageWriter(frame(**options))
    raw = writer.opening(1) + b"".join(writer.chunks(0, delta) for delta in news)
    raw += writer.closing([news[-1].usage], 1)
    found = []
    for part in raw.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events):
    """Return the message that a stream makes, as a client would."""
    message = events[0]["message"]
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["json"] += delta["partial_json"]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    for block in message["content"]:
        if partial := block.pop("json"):
            block["input"] = whole_members(partial)
    return message


CALLS = ["Now <tool", '_call>\n{"name": "clock", "argu', 'ments": {"zone": "U',
         'TC"}}\n</tool_call>',
         '\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>', " done"]  # fmt: skip


@pytest.mark.parametrize("words", [["Hel", "lo"], [""], CALLS, CALLS[:3], CALLS[1:]])
def test_a_stream_makes_the_message_of_a_whole_answer(words):
    options = {"tools": ("clock",)}
    message, expected = put_together(streamed(deltas(words), **options)), whole(
        deltas(words), **options
    )  # fmt: skip
    for block in [*message["content"], *expected["content"]]:
        block.pop("id", None)  # made by chance
    assert message == expected


def test_events_come_in_the_order_that_clients_expect():
    kinds = [event["type"] for event in streamed(deltas(CALLS), tools=("clock",))]
    text_block = ["content_block_start", "content_block_delta", "content_block_stop"]
    call = ["content_block_start", "content_block_delta", "content_block_delta",
            "content_block_stop"]  # fmt: skip
    assert kinds == ["message_start", *text_block, *call, *text_block, *text_block,
                     "message_delta", "message_stop"]  # fmt: skip


def test_calls_are_blocks_with_objects():
    blocks = whole(deltas(CALLS), tools=("clock",))["content"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use", "text"]
    assert [block["input"] for block in blocks[1:3]] == [{"zone": "UTC"}, {}]
    assert len({block["id"] for block in blocks[1:3]}) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "end_turn"), ({"stop": 17}, "end_turn"), ({"stop": "END"}, "stop_sequence"),
        ({"reason": "length", "tokens": 50}, "max_tokens"),
        ({"reason": "length", "tokens": 49}, "model_context_window_exceeded"),
        ({"words": CALLS[:4]}, "tool_use"),
        ({"words": CALLS[:3], "reason": "length", "tokens": 50}, "max_tokens"),
    ],
)  # fmt: skip
def test_the_stop_reason_says_why_the_answer_ended(options, reason):
    news = deltas(options.pop("words", ["a"]), **options)
    message = whole(news, tools=("clock",))
    sequence = "END" if reason == "stop_sequence" else None
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    [end] = [e for e in streamed(news, tools=("clock",)) if e["type"] == "message_delta"]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_input_tokens_are_those_that_were_in_no_cache():
    events = streamed(deltas(["a"]))
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    usage = events[-2]["usage"]
    assert usage == whole(deltas(["a"]))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (
        3, 4, 5
    )  # fmt: skip


def test_a_failure_is_an_error_event_and_a_pause_is_a_ping():
    writer = MessageWriter(frame())
    name, data = writer.failure(ApiError(503, "over")).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    assert writer.idle() == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, 2, 3', {"a": [1, 2]}), ('{"a": {"b": "x,}", "c": "y', {"a": {"b": "x,}"}}),
        ('{"a": "q\\"{', {}), ('{"a": 1}', {"a": 1}), ('{"a": 1, "b', {"a": 1}), ("{", {}),
        ("", {}), ("[1]", {}), ("{oops}", {}), ('{"a": [[]', {"a": [[]]}), ("}{", {}),
        ('{"a": "\\\\", "b": 2', {"a": "\\"}),
    ],
)  # fmt: skip
def test_of_an_object_that_was_cut_the_whole_members_stay(text, expected):
    assert whole_members(text) == expected
