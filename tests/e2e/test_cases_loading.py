"""Cases LOD-01, LOD-03, LOD-04, LOD-05 and LOD-06, for GGUF files and HF folders."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers

from paceline.config import EngineConfig
from paceline.engine.build import LoadedModel, load_model
from tests.e2e.live import ALPHABET, PACELINE, LiveServer
from tests.texts import glued, hard_texts
from tests.tiny import (
    CHATML,
    CONTROL,
    TinyModel,
    TinyTokenizer,
    context_free_model,
    random_model,
    successor_model,
    write_gguf,
    write_hf,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CONTAINERS = ("gguf", "hf")


def write(model: TinyModel, folder: Path, container: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if container == "gguf":
        return write_gguf(model, folder / "tiny.gguf")
    return write_hf(model, folder / "tiny")


def serve(path: Path, **options: Any) -> LiveServer:
    return LiveServer(path, num_threads=1, kv_memory_bytes=4 * 2**20, **options)


# ---- incomplete files ----


def cut_gguf(at: Callable[[bytes], int]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write(random_model(), folder, "gguf")
        content = path.read_bytes()
        path.write_bytes(content[: at(content)])
        return path

    return make


def broken_hf(spoil: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write_hf(random_model(), folder / "tiny", shards=2)
        spoil(path)
        return path

    return make


SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


def shorten(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def name_absent_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.0.mlp.ghost.weight"] = SECOND
    (folder / INDEX).write_text(json.dumps(index))


def two_of_three_parts(folder: Path) -> Path:
    first = write_gguf(random_model(), folder / "tiny.gguf", shards=3)
    first.with_name("tiny-00002-of-00003.gguf").unlink()
    return first


def one_file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


# name -> (how to make it, what the message names)
INCOMPLETE: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "cut in the header": (cut_gguf(lambda c: 12), ("tiny.gguf",)),
    "cut in the metadata": (cut_gguf(lambda c: 200), ("tiny.gguf",)),
    "cut in the tensor list": (cut_gguf(lambda c: c.index(b"blk.1.ffn_up")), ("tiny.gguf",)),
    "cut in the data": (cut_gguf(lambda c: len(c) - 100_000), ("tiny.gguf",)),
    "one byte short": (cut_gguf(lambda c: len(c) - 1), ("tiny.gguf",)),
    "an empty file": (one_file("tiny.gguf", b""), ("tiny.gguf",)),
    "an LFS pointer": (one_file("tiny.gguf", POINTER), ("tiny.gguf", "LFS")),
    "two of three parts": (two_of_three_parts, ("tiny-00002-of-00003.gguf",)),
    "a shard missing": (broken_hf(lambda f: (f / SECOND).unlink()), (SECOND,)),
    "a shard 1 kB short": (broken_hf(lambda f: shorten(f / SECOND, 1024)), (SECOND,)),
    "an absent tensor": (broken_hf(name_absent_tensor), ("mlp.ghost.weight", SECOND)),
    "an empty shard": (broken_hf(lambda f: (f / SECOND).write_bytes(b"")), (SECOND,)),
    "a shard that is a pointer": (
        broken_hf(lambda f: (f / SECOND).write_bytes(POINTER)), (SECOND, "LFS"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INCOMPLETE)
def test_serve_refuses_an_incomplete_model_by_its_name(name, tmp_path):
    """LOD-01: an exit code, not a signal; a line that names the file; never "serving"."""
    make, named = INCOMPLETE[name]
    command = [*PACELINE, "serve", str(make(tmp_path)), "--port", "0", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 1, result.stderr
    for part in named:
        assert part in result.stderr
    assert "serving" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_short_file_is_told_with_both_its_sizes(container, tmp_path):
    """LOD-01: expected and actual size."""
    if container == "gguf":
        path = short = write(random_model(), tmp_path, "gguf")
    else:
        path = write_hf(random_model(), tmp_path / "tiny", shards=2)
        short = path / SECOND
    full = short.stat().st_size
    shorten(short, 1000)
    command = [*PACELINE, "info", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 1
    figures = {int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", result.stderr)}
    assert full - 1000 in figures
    assert any(full - 1000 < n <= full for n in figures)  # a GGUF names the first tensor cut


def test_a_stray_tensor_in_another_shard_is_ignored(tmp_path):
    """LOD-01: the shard that the index names wins, wherever the stray copy lies."""
    model = successor_model([*TinyTokenizer().byte_ids(ALPHABET), TinyTokenizer().eos_id])
    for stray in (1, 2):
        path = write_hf(model, tmp_path / f"stray{stray}", shards=2)
        index = json.loads((path / INDEX).read_text())["weight_map"]
        name = next(n for n, file in index.items() if f"-0000{stray}-" not in file)
        add_stray(path / f"model-0000{stray}-of-00002.safetensors", name, model)
        with serve(path) as server:
            server.survive()


def add_stray(shard: Path, name: str, model: TinyModel) -> None:
    """Put a tensor of noise under `name` into a shard that has none of that name."""
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert name not in header
    shape = model.tensors[name].shape
    noise = random.Random(1).randbytes(model.tensors[name].size) * 4
    header[name] = {
        "dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(noise)]
    }  # fmt: skip
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    shard.write_bytes(struct.pack("<Q", len(raw)) + raw + data + noise)


# ---- tied heads ----


def tied_builds() -> dict[str, TinyModel]:
    own = random_model("llama", seed=4)
    silent = own.without("lm_head.weight")
    del silent.config["tie_word_embeddings"]
    embedding = own.tensors["model.embed_tokens.weight"]
    return {
        "tied": own.without("lm_head.weight").with_config(tie_word_embeddings=True),
        "silent": silent,
        "both": own.with_tensor("lm_head.weight", embedding).with_config(tie_word_embeddings=True),
        "own": own,
    }


def test_four_builds_of_a_head_answer_as_they_should(tmp_path):
    """LOD-03: greedy text and top-5 logprobs over HTTP; one copy in memory where tied.

    The logits of the builds against transformers: tests/numerics/test_families.py.
    """
    answers, sizes = {}, {}
    for name, model in tied_builds().items():
        for container in CONTAINERS:
            with serve(write(model, tmp_path / name, container), kv_dtype="f32") as server:
                answer = server.complete(
                    "hello cat", temperature=0, max_tokens=8, logprobs=5, ignore_eos=True
                )
                sizes[name, container] = server.loaded.weight_bytes
            answers[name, container] = answer["choices"][0]
    first = answers["tied", "gguf"]
    for key, answer in answers.items():
        if key[0] == "own":
            assert answer["logprobs"] != first["logprobs"]
        else:
            assert answer == first, key
    assert answers["own", "gguf"] == answers["own", "hf"]
    head_bytes = tied_builds()["own"].tensors["lm_head.weight"].nbytes
    for name in ("tied", "silent"):
        assert {sizes["own", c] - sizes[name, c] for c in CONTAINERS} == {head_bytes}
    assert sizes["both", "hf"] == sizes["tied", "hf"]  # a GGUF has no flag that says "tied"


# ---- begin tokens ----

BEGIN = {
    "template and tokenizer": (True, True),
    "template only": (True, False),
    "tokenizer only": (False, True),
    "neither": (False, False),
}
TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": "the cat sat"},
]


def hf_chat_ids(folder: Path, messages: list[dict[str, str]], template: str) -> list[int]:
    """Return what HF's apply_chat_template gives: the rendered text, and no begin token added."""
    rendered = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    text = rendered.render(messages=messages, add_generation_prompt=True, bos_token="<s>")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", BEGIN)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_begin_token_comes_once_where_the_model_wants_it(name, container, tmp_path):
    """LOD-04: chats, plain prompts, prompts that begin with the marker, token ids."""
    writes, adds = BEGIN[name]
    template = ("{{ bos_token }}" if writes else "") + CHATML
    tokenizer = TinyTokenizer(add_bos=adds)
    model = random_model(tokenizer=tokenizer, max_position_embeddings=512)
    model = TinyModel(model.config, model.tensors, tokenizer, template, model.eos_ids)
    folder = write(model, tmp_path, "hf")
    server = serve(write(model, tmp_path, container))
    bos, loaded = tokenizer.bos_id, server.loaded

    def num_prompt_tokens(path: str, **body: Any) -> int:
        response = server.post(path, max_tokens=1, **body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens"]

    for messages in (TURNS[:1], TURNS):
        ids = loaded.encode_chat(messages)
        assert ids == hf_chat_ids(folder, messages, template)
        assert ids.count(bos) == writes
        assert num_prompt_tokens(CHAT, messages=messages) == len(ids)
    plain = loaded.encode_prompt("hello")
    assert plain == [bos] * adds + [tokenizer.id("hello")]
    assert num_prompt_tokens(COMPLETIONS, prompt="hello") == len(plain)
    marked = [bos, tokenizer.id("hello")]
    assert loaded.encode_prompt("<s>hello") == marked
    assert num_prompt_tokens(COMPLETIONS, prompt="<s>hello") == len(marked)
    assert num_prompt_tokens(COMPLETIONS, prompt=marked) == len(marked)
    assert num_prompt_tokens(COMPLETIONS, prompt=[bos, bos, 97]) == 3
    server.close()


# ---- odd vocabularies ----

USER_DEFINED = ("<tool>", "<|fim|>", "Привет", "  ")


def write_both_with_user_defined(folder: Path) -> tuple[Path, Path]:
    """Write one model twice; four of its added tokens are "user defined", not control."""
    tokenizer = TinyTokenizer(control=(*CONTROL, *USER_DEFINED))
    model = random_model(tokenizer=tokenizer)
    num_normal = len(tokenizer.tokens) - len(tokenizer.control)
    kinds = [1] * num_normal + [3] * len(CONTROL) + [4] * len(USER_DEFINED)
    gguf = write_gguf(
        model, folder / "tiny.gguf", overrides={"tokenizer.ggml.token_type": ("i32", kinds)}
    )
    hf = write_hf(model, folder / "tiny")
    spec = json.loads((hf / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] not in USER_DEFINED
    (hf / "tokenizer.json").write_text(json.dumps(spec))
    return gguf, hf


def loaded_of(path: Path) -> LoadedModel:
    return load_model(str(path), EngineConfig(num_threads=1, kv_memory_bytes=2**20))


def test_a_gguf_and_a_folder_cut_text_alike_and_lose_nothing(tmp_path):
    """LOD-05 (a): more than 300 texts, every added token alone and glued to letters."""
    gguf, hf = map(loaded_of, write_both_with_user_defined(tmp_path))
    texts = [*hard_texts(300), *glued((*USER_DEFINED, *CONTROL))]
    assert len(texts) >= 300
    for text in texts:
        for parse_special in (False, True):
            ids = gguf.tokenizer.encode(text, parse_special=parse_special)
            assert ids == hf.tokenizer.encode(text, parse_special=parse_special), repr(text)
            assert gguf.tokenizer.decode(ids, skip_special=False) == text
            assert hf.tokenizer.decode(ids, skip_special=False) == text
    for token in USER_DEFINED:
        assert len(gguf.encode_prompt(token)) == 1, token
    gguf.engine.stop()
    hf.engine.stop()


@pytest.mark.parametrize("container", CONTAINERS)
def test_ids_beyond_the_tokenizer_are_never_chosen_and_a_bias_on_them_is_refused(
    container, tmp_path
):
    """LOD-05 (b): the padded head prefers its padding to everything else."""
    num_tokens = len(TinyTokenizer().tokens)
    model = context_free_model({num_tokens: 30.0, num_tokens + 1: 29.0, 88: 5.0, 89: 4.9})
    assert model.config["vocab_size"] > num_tokens + 1
    server = serve(write(model, tmp_path, container))
    assert server.complete("a", temperature=0, max_tokens=5)["choices"][0]["text"] == "XXXXX"
    sampled = server.complete("a", temperature=1, seed=1, max_tokens=50)["choices"][0]["text"]
    assert set(sampled) == {"X", "Y"}
    response = server.post(COMPLETIONS, prompt="a", logit_bias={str(num_tokens): 100})
    assert response.status_code == 400
    assert str(num_tokens) in response.json()["error"]["message"]
    padded = server.complete([num_tokens, 97], temperature=0, max_tokens=2)  # a prompt may hold it
    assert padded["choices"][0]["text"] == "XX"
    server.drain()
    server.close()


# ---- several end tokens ----


@pytest.fixture(params=CONTAINERS)
def two_ends(request, tmp_path):
    """A model that says "bc", its second end token, and would go on "defg…"."""
    tokenizer = TinyTokenizer()
    ids = tokenizer.byte_ids(ALPHABET)
    model = successor_model([*ids[:3], tokenizer.eot_id, *ids[3:], tokenizer.eos_id])
    model = TinyModel(
        model.config, model.tensors, tokenizer, CHATML, (tokenizer.eos_id, tokenizer.eot_id)
    )
    server = serve(write(model, tmp_path, request.param))
    yield server
    server.close()


# fields of the request -> (text, finish_reason, completion_tokens)
ENDS: dict[str, tuple[dict[str, Any], tuple[str, str, int]]] = {
    "plain": ({}, ("bc", "stop", 3)),
    "markers shown": ({"skip_special_tokens": False}, ("bc", "stop", 3)),
    "ends ignored": ({"ignore_eos": True, "max_tokens": 20}, (ALPHABET[1:20], "length", 20)),
    "ends ignored and shown": (
        {"ignore_eos": True, "max_tokens": 5, "skip_special_tokens": False},
        ("bc<|im_end|>de", "length", 5),
    ),
    "marker as stop": ({"stop": "<|im_end|>", "max_tokens": 20}, ("bc", "stop", 3)),
    "hidden marker as stop, ends ignored": (
        {"stop": "<|im_end|>", "ignore_eos": True, "max_tokens": 20}, ("bc", "stop", 3),
    ),
    "marker as stop, ends ignored": (
        {
            "stop": "<|im_end|>", "ignore_eos": True, "skip_special_tokens": False,
            "max_tokens": 20,
        },
        ("bc", "stop", 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_second_end_token_ends_the_text_like_the_first(two_ends, name):
    """LOD-06."""
    options, expected = ENDS[name]
    answer = two_ends.complete("a", temperature=0, **options)
    choice = answer["choices"][0]
    got = (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])
    assert got == expected


def test_min_tokens_holds_every_end_token_back(two_ends):
    """LOD-06: until 8, and the contradictory pair is a 400."""
    answer = two_ends.complete("a", temperature=0, min_tokens=8, logit_bias={"100": 1})
    choice = answer["choices"][0]
    assert choice["text"] == ALPHABET[1:]  # the bias leads on to "d" where the end is held back
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 26)
    both = two_ends.complete("a", temperature=0, min_tokens=2)
    assert both["choices"][0]["text"] == "bc"
    pair = two_ends.post(COMPLETIONS, prompt="a", min_tokens=9, max_tokens=8)
    assert pair.status_code == 400
    assert pair.json()["error"]["param"] == "min_tokens"
