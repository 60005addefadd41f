"""/v1/embeddings: an encoder alone, and the hidden states of a model that writes."""

import base64
import json
import re
import subprocess
import sys
from concurrent.futures import Future

import numpy as np
import pytest
from fastapi.testclient import TestClient

from paceline.config import EngineConfig
from paceline.embedding.build import embeddings_of, load_embedding_model
from paceline.engine.build import load_model
from paceline.errors import UnsupportedModelError
from paceline.explain.sources import from_trace
from paceline.server import embeddings as module
from paceline.server.app import create_app
from paceline.server.embedding_app import create_embedding_app
from paceline.server.embeddings import Embeddings
from tests.e2e.live import ServeProcess
from tests.tiny import random_model, write_hf
from tests.tiny_bert import write_bert

NAME = "tiny-bert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="module")
def embeddings(folder):
    config = EngineConfig(num_threads=1)
    embeddings = Embeddings(load_embedding_model(NAME, config, path=folder, pooling=None))
    yield embeddings
    embeddings.close()


@pytest.fixture
def client(embeddings):
    with TestClient(create_embedding_app(embeddings)) as client:
        yield client


def embed(client, given, **fields):
    response = client.post("/v1/embeddings", json={"model": NAME, "input": given, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return [item["embedding"] for item in body["data"]], body


def refusal(client, given, **fields):
    response = client.post("/v1/embeddings", json={"model": NAME, "input": given, **fields})
    assert response.status_code in (400, 404), response.text
    return response.json()["error"]


def test_texts_ids_and_lists_of_them_have_the_same_vectors(client, embeddings):
    text = "the cat sat on a mat."
    ids = embeddings.model.encode(text)
    [alone], body = embed(client, text, user="somebody")
    assert (body["object"], body["model"]) == ("list", NAME)
    assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert len(alone) == 64
    np.testing.assert_allclose(np.linalg.norm(alone), 1, atol=1e-6)
    for given in ([text, "a dog ran"], ids, [[5, 6], ids], [ids, "a dog ran"]):
        vectors, _ = embed(client, given)
        assert alone in vectors  # law 1: the same bits beside others


def test_base64_is_the_same_floats(client):
    floats, _ = embed(client, ["a cat", "big dog"], encoding_format="float", dimensions=64)
    packed, _ = embed(client, ["a cat", "big dog"], encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(item), "<f4").tolist() for item in packed]
    assert decoded == floats


@pytest.mark.parametrize(
    ("given", "fields", "param", "words"),
    [
        ("", {}, "input", "input is empty"),
        ([], {}, "input", "input is empty"),
        (["a", ""], {}, "input", r"input\[1\] is empty"),
        ([[1], []], {}, "input", r"input\[1\] is empty"),
        (["a", 1], {}, "input", r"input\[1\] is 1: it must be a string or a list"),
        ([[1], [2, "b"]], {}, "input", r"input\[1\] is a list of 2: it must be a string"),
        ([1, 99999], {}, "input", "token id 99999"),
        ([-1], {}, "input", "token id -1"),
        (["a"] * 2049, {}, "input", "holds 2049 texts: send at most 2048"),
        (["cat", "cat " * 60], {}, "input", r"input\[1\] has 62 tokens, the limit.* is 50"),
        ("a" * 100_000, {}, "input", "has 100000 characters"),
        ("a", {"dimensions": 32}, "dimensions", "the vectors of tiny-bert have 64"),
        ("a", {"encoding_format": "int8"}, "encoding_format", "int8"),
        ("a", {"truncate": True}, "truncate", "truncate is not a field"),
        ("a", {"user": 5}, "user", "user"),
        ("a", {"model": "other"}, "model", "'other' is not served"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(client, given, fields, param, words):
    error = refusal(client, given, **fields)
    assert error["param"] == param
    assert re.search(words, error["message"]), error["message"]


def test_a_call_is_bounded_in_all_its_tokens(client, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS", 20)
    assert "more than 20 tokens in all" in refusal(client, ["a cat sat"] * 5)["message"]


def test_an_encoder_writes_nothing_and_says_what_to_ask(client):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        response = client.post(path, json={"model": NAME, "prompt": "a"})
        assert response.status_code == 400
        assert "embeds texts and writes none: ask /v1/embeddings" in response.text
    assert client.get("/v1/models").json()["data"][0]["id"] == NAME
    assert client.get("/health").json()["embedding"]["dimensions"] == 64
    assert client.get("/ready").status_code == 200


def test_a_full_queue_is_a_429_that_says_when_to_come_back(client, embeddings, monkeypatch):
    monkeypatch.setattr(type(embeddings._queue), "num_tokens", 10**9)
    response = client.post("/v1/embeddings", json={"model": NAME, "input": "a"})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1


def ask_within(client, deadline_ms):
    headers = {"x-request-deadline-ms": deadline_ms}
    return client.post("/v1/embeddings", json={"model": NAME, "input": "a"}, headers=headers)


def test_a_deadline_is_kept(client, embeddings, monkeypatch):
    assert ask_within(client, "60000").status_code == 200
    queue = type(embeddings._queue)
    with monkeypatch.context() as patch:
        asked = []
        patch.setattr(queue, "predict_s", lambda self: None)
        patch.setattr(queue, "submit", lambda self, texts: asked.append(Future()) or asked[-1])
        late = ask_within(client, "20")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert asked[0].cancelled()  # so its texts are not computed
    monkeypatch.setattr(queue, "predict_s", lambda self: 1.5)
    refused = ask_within(client, "1000")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    assert refused.json()["error"]["code"] == "deadline_unreachable"


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "1e99"])
def test_a_header_that_is_no_deadline_is_refused(client, value):
    refused = ask_within(client, value)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-deadline-ms")


def test_a_model_that_writes_embeds_too(tmp_path):
    path = write_hf(random_model("llama"), tmp_path / "llama")
    loaded = load_model(str(path), EngineConfig(num_threads=1, kv_memory_bytes=2**22))
    embeddings = Embeddings(embeddings_of(loaded, "last"))
    with TestClient(create_app(loaded, embeddings=embeddings)) as client:
        body = {"model": "llama", "input": ["abc", "xyz and more"]}
        vectors = [d["embedding"] for d in client.post("/v1/embeddings", json=body).json()["data"]]
        assert np.abs(np.subtract(*vectors)).max() > 0.01
        answer = client.post(
            "/v1/completions", json={"model": "llama", "prompt": "abc", "max_tokens": 2}
        )
        assert answer.status_code == 200
    embeddings.close()


def test_calls_that_embed_are_in_the_books_of_their_server(tmp_path):
    path = write_hf(random_model("llama"), tmp_path / "llama")
    loaded = load_model(str(path), EngineConfig(num_threads=1, kv_memory_bytes=2**22, ledger=True))
    embeddings = Embeddings(embeddings_of(loaded, "last"))
    with TestClient(create_app(loaded, embeddings=embeddings)) as client:
        body = {"model": "llama", "input": ["abc", "xyz and more"]}
        answer = client.post("/v1/embeddings", json=body, headers={"x-request-id": "mine"})
        assert client.post("/v1/embeddings", json={**body, "input": []}).status_code == 400
        num_tokens = answer.json()["usage"]["prompt_tokens"]
        ledger = client.get("/v1/requests/mine/timeline").json()
        metrics = client.get("/metrics").text
        trace = client.get("/v1/trace").json()
    embeddings.close()
    assert (ledger["outcome"], ledger["prompt_tokens"]) == ("ok", num_tokens)
    assert ledger["parts_ms"]["prefill"] > 0
    assert sum(ledger["parts_ms"].values()) == pytest.approx(ledger["wall_ms"])

    def value(name, outcome):
        labels = f'{{engine="0",model_name="llama",outcome="{outcome}"}}'
        (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name}{labels}")]
        return float(line.split()[-1])

    assert value("paceline:embedding_seconds_count", "ok") == 1
    assert value("paceline:embedding_seconds_count", "refused") == 1
    assert value("paceline:embedding_tokens_total", "ok") == num_tokens
    # Their times are none of answers that are written token by token.
    assert value("paceline:request_seconds_count", "ok") == 0
    facts = from_trace(trace, "trace")
    assert (facts.calls, facts.num_failed) == ((), 0)


@pytest.mark.clients
def test_the_openai_package_gets_its_vectors(folder):
    openai = pytest.importorskip("openai")
    with (
        ServeProcess(folder, "--threads", "1") as server,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        packed = client.embeddings.create(model=NAME, input=["a cat", "big dog"])
        floats = client.embeddings.create(
            model=NAME, input=["a cat", "big dog"], encoding_format="float"
        )
        assert [d.embedding for d in packed.data] == [d.embedding for d in floats.data]
        assert packed.usage.prompt_tokens == 8
        with pytest.raises(openai.BadRequestError, match="embeds texts and writes none"):
            client.completions.create(model=NAME, prompt="a")


def test_serve_ends_calls_in_good_order(folder):
    with ServeProcess(folder, "--threads", "1") as server:
        answer = server.post("/v1/embeddings", input="the cat")
        assert answer.status_code == 200
        assert len(answer.json()["data"][0]["embedding"]) == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-dtype", "int8"], "kv_dtype is 'int8', but this model embeds texts"),
        (["--access-log", "-"], "--access-log has no use for a model that embeds"),
        (["--weights", "q3"], "weights is 'q3': choose one of file, q8_0"),
        (["--max-model-len", "51"], "the model's context is 50 tokens"),
    ],
)
def test_serve_refuses_what_an_encoder_has_no_use_for(folder, options, words):
    command = [sys.executable, "-m", "paceline", "serve", str(folder), "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert words in done.stderr


def test_embed_shows_cosines_or_vectors(folder):
    command = [sys.executable, "-m", "paceline", "embed", str(folder)]
    shown = subprocess.run(
        [*command, "a cat", "a cat", "run away!"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["1.000", "1.000"]
    assert float(shown[3].split()[0]) < 0.999
    printed = subprocess.run(
        [*command, "-", "--json"], input="a cat\n\nbig dog\n", capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    mixed = subprocess.run([*command, "-", "b"], input="a", capture_output=True, text=True)
    assert (mixed.returncode, "reads all texts from stdin" in mixed.stderr) == (1, True)
    result = json.loads(printed)
    assert (result["dimensions"], result["num_tokens"]) == (64, [4, 4])
    assert len(result["embeddings"]) == 2


def test_an_encoder_is_no_draft_model(folder, script_path):
    config = EngineConfig(speculate=f"draft:model={folder}")
    with pytest.raises(UnsupportedModelError, match="embeds texts and writes none"):
        load_model(str(script_path), config)


def test_a_folder_of_an_encoder_does_not_load_as_a_model_that_writes(folder):
    with pytest.raises(UnsupportedModelError, match="embeds texts and writes none"):
        load_model(str(folder), EngineConfig())
