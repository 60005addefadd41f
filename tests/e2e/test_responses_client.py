"""The Responses API of the real openai package against the real server."""

import asyncio
from typing import Literal

import pytest

from tests.e2e.live import LiveServer, wait_until
from tests.e2e.test_tools import HERMES

openai = pytest.importorskip("openai", reason="pip install '.[clients]' to test with real clients")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.clients


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
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
    server.close()


ASK = {"model": "script", "input": "Hi", "temperature": 0}


def test_a_response_is_created_retrieved_listed_and_deleted(client):
    response = client.responses.create(**ASK, instructions="Be brief.", metadata={"a": "b"})
    assert (response.output_text, response.status) == ("HELO", "completed")
    assert response.usage.output_tokens == 5
    assert client.responses.retrieve(response.id) == response
    [item] = client.responses.input_items.list(response.id).data
    assert (item.role, item.content[0].text) == ("user", "Hi")
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_conversation_goes_on(client):
    first = client.responses.create(**ASK)
    second = client.responses.create(**ASK, previous_response_id=first.id)
    assert second.output_text == "HELO"
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message"] * 3  # the pages are walked through
    by_hand = client.responses.create(
        model="script", temperature=0, store=False,
        input=[{"role": "user", "content": "Hi"}, *first.output,
               {"role": "user", "content": "Hi"}],
    )  # fmt: skip
    assert by_hand.usage.input_tokens == second.usage.input_tokens


def test_a_stream_has_the_packages_events(client):
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 4, "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[-1].response.output_text == "HELO"


def test_parse_gives_an_object_of_the_callers_class(client):
    fields = {"model": "script", "input": "Hi", "temperature": 1, "text_format": Animal,
              "extra_body": {"seed": 1}}  # fmt: skip
    response = client.responses.parse(**fields)
    assert isinstance(response.output_parsed, Animal)
    with client.responses.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert final.output_parsed == response.output_parsed
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "GetWeather"}])
def test_tools_are_called_parsed_and_answered(client, choice):
    tools = [openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}]
    fields = {"model": "script", "input": "Hi", "tools": tools, "tool_choice": choice,
              "parallel_tool_calls": False, "extra_body": {"seed": 3}}  # fmt: skip
    response = client.responses.create(**fields)
    [call] = response.output
    assert GetWeather.model_validate_json(call.arguments)
    with client.responses.stream(**fields) as stream:
        assert any(e.type == "response.function_call_arguments.delta" for e in stream)
        [streamed] = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = client.responses.create(
        **{**ASK, "input": [result]}, tools=tools, previous_response_id=response.id
    )
    by_hand = client.responses.create(
        **{**ASK, "input": [{"role": "user", "content": "Hi"}, call, result]}, tools=tools
    )
    assert by_id.output_text == by_hand.output_text == "HELO"
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, conversation="c")
    assert refused.value.param == "conversation"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ASK, "model": "other"})
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**ASK, previous_response_id="resp_none")
    assert unknown.value.code == "previous_response_not_found"
    response = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="nothing is left to cancel"):
        client.responses.cancel(response.id)


def test_a_response_in_the_background_is_polled_and_cancelled(client):
    response = client.responses.create(**ASK, background=True)
    assert (response.status, response.background) == ("queued", True)

    def polled(wanted):
        nonlocal response
        response = client.responses.retrieve(response.id)
        return response.status == wanted

    wait_until(lambda: polled("completed"))
    assert response.output_text == "HELO"
    schema = {"type": "object", "properties": {"a": {"type": "array", "minItems": 9000}},
              "required": ["a"]}  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    response = client.responses.create(**{**ASK, "temperature": 1}, text=text, background=True)
    assert client.responses.cancel(response.id).status == "cancelled"
    assert polled("cancelled")


def test_a_stream_in_the_background_is_left_and_taken_up_again(client):
    with client.responses.create(**ASK, background=True, stream=True) as stream:
        first = [next(stream) for _ in range(5)]
    response_id, number = first[0].response.id, first[-1].sequence_number
    assert [event.type for event in first[:3]] == [
        "response.created", "response.queued", "response.in_progress"
    ]  # fmt: skip
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=number))
    assert [event.sequence_number for event in first + rest] == list(range(len(first + rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response == client.responses.retrieve(response_id)
    with client.responses.stream(response_id=response_id, starting_after=number) as stream:
        assert len(list(stream)) == len(rest)
        assert stream.get_final_response().output_text == "HELO"


def test_the_async_client_streams_several_answers_at_once(client):
    async def ask(asker, name):
        async with asker.responses.stream(**ASK, instructions=name) as stream:
            return (await stream.get_final_response()).output_text

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as asker:
            return await asyncio.gather(*(ask(asker, name) for name in "abcde"))

    assert asyncio.run(ask_all()) == ["HELO"] * 5


def test_every_parameter_of_the_package_is_in_our_table():
    """A field that a newer client sends is in docs/api.md: supported, neutral or noted."""
    from openai.types.responses import response_create_params

    from paceline.server.responses.schema import ResponseRequest as Ours

    sent = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    assert sent - {*Ours.__struct_fields__, *Ours.neutral, *Ours.noted} == set()
