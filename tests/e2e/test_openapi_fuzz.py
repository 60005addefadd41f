"""schemathesis against the real server: bodies by the document, and bodies that are none."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.server.operations import OPERATIONS
from tests.e2e.live import ServeProcess

schemathesis = pytest.importorskip(
    "schemathesis", reason="pip install '.[clients]' to test the document with schemathesis"
)
pytestmark = pytest.mark.clients
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.negative_data_rejection,
]
DEADLINE = "x-request-deadline-ms"
NUM_EXAMPLES = 10  # an operation and mode; enough for CI, raise it to search


@pytest.fixture(scope="module")
def fuzzed(script_path):
    with ServeProcess(script_path, "--kv-memory", "8M", "--max-model-len", "64") as server:
        yield server
        server.drain()


@pytest.fixture(scope="module")
def told(fuzzed):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{fuzzed.port}/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_sent_the_answer_is_a_documented_one(fuzzed, told, method, path):
    operation = told[path][method]
    modes = [operation.as_strategy(generation_mode=m) for m in schemathesis.GenerationMode]

    @given(case=st.one_of(modes))
    @settings(
        max_examples=NUM_EXAMPLES * len(modes), deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def send(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = fuzzed.name  # or nearly every answer is a 404
        with suppress(TypeError, KeyError, ValueError):
            if 0 < float(case.headers[DEADLINE]) < 60_000:  # a 504 would be right
                case.headers[DEADLINE] = "60000"
        case.call_and_validate(checks=CHECKS, timeout=120)

    send()
