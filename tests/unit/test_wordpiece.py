"""WordPiece from a tokenizer.json: ids as the library's, and texts of ids."""

import json

import pytest
import tokenizers

from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import HFTokenizerData
from tests.texts import hard_texts
from tests.tiny_bert import WORDS, wordpiece_json


@pytest.fixture(scope="module")
def spec():
    return wordpiece_json()


@pytest.fixture(scope="module")
def tokenizer(spec):
    return build_tokenizer(HFTokenizerData(json=json.dumps(spec).encode(), config={}))


def test_ids_are_the_librarys_between_cls_and_sep_without_its_cuts(spec, tokenizer):
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    library.no_truncation()
    library.no_padding()
    for text in (*hard_texts(), "The cats, UNBELIEVABLE! running " * 20, "Él café", ""):
        assert tokenizer.encode(text) == library.encode(text).ids


def test_a_marker_that_a_user_types_is_no_token(tokenizer):
    marker = tokenizer.special_tokens["[SEP]"]
    assert tokenizer.encode("a [SEP] b").count(marker) == 1


def test_pieces_join_to_words(tokenizer):
    ids = [WORDS.index(word) for word in ("[CLS]", "un", "##believ", "##able", "cat", "##s", ".")]
    assert tokenizer.decode(ids) == "unbelievable cats ."
    assert tokenizer.decode(ids, skip_special=False).endswith("unbelievable cats .")
