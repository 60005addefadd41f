"""The real anthropic package against the real server."""

import asyncio
import json
from typing import Literal

import pytest

from paceline.server.door import read_keys
from tests.e2e.live import LiveServer
from tests.e2e.test_tools import HERMES

anthropic = pytest.importorskip("anthropic", reason="pip install '.[clients]' to test with it")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.clients

HI = [{"role": "user", "content": "Hi"}]
KEY = "sk-ant-0123456789"
WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
                     "required": ["city"], "additionalProperties": False},
}  # fmt: skip
ASK = {"model": "script", "max_tokens": 60, "messages": HI, "extra_body": {"temperature": 0}}


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_old: bool


@pytest.fixture(scope="module")
def url(long_script_path, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    server = LiveServer(
        long_script_path, chat_template=HERMES, kv_memory_bytes=64 * 2**20, num_threads=1,
        keys=read_keys(str(keys)),
    )  # fmt: skip
    yield f"http://127.0.0.1:{server.port}"
    server.close()


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message(client):
    message = client.messages.create(
        **ASK, metadata={"user_id": "somebody"}, stop_sequences=["zzz"],
        system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    assert [(block.type, block.text) for block in message.content] == [("text", "HELO")]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 5)
    assert message._request_id
    stopped = client.messages.create(**ASK, stop_sequences=["LO"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "LO")


def test_raw_events(client):
    events = list(client.messages.create(**ASK, stream=True))
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 4,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2].usage.output_tokens == 5


def test_the_streaming_helper(client):
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == "HELO"
        message = stream.get_final_message()
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "HELO")
    usage = message.usage
    plain = client.messages.create(**ASK).usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert total == plain.input_tokens + plain.cache_read_input_tokens
    assert plain.cache_read_input_tokens > 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_are_used_and_their_results_go_back(client, choice):
    fields = {**ASK, "max_tokens": 400, "tools": [WEATHER], "extra_body": {"seed": 3},
              "tool_choice": {**choice, "disable_parallel_tool_use": True}}  # fmt: skip
    message = client.messages.create(**fields)
    [use] = message.content
    assert (message.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    assert use.input["city"] in ("Ulm", "Bonn")
    with client.messages.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_message().content
    assert streamed.input == use.input
    assert "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": use.id,
              "content": [{"type": "text", "text": "sunny"}]}  # fmt: skip
    more = {"type": "text", "text": "and?"}
    messages = [*HI, {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result, more]}]  # fmt: skip
    again = client.messages.create(**{**ASK, "messages": messages}, tools=[WEATHER])
    assert again.content[0].text == "HELO"


def test_tokens_are_counted(client):
    body = {"model": "script", "messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**body)
    usage = client.messages.create(**body, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_parse_gives_an_object_of_the_callers_class(client):
    parsed = client.messages.parse(
        model="script", max_tokens=200, messages=HI, output_format=Animal, extra_body={"seed": 1}
    )
    assert isinstance(parsed.parsed_output, Animal)


def test_errors_are_the_clients_own(client, url):
    with pytest.raises(anthropic.BadRequestError, match="this model does not reason") as refused:
        client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "other"})
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**{**ASK, "messages": image})
    with (
        anthropic.Anthropic(base_url=url, api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**ASK)
    with anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0) as bearer:
        assert bearer.messages.create(**ASK).content


def test_an_error_inside_of_a_stream_is_raised(client):
    schema = {"type": "object", "properties": {"a": {"type": "array", "minItems": 9000}},
              "required": ["a"]}  # fmt: skip
    fields = {**ASK, "max_tokens": 12_000, "extra_body": {"deadline_ms": 300},
              "output_config": {"format": {"type": "json_schema", "schema": schema}}}  # fmt: skip
    with pytest.raises(anthropic.APIStatusError, match="deadline of 300 ms"):
        list(client.messages.create(**fields, stream=True))


def test_the_async_client_streams_several_answers_at_once(url):
    async def ask(asker, name):
        async with asker.messages.stream(**{**ASK, "system": name}) as stream:
            return await stream.get_final_text()

    async def ask_all():
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as asker:
            texts = await asyncio.gather(*(ask(asker, name) for name in "abcde"))
            counted = await asker.messages.count_tokens(model="script", messages=HI)
            return texts, counted.input_tokens

    texts, num_tokens = asyncio.run(ask_all())
    assert texts == ["HELO"] * 5
    assert num_tokens > 0


def test_every_parameter_of_the_package_is_in_our_table():
    """A field that a newer client sends is in docs/api.md: supported, neutral or noted."""
    from anthropic.types import message_count_tokens_params, message_create_params

    from paceline.server.messages.schema import CountRequest, MessageRequest

    create = message_create_params.MessageCreateParamsBase.__annotations__
    count = message_count_tokens_params.MessageCountTokensParams.__annotations__
    for sent, kind in (({*create, "stream"}, MessageRequest), ({*count}, CountRequest)):
        assert sent - {*kind.__struct_fields__, *kind.neutral, *kind.noted} == set()


def test_a_json_answer_is_json(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    message = client.messages.create(
        **ASK, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert set(json.loads(message.content[0].text)) == {"ok"}
