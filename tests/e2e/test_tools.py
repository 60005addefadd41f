"""Tools over real HTTP: what is called, streamed or not, and how an answer ends (STO-04)."""

import json

import pytest

from tests.e2e.live import Canary, LiveServer, choices

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = "{% if tools %}{{ tools }}<tool_call>{% endif %}" + CHATML
LLAMA = "{% if tools %}{{ tools }}<|python_tag|>{% endif %}" + CHATML


def tool(name, strict=None, **properties):
    parameters = {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function",
            "function": {"name": name, "parameters": parameters, "strict": strict}}  # fmt: skip


# The model writes random letters: only what is bounded comes to an end.
WEATHER = tool("weather", city={"enum": ["Ulm", '"Bad" {Ort}\n😀']}, days={"enum": [1, 2]})
CLOCK = tool("clock", zone={"type": "string", "maxLength": 4})


@pytest.fixture(scope="module", params=[CHATML, HERMES, LLAMA], ids=["chatml", "hermes", "llama"])
def tool_server(request, long_script_path):
    live = LiveServer(
        long_script_path, chat_template=request.param, kv_memory_bytes=64 * 2**20, num_threads=1
    )
    yield live
    live.close()


def assembled(events):
    """Put streamed calls together; ids, names and roles come once for each."""
    found: dict[int, dict] = {}
    for choice in choices(events):
        own = found.setdefault(choice["index"], {"calls": {}, "content": "", "finish": []})
        own["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] not in own["calls"]
                assert call["type"] == "function"
                own["calls"][call["index"]] = [call["function"]["name"], ""]
            own["calls"][call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"]:
            own["finish"].append(choice["finish_reason"])
    return {
        index: ([tuple(c) for c in own["calls"].values()], own["content"] or None, own["finish"])
        for index, own in found.items()
    }


def whole(answer):
    return {
        choice["index"]: (
            [(c["function"]["name"], c["function"]["arguments"])
             for c in choice["message"].get("tool_calls", ())],
            choice["message"]["content"] or None,
            [choice["finish_reason"]],
        )
        for choice in answer["choices"]
    }  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "clock"}),
     ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
     ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)  # fmt: skip
def test_calls_that_must_be_made_are_made(tool_server, choice, names, n):
    body = {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": choice, "n": n,
            "temperature": 1, "seed": 7, "max_tokens": 400,
            "parallel_tool_calls": False}  # fmt: skip
    response = tool_server.post(CHAT, **body)
    assert response.status_code == 200, response.text
    answers = whole(response.json())
    assert len(answers) == n
    for calls, content, finish in answers.values():
        assert (content, finish) == (None, ["tool_calls"])
        [(name, arguments)] = calls
        assert name in names
        assert set(json.loads(arguments)) == ({"zone"} if name == "clock" else {"city", "days"})
    assert assembled(tool_server.stream(CHAT, **body)) == answers
    ids = [c["id"] for a in response.json()["choices"] for c in a["message"]["tool_calls"]]
    assert len(set(ids)) == n


def test_a_call_that_is_cut_says_length_and_keeps_its_arguments(tool_server):
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    [(full, _, _)] = whole(tool_server.post(CHAT, **body, max_tokens=400).json()).values()
    for max_tokens in range(1, 80, 7):
        answer = tool_server.post(CHAT, **body, max_tokens=max_tokens)
        assert answer.status_code == 200
        [(calls, content, finish)] = whole(answer.json()).values()
        assert content is None  # not even the head of the call
        assert assembled(tool_server.stream(CHAT, **body, max_tokens=max_tokens)) == whole(
            answer.json()
        )
        if answer.json()["usage"]["completion_tokens"] == max_tokens and finish != ["tool_calls"]:
            assert finish == ["length"]
        assert all(full[0][1].startswith(arguments) for _, arguments in calls[:1])


def test_none_never_calls_and_auto_may_just_talk(tool_server):
    for choice in ("none", "auto", None):
        body = {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": choice, "temperature": 0}
        answer = tool_server.post(CHAT, **body, max_tokens=40).json()
        [(calls, content, _)] = whole(answer).values()
        assert (calls, content) == ([], "HELO")
        assert assembled(tool_server.stream(CHAT, **body, max_tokens=40)) == whole(answer)


def test_a_strict_tool_is_kept_to_even_where_the_model_is_free(tool_server):
    """Only the words or a call by the schema: a biased model that opens a call must finish it."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    body = {"messages": HI, "tools": [strict], "max_tokens": 400, "temperature": 0}
    assert whole(tool_server.post(CHAT, **body).json())[0][1] == "HELO"


def test_an_answer_may_be_json_beside_tools(tool_server):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": HI, "tools": [WEATHER], "temperature": 1, "max_tokens": 300}
    for seed in range(4):
        answer = tool_server.post(CHAT, **body, seed=seed, response_format=format_)
        [(calls, content, _)] = whole(answer.json()).values()
        assert bool(calls) != bool(content)
        if content:
            assert set(json.loads(content)) == {"ok"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [WEATHER] * 200}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": [CLOCK, tool("broken", True, a="x")]}, "tools[1].function.parameters"),
        ({"tools": [tool("odd", True, a={"type": "array", "uniqueItems": True})]},
         "tools[0].function.parameters"),
        ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_broken_tools_are_refused_by_name(tool_server, fields, param):
    response = tool_server.post(CHAT, messages=HI, max_tokens=5, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_one_odd_tool_leaves_the_others_working(tool_server):
    """STO-02: a schema that is legal, but says more than can be kept to."""
    odd = tool("odd", a={"type": "array", "uniqueItems": True})
    with Canary(tool_server):
        answer = tool_server.post(
            CHAT, messages=HI, tools=[odd, WEATHER], temperature=0, max_tokens=400,
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )  # fmt: skip
    [([(name, arguments)], _, _)] = whole(answer.json()).values()
    assert (name, set(json.loads(arguments))) == ("weather", {"city", "days"})


def test_calls_and_their_results_can_be_sent_back(tool_server):
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]  # fmt: skip
    answer = tool_server.post(CHAT, messages=messages, tools=[CLOCK], temperature=0, max_tokens=20)
    assert answer.status_code == 200, answer.text
    assert whole(answer.json())[0][1] == "HELO"


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
@pytest.mark.parametrize(
    "parameters",
    [{"type": "bogus"}, {"properties": []}, {"properties": {"a": "x"}}, {"required": "a"},
     {"properties": {"a": {"$ref": "#/nowhere"}}}, {"properties": {"a": {"maxLength": "5"}}}],
)  # fmt: skip
def test_a_broken_schema_is_refused_whatever_the_choice(tool_server, choice, parameters):
    broken = {"type": "function", "function": {"name": "broken", "parameters": parameters}}
    response = tool_server.post(CHAT, messages=HI, max_tokens=2, tools=[WEATHER, broken],
                                tool_choice=choice)  # fmt: skip
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "'broken'" in error["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "rule",
    [{"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"type": "string", "format": "odd"},
     {"type": "string", "pattern": "^(?!x)y$"}, {"$ref": "https://example.org/schema"}],
)  # fmt: skip
def test_a_legal_schema_that_cannot_be_kept_to_is_no_error(tool_server, choice, rule):
    odd = tool("odd", a=rule)
    body = {"messages": HI, "max_tokens": 2, "tools": [odd], "tool_choice": choice}
    assert tool_server.post(CHAT, **body).status_code == 200


def test_a_named_tool_is_refused_by_its_place_among_all(tool_server):
    odd = tool("odd", True, a={"type": "array", "uniqueItems": True})
    named = {"type": "function", "function": {"name": "odd"}}
    response = tool_server.post(CHAT, messages=HI, tools=[WEATHER, odd], tool_choice=named)
    assert response.json()["error"]["param"] == "tools[1].function.parameters"
