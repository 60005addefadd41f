"""Tokenizers and templates of real files against independent implementations.

The oracles are the BPE of the `tokenizers` library with the pre-tokenizer that the model's
published tokenizer.json has, `sentencepiece`, and `apply_chat_template` of transformers.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from paceline.text.chat_template import ChatTemplate
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from paceline.weights.checkpoint import Checkpoint, GGUFTokenizerData, open_checkpoint
from tests.spm_oracle import processor
from tests.texts import glued, hard_texts

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMOLLM2 = pytest.param("smollm2-135m", marks=pytest.mark.real)
QWEN2 = pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.big)
GEMMA3 = "gemma3-270m"
ADDED = (3, 4)  # control and user-defined

RealModel = Callable[[str], Path]


def opened(real_model: RealModel, name: str) -> tuple[Checkpoint, GGUFTokenizerData, Tokenizer]:
    checkpoint = open_checkpoint(real_model(name))
    assert isinstance(checkpoint.tokenizer, GGUFTokenizerData)
    return checkpoint, checkpoint.tokenizer, build_tokenizer(checkpoint.tokenizer)


def added_tokens(data: GGUFTokenizerData) -> dict[str, bool]:
    """Return the added tokens' texts, and whether each is special."""
    pairs = zip(data.tokens, data.token_types, strict=True)
    return {text: kind == 3 for text, kind in pairs if kind in ADDED}


def library(name: str, data: GGUFTokenizerData) -> Library:
    vocab = {text: i for i, text in enumerate(data.tokens)}
    made = Library(models.BPE(vocab, [tuple(merge.split(" ")) for merge in data.merges]))
    if name.startswith("smollm2"):
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    else:
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.add_tokens(
        [
            AddedToken(text, special=special, normalized=False)
            for text, special in added_tokens(data).items()
        ]
    )
    return made


@pytest.mark.parametrize("name", [SMOLLM2, QWEN2])
def test_bpe_ids_equal_the_librarys_and_text_comes_back(name: str, real_model: RealModel) -> None:
    _, data, tokenizer = opened(real_model, name)
    oracle = library(name, data)
    texts = hard_texts() + glued(added_tokens(data))
    assert len(texts) > 300
    for parse_special in (False, True):
        oracle.encode_special_tokens = not parse_special
        for text in texts:
            ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
            assert ids == oracle.encode(text, add_special_tokens=False).ids, text
            # Qwen normalises to NFC, as its tokenizer.json does.
            expected = text if data.pre == "smollm" else unicodedata.normalize("NFC", text)
            assert tokenizer.decode(ids, skip_special=False) == expected


@pytest.mark.big
def test_gemma_ids_and_text_equal_those_of_sentencepiece(real_model: RealModel) -> None:
    _, data, tokenizer = opened(real_model, GEMMA3)
    tokens = list(data.tokens)
    types = [int(kind) for kind in data.token_types]
    scores = [float(score) for score in data.scores]
    oracle = processor(tokens, scores, types, unk_id=3, space_prefix=False)
    user_defined = [text for text, kind in zip(tokens, types, strict=True) if kind == 4]
    for text in hard_texts() + glued(user_defined):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == oracle.Encode(text), text
        assert tokenizer.decode(ids) == oracle.Decode(ids), text
    assert tokenizer.encode("hi")[0] == 2


@pytest.mark.parametrize("name", [SMOLLM2, QWEN2])
def test_streams_join_to_the_text(name: str, real_model: RealModel) -> None:
    _, _, tokenizer = opened(real_model, name)
    for text in hard_texts():
        ids = tokenizer.encode(text)
        decoder = tokenizer.stream_decoder()
        assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)


@pytest.mark.real
def test_a_tokenizer_is_ready_at_once(real_model: RealModel) -> None:
    _, data, _ = opened(real_model, "smollm2-135m")
    begin = time.process_time()
    build_tokenizer(data)
    assert time.process_time() - begin < 0.15


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"q": "Zürich <b>"}}}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Find “it”", "parameters": {"type": "object"}},
}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Why?\n\n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "def f():\n\treturn '日本'"},
        {"role": "user", "content": "Thanks 😀"},
    ],
)
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 21}'},
    {"role": "tool", "content": "sunny"},
]


@pytest.mark.parametrize("name", [SMOLLM2, QWEN2])
def test_chat_ids_equal_those_of_transformers(name: str, real_model: RealModel) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint, data, tokenizer = opened(real_model, name)
    source = checkpoint.chat_templates["default"]
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=library(name, data))
    template = ChatTemplate(source)
    cases: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]
    cases = [(chat, None) for chat in CHATS]
    if "tools" in source:
        cases += [(CHATS[0], [TOOL]), (TOOL_CHAT, [TOOL])]
    for messages, tools in cases:
        for prompted in (True, False):
            expected = oracle.apply_chat_template(
                messages, tools=tools, chat_template=source, tokenize=True, return_dict=False,
                add_generation_prompt=prompted,
            )  # fmt: skip
            ids = template.encode(messages, tokenizer, tools=tools, add_generation_prompt=prompted)
            assert ids == list(expected), messages
