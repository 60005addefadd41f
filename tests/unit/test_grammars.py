"""Grammars compiled by llguidance over a tokenizer of bytes and a few words."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from paceline.errors import PacelineError, ParameterError
from paceline.structured import grammars as grammars_module
from paceline.structured.grammars import MAX_CACHED, Grammars
from paceline.types import Structured

EOS = 256
WORDS = (b'{"', b'":', b"   ", b"true", b"hello")


class ByteVocabulary:
    """Ids 0-255 are bytes, 256 ends, then words."""

    vocab_size = 257 + len(WORDS)
    special_tokens = {"<end>": EOS}  # noqa: RUF012

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        if token_id == EOS:
            return b"<end>"
        return bytes([token_id]) if token_id < EOS else WORDS[token_id - EOS - 1]


@pytest.fixture(scope="module")
def grammars():
    return Grammars(ByteVocabulary(), vocab_size=ByteVocabulary.vocab_size, eos_ids=(EOS,))


def allowed(state) -> set[int]:
    mask = np.zeros(-(-ByteVocabulary.vocab_size // 32), np.uint32)
    state.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(grammar, text: str) -> bool:
    """True where `text`, byte by byte, is allowed and may end."""
    state = grammar.start(may_end_early=True)
    left = list(text.encode())
    while left:
        if left[0] not in allowed(state):
            return False
        if state.commit(left.pop(0)):
            return not left
    return EOS in allowed(state)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "y"]}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (Structured(json_object=True), ['{}', '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
        (Structured(json_schema=SCHEMA), ['{"a":1,"b":["x","y"]}', '{\n  "a": -5,\n  "b": []\n}'],
         ['{"a":1}', '{"a":"1","b":[]}', '{"a":1,"b":["z"]}', '{"a":1,"b":[],"c":1}']),
        (Structured(json_schema=json.dumps(SCHEMA)), ['{"a":1,"b":[]}'], ["{}"]),
        (Structured(json_schema=True), ["1", '"a"', "[{}]"], ["a"]),
        (Structured(regex="[ab]{2,3}"), ["ab", "bbb"], ["a", "abc", "aaaa"]),
        (Structured(choice=("yes", "no", 'a "b"\n')), ["yes", "no", 'a "b"\n'], ["ye", "maybe"]),
        (Structured(grammar='start: "a" b+\nb: "b" | "c"'), ["ab", "acb"], ["a", "b"]),
    ],
)  # fmt: skip
def test_a_structure_allows_its_texts_and_no_others(grammars, structured, good, bad):
    grammar = grammars.compile(structured)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_what_is_forced_is_all_that_the_masks_allow_and_no_more_is_allowed_than_that(grammars):
    """Along texts chosen at random: each forced token is the only one in its mask."""
    rng = random.Random(3)
    num_forced = num_steps = 0
    schema = Structured(json_schema={**SCHEMA, "required": ["b"]})
    for structured in (schema, Structured(choice=("certainly", "certainly not", "no"))) * 20:
        state = grammars.compile(structured).start(may_end_early=True)
        is_over, forced = False, []
        while not is_over:
            choices = sorted(allowed(state))
            if not forced:
                forced = state.forced(rng.choice([1, 3, 60]))
                assert allowed(state) == set(choices)  # asking changes nothing
            if forced:
                assert choices == [forced.pop(0)]
                num_forced += 1
            token_id = rng.choice(choices)
            is_over = token_id == EOS or state.commit(token_id)
            num_steps += 1
            assert not (is_over and forced)
    assert num_forced > num_steps / 4


def test_a_token_that_ends_the_answer_is_not_told_as_forced(grammars):
    state = grammars.compile(Structured(choice=("no, never",))).start(may_end_early=True)
    text = bytes(state.forced(60))
    assert text == b"no, neve"
    for token_id in text:
        state.commit(token_id)
    assert allowed(state) == {ord("r")}
    assert state.forced(60) == []


def test_blanks_between_the_parts_of_json_are_bounded(grammars):
    grammar = grammars.compile(Structured(json_object=True))
    assert accepts(grammar, "{\n" + " " * 12 + '"a": 1}')
    for blanks in ("  ", "\n" + " " * 13, "\n\n", "\t", "\r\n", " \n"):
        assert not accepts(grammar, "{" + blanks + '"a": 1}')
    state = grammar.start(may_end_early=True)
    assert state.commit(ord("{")) is False
    assert state.commit(ord("}")) is True  # and not a blank after it
    assert accepts(grammar, '{"a": "' + " " * 100 + '"}')


def test_a_token_of_several_bytes_is_allowed_where_all_of_it_fits(grammars):
    state = grammars.compile(Structured(json_object=True)).start(may_end_early=True)
    assert EOS + 1 in allowed(state)
    assert EOS + 3 not in allowed(state)
    state.commit(EOS + 1)
    assert EOS + 5 in allowed(state)


def test_the_end_is_withheld_on_demand_while_more_may_follow(grammars):
    grammar = grammars.compile(Structured(regex="a+"))
    for may_end_early in (True, False):
        state = grammar.start(may_end_early=may_end_early)
        state.commit(ord("a"))
        assert (EOS in allowed(state)) == may_end_early
        assert ord("a") in allowed(state)


def test_a_token_that_may_not_come_is_an_error(grammars):
    state = grammars.compile(Structured(regex="a")).start(may_end_early=True)
    with pytest.raises(PacelineError, match="the structure of the answer failed"):
        state.commit(ord("b"))


def test_a_grammar_that_is_too_complex_is_the_requests_doing(grammars):
    words = " | ".join(f'"w{number}"' for number in range(3000))
    state = grammars.compile(Structured(grammar=f"start: {words}")).start(may_end_early=True)
    with pytest.raises(ParameterError, match=r"too complex.*max is 2000") as caught:
        state.commit(ord("w"))
    assert caught.value.param == "structured"


def test_a_choice_may_be_of_many_texts_and_of_one_that_begins_another(grammars):
    many = tuple(f"c{number}" for number in range(10_000))
    state = grammars.compile(Structured(choice=many)).start(may_end_early=True)
    assert [state.commit(ord(char)) for char in "c123"] == [False] * 4
    assert allowed(state) == {EOS, *map(ord, "0123456789")}
    assert state.commit(ord("4"))
    state = grammars.compile(Structured(choice=("no", "not"))).start(may_end_early=True)
    assert [state.commit(ord(char)) for char in "no"] == [False] * 2
    assert allowed(state) == {EOS, ord("t")}


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("structured", "says"),
    [
        (Structured(json_schema=nested(64)), "cannot be kept to"),
        (Structured(json_schema=nested(300)), "cannot be kept to: recursion limit"),
        (Structured(json_schema={"type": "object", "properties": {"a": "x"}}), "schema must be"),
        (Structured(json_schema={"type": "strnig"}), "strnig"),
        (Structured(json_schema={"$ref": "#/$defs/none"}), "/$defs/none"),
        (Structured(json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Structured(json_schema={"enum": []}), "Unsatisfiable"),
        (Structured(json_schema=False), "Unsatisfiable"),
        (Structured(json_schema={"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (Structured(json_schema="[1]"), "must be a JSON object"),
        (Structured(json_schema="{"), "is no JSON"),
        (Structured(json_schema={"description": "x" * 300_000}), "at most 262144"),
        (Structured(regex="(a"), "unclosed group"),
        (Structured(regex="(?<!a)b"), "look-around"),
        (Structured(regex="(" * 20_000 + ")" * 20_000), "regex"),
        (Structured(grammar="start: nothing"), "nothing"),
        (Structured(grammar="start: a\na: a"), "no text"),
        (Structured(grammar="start: " + "(" * 900 + '"a"'), "nested"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_with_the_reason(grammars, structured, says):
    with pytest.raises(ParameterError) as caught:
        grammars.compile(structured)
    assert caught.value.param == "structured"
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


TREE = {
    "$defs": {"node": {"type": "object", "properties": {
        "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["kids"],
        "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
OPTIONAL = {f"p{i}": {"type": "boolean"} for i in range(200)}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, '{"a":[{}]}', "[]"),
        ({"type": "string", "maxLength": 100_000}, '"abc"', "abc"),
        ({"type": "integer", "maximum": 2 * 10**10}, "20000000000", "20000000001"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a|b)+c$"}},
          "required": ["a"], "additionalProperties": False}, '{"a":"abac"}', '{"a":"c"}'),
        (TREE, '{"kids":[{"kids":[]},{"kids":[]}]}', '{"kids":[{}]}'),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "null", "1"),
        ({"enum": [f"value {i}" for i in range(5000)]}, '"value 4321"', '"value 5000"'),
        ({"type": "object", "properties": OPTIONAL, "additionalProperties": False},
         '{"p3":true,"p199":false}', '{"q":1}'),
        ({"type": "array", "items": {"const": 1}, "minItems": 50, "maxItems": 60},
         "[" + ",".join("1" * 55) + "]", "[1]"),
    ],
)  # fmt: skip
def test_an_unusual_schema_is_kept_to_and_compiles_soon(grammars, schema, good, bad):
    start = time.monotonic()
    grammar = grammars.compile(Structured(json_schema=schema))
    assert time.monotonic() - start < 5
    assert (accepts(grammar, good), accepts(grammar, bad)) == (True, False)


def test_a_grammar_is_compiled_once_and_the_oldest_are_forgotten():
    grammars = Grammars(ByteVocabulary(), vocab_size=ByteVocabulary.vocab_size, eos_ids=(EOS,))
    first = grammars.compile(Structured(regex="a"))
    assert grammars.compile(Structured(regex="a")) is first
    for i in range(MAX_CACHED):
        grammars.compile(Structured(regex=f"b{i}"))
    assert grammars.compile(Structured(regex="a")) is not first


def test_a_model_without_an_end_token_cannot_be_structured():
    grammars = Grammars(ByteVocabulary(), vocab_size=ByteVocabulary.vocab_size, eos_ids=())
    with pytest.raises(ParameterError, match="no end token"):
        grammars.compile(Structured(regex="a"))


def test_a_schema_is_checked_once_and_without_the_vocabulary(monkeypatch):
    fresh = Grammars(ByteVocabulary(), vocab_size=ByteVocabulary.vocab_size, eos_ids=(EOS,))
    monkeypatch.setattr(fresh, "_new_index", lambda: pytest.fail("the vocabulary was indexed"))
    asked = []
    real = grammars_module._problem
    monkeypatch.setattr(grammars_module, "_problem", lambda text: asked.append(1) or real(text))
    for _ in range(2):
        fresh.check_schema({"type": "object"})
        with pytest.raises(ParameterError, match="bogus"):
            fresh.check_schema({"type": "bogus"})
    assert len(asked) == 2


def test_a_schema_that_nests_too_deeply_is_no_tools_schema(grammars):
    with pytest.raises(ParameterError, match="cannot be kept to: recursion limit"):
        grammars.check_schema(nested(300))
