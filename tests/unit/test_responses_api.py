"""OpenAI's Responses API: what is read, refused by name, written and kept."""

import json

import pytest

from paceline.completion import ChoiceBuilder
from paceline.server.dialect import Frame
from paceline.server.door import Life
from paceline.server.errors import ApiError
from paceline.server.params import sampling_params
from paceline.server.responses.background import Background
from paceline.server.responses.routes import _is_quick
from paceline.server.responses.store import ResponseStore, Stored
from paceline.server.responses.translate import read_response
from paceline.server.responses.writer import ResponseWriter
from paceline.text.tool_calls import ToolReader
from paceline.text.tools import ToolStyle
from paceline.types import Delta, SamplingParams, Timings, Usage

BACKGROUND = Background(Life())
TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"zone":"UTC"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}


def read(*, of=None, tenant="", **fields):
    body = {"model": "m", "input": "Hi", **fields}
    return read_response(json.dumps(body).encode(), of or ResponseStore(), tenant, BACKGROUND)


def refusal(**fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


# ---- reading ----


def test_the_fields_become_those_of_a_chat():
    asked = read(
        temperature=0.5, top_p=0.9, top_k=3, max_output_tokens=9, stream=True, seed=4,
        deadline_ms=50, timings=True, cache_salt="s", service_tier="flex", user="u",
        safety_identifier="s", prompt_cache_key="k", include=[],
        reasoning={"effort": "none"}, truncation="disabled", top_logprobs=0,
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    )  # fmt: skip
    params = sampling_params(asked.request, {})
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 3)
    assert params.structured.json_schema == {"type": "object"}
    assert (asked.request.stream, asked.request.service_tier) == (True, "flex")
    assert read(text={"format": {"type": "text"}}).request.response_format is not None
    assert sampling_params(read(text={"verbosity": "medium"}).request, {}).structured is None


def test_instructions_come_first_and_a_string_is_the_users():
    assert read(instructions="Be brief.").request.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    ]  # fmt: skip


def test_items_become_turns_and_calls_go_into_the_turn_before_them():
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
              "content": [{"type": "output_text", "text": "Now", "annotations": []},
                          {"type": "refusal", "refusal": "!"}]}  # fmt: skip
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    asked = read(input=[
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts},
        answer, CALL, {**OUTPUT, "output": parts}, CALL,
    ])  # fmt: skip
    call = {"id": "c1", "type": "function",
            "function": {"name": "clock", "arguments": '{"zone":"UTC"}'}}  # fmt: skip
    assert asked.request.messages == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "Now!", "tool_calls": [call]},
        {"role": "tool", "content": "ab", "tool_call_id": "c1", "name": "clock"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert asked.names.messages == [f"input[{i}]" for i in (0, 1, 2, 4, 5)]
    assert all(item["id"] and item["status"] for item in json.loads(asked.sent))


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_tools_and_choices_are_those_of_a_chat(choice):
    request = read(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).request
    assert (request.tool_choice, request.parallel_tool_calls) == (choice, False)
    assert request.tools[0].function.strict
    named = read(tools=[TOOL], tool_choice={"type": "function", "name": "clock"}).request
    assert named.tool_choice.function.name == "clock"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "e"}]},
         "input[0].encrypted_content"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"background": True, "store": False}, "store"), ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"), ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"stream_options": {}}, "stream_options"), ({"store": "no"}, "store"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"), ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields, param):
    error = refusal(**fields)
    assert error.param == param
    assert param in str(error)


def test_errors_about_the_chat_name_the_fields_of_the_body():
    asked = read(instructions="s", input=[{"role": "user", "content": "a"}])
    for param, expected in (
        ("messages[0]", "instructions"), ("messages[1].content", "input[0].content"),
        ("messages", "input"), ("prompt", "input"), ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"), ("tools[0].function.parameters", "tools[0].parameters"),
        ("prompt_cache_key", "prompt_cache_key"), ("temperature", "temperature"),
    ):  # fmt: skip
        assert asked.in_its_words(ApiError(400, "no", param=param)).param == expected


# ---- writing ----


def frame(*, tools=()):
    reader = (lambda: ToolReader(ToolStyle.TAGGED, tools, max_calls=4)) if tools else None
    return Frame(answer_id="resp_1", model="m", tokenizer=None, num_prompt_tokens=7,
                 params=SamplingParams(temperature=0.5), new_reader=reader)  # fmt: skip


def deltas(words, *, reason="stop"):
    usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
    timings = Timings(queue_s=0, ttft_s=0, tpot_s=None, e2e_s=0)
    *rest, last = words
    return [
        *(Delta(request_id="r", index=0, text=word) for word in rest),
        Delta(request_id="r", index=0, text=last, finish_reason=reason, usage=usage,
              timings=timings),
    ]  # fmt: skip


def writer(**options):
    kept = []
    echo = {"metadata": {"a": "b"}, "store": True}
    return ResponseWriter(frame(**options), echo, keep=lambda *what: kept.append(what)), kept


def whole(news, **options):
    builder = ChoiceBuilder(0)
    for delta in news:
        builder.add(delta)
    return json.loads(writer(**options)[0].whole([builder.choice()], 1))


def parsed(raw):
    """Return events; each one's name is its type, and they are numbered from 0."""
    found = []
    for part in raw.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(news, **options):
    made, kept = writer(**options)
    raw = made.opening(1) + b"".join(made.chunks(0, delta) for delta in news)
    raw += made.closing([news[-1].usage], 1)
    events = parsed(raw)
    [(response_id, body)] = kept
    assert (response_id, json.loads(body)) == ("resp_1", events[-1]["response"])
    return events


def without_chance(response):
    """Return a response without what is made by chance or by the clock."""
    for item in response["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return {k: v for k, v in response.items() if k not in ("created_at", "completed_at")}


CALLS = ["Now <tool", '_call>\n{"name": "clock", "argu', 'ments": {"zone": "U',
         'TC"}}\n</tool_call>',
         '\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>']  # fmt: skip


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("words", [["Hel", "lo"], [""], CALLS, CALLS[:3]])
def test_a_stream_ends_with_the_response_of_a_whole_answer(words, reason):
    news = deltas(words, reason=reason)
    events = streamed(news, tools=("clock",))
    status = "completed" if reason == "stop" else "incomplete"
    assert events[-1]["type"] == f"response.{status}"
    response = events[-1]["response"]
    assert response["status"] == status
    assert (response["incomplete_details"] is None) == (status == "completed")
    assert without_chance(response) == without_chance(whole(news, tools=("clock",)))


def test_events_come_in_the_order_that_clients_expect():
    events = streamed(deltas(CALLS), tools=("clock",))
    kinds = [event["type"].removeprefix("response.") for event in events]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
               "content_part.done", "output_item.done"]  # fmt: skip
    arguments = "function_call_arguments"
    call = ["output_item.added", f"{arguments}.delta", f"{arguments}.delta", f"{arguments}.done",
            "output_item.done"]  # fmt: skip
    assert kinds == ["created", "in_progress", *message, *call, call[0], *call[2:], "completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    assert [item["status"] for item in done] == ["completed"] * 3
    assert [event["output_index"] for event in events if "output_index" in event] == sorted(
        [0] * 6 + [1] * 5 + [2] * 4
    )


def test_deltas_make_what_is_done():
    events = streamed(deltas(CALLS), tools=("clock",))
    texts, arguments = {}, {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["item_id"]] = arguments.get(event["item_id"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    assert {i["id"]: i["content"][0]["text"] for i in output if "content" in i} == texts
    assert {i["id"]: i["arguments"] for i in output if "arguments" in i} == arguments


def test_a_failure_is_told_and_nothing_is_kept():
    made, kept = writer()
    raw = made.opening(1) + made.chunks(0, deltas(["a", "b"])[0])
    events = parsed(raw + made.failure(ApiError(504, "late", code="deadline_exceeded")))
    told, failed = events[-2:]
    assert (told["type"], told["code"], told["message"]) == ("error", "deadline_exceeded", "late")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "late"}
    assert kept == []


# ---- the store ----


def stored(size):
    return Stored(b"x" * (size - 1), b"y")


def test_the_tenant_that_holds_most_loses_its_oldest():
    store = ResponseStore(max_responses=100, max_bytes=1000)
    store.put("small", "s", stored(300))
    for i in range(10):
        store.put("big", f"b{i}", stored(250))
    assert store.get("small", "s") is not None
    assert [i for i in range(10) if store.get("big", f"b{i}")] == [8, 9]
    store = ResponseStore(max_responses=3)
    for i in range(5):
        store.put("", str(i), stored(1))
    assert [i for i in range(5) if store.get("", str(i))] == [2, 3, 4]


def test_a_later_state_of_a_response_takes_the_place_of_the_earlier():
    store = ResponseStore(max_responses=2, max_bytes=100)
    for _ in range(3):
        store.put("", "a", Stored(b"x" * 20, b"y" * 20))
    store.put("", "b", Stored(b"x" * 20, b"y" * 20))
    store.put("", "a", Stored(b"z" * 20, b"y" * 20))
    assert store.get("", "a").body == b"z" * 20
    assert store.get("", "b") is not None


def test_one_that_is_larger_than_the_store_is_not_kept():
    store = ResponseStore(max_bytes=10)
    store.put("a", "1", stored(11))
    assert store.get("a", "1") is None
    store.put("a", "2", stored(9))
    assert store.get("a", "2") is not None


def test_a_tenant_sees_and_deletes_its_own_alone():
    store = ResponseStore()
    store.put("a", "1", stored(1))
    assert store.get("b", "1") is None
    assert not store.delete("b", "1")
    assert store.delete("a", "1")
    assert not store.delete("a", "1")


def finished(asked, text="a"):
    """Write the whole stream of an answer."""
    made = asked.writer(frame(tools=("clock",)))
    news = deltas([text])
    made.chunks(0, news[0])
    made.closing([news[0].usage], 1)


def test_a_conversation_goes_on_from_what_is_kept():
    store = ResponseStore()
    first = read(of=store, instructions="Be brief.", tools=[TOOL])
    finished(first, '<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    call_id = store.get("", "resp_1").conversation()[-1]["call_id"]
    second = read(of=store, previous_response_id="resp_1", input=[{**OUTPUT, "call_id": call_id}])
    assert [message["role"] for message in second.request.messages] == ["user", "assistant", "tool"]
    assert second.names.messages == ["previous_response_id"] * 2 + ["input[0]"]
    kinds = [item["type"] for item in json.loads(second.sent)]
    assert kinds == ["message", "function_call", "function_call_output"]
    with pytest.raises(ApiError):
        read(of=store, tenant="other", previous_response_id="resp_1")


def test_what_is_not_to_be_kept_is_not():
    store = ResponseStore()
    finished(read_response(b'{"model":"m","input":"Hi","store":false}', store, "", BACKGROUND))
    assert store.get("", "resp_1") is None
    finished(read(of=store))
    assert store.get("", "resp_1") is not None


@pytest.mark.parametrize(
    ("body", "is_quick"),
    [
        (b'{"model":"m","input":"Hi"}', True), (b'{"input":"' + b"a" * 5000 + b'"}', False),
        (b'{"previous_response_id":"resp_1"}', False),
        (b'{"previous\\u005fresponse_id":"resp_1"}', False),
    ],
)  # fmt: skip
def test_a_body_that_goes_on_from_a_conversation_is_not_read_on_the_event_loop(body, is_quick):
    assert _is_quick(body) is is_quick
