"""litellm, langchain-openai and simonw's llm, the real packages against a real server process."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Literal

import pytest

from tests.e2e.live import ALPHABET, ServeProcess

pydantic = pytest.importorskip("pydantic")
# What these packages warn of is theirs.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Animal(pydantic.BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    is_old: bool


@pytest.fixture(scope="module")
def serve(long_script_path):
    with ServeProcess(long_script_path, "--kv-memory", "64M") as server:
        yield server
        close_connections(server.port)


def close_connections(port: int) -> None:
    """Close what these packages leave open in caches of their own, to be found as some test's."""
    for thing in gc.get_objects():
        if issubclass(type(thing), socket.socket) and thing.family == socket.AF_INET:
            with suppress(OSError):
                if thing.getpeername()[1] == port:
                    thing.close()


@pytest.fixture
def url(serve):
    return f"http://127.0.0.1:{serve.port}/v1"


# ---- litellm ----


@pytest.fixture
def litellm(monkeypatch):
    # It would else fetch the prices of models over the network.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    module = pytest.importorskip("litellm", reason="pip install '.[clients]'")
    monkeypatch.setattr(module, "drop_params", False)
    return module


def test_litellm_chats_whole_and_in_a_stream(litellm, url):
    fields = {"model": "openai/script", "api_base": url, "api_key": "none", "messages": HI,
              "temperature": 0}  # fmt: skip
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == "HELO"
    assert answer.usage.completion_tokens == 5
    chunks = list(litellm.completion(**fields, stream=True, n=2))
    for index in range(2):
        pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices
                  if c.index == index]  # fmt: skip
        assert "".join(pieces) == "HELO"


def test_litellm_calls_tools_and_keeps_to_schemas(litellm, url):
    fields = {"model": "openai/script", "api_base": url, "api_key": "none", "messages": HI,
              "temperature": 1, "seed": 3}  # fmt: skip
    answer = litellm.completion(
        **fields, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")
    answer = litellm.completion(**fields, response_format=Animal)
    Animal.model_validate_json(answer.choices[0].message.content)


def test_litellm_completes_embeds_and_speaks_anthropics_api(litellm, url):
    text = litellm.text_completion(
        model="text-completion-openai/script", api_base=url, api_key="none", prompt="a",
        temperature=0, max_tokens=25,
    )  # fmt: skip
    assert text.choices[0].text == ALPHABET[1:]
    vectors = litellm.embedding(
        model="openai/script", api_base=url, api_key="none", input=["a", "b"]
    )
    assert [item["index"] for item in vectors.data] == [0, 1]
    message = litellm.completion(
        model="anthropic/script", api_base=url.removesuffix("/v1"), api_key="none", messages=HI,
        temperature=0, max_tokens=20,
    )  # fmt: skip
    assert message.choices[0].message.content == "HELO"


def test_litellm_tells_a_wrong_request_from_a_wrong_server(litellm, url):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/script", api_base=url, api_key="none", messages=HI,
                           temperature=-1)  # fmt: skip
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(model="openai/other", api_base=url, api_key="none", messages=HI)


# ---- langchain-openai ----


@pytest.fixture
def langchain():
    return pytest.importorskip("langchain_openai", reason="pip install '.[clients]'")


@pytest.fixture
def chat(langchain, url):
    return langchain.ChatOpenAI(model="script", base_url=url, api_key="none", temperature=0)


def test_langchain_invokes_batches_and_streams(chat):
    answer = chat.invoke("Hi")
    assert (answer.content, answer.usage_metadata["output_tokens"]) == ("HELO", 5)
    assert [a.content for a in chat.batch(["Hi", "Ho"])] == ["HELO", "HELO"]
    assert "".join(chunk.content for chunk in chat.stream("Hi")) == "HELO"


def test_langchain_by_the_responses_api(langchain, url):
    chat = langchain.ChatOpenAI(
        model="script", base_url=url, api_key="none", temperature=0, use_responses_api=True
    )
    assert chat.invoke("Hi").text == "HELO"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_objects_of_the_callers_class(langchain, url, method):
    chat = langchain.ChatOpenAI(
        model="script", base_url=url, api_key="none", temperature=1, seed=1, max_tokens=200
    )
    assert isinstance(chat.with_structured_output(Animal, method=method).invoke("Hi"), Animal)


def test_langchain_goes_on_after_a_tools_result(langchain, url):
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain.ChatOpenAI(
        model="script", base_url=url, api_key="none", temperature=1, seed=3, max_tokens=200
    )
    bound = chat.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    asked = bound.invoke("Hi")
    [call] = asked.tool_calls
    assert call["args"]["city"] in ("Ulm", "Bonn")
    result = ToolMessage("sunny", tool_call_id=call["id"])
    greedy = langchain.ChatOpenAI(model="script", base_url=url, api_key="none", temperature=0)
    assert greedy.invoke([HumanMessage("Hi"), asked, result]).content == "HELO"


def test_langchain_embeds(langchain, url):
    embeddings = langchain.OpenAIEmbeddings(
        model="script", base_url=url, api_key="none", check_embedding_ctx_length=False
    )
    one, two = embeddings.embed_documents(["a", "b"])
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-4)
    assert len(one) == len(two)


# ---- llm ----


@pytest.fixture
def llm(url, tmp_path):
    """Return what runs `llm` with the server's model configured, and gives its output."""
    pytest.importorskip("llm", reason="pip install '.[clients]'")
    options = {"model_name": "script", "api_base": url}
    models = [
        {"model_id": "script", **options, "supports_schema": True, "supports_tools": True},
        {"model_id": "script-text", **options, "completion": True},
    ]
    # JSON is YAML.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], env=environment, capture_output=True,
            text=True, timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout.removesuffix("\n")

    return run


@pytest.mark.parametrize("how", [(), ("--no-stream",), ("--system", "Be short.")])
def test_llm_prompts(llm, how):
    assert llm("-m", "script", "Hi", "-o", "temperature", "0", *how) == "HELO"


def test_llm_completes(llm):
    text = llm("-m", "script-text", "a", "-o", "temperature", "0", "-o", "max_tokens", "25")
    assert text == ALPHABET[1:]


def test_llm_keeps_to_a_schema(llm):
    text = llm("-m", "script", "Hi", "-o", "temperature", "1", "-o", "seed", "1",
               "--schema", json.dumps(Animal.model_json_schema()))  # fmt: skip
    Animal.model_validate_json(text)
