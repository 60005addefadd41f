"""Offline batches through `LLM`."""

import contextlib
import signal
import threading
import time

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import ParameterError, PromptTooLongError, TemplateError
from paceline.weights.checkpoint import open_checkpoint
from tests.e2e.live import ALPHABET, EMOJI
from tests.tiny import random_model, successor_model, write_gguf, write_hf

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def llm(script_path):
    with LLM(str(script_path), kv_memory_bytes=8 * 2**20, num_threads=1) as model:
        yield model


def test_a_prompt_a_list_and_token_ids_are_all_prompts(llm):
    (one,) = llm.generate("a", GREEDY)
    assert (one.prompt, one.prompt_token_ids, one.text) == ("a", (97,), ALPHABET[1:])
    assert [c.text for c in llm.generate(["x", "#"], GREEDY)] == ["yz", EMOJI[1:]]
    assert [c.prompt for c in llm.generate([[120], [121]], GREEDY)] == [None, None]
    assert llm.generate([120], GREEDY)[0].text == "yz"
    assert llm.generate([], GREEDY) == []


def test_a_choice_tells_its_tokens_usage_timings_and_end(llm):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, n=2)
    (completion,) = llm.generate("a", params)
    first, second = completion.outputs
    assert (first.index, second.index) == (0, 1)
    assert first.token_ids == (98, 99)
    assert first.finish_reason == "length"
    assert [item.token_id for item in first.logprobs] == [98, 99]
    assert [item.top[0][0] for item in first.logprobs] == [98, 99]
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (1, 2)
    assert 0 <= first.timings.queue_s <= first.timings.ttft_s <= first.timings.e2e_s
    assert llm.generate("a", GREEDY)[0].outputs[0].logprobs is None


def test_the_progress_bar_is_no_part_of_the_queue_time(llm, monkeypatch):
    @contextlib.contextmanager
    def slow_bar(num_choices, *, is_shown):
        time.sleep(0.5)  # the first bar of a process imports its library
        yield lambda num_tokens, is_finished: None

    monkeypatch.setattr("paceline.llm._progress_bar", slow_bar)
    assert llm.generate("x", GREEDY)[0].outputs[0].timings.queue_s < 0.4


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2)]
    assert [c.text for c in llm.generate(["a", "a"], params)] == ["b", "bc"]
    with pytest.raises(ParameterError, match="1 params for 2 prompts"):
        llm.generate(["a", "a"], params[:1])


def test_chat_takes_one_conversation_or_several(llm):
    turn = [{"role": "user", "content": "Hi"}]
    assert [c.text for c in llm.chat(turn, GREEDY)] == ["HELO"]
    assert [c.text for c in llm.chat([turn, turn], GREEDY)] == ["HELO", "HELO"]


def test_a_bad_prompt_fails_the_call_and_leaves_nothing_running(llm):
    with pytest.raises(PromptTooLongError, match="600"):
        llm.generate(["a", "x" * 600], GREEDY)
    assert llm.loaded.engine.stats().num_waiting == 0
    assert llm.generate("y", GREEDY)[0].text == "z"


def test_ctrl_c_aborts_what_runs_and_leaves_the_llm_usable(llm):
    params = SamplingParams(temperature=0, ignore_eos=True)
    timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        generate_for_ever(llm, params)
    stats = llm.loaded.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_live_blocks) == (0, 0, 0)
    llm.loaded.engine.check_integrity()
    assert llm.generate("a", GREEDY)[0].text == ALPHABET[1:]


def generate_for_ever(llm, params):
    while True:
        llm.generate(["0"] * 4, params)


def test_an_unknown_option_is_refused_with_the_known_ones(script_path):
    with pytest.raises(ParameterError, match=r"'threads': choose from .*num_threads"):
        LLM(str(script_path), threads=1)


def test_a_closed_llm_says_so(script_path):
    llm = LLM(str(script_path), kv_memory_bytes=2**20)
    llm.close()
    llm.close()
    with pytest.raises(ParameterError, match="closed"):
        llm.generate("a")


def test_a_model_without_template_completes_but_does_not_chat(tmp_path):
    import dataclasses

    model = dataclasses.replace(successor_model([97, 98, 99]), chat_template=None)
    path = write_gguf(model, tmp_path / "base.gguf")
    with LLM(str(path), kv_memory_bytes=2**20) as llm:
        assert llm.generate("a", GREEDY)[0].text == "bc"
        with pytest.raises(TemplateError, match="--chat-template"):
            llm.chat([{"role": "user", "content": "Hi"}])
    with LLM(str(path), kv_memory_bytes=2**20, chat_template="a") as llm:
        assert llm.chat([{"role": "user", "content": "a"}], GREEDY)[0].text == "bc"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_a_gguf_file_and_a_folder_of_one_model_answer_alike(tmp_path, family):
    model = random_model(family, seed=3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for path in (write_gguf(model, tmp_path / "m.gguf"), write_hf(model, tmp_path / "m")):
        assert open_checkpoint(path).config.num_layers == 2
        with LLM(str(path), kv_memory_bytes=2**20, num_threads=1) as llm:
            answers.append(llm.generate("one two", params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 2
