"""SmolLM2-135M answers: through the engine, the server and the command line."""

import json
import subprocess
import sys

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.live import LiveServer, texts

pytestmark = pytest.mark.real
KV_DTYPE = "f16"  # with it the text is the same on every CPU

QUESTION = [{"role": "user", "content": "Which planet do we live on?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def path(real_model):
    return real_model("smollm2-135m")


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), kv_memory_bytes=64 * 2**20, kv_dtype=KV_DTYPE) as model:
        yield model


def test_greedy_ids_are_the_golden_ones(llm):
    (completion,) = llm.generate("The capital of France is", GREEDY)
    assert completion.text.startswith(" Paris")
    assert completion.outputs[0].token_ids[:8] == (7042, 30, 198, 198, 504, 2988, 314, 42)


def test_a_chat_answers_the_question(llm):
    (completion,) = llm.chat(QUESTION, GREEDY)
    assert completion.text == "The planet we live on is called Earth."
    assert "<|im_end|>" not in completion.text


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm):
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3, 4,"] * 2
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2)
    together = llm.generate(prompts, params)
    for prompt, batched in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, params)
        assert alone.outputs[0].token_ids == batched.outputs[0].token_ids
        assert alone.outputs[0].logprobs == batched.outputs[0].logprobs


def test_the_server_chats(path):
    server = LiveServer(path, kv_memory_bytes=64 * 2**20, kv_dtype=KV_DTYPE)
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    answer = server.chat(QUESTION[0]["content"], temperature=0, max_tokens=24)
    text = answer["choices"][0]["message"]["content"]
    assert "Earth" in text
    assert texts(server.stream("/v1/chat/completions", **body))[0] == text
    server.drain()
    server.close()


def test_run_answers_from_the_command_line(path):
    command = [sys.executable, "-c", "from paceline.cli.main import main; main()", "run", str(path)]
    arguments = [QUESTION[0]["content"], "--temperature", "0", "-n", "24", "--json"]
    arguments += ["--kv-dtype", KV_DTYPE]
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    answer = json.loads(result.stdout)
    assert "Earth" in answer["text"]
    assert 0 < answer["timings"]["bandwidth_fraction"] < 1.5
