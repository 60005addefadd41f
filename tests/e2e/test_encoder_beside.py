"""An encoder beside models that write: loaded when a text comes, and asked for vectors alone."""

import weakref
from pathlib import Path

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.embedding.build import load_embedding_model
from paceline.server.embeddings import EMBEDDINGS_PATH
from tests.e2e.live import ServeProcess
from tests.e2e.several import SPELT, Reader, SeveralServer, spelling_model
from tests.tiny_bert import write_bert

NAME = "bert"
TEXTS = ["the cat sat on a mat.", "a dog ran far away"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    return [spelling_model(folder, "up"), write_bert(folder / NAME)]


@pytest.fixture
def serve(paths):
    servers = []

    def start(*given, **options):
        servers.append(SeveralServer(*(given or paths), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def alone(paths):
    """The vectors of TEXTS by the encoder alone."""
    config = EngineConfig(num_threads=1)
    model = load_embedding_model(NAME, config, path=paths[1], pooling=None)
    embedder = model.open()
    yield embedder.embed([model.encode(text) for text in TEXTS])
    embedder.close()


def embed(server, model=NAME, given=TEXTS):
    reply = server.client.post(EMBEDDINGS_PATH, json={"model": model, "input": given})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == (NAME if model == "alias" else model)
    return np.array([item["embedding"] for item in reply.json()["data"]], np.float32)


def test_it_is_loaded_at_the_first_text_and_its_vectors_are_those_of_a_server_of_its_own(
    serve, alone
):
    server = serve(aliases=(f"alias={NAME}",))
    assert server.loaded() == ["up"]
    np.testing.assert_array_equal(embed(server), alone)
    assert server.loaded() == ["up", NAME, "alias"]
    np.testing.assert_array_equal(embed(server, "alias"), alone)
    assert embed(server, "up").shape != alone.shape  # the model that writes embeds, too
    with Reader(server, "up"):
        np.testing.assert_array_equal(embed(server), alone)
    assert server.spells("up")


def test_who_asks_it_to_write_gets_a_400_and_loads_nothing(serve):
    server = serve()
    hello = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": hello}),
        ("/v1/chat/completions", {"messages": hello, "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": hello, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": hello}),
        ("/v1/cache/prefixes", {"prompt": "a" * 40}),
        ("/tokenize", {"prompt": "ab"}),
        ("/detokenize", {"tokens": [9]}),
    ):
        reply = server.client.post(path, json={"model": NAME, **body})
        assert reply.status_code == 400, path
        assert "embeds texts and writes none: ask /v1/embeddings" in reply.text
    assert server.loaded() == ["up"]


def test_it_makes_room_and_comes_back_as_any_model_does(serve, alone):
    server = serve(fits=1)
    for _ in range(2):
        np.testing.assert_array_equal(embed(server), alone)
        assert server.loaded() == [NAME]
        embedder = weakref.ref(server.models.find(NAME).served.embeddings.model.open())
        assert server.spells("up")
        assert server.loaded() == ["up"]
        assert embedder() is None
    with Reader(server, "up"):
        refused = server.client.post(EMBEDDINGS_PATH, json={"model": NAME, "input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_memory")
    assert server.client.get("/health").json()["models"][NAME]["num_loads"] == 2


def test_the_first_that_writes_is_the_default_wherever_the_encoder_stands(serve, paths):
    server = serve(*reversed(paths))
    assert server.loaded() == ["up"]
    assert server.client.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert server.client.get("/health").json()["model"] == "up"


def test_reports_know_it_and_the_page_offers_it_to_nobody(serve):
    server = serve()
    embed(server)
    live = server.client.get("/v1/paceline/live").json()
    assert (live["model"], live["models"]) == ("up", ["up"])
    assert server.client.get("/v1/paceline/live", params={"model": NAME}).json()["loaded"] is True
    trace = server.client.get("/v1/trace", params={"model": NAME})
    assert trace.status_code == 404
    assert "it has no trace" in trace.json()["error"]["message"]
    health = server.client.get("/health").json()["models"]
    assert [health[name]["writes"] for name in ("up", NAME)] == [True, False]
    lines = server.client.get("/metrics").text.splitlines()
    [loaded] = [x for x in lines if x.startswith("paceline:model_loaded{") and NAME in x]
    assert loaded.endswith(" 1.0")
    assert any(x.startswith("paceline:embedding_tokens_total{") and NAME in x for x in lines)


def test_the_command_serves_both_with_options_that_only_writing_has_a_use_for(paths):
    options = ("--kv-memory", "4M", "--max-model-len", "400", "--weights", "q8_0")
    with ServeProcess(Path(paths[0]), str(paths[1]), *options) as server:
        listed = server.client.get("/v1/models").json()["data"]
        assert [(m["id"], m["max_model_len"]) for m in listed] == [("up", 400), (NAME, 50)]
        embed(server)
        body = {"model": "up", "prompt": "a", "temperature": 0}
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == SPELT["up"]
