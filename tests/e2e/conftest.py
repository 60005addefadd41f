"""Models and servers that the end-to-end tests share."""

import pytest

from tests.e2e.live import LiveServer, script_model


@pytest.fixture(scope="session")
def script_path(tmp_path_factory):
    return script_model(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="session")
def long_script_path(tmp_path_factory):
    """The same, with a context long enough to be cut in the middle of anything."""
    return script_model(tmp_path_factory.mktemp("long"), max_context=16384)


@pytest.fixture(scope="module")
def server(script_path):
    live = LiveServer(script_path, kv_memory_bytes=8 * 2**20, num_threads=1)
    yield live
    live.close()
