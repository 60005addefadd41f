"""What the server accepts, refuses by name, and writes."""

import json

import msgspec
import pytest

from paceline.completion import ChoiceBuilder
from paceline.errors import ParameterError
from paceline.server.errors import ApiError
from paceline.server.openai import Formatter
from paceline.server.params import (
    check_stream_options,
    priority,
    sampling_params,
    split_prompts,
)
from paceline.server.schema import ChatRequest, CompletionRequest, parse
from paceline.types import Delta, Structured, Timings, TokenLogprob, Usage

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields):
    body = {"model": "m", "messages": MESSAGES, **fields}
    return parse(json.dumps(body).encode(), ChatRequest)


def completion(**fields):
    body = {"model": "m", "prompt": "Hi", **fields}
    return parse(json.dumps(body).encode(), CompletionRequest)


def refusal(make, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.status == 400
    return caught.value


# ---- parsing ----


def test_null_means_the_default():
    request = chat(temperature=None, tools=None, stop=None, n=None)
    assert sampling_params(request, {}).temperature == 1.0


def test_the_models_defaults_give_way_to_the_requests_fields():
    defaults = {"temperature": 0.3, "top_k": 7}
    params = sampling_params(chat(temperature=0), defaults)
    assert (params.temperature, params.top_k) == (0, 7)


def test_every_extra_reaches_the_sampling_parameters():
    fields = {
        "top_k": 3, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1, "min_tokens": 2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "ignore_eos": True, "seed": -4, "n": 2,
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    params = sampling_params(
        completion(stop_token_ids=[5], bad_words=["x"], logit_bias={"7": -100}, **fields), {}
    )
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.stop_token_ids, params.bad_words, params.logit_bias) == ((5,), ("x",), {7: -100})


@pytest.mark.parametrize(("stop", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_a_string_or_a_list(stop, expected):
    assert sampling_params(chat(stop=stop), {}).stop == expected


def test_both_names_of_max_tokens_work_and_must_agree():
    assert sampling_params(chat(max_completion_tokens=5), {}).max_tokens == 5
    assert sampling_params(chat(max_tokens=6), {}).max_tokens == 6
    error = refusal(lambda: sampling_params(chat(max_tokens=6, max_completion_tokens=5), {}))
    assert error.param == "max_tokens"


def test_chat_logprobs_are_a_flag_and_a_count():
    assert sampling_params(chat(), {}).logprobs is None
    assert sampling_params(chat(logprobs=True), {}).logprobs == 0
    assert sampling_params(chat(logprobs=True, top_logprobs=4), {}).logprobs == 4
    error = refusal(lambda: sampling_params(chat(top_logprobs=4), {}))
    assert error.param == "top_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}), ("store", True),
        ("reasoning_effort", "extreme"), ("verbosity", "low"), ("audio", {}), ("echo", False),
        ("best_of", 1), ("suffix", ""), ("service_tier", "scale"),
        ("guided_json", {}), ("temprature", 1), ("use_beam_search", False),
    ],
)  # fmt: skip
def test_unsupported_and_unknown_fields_are_refused_by_name(field, value):
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert field in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []), ("tool_choice", "none"), ("response_format", {"type": "text"}),
        ("store", False), ("service_tier", "auto"), ("user", "someone"), ("metadata", {"a": "b"}),
        ("parallel_tool_calls", True), ("verbosity", "medium"),
    ],
)  # fmt: skip
def test_values_that_ask_for_nothing_are_accepted(field, value):
    chat(**{field: value})


def test_what_completions_do_not_do_is_refused_by_name():
    completion(best_of=1, suffix="")
    for field, value in (("best_of", 2), ("suffix", "x"), ("response_format", {"type": "text"})):
        assert refusal(completion, **{field: value}).param == field


def test_an_echo_with_logprobs_scores_the_prompt_and_may_write_nothing():
    params = sampling_params(completion(echo=True, logprobs=3, max_tokens=0), {})
    assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (3, 3, 0)
    assert sampling_params(completion(echo=True), {}).prompt_logprobs is None
    assert sampling_params(completion(logprobs=3), {}).prompt_logprobs is None
    for fields in ({}, {"echo": True}, {"logprobs": 1}):
        with pytest.raises(ApiError, match="max_tokens is 0: it must be at least 1; to score"):
            sampling_params(completion(max_tokens=0, **fields), {})
    with pytest.raises(ParameterError, match="logprobs is 21"):
        sampling_params(completion(echo=True, logprobs=21), {})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": SCHEMA, "strict": True}}}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, Structured(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structured(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": "start: A"}}, Structured(grammar="start: A")),
        ({"structured_outputs": {"json_object": True}}, Structured(json_object=True)),
    ],
)  # fmt: skip
def test_every_form_of_structure_reaches_the_parameters(fields, expected):
    assert sampling_params(chat(**fields), {}).structured == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a b", "schema": {}}}}, "response_format.json_schema.name"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"rgex": "a"}}, "structured_outputs.rgex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs"),
    ],
)  # fmt: skip
def test_a_broken_structure_is_refused_by_name(fields, param):
    assert refusal(lambda: sampling_params(chat(**fields), {})).param == param


def test_a_service_tier_is_a_priority_unless_one_is_given():
    assert priority(chat()) == priority(chat(service_tier="auto")) == 0
    assert priority(chat(service_tier="priority")) < 0 < priority(chat(service_tier="flex"))
    assert priority(chat(service_tier="flex", priority=-7)) == -7


def test_stream_options_need_what_they_act_on():
    usage = {"include_usage": True, "continuous_usage_stats": True}
    check_stream_options(chat(stream=True, stream_options=usage))
    for fields in (
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ):
        error = refusal(lambda fields=fields: check_stream_options(chat(**fields)))
        assert error.param.startswith("stream_options")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"), ({"n": True}, "n"), ({"n": 1.5}, "n"),
        ({"stream": "yes"}, "stream"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"), ({"stop": [1]}, "stop[0]"),
        ({"messages": "Hi"}, "messages"), ({"messages": ["Hi"]}, "messages[0]"),
        ({"stream_options": {"x": 1}}, "stream_options.x"), ({"user": 5}, "user"),
        ({"stop": ["a"] * 65}, "stop"), ({"seed": "1"}, "seed"), ({"priority": 2**40}, "priority"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(fields, param):
    assert refusal(chat, **fields).param == param


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field):
    body = {"model": "m", "messages": MESSAGES}
    del body[field]
    error = refusal(lambda: parse(json.dumps(body).encode(), ChatRequest))
    assert (error.param, str(error)) == (field, f"{field} is missing")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b"[]", b"5", b"null", b'{"model": NaN}', b'{"temperature": 1e400}',
        b'{"model": "\xff"}', b'{"model": "\\ud800 is half a pair"}', b"[" * 100_000,
    ],
    ids=range(11),
)  # fmt: skip
def test_a_broken_body_is_a_400(body):
    assert refusal(lambda: parse(body, ChatRequest)).status == 400


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1}, {"top_p": 0}, {"n": 0}, {"n": 2**63}, {"max_tokens": 0},
     {"seed": 2**63}, {"logit_bias": {"1": 1e9}}, {"repetition_penalty": 0}, {"stop": ""},
     {"min_tokens": 5, "max_tokens": 4}],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(fields):
    with pytest.raises(ParameterError) as caught:
        sampling_params(chat(**fields), {})
    assert caught.value.param in fields


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], "b"], [[1], "b"])],
)
def test_prompts_come_alone_or_in_lists(prompt, expected):
    assert split_prompts(prompt) == expected


@pytest.mark.parametrize("prompt", [[], [[]], [None], [1, "a"], [True], [[1.5]], ["a"] * 300])
def test_odd_prompts_are_refused(prompt):
    assert refusal(lambda: split_prompts(prompt)).param == "prompt"


# ---- answers ----


class Letters:
    """Characters by their numbers; those below 0 are single bytes."""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return bytes([-token_id]) if token_id < 0 else chr(token_id).encode()


def formatter(endpoint="chat", **options):
    options = {"wants_logprobs": False, **options}
    return Formatter(endpoint, answer_id="id-1", model="m", tokenizer=Letters(), **options)


def events(data: bytes) -> list:
    assert data.endswith(b"\n\n") or not data
    payloads = [part.removeprefix(b"data: ") for part in data.split(b"\n\n")[:-1]]
    return [payload if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def last(index=0, text="", logprobs=(), tokens=3):
    usage = Usage(prompt_tokens=4, completion_tokens=tokens, cached_tokens=1)
    return Delta(
        request_id="r", index=index, text=text, token_ids=(65,), logprobs=logprobs,
        finish_reason="stop", usage=usage,
        timings=Timings(queue_s=0, ttft_s=0, tpot_s=None, e2e_s=0),
    )  # fmt: skip


def test_a_text_delta_is_one_chunk_in_openais_shape():
    (chunk,) = events(formatter().chunks(1, Delta(request_id="r", index=1, text='say "hé"\n')))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"] == [
        {"index": 1, "delta": {"content": 'say "hé"\n'}, "logprobs": None, "finish_reason": None}
    ]
    assert "usage" not in chunk


def test_a_delta_without_text_writes_nothing():
    assert formatter().chunks(0, Delta(request_id="r", index=0, token_ids=(1,))) == b""


def test_the_last_delta_writes_its_text_then_the_finish():
    text, end = events(formatter().chunks(0, last(text="bye")))
    assert text["choices"][0]["finish_reason"] is None
    assert end["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"
    }  # fmt: skip


def test_chat_opens_with_a_role_for_each_choice_and_completions_with_nothing():
    roles = [event["choices"][0] for event in events(formatter().opening(2))]
    assert [(role["index"], role["delta"]["role"]) for role in roles] == [
        (0, "assistant"), (1, "assistant")
    ]  # fmt: skip
    assert formatter("completion").opening(2) == b""


def test_usage_comes_last_with_no_choices_and_is_null_before_where_asked_for():
    writer = formatter(include_usage=True)
    (chunk,) = events(writer.chunks(0, Delta(request_id="r", index=0, text="a")))
    assert chunk["usage"] is None
    usages = [last(tokens=3).usage, last(tokens=5).usage]
    end, _ = events(writer.closing(usages, n=2))
    assert end["choices"] == []
    assert end["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert events(formatter().closing(usages, n=2)) == [b"[DONE]"]


def test_continuous_usage_is_in_every_chunk_and_grows():
    writer = formatter(include_usage=True, num_prompt_tokens=4)
    chunks = events(writer.opening(1))
    for text in "ab":
        delta = Delta(request_id="r", index=0, text=text, token_ids=(1, 2))
        chunks += events(writer.chunks(0, delta))
    chunks += events(writer.chunks(0, last(tokens=5)))
    totals = [(c["usage"]["completion_tokens"], c["usage"]["total_tokens"]) for c in chunks]
    assert totals == [(0, 4), (2, 6), (4, 8), (5, 9)]
    end, _ = events(writer.closing([last(tokens=5).usage], n=1))
    assert end["usage"]["completion_tokens"] == 5


def test_an_echo_comes_before_the_text_of_its_choice():
    writer = formatter("completion", prefixes=["one", "two"])
    assert [(c["index"], c["text"]) for event in events(writer.opening(2))
            for c in event["choices"]] == [(0, "one"), (1, "two")]  # fmt: skip
    builders = [ChoiceBuilder(i) for i in range(2)]
    for i, builder in enumerate(builders):
        builder.add(last(index=i, text="!"))
    answer = msgspec.json.decode(writer.whole([b.choice() for b in builders], 1))
    assert [choice["text"] for choice in answer["choices"]] == ["one!", "two!"]


def test_usage_counts_each_prompt_once_whatever_n_is():
    usages = [last().usage] * 4
    end, _ = events(formatter(include_usage=True).closing(usages, n=2))
    assert end["usage"]["prompt_tokens"] == 8


SCORES = (
    TokenLogprob(65, -0.5, 1, ((65, -0.5), (66, -1.0))),
    TokenLogprob(0x20AC, float("-inf"), 9, ()),
)


def test_chat_logprobs_carry_bytes_and_no_infinity():
    writer = formatter(wants_logprobs=True)
    text, end = events(writer.chunks(0, last(text="A€", logprobs=SCORES)))
    first, second = text["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "A", "logprob": -0.5, "bytes": [65],
        "top_logprobs": [
            {"token": "A", "logprob": -0.5, "bytes": [65]},
            {"token": "B", "logprob": -1.0, "bytes": [66]},
        ],
    }  # fmt: skip
    assert (second["logprob"], second["bytes"]) == (-9999.0, [0xE2, 0x82, 0xAC])
    assert end["choices"][0]["logprobs"] is None


def test_held_back_text_still_brings_its_logprobs():
    writer = formatter("completion", wants_logprobs=True)
    delta = Delta(request_id="r", index=0, token_ids=(65,), logprobs=SCORES[:1])
    (chunk,) = events(writer.chunks(0, delta))
    assert chunk["choices"][0]["text"] == ""
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["A"]


def test_completion_offsets_go_on_from_chunk_to_chunk():
    writer = formatter("completion", wants_logprobs=True)
    for expected in ([0, 1], [2, 3]):
        delta = Delta(request_id="r", index=0, text="A€", logprobs=SCORES)
        (chunk,) = events(writer.chunks(0, delta))
        assert chunk["choices"][0]["logprobs"]["text_offset"] == expected


@pytest.mark.parametrize("given", [{}, {"json_object": False}, {"json": {}, "regex": "a"}])
def test_a_structure_that_is_none_or_two_is_refused_in_the_fields_own_names(given):
    error = refusal(lambda: sampling_params(chat(structured_outputs=given), {}))
    assert error.param == "structured_outputs"
    assert "exactly one of json, json_object, regex, choice, grammar" in str(error)


def test_parts_of_characters_are_told_apart_and_the_chosen_token_is_among_the_likeliest():
    top = ((-0xE4, -0.1), (-0xE5, -0.2))
    scores = (TokenLogprob(-0xE4, -0.1, 1, top), TokenLogprob(67, -9.0, 5, top))
    writer = formatter("completion", wants_logprobs=True)
    (chunk,) = events(writer.chunks(0, Delta(request_id="r", index=0, logprobs=scores)))
    told = chunk["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xe4", "C"]
    first = {"bytes:\\xe4": -0.1, "bytes:\\xe5": -0.2}
    assert told["top_logprobs"] == [first, {**first, "C": -9.0}]
    assert told["text_offset"] == [0, 1]
    (chunk,) = events(formatter(wants_logprobs=True).chunks(
        0, Delta(request_id="r", index=0, text="x", logprobs=scores[:1])
    ))  # fmt: skip
    assert chunk["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xE4]


def test_a_whole_chat_answer_has_openais_shape():
    builder = ChoiceBuilder(0)
    builder.add(Delta(request_id="r", index=0, text="Hel"))
    builder.add(last(text="lo"))
    answer = msgspec.json.decode(formatter().whole([builder.choice()], 1))
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0, "logprobs": None, "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
        }
    ]  # fmt: skip
    assert answer["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(
    ("text", "half"),
    [(r"\ud800", "d800"), (r"\ud83dx", "d83d"), (r"\udc00 tail", "dc00"), (r"\uD800A", "d800")],
)
def test_a_lone_surrogate_is_called_by_its_name(text, half):
    for body in ('{"model": "m", "prompt": "%s"}', '{"model": "m", "%s": 1}'):
        with pytest.raises(ApiError, match=rf"lone surrogate \\u{half}"):
            parse((body % text).encode(), CompletionRequest)


@pytest.mark.parametrize("body", [b'{"model": "m', b'{"model": "\xff"}', b"[" * 100_000])
def test_other_broken_bodies_are_not_blamed_on_surrogates(body):
    with pytest.raises(ApiError, match="no valid JSON") as caught:
        parse(body, CompletionRequest)
    assert "surrogate" not in str(caught.value)
