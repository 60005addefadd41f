from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from paceline.errors import ParameterError, TokenizerError
from paceline.text.pretokenizers import PRE_TOKENIZERS
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from paceline.weights.checkpoint import HFTokenizerData
from tests.texts import glued, hard_texts
from tests.tokenizers import SPECIAL, UNUSED, USER_DEFINED, bpe_data, hf_data, hf_spm_data, spm_data

BPE = build_tokenizer(bpe_data())
HF = build_tokenizer(hf_data(bpe_data()))
MARKED = {**SPECIAL, "<tool>": USER_DEFINED, "<tool>\n": USER_DEFINED, "<pad7>": UNUSED}


@pytest.mark.parametrize("parse_special", [False, True])
def test_bpe_ids_equal_those_of_the_tokenizers_library(parse_special: bool) -> None:
    data = bpe_data(extra=MARKED)
    library = Library.from_str(hf_data(data).json.decode())
    library.encode_special_tokens = not parse_special
    tokenizer = build_tokenizer(data)
    for text in hard_texts() + glued(MARKED):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=parse_special) == expected, text


def test_a_tokenizer_json_gives_the_ids_of_the_same_gguf() -> None:
    for text in hard_texts() + glued(SPECIAL):
        assert HF.encode(text) == BPE.encode(text), text
        assert HF.encode(text, parse_special=True) == BPE.encode(text, parse_special=True), text


@pytest.mark.parametrize("tokenizer", [BPE, HF], ids=["gguf", "hf"])
def test_every_text_comes_back_from_its_ids(tokenizer: Tokenizer) -> None:
    for text in hard_texts() + glued(SPECIAL):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


def test_a_long_word_is_merged_as_a_short_one_would_be() -> None:
    library = Library.from_str(hf_data(bpe_data()).json.decode())
    for unit in ("ab", "the", "日", "  ", "="):
        text = unit * 400
        assert BPE.encode(text) == library.encode(text).ids


def test_control_markers_in_plain_text_stay_text() -> None:
    ids = BPE.encode("say <|im_end|> now")
    assert not any(map(BPE.is_special, ids))
    assert BPE.decode(ids) == "say <|im_end|> now"


def test_control_markers_are_tokens_where_they_are_parsed() -> None:
    ids = BPE.encode("a<|im_end|>b", parse_special=True)
    assert [i for i in ids if BPE.is_special(i)] == [BPE.special_tokens["<|im_end|>"]]


def test_a_marker_is_not_matched_across_a_cut() -> None:
    text = "<|im_end|><|im_end|>"
    ids = BPE.encode(text, parse_special=True, cuts=[3])
    assert ids.count(2) == 1
    assert BPE.decode(ids, skip_special=False) == text


def test_user_defined_tokens_are_matched_whole_longest_first() -> None:
    tokenizer = build_tokenizer(bpe_data(extra=MARKED))
    assert tokenizer.encode("<tool>\n") == [MARKED_ID["<tool>\n"]]
    assert tokenizer.encode("<tool> ")[0] == MARKED_ID["<tool>"]


MARKED_ID = {text: i for i, text in enumerate(MARKED)}


def test_skipped_special_and_unknown_ids_decode_to_nothing() -> None:
    tokenizer = build_tokenizer(bpe_data(extra=MARKED))
    beyond = [tokenizer.vocab_size, 10**9, -1, MARKED_ID["<pad7>"]]
    ids = [1, *tokenizer.encode("ab"), 2, *beyond]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>ab<|im_end|>"
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(10**9) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "gpt-2"}, (False, False)),
        ({"pre": "llama-bpe"}, (True, False)),
        ({"pre": "llama-bpe", "add_bos": False}, (False, False)),
        ({"pre": "gpt-2", "add_bos": True, "add_eos": True}, (True, True)),
        ({"pre": "gpt-2", "add_bos": True, "bos_id": None}, (False, False)),
    ],
)
def test_begin_and_end_tokens_follow_the_flags(
    changes: dict[str, object], expected: tuple[bool, bool]
) -> None:
    tokenizer = build_tokenizer(bpe_data(**changes))
    ids = tokenizer.encode("hello")
    assert (ids[0] == 1, ids[-1] == 2) == expected
    assert tokenizer.adds_bos == expected[0]
    assert tokenizer.encode("hello", add_special=False) == ids[expected[0] : len(ids) - expected[1]]


def test_a_begin_marker_in_the_text_is_not_doubled() -> None:
    tokenizer = build_tokenizer(bpe_data(add_bos=True, add_eos=True))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    assert (ids.count(1), ids.count(2)) == (1, 1)
    assert tokenizer.encode("") == [1, 2]


def test_hf_config_adds_the_begin_token_that_it_names() -> None:
    config = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True}
    tokenizer = build_tokenizer(hf_data(bpe_data(), config))
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("hi")[0] == 1


def test_a_llama_like_tokenizer_json_encodes_and_decodes_as_the_library_does() -> None:
    data = hf_spm_data()
    library = Library.from_str(data.json.decode())
    tokenizer = build_tokenizer(data)
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (1, True)
    for text in hard_texts():
        library.encode_special_tokens = True
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids)


def test_hf_markers_are_not_matched_across_a_cut() -> None:
    text = "<|im_end|>a<|im_end|>"
    ids = HF.encode(text, parse_special=True, cuts=[13])
    assert ids == BPE.encode(text, parse_special=True, cuts=[13])


@pytest.mark.parametrize("parse_special", [False, True])
def test_hf_ids_of_short_and_long_texts_are_those_of_the_library_alone(parse_special: bool) -> None:
    for data in (hf_data(bpe_data(extra=MARKED)), hf_spm_data()):
        library = Library.from_str(data.json.decode())
        library.encode_special_tokens = not parse_special
        tokenizer = build_tokenizer(data)
        texts = hard_texts() + glued(MARKED)
        for text in [*texts, "\n".join(texts), "a <|im_end|> b<tool>\n<s>c</s>" * 200]:
            expected = library.encode(text, add_special_tokens=False).ids
            ids = tokenizer.encode(text, parse_special=parse_special, add_special=False)
            assert ids == expected, text[:80]


def test_while_one_encodes_a_long_text_others_encode_short_ones() -> None:
    tokenizer = build_tokenizer(hf_data(bpe_data()))
    text = "the quick brown fox 123 jumps over <|im_end|> and on\n" * 20_000
    has_begun, has_ended = threading.Event(), threading.Event()

    def encode_long() -> None:
        has_begun.set()
        tokenizer.encode(text, parse_special=True)
        has_ended.set()

    thread = threading.Thread(target=encode_long)
    thread.start()
    has_begun.wait()
    num_short = 0
    while not has_ended.is_set() and num_short < 100:
        tokenizer.encode("a <|im_end|>", parse_special=num_short % 2 == 0)
        num_short += not has_ended.is_set()
    thread.join()
    assert num_short == 100


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(ParameterError, match=r"U\+D83D.*character 3"):
        BPE.encode("abc\ud83d")


def test_an_unknown_pre_tokenizer_names_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'quux'.*llama-bpe.*qwen2"):
        build_tokenizer(bpe_data(pre="quux"))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_compiles_and_loses_nothing(name: str) -> None:
    tokenizer = build_tokenizer(bpe_data(pre=name))
    for text in hard_texts(150):
        expected = text
        if PRE_TOKENIZERS[name].nfc:
            import unicodedata

            expected = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 123 x", ["It", "'s", " 123", " x"]),
        ("smollm", "It's 123 x", ["It", "'s", " ", "1", "2", "3", " x"]),
        ("llama-bpe", "IT'S 12345 x\n\n", ["IT", "'S", " ", "123", "45", " x", "\n\n"]),
        ("qwen2", "12 (ab)\n c", ["1", "2", " (", "ab", ")\n", " c"]),
        ("tekken", "don't HTTPServer 12/\n", ["don", "'t", " HTTPServer", " ", "1", "2", "/\n"]),
        ("gpt-4o", "don't fooBar 1234", ["don't", " foo", "Bar", " ", "123", "4"]),
        ("deepseek-v3", "a1234日本.x !", ["a", "123", "4", "日本", ".x", " !"]),
        ("deepseek-coder", "ab 12\n!?", ["ab", " ", "1", "2", "\n", "!?"]),
        ("falcon", "x=12345 $y", ["x", "=", "123", "45", " ", "$", "y"]),
        ("default", "x=12345 `y", ["x", "=", "123", "45", " `", "y"]),
        ("bloom", "ab cd, ef", ["ab", " cd", ",", " ef"]),
        ("seed-coder", "12 !\n", ["1", "2", " !", "\n"]),
    ],
)
def test_text_is_cut_as_the_named_tokenizer_cuts_it(pre: str, text: str, words: list[str]) -> None:
    from paceline.text.bpe import pre_tokenizer_of

    cut = pre_tokenizer_of(PRE_TOKENIZERS[pre].patterns).pre_tokenize_str(text)
    assert [word for word, _ in cut] == words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"merges": ()}, "merges"),
        ({"tokens": ()}, "tokens is empty"),
        ({"tokens": [1, 2]}, "no strings"),
        ({"token_types": [1]}, "1 entries"),
        ({"token_types": ["x"] * 3}, "no numbers"),
        ({"bos_id": 10**6}, "bos_token_id is 1000000"),
        ({"eos_id": -1}, "eos_token_id is -1"),
    ],
)
def test_broken_tokenizer_data_names_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(bpe_data(**changes))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[1]", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_json_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        build_tokenizer(HFTokenizerData(json=content, config={}))


def test_a_user_defined_end_marker_counts_as_control() -> None:
    data = spm_data(extra={"<end_of_turn>": USER_DEFINED, "<table>": USER_DEFINED})
    tokenizer = build_tokenizer(data)
    assert tokenizer.special_tokens["<end_of_turn>"] == 3
    assert "<table>" not in tokenizer.special_tokens


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-2, BPE.vocab_size + 2)))
def test_any_ids_decode(ids: list[int]) -> None:
    raw = b"".join(BPE.token_bytes(i) for i in ids)
    assert BPE.decode(ids) == raw.decode("utf-8", errors="replace")
