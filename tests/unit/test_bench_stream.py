"""What the bench reads from a wire: events cut anywhere, and every dialect's figures."""

import itertools
import math
import tracemalloc
from email.utils import formatdate
from types import SimpleNamespace

import pytest

from paceline.bench import exchange as exchanges
from paceline.bench.answer import Answer
from paceline.bench.conversation import Turn
from paceline.bench.exchange import Exchange
from paceline.bench.sse import Event, EventReader
from paceline.bench.workloads import build_workload
from tests.fake_server import DONE, EMPTY, FINISH, ROLE, delta, event, usage


def events(*packets: bytes) -> list[Event]:
    reader = EventReader()
    return [*itertools.chain.from_iterable(map(reader.feed, packets)), *reader.finish()]


def payloads(*packets: bytes) -> list[bytes]:
    found = events(*packets)
    assert not any(event.is_error for event in found)
    return [event.data for event in found]


def test_events_are_the_same_wherever_packets_end():
    stream = b': x\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:{"b":\r\ndata: 2}\r\n\r\ndata: [DONE]\n\n'
    expected = [b'{"a":1}', b'{"b":\n2}', b"[DONE]"]
    for size in range(1, len(stream) + 1):
        packets = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert payloads(*packets) == expected


def test_a_unicode_line_separator_is_text():
    assert payloads("data: a\u2028b\x85c\n\n".encode()) == ["a\u2028b\x85c".encode()]


def test_an_event_without_its_blank_line_is_read_at_the_end():
    assert payloads(b"data: a\n\ndata: b") == [b"a", b"b"]


def test_llama_cpps_error_field_is_an_event():
    assert events(b'error: {"message":"no slot"}\n\n') == [Event(b'{"message":"no slot"}', True)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_event_is_an_error_by_its_name_and_the_next_one_is_not(end):
    lines = ["event: error", "data: a", "", "data: b", "", "data: c", "event:error", "",
             "event: error", "event: x", "data: d", "", "event: errors", "data: e", "",
             "event: error", "", "data: f", "", ""]  # fmt: skip
    found = events(*(bytes([byte]) for byte in end.join(lines).encode()))
    assert found == [
        (b"a", True), (b"b", False), (b"c", True), (b"d", False), (b"e", False), (b"", True),
        (b"f", False),
    ]  # fmt: skip


def answered(*events: tuple[float, bytes], status: int = 200, keeps_text: bool = True) -> Answer:
    answer = Answer(keeps_text=keeps_text)
    answer.on_head(status, {"content-type": "text/event-stream"}, 0.0)
    for now, data in events:
        answer.on_body(data, now)
    answer.finish(9.0)
    return answer


def exchange(answer: Answer, **settings) -> Exchange:
    turn = Turn(messages=(), max_tokens=1, **settings)
    made = Exchange(idx=0, kind="x", turn_idx=0, turn=turn, answer=answer, scheduled_at=0.0)
    made.sent_at = 0.0
    made.close(9.0)
    return made


def test_role_and_empty_chunks_start_no_clock():
    made = exchange(answered((0.1, ROLE), (0.2, EMPTY), (0.5, delta(content="a")), (0.5, DONE)))
    assert made.ttft_s == 0.5
    assert made.outcome == "ok"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_text(name):
    answer = answered((0.3, delta(**{name: "hm"})), (0.7, delta(content="a")), (0.7, FINISH))
    assert list(answer.arrivals) == [0.3, 0.7]
    assert answer.text == "hma"


def test_texts_of_one_packet_are_one_arrival_and_no_gap():
    two = delta(content="a") + delta(content="b")
    made = exchange(answered((0.5, two), (0.6, two), (0.6, usage(3, 4) + DONE)))
    assert list(made.gaps()) == pytest.approx([0.1])
    assert made.answer.num_text_events == 4
    assert made.tpot_s(4) == pytest.approx(0.1 / 3)


def test_one_token_has_no_time_per_token_and_none_has_no_ttft():
    one = exchange(answered((0.5, delta(content="a")), (0.5, usage(3, 1) + DONE)))
    none = exchange(answered((0.5, FINISH), (0.5, usage(3, 0) + DONE)))
    assert math.isnan(one.tpot_s(1))
    assert math.isnan(none.ttft_s)
    assert none.outcome == "ok"
    assert none.output_tokens(None) == (0, "usage")


def test_output_tokens_come_from_usage_then_the_tokenizer_then_the_events():
    chunks = [(0.1, delta(content="one two")), (0.2, delta(content=" three")), (0.3, DONE)]
    without = exchange(answered(*chunks))
    assert without.output_tokens(None) == (2, "events")
    assert without.output_tokens(lambda text: len(text.split())) == (3, "tokenizer")
    assert exchange(answered((0.3, usage(9, 5)), *chunks)).output_tokens(None) == (5, "usage")
    uncounted = exchange(answered(*chunks, (0.3, usage(0, 0) + DONE)))
    assert (uncounted.output_tokens(None)[1], uncounted.input_tokens(None)) == ("events", None)


def test_a_stream_that_just_ends_is_broken_and_an_error_in_it_is_an_error():
    cut = exchange(answered((0.1, delta(content="a"))))
    failed = exchange(answered((0.1, delta(content="a")), (0.2, event(error={"message": "oom"}))))
    assert cut.outcome == "broken"
    assert (failed.outcome, failed.error) == ("error", "oom")
    flat = event(object="error", message="oom", type="InternalServerError", code=500)
    old_vllm = exchange(answered((0.1, delta(content="a")), (0.2, flat + DONE)))
    assert (old_vllm.outcome, old_vllm.error) == ("error", "oom")


NAMED_ERRORS = {
    b'data: {"error": {"message": "oom", "code": 500}}': "oom",
    b'data: {"type": "error", "error": {"type": "overloaded_error", "message": "oom"}}': "oom",
    b'data: {"message": "oom"}': "oom",
    b'data: {"detail": "oom"}': "oom",
    b'data: {"error": "oom"}': "oom",
    b"data: out of\ndata: memory": "out of\\nmemory",
    b'data: {"error": null}': '{"error": null}',
    b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}': "{'choices': [{'index': 0, ",
    b"data: [DONE]": "[DONE]",
    b"data:": "error",
    b": no data": "error",
}


@pytest.mark.parametrize("kind", ["text/event-stream", None])
@pytest.mark.parametrize("data", NAMED_ERRORS)
def test_an_error_that_only_its_name_tells_ends_no_answer_well(data, kind):
    text = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
    for begin in (b"event: error\n" + data, data + b"\nevent: error"):
        answer = Answer(keeps_text=False)
        answer.on_head(200, {} if kind is None else {"content-type": kind}, 0.0)
        answer.on_body(text + begin + b"\n\n" + FINISH + usage(3, 1) + DONE, 0.1)
        made = exchange(answer)
        assert (made.outcome, list(answer.arrivals)) == ("error", [0.1])
        assert made.error.startswith(NAMED_ERRORS[data])
        assert answer.num_unread == 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_an_error(reason):
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}])
    made = exchange(answered((0.1, delta(content="a")), (0.2, end + DONE)))
    assert (made.outcome, made.error) == (
        "error", f"the server ended it with finish reason '{reason}'"
    )  # fmt: skip


def test_an_error_that_is_null_is_none_in_a_stream_and_in_a_whole_answer():
    choices = [{"delta": {"content": "a"}, "finish_reason": "stop"}]
    whole = Answer(keeps_text=True)
    whole.on_head(200, {"content-type": "application/json"}, 0.1)
    whole.on_body(event(choices=choices, error=None).removeprefix(b"data: "), 0.2)
    streamed = answered((0.2, event(choices=choices, error=None) + DONE))
    assert [exchange(each).outcome for each in (streamed, whole)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, "refused"), (503, "refused"), (400, "error"), (500, "error")]
)
def test_statuses_are_refusals_or_errors(status, outcome):
    answer = Answer(keeps_text=False)
    answer.on_head(status, {"content-type": "application/json", "retry-after": "3"}, 0.1)
    answer.on_body(b'{"error":{"message":"no"}}', 0.1)
    made = exchange(answer)
    assert made.outcome == outcome
    assert made.retry_after_s == 3.0
    assert "no" in made.error


def test_a_refusal_says_in_seconds_or_with_a_date_when_to_come_back(monkeypatch):
    monkeypatch.setattr(exchanges, "time", SimpleNamespace(time=lambda: 1e9))

    def wait(value: str) -> float | None:
        answer = Answer(keeps_text=False)
        answer.on_head(429, {"retry-after": value}, 0.1)
        return exchange(answer).retry_after_s

    assert [wait(formatdate(1e9 + late, usegmt=True)) for late in (100, -100)] == [100, 0]
    assert [wait("1.5"), wait("soon"), wait("-1"), wait("inf"), wait("")] == [1.5, *[None] * 4]


def test_events_that_are_no_json_are_counted_and_lose_nothing_else():
    answer = answered((0.1, b"data: {oops\n\n"), (0.2, delta(content="a")), (0.3, DONE))
    assert answer.num_unread == 1
    assert list(answer.arrivals) == [0.2]


def test_a_server_that_ignores_stream_gives_a_whole_answer():
    answer = Answer(keeps_text=True)
    answer.on_head(200, {"content-type": "application/json"}, 0.1)
    answer.on_body(b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],', 0.1)
    answer.on_body(b'"usage":{"prompt_tokens":3,"completion_tokens":2}}', 0.2)
    made = exchange(answer)
    assert (made.outcome, answer.text, answer.output_tokens) == ("ok", "hi", 2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"choices": 5}', "choices is 5"),
        (b'{"choices": ["a"]}', "choices is ['a']"),
        (b'{"choices": [{"delta": "a"}]}', "delta is 'a'"),
        (b'{"choices": [{"text": 5}]}', "text is 5"),
        (b'{"choices": [{"delta": {"tool_calls": [{"function": 1}]}}]}', "function is 1"),
        (b'{"choices": [], "usage": 5}', "usage is 5"),
        (b'{"choices": [], "usage": {"prompt_tokens": "x"}}', "prompt_tokens is 'x'"),
        (b'{"choices": [], "usage": {"completion_tokens": 1e30}}', "completion_tokens is 1e+30"),
        (b'{"choices": [], "usage": {"completion_tokens": -1}}', "completion_tokens is -1"),
        (b'{"choices": [], "timings": [1]}', "timings is [1]"),
        (b"{}", "no choice came"),
    ],
)
def test_an_answer_that_breaks_the_form_is_an_error_as_a_stream_and_as_a_whole(body, reason):
    stream = exchange(answered((0.1, b"data: " + body + b"\n\n"), (0.2, DONE)))
    whole = Answer(keeps_text=False)
    whole.on_head(200, {"content-type": "application/json"}, 0.1)
    whole.on_body(body, 0.1)
    for made in (stream, exchange(whole)):
        assert made.outcome == "error"
        assert made.error.startswith("no answer: ")
        assert reason in made.error
        made.output_tokens(None)


def test_a_stream_of_no_json_and_an_empty_body_are_no_answers():
    stream = exchange(answered((0.1, b"data: oops\n\ndata: [1]\n\n"), (0.2, DONE)))
    assert (stream.outcome, stream.error) == (
        "error", "no answer: no choice came, 2 events are no JSON object",
    )  # fmt: skip
    for body, reason in ((b"", "no answer: no body"), (b"[" * 10**6, "[" * 300)):
        answer = Answer(keeps_text=False)
        answer.on_head(200, {"content-type": "application/json"}, 0.1)
        answer.on_body(body, 0.1)
        made = exchange(answer)
        assert (made.outcome, made.error) == ("error", reason)


def test_header_figures_that_are_no_numbers_are_passed_over():
    answer = Answer(keeps_text=False)
    headers = {
        "server-timing": "a;dur=1.2.3, b;dur=., c;dur=5, d;dur=1e308, e;dur=5e-2, f;dur=-1",
        "retry-after": "nan",
    }
    answer.on_head(429, headers, 0.1)
    assert answer.phases == {"c": 0.005, "e": pytest.approx(0.00005)}
    assert exchange(answer).retry_after_s is None


def test_phases_are_read_from_each_dialect():
    answer = Answer(keeps_text=False)
    header = 'queue;dur=12.5, prefill;desc="own";dur=80'
    answer.on_head(200, {"content-type": "text/event-stream", "server-timing": header}, 0.0)
    answer.on_body(event(choices=[], timings={"prompt_ms": 30.5, "prompt_n": 7}), 0.1)
    assert answer.phases == pytest.approx({"queue": 0.0125, "prefill": 0.08, "prompt": 0.0305})
    ledger = {
        "wall_ms": 300, "tpot_ms": None, "parts_ms": {"decode": 200, "queue_kv": 1},
        "blame": {"preemption_ms": 4, "num_preemptions": 1, "prefill_of": [{"ms": 3}]},
    }  # fmt: skip
    answer.on_body(event(choices=[], usage={"completion_tokens": 1, "paceline": ledger}), 0.1)
    assert answer.phases == pytest.approx(
        {"wall": 0.3, "decode": 0.2, "queue_kv": 0.001, "blame.preemption": 0.004}
    )


def test_completions_and_cached_tokens_are_read():
    chunk = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
    end = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1,
                                   "prompt_tokens_details": {"cached_tokens": 8}})  # fmt: skip
    answer = answered((0.1, chunk), (0.2, end + DONE))
    assert (answer.text, answer.cached_tokens) == ("a", 8)


def test_a_call_and_json_are_judged_by_what_they_hold():
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
    good = exchange(answered((0.1, delta(tool_calls=[call])), (0.2, FINISH)), expects="tool_call")
    plain = exchange(answered((0.1, delta(content="{}")), (0.2, FINISH)), expects="tool_call")
    json = exchange(answered((0.1, delta(content='{"a": ')), (0.2, FINISH)), expects="json")
    assert [good.is_valid(), plain.is_valid(), json.is_valid()] == [True, False, False]


VLLM = [
    (0.1, event(id="c", object="chat.completion.chunk", choices=[
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
         "finish_reason": None}], prompt_token_ids=None)),
    (0.4, event(choices=[{"index": 0, "delta": {"reasoning_content": "So"}, "logprobs": None,
                          "finish_reason": None, "token_ids": None}])),
    (0.5, event(choices=[{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}],
                usage={"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2})),
    (0.6, event(choices=[{"index": 0, "delta": {"content": ""}, "finish_reason": "length",
                          "stop_reason": None}])),
    (0.6, event(choices=[], usage={"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3,
                                   "prompt_tokens_details": None}) + DONE),
]  # fmt: skip
LLAMA_SERVER = [
    (0.1, event(choices=[{"finish_reason": None, "index": 0,
                          "delta": {"role": "assistant", "content": None}}], created=1)),
    (0.4, event(choices=[{"finish_reason": None, "index": 0, "delta": {"content": "So"}}])),
    (0.5, event(choices=[{"finish_reason": None, "index": 0, "delta": {"content": "Hi"}}])),
    (0.6, event(choices=[{"finish_reason": "length", "index": 0, "delta": {}}])),
    (0.6, event(choices=[], usage={"completion_tokens": 3, "prompt_tokens": 5, "total_tokens": 8},
                timings={"prompt_n": 5, "prompt_ms": 250.0, "predicted_n": 3,
                         "predicted_ms": 90.0, "predicted_per_second": 33.3}) + DONE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "phases"), [(VLLM, {}), (LLAMA_SERVER, {"prompt": 0.25, "predicted": 0.09})]
)
def test_streams_as_vllm_and_as_llama_server_write_them_give_the_same_figures(events, phases):
    made = exchange(answered(*events))
    assert (made.outcome, made.ttft_s, made.answer.finish_reason) == ("ok", 0.4, "length")
    assert list(made.gaps()) == pytest.approx([0.1])
    assert (made.answer.input_tokens, *made.output_tokens(None)) == (5, 3, "usage")
    assert made.answer.phases == pytest.approx(phases)
    assert made.answer.num_unread == 0


def test_what_a_server_says_cannot_steer_the_terminal():
    words = "a\x1b[31m\x9bb\r\n"
    failed = exchange(answered((0.1, event(error={"message": words}))))
    refused = Answer(keeps_text=False)
    refused.on_head(500, {}, 0.1)
    refused.on_body(words.encode(), 0.1)
    for error in (failed.error, exchange(refused).error):
        assert "a\\x1b[31m\\x9bb\\r\\n" in error
        assert error.isprintable()
    timings = {"\x1b[2J_ms": 5, "good_ms": 5}
    assert answered((0.1, event(choices=[], timings=timings))).phases == {"good": 0.005}


def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it():
    assert payloads(b"\xef\xbb\xbfdata: a\n\ndata: b\n\n") == [b"a", b"b"]
    assert payloads(b"\xef", b"\xbb\xbfdata: a\n\n") == [b"a"]


@pytest.mark.parametrize("kind", ["Text/Event-Stream; charset=utf-8", None])
def test_a_stream_is_read_whatever_the_case_of_its_type_and_without_one(kind):
    answer = Answer(keeps_text=True)
    answer.on_head(200, {} if kind is None else {"content-type": kind}, 0.0)
    for now, data in ((0.1, b"\n"), (0.2, ROLE), (0.3, delta(content="a")), (0.4, FINISH)):
        answer.on_body(data, now)
    made = exchange(answer)
    assert (made.outcome, answer.text, list(answer.arrivals)) == ("ok", "a", [0.3])


def test_a_whole_answer_without_a_type_is_read():
    answer = Answer(keeps_text=True)
    answer.on_head(200, {}, 0.0)
    answer.on_body(b' {"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}', 0.2)
    assert (exchange(answer).outcome, answer.text) == ("ok", "hi")


def called(*calls, reason="tool_calls") -> Exchange:
    fields = build_workload("tools:mode=call").conversation("0", 0).turns[0].fields
    parts = [(0.1, delta(content="I call.", reasoning_content="{so}"))]
    for index, (name, arguments) in enumerate(calls):
        for function in ({"name": name, "arguments": arguments[:5]}, {"arguments": arguments[5:]}):
            parts.append((0.2, delta(tool_calls=[{"index": index, "function": function}])))
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}])
    return exchange(answered(*parts, (0.3, end)), expects="tool_call", fields=fields)


WEATHER = ("get_weather", '{"city": "a", "day": "b", "unit": "celsius"}')
TABLE = ("book_table", '{"city": "a", "day": "b", "people": 2}')


def test_calls_are_valid_by_the_schemas_of_the_tools_that_were_given():
    assert called(WEATHER).is_valid()
    assert called(WEATHER, TABLE).is_valid()
    assert not called().is_valid()
    assert not called(TABLE, reason="length").is_valid()
    for name, arguments in (
        ("rm_rf", "{}"),
        ("book_table", "{}"),
        ("book_table", '{"city": "a", "day": "b", "people": "2"}'),
        ("book_table", '{"city": "a", "day": "b", "people": true}'),
        ("book_table", '{"city": "a", "day": "b", "people": 2, "more": 1}'),
        ("get_weather", '{"city": "a", "day": "b", "unit": "kelvin"}'),
        ("book_table", '{"city": "a'),
        ("book_table", "[]"),
    ):
        assert not called(TABLE, (name, arguments)).is_valid()


def test_json_is_valid_by_its_schema_and_apart_from_the_reasoning():
    fields = build_workload("tools:mode=json").conversation("0", 0).turns[0].fields

    def is_valid(text: str) -> bool | None:
        parts = (0.1, delta(reasoning_content="use {curly}")), (0.2, delta(content=text))
        return exchange(answered(*parts, (0.3, FINISH)), expects="json", fields=fields).is_valid()

    assert is_valid('{"city": "a", "day": "b", "people": 2}')
    for text in ("{}", '{"city": 1}', '```json\n{"a": 1}\n```', "", "[" * 100_000):
        assert not is_valid(text)


def fed(answer: Answer, piece: bytes, *, most: int) -> int:
    """Feed `piece` until the answer wants no more; return how often. It fails after `most`."""
    for number in range(1, most + 1):
        if not answer.on_body(piece, 0.1):
            return number
    pytest.fail(f"{most * len(piece)} bytes were taken")


MIB = 1 << 20
ENDLESS = {
    "a stream of texts": ("text/event-stream", delta(content="x") * 800, "stream", 8),
    "a stream of comments": ("text/event-stream", b": still here\n\n" * 5_000, "stream", 8),
    "a line": ("text/event-stream", b"data: " + b"x" * MIB, "event", 4),
    "an event of many lines": ("text/event-stream", b"data: x\n" * 6_000, "event", 4),
    "an event of empty lines": ("text/event-stream", b"data:\n" * 6_000, "event", 4),
    "a body": ("application/json", b'{"a": "' + b"x" * MIB, "body", 16),
    "a body without a type": (None, b" " * MIB, "body", 16),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_an_end_is_an_error_and_not_all_of_the_memory(name, monkeypatch):
    monkeypatch.setattr("paceline.bench.answer._MAX_STREAM_BYTES", 8 * MIB)  # it is 256
    kind, piece, what, limit = ENDLESS[name]
    answer = Answer(keeps_text=False)
    answer.on_head(200, {} if kind is None else {"content-type": kind}, 0.0)
    tracemalloc.start()
    fed(answer, piece, most=2 * limit * MIB // len(piece) + 1)
    made = exchange(answer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 * MIB
    assert made.outcome == "error"
    assert made.error == f"no answer: its {what} is longer than {limit} MiB"


@pytest.mark.parametrize(("status", "outcome"), [(500, "error"), (429, "refused")])
def test_of_an_error_without_an_end_the_beginning_is_told(status, outcome):
    answer = Answer(keeps_text=False)
    answer.on_head(status, {"content-type": "application/json"}, 0.0)
    assert fed(answer, b"x" * 65536, most=32) == 17
    made = exchange(answer)
    assert made.outcome == outcome
    assert made.error.endswith("x" * 300)


def test_a_server_timing_of_any_length_is_read_at_once_and_a_hundred_phases_are_kept():
    answer = Answer(keeps_text=False)
    answer.on_head(200, {"server-timing": "a" * 200_000}, 0.0)
    names = ", ".join(f"p{i};dur=1" for i in range(500))
    answer.on_head(200, {"server-timing": names}, 0.0)
    answer.on_body(event(choices=[], timings={f"q{i}_ms": 1 for i in range(500)}), 0.1)
    assert len(answer.phases) == 100
