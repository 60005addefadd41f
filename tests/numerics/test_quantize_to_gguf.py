"""GGUF files quantised from folders: by methods that read a text, and as llama.cpp reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.tensor import dequantize
from tests.tiny import TinyTokenizer, write_hf
from tests.unit.test_quantize_to_gguf import DIGITS, edited, model_of, write

PROMPT = "hello world 12 the cat"
PEER = """
import sys, llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False, n_threads=1)
ids = llm.tokenize(sys.argv[2].encode(), add_bos=False, special=False)
steps = llm.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
print(*ids, "/", *[next(steps) for _ in range(5)])
"""


@pytest.mark.parametrize("case", ["llama", "gemma3"])
@pytest.mark.parametrize(("method", "fmt"), [("gptq", "q4_0"), ("awq", "q4_k")])
def test_methods_that_read_a_text_round_the_same_weights(
    case: str, method: str, fmt: str, tmp_path: Path
) -> None:
    folder = write_hf(model_of(case), tmp_path / "hf", fmt="bf16")
    text = tmp_path / "text"
    text.write_text("hello world one two three the cat sat " * 80)
    write(folder, tmp_path / "m.gguf", fmt, method=method, calibrate=text)
    write(folder, tmp_path / "made", fmt, method=method, calibrate=text, to_gguf=False)
    gguf, made = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(tmp_path / "made")
    for name, tensor in made.tensors.items():
        np.testing.assert_allclose(
            dequantize(gguf.tensors[name]), dequantize(tensor), rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("case", ["llama", "llama3", "qwen2", "qwen3", "gemma3"])
def test_llama_cpp_reads_the_same_ids_and_goes_on_as_we_do(case: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = model_of(case, tokenizer=TinyTokenizer(add_bos=False), vocab_size=320)
    folder = edited(write_hf(model, tmp_path / "hf", fmt="bf16"), pre_tokenizer=DIGITS)
    path = tmp_path / "m.gguf"
    write(folder, path)
    done = subprocess.run(
        [sys.executable, "-c", PEER, str(path), PROMPT], capture_output=True, text=True, check=True
    )
    ids, answer = (list(map(int, part.split())) for part in done.stdout.split("/"))
    with LLM(str(path), max_model_len=64) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        [result] = llm.generate([PROMPT], params)
    assert list(result.prompt_token_ids) == ids
    assert list(result.outputs[0].token_ids) == answer
