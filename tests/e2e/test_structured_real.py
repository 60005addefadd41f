"""Structures and tools on SmolLM2, whose words are free where the structure leaves them free."""

import concurrent.futures
import json
import re

import pytest

from tests.e2e.live import LiveServer, texts
from tests.e2e.test_tools import assembled, whole

pytestmark = pytest.mark.real
CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Describe a person as JSON, then stop."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"], "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def smollm(real_model):
    live = LiveServer(real_model("smollm2-135m"), kv_memory_bytes=256 * 2**20)
    yield live
    live.close()


def test_free_text_stays_within_the_schema_in_any_batch(smollm):
    bodies = [
        {"messages": ASK, "response_format": FORMAT, "max_tokens": 200, "temperature": t, "seed": 2}
        for t in (0, 0.8)
    ]
    bodies.append({"messages": ASK, "max_tokens": 30, "temperature": 0})

    def ask(body):
        return smollm.post(CHAT, **body).json()["choices"][0]["message"]["content"]

    alone = [ask(body) for body in bodies]
    for text in alone[:2]:
        person = json.loads(text)
        assert set(person) == {"name", "age", "tags"}
        assert 0 <= person["age"] <= 120
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, bodies * 2)) == alone * 2
    assert texts(smollm.stream(CHAT, **bodies[1]))[0] == alone[1]


def test_a_model_that_would_rather_talk_is_bound_to_a_regex(smollm):
    body = {"messages": ASK, "temperature": 1, "max_tokens": 60,
            "structured_outputs": {"regex": r"[A-Z][a-z]{2,9} is \d{1,3} years old\."}}  # fmt: skip
    for seed in range(3):
        text = smollm.post(CHAT, **body, seed=seed).json()["choices"][0]["message"]["content"]
        assert re.fullmatch(r"[A-Z][a-z]{2,9} is \d{1,3} years old\.", text)


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_model_that_knows_no_tools_is_told_of_them(smollm, choice, strict):
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    messages = [{"role": "user", "content": "What is the weather in Paris? Call the function."}]
    body = {"messages": messages, "tools": [tool], "tool_choice": choice, "temperature": 0,
            "max_tokens": 120, "parallel_tool_calls": False}  # fmt: skip
    answer = whole(smollm.post(CHAT, **body).json())
    [(calls, content, finish)] = answer.values()
    if choice == "required":
        assert (len(calls), content, finish) == (1, None, ["tool_calls"])
    for name, arguments in calls:
        assert name == "get_weather"
        if finish == ["tool_calls"] and (strict or choice == "required"):
            assert set(json.loads(arguments)) == {"city"}
    assert assembled(smollm.stream(CHAT, **body)) == answer
