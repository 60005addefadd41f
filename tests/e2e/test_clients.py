"""The real openai package against the real server."""

import asyncio
import json
from typing import Literal

import pytest

from tests.e2e.live import ALPHABET, LiveServer

openai = pytest.importorskip("openai", reason="pip install '.[clients]' to test with real clients")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.clients

HI = [{"role": "user", "content": "Hi"}]
HERMES = (
    "{% if tools %}{{ tools }}<tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_old: bool


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Ulm", "Bonn"]


@pytest.fixture(scope="module")
def client(long_script_path):
    server = LiveServer(
        long_script_path, chat_template=HERMES, kv_memory_bytes=64 * 2**20, num_threads=1
    )
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
    server.close()


def test_models_chat_and_completions(client):
    [model] = client.models.list().data
    assert model.id == "script"
    answer = client.chat.completions.create(model="script", messages=HI, temperature=0)
    assert answer.choices[0].message.content == "HELO"
    text = client.completions.create(
        model="script", prompt="a", temperature=0, echo=True, user="somebody",
        extra_body={"ignore_eos": True, "min_tokens": 3}, max_tokens=25,
    )  # fmt: skip
    assert text.choices[0].text == ALPHABET


def test_a_stream_with_usage(client):
    chunks = list(client.chat.completions.create(
        model="script", messages=HI, temperature=0, stream=True, n=2, metadata={"a": "b"},
        stream_options={"include_usage": True},
    ))  # fmt: skip
    for index in range(2):
        text = "".join(
            c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index
        )
        assert text == "HELO"
    assert chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_parse_gives_an_object_of_the_callers_class(client):
    answer = client.chat.completions.parse(
        model="script", messages=HI, response_format=Animal, temperature=1, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_the_streaming_helper_gives_the_same_object(client):
    with client.chat.completions.stream(
        model="script", messages=HI, response_format=Animal, temperature=1, seed=1
    ) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Animal)
    assert {"chunk", "content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("choice", ["required", {"type": "function",
                                                 "function": {"name": "GetWeather"}}])  # fmt: skip
def test_tools_are_called_and_parsed(client, choice):
    tools = [openai.pydantic_function_tool(GetWeather)]
    fields = {"model": "script", "messages": HI, "tools": tools, "tool_choice": choice,
              "temperature": 1, "seed": 3, "parallel_tool_calls": False}  # fmt: skip
    answer = client.chat.completions.parse(**fields)
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert any(event.type == "tool_calls.function.arguments.delta" for event in events)


def test_a_conversation_with_tool_results_goes_on(client):
    tools = [openai.pydantic_function_tool(GetWeather)]
    first = client.chat.completions.create(
        model="script", messages=HI, tools=tools, tool_choice="required", temperature=0,
        parallel_tool_calls=False,
    )  # fmt: skip
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = client.chat.completions.create(
        model="script", messages=[*HI, message, result], tools=tools, temperature=0, max_tokens=20
    )
    assert second.choices[0].message.content == "HELO"


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="script", messages=HI, reasoning_effort="high")
    assert refused.value.param == "reasoning_effort"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=HI)
    assert unknown.value.code == "model_not_found"


def test_the_async_client_streams_several_answers_at_once(client):
    async def ask(asker, prompt):
        stream = await asker.completions.create(
            model="script", prompt=prompt, temperature=0, stream=True
        )
        return prompt + "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as asker:
            return await asyncio.gather(*(ask(asker, letter) for letter in "acegi"))

    assert asyncio.run(ask_all()) == [ALPHABET[i:] for i in (0, 2, 4, 6, 8)]


def test_every_parameter_of_the_package_is_in_our_table():
    """A field that a newer client sends is in docs/api.md: supported, neutral or noted."""
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat

    from paceline.server.schema import INFORMATIONAL, ChatRequest, CompletionRequest

    for params, kind in ((chat, ChatRequest), (completion, CompletionRequest)):
        sent = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
        known = {*kind.__struct_fields__, *kind.neutral, *INFORMATIONAL}
        assert sent - known == set()


def test_json_mode_gives_json(client):
    answer = client.chat.completions.create(
        model="script", messages=HI, response_format={"type": "json_object"}, temperature=0,
        max_tokens=200, logit_bias={"125": 30},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content) == {}
