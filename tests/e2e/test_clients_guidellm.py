"""guidellm measures a server, as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.live import ServeProcess
from tests.tiny import random_model, write_hf

pytestmark = pytest.mark.clients
NUM_REQUESTS, NUM_TOKENS = 6, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = random_model("llama", seed=5, max_position_embeddings=2048)
    return write_hf(model, tmp_path_factory.mktemp("guidellm") / "random")


def test_a_run_counts_the_requests_and_tokens_that_were_asked_for(folder, tmp_path):
    pytest.importorskip("guidellm", reason="pip install '.[clients-heavy]'")
    report = tmp_path / "report.json"
    with ServeProcess(folder, "--threads", "1", "--kv-memory", "8M") as server:
        arguments = {
            "--backend": f"kind=openai_http,target=http://127.0.0.1:{server.port}",
            "--profile": "kind=concurrent,streams=2",
            "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer": f"kind=hf_auto,model={folder}",
            "--data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
            "--output": f"kind=json,path={report}",
        }
        result = subprocess.run(
            [sys.executable, "-m", "guidellm", "run", "--disable-console",
             *(word for pair in arguments.items() for word in pair)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        metrics = server.client.get("/metrics").text
        assert 'finished_reason="error",model_name="random"} 0.0' in metrics
    [run] = json.loads(report.read_text())["benchmarks"]
    requests = run["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (NUM_REQUESTS, 0)
    assert {request["output_tokens"] for request in requests["successful"]} == {NUM_TOKENS}
