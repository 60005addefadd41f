from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import TokenizerError
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from tests.spm_oracle import processor
from tests.texts import glued, hard_texts
from tests.tokenizers import UNUSED, USER_DEFINED, spm_data

EXTRA = {"\n\n": USER_DEFINED, "  ": USER_DEFINED, "<b>": USER_DEFINED, "    ": USER_DEFINED}
TEXT = st.text(st.sampled_from("the quick\u2581 \n<b>日😀x"), max_size=120)


@pytest.mark.parametrize("space_prefix", [False, True])
def test_ids_equal_those_of_sentencepiece(space_prefix: bool) -> None:
    data = spm_data(extra=EXTRA, add_space_prefix=space_prefix)
    oracle = processor(
        data.tokens, data.scores, data.token_types, unk_id=0, space_prefix=space_prefix
    )
    tokenizer = build_tokenizer(data)
    for text in hard_texts() + glued(EXTRA):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == oracle.Encode(text), text
        assert tokenizer.decode(ids) == oracle.Decode(ids), text


def test_unused_pieces_are_taken_apart_as_sentencepiece_does() -> None:
    data = spm_data()
    types = list(data.token_types)
    merged = [i for i, text in enumerate(data.tokens) if types[i] == 1 and len(text) == 3]
    for i in merged[::2]:
        types[i] = UNUSED
    data = spm_data(token_types=types)
    oracle = processor(data.tokens, data.scores, types, unk_id=0, space_prefix=True)
    tokenizer = build_tokenizer(data)
    for text in hard_texts():
        assert tokenizer.encode(text, add_special=False) == oracle.Encode(text), text


@settings(max_examples=50, deadline=None)
@given(TEXT)
def test_cutting_at_spaces_changes_no_ids(text: str) -> None:
    for cut, whole in PAIRS:
        assert cut.encode(text) == whole.encode(text)


def _pairs() -> list[tuple[Tokenizer, Tokenizer]]:
    """Return tokenizers that cut at spaces, each with its twin that does not."""
    data = spm_data(add_space_prefix=False)
    # Pieces with a space inside or behind, as Gemma has one: they must still be found.
    spanning = spm_data(
        tokens=[*data.tokens, "k\u2581", "k\u2581q", "e\u2581t"],
        token_types=[*data.token_types, 1, 1, 1],
        scores=[*data.scores, 5.0, 6.0, 7.0],
        add_space_prefix=False,
    )
    pairs = []
    for changed in (data, spanning):
        cut, whole = build_tokenizer(changed), build_tokenizer(changed)
        assert cut._codec._boundary is not None
        whole._codec._boundary = None
        pairs.append((cut, whole))
    return pairs


PAIRS = _pairs()


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_but_for_the_space_sign(text: str) -> None:
    for prefix in (False, True):
        tokenizer = TOKENIZERS[prefix]
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


TOKENIZERS = {
    prefix: build_tokenizer(spm_data(add_space_prefix=prefix)) for prefix in (False, True)
}


def test_the_space_before_the_text_is_added_and_taken_away() -> None:
    tokenizer = build_tokenizer(spm_data())
    ids = tokenizer.encode("the", add_special=False)
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, continuation=True) == " the"
    assert build_tokenizer(spm_data(add_space_prefix=False)).decode(ids) == " the"


def test_special_names_in_text_never_become_special_tokens() -> None:
    tokenizer = build_tokenizer(spm_data())
    assert not any(map(tokenizer.is_special, tokenizer.encode("<s></s><unk>", add_special=False)))
    ids = tokenizer.encode("<s>the</s>", parse_special=True)
    assert (ids[0], ids[-1], ids.count(1)) == (1, 2, 1)


def test_a_byte_name_in_text_is_not_that_byte() -> None:
    tokenizer = build_tokenizer(spm_data(add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode("<0x0A>")) == "<0x0A>"


def test_the_model_adds_a_begin_token_unless_told_otherwise() -> None:
    assert build_tokenizer(spm_data()).encode("a")[0] == 1
    assert build_tokenizer(spm_data(add_bos=False)).encode("a")[0] != 1


def test_a_long_text_without_spaces_is_merged_in_time() -> None:
    tokenizer = build_tokenizer(spm_data(add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode("thequick日" * 3000)) == "thequick日" * 3000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"scores": ["a"] * len(spm_data().tokens)}, "no numbers"),
        ({"tokens": ["<unk>", "<s>", "</s>", "<0xZZ>"], "token_types": [2, 3, 3, 6],
          "scores": [0.0] * 4}, "<0xZZ>"),
    ],
)  # fmt: skip
def test_broken_pieces_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(spm_data(**changes))
