"""/openapi.json is true: nothing is left out of it, and answers to what it allows keep to it."""

from __future__ import annotations

import pytest

from paceline.embedding.build import embeddings_of
from paceline.server.app import create_app
from paceline.server.door import Keys
from paceline.server.embeddings import Embeddings
from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.openapi import openapi
from paceline.server.operations import OPERATIONS
from paceline.server.responses.schema import ResponseRequest
from paceline.server.schema import ChatRequest, CompletionRequest
from tests.e2e.live import LiveServer


@pytest.fixture(scope="module")
def live(long_script_path):
    with LiveServer(
        long_script_path, kv_memory_bytes=8 * 2**20, num_threads=1, max_model_len=64
    ) as server:
        yield server


@pytest.fixture(scope="module")
def document(live):
    return live.client.get("/openapi.json").json()


def shown(document):
    return {(method, path) for path, methods in document["paths"].items() for method in methods}


def test_every_operation_is_shown_and_nothing_else(live):
    embeddings = Embeddings(embeddings_of(live.loaded, None))
    try:
        app = create_app(live.loaded, embeddings=embeddings, page=False)
    finally:
        embeddings.close()
    assert shown(openapi(app, has_keys=False)) == OPERATIONS.keys()


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, MessageRequest, CountRequest, ResponseRequest]
)
def test_bodies_have_the_fields_that_are_decoded(document, kind):
    schema = document["components"]["schemas"][kind.__name__]
    known = {*kind.__struct_fields__, *kind.neutral, *kind.noted}
    assert schema["properties"].keys() == known
    assert schema["additionalProperties"] is False


def test_every_reference_leads_somewhere(document):
    def references(node):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            node = list(node.values())
        if isinstance(node, list):
            for part in node:
                yield from references(part)

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


def test_where_there_are_keys_the_document_asks_for_them(live):
    told = openapi(create_app(live.loaded, keys=Keys([b"x" * 32])), has_keys=True)["paths"]
    assert told["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "401" in told["/v1/completions"]["post"]["responses"]
    assert "security" not in told["/health"]["get"]
