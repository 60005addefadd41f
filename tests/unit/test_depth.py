"""Structures that are deep are compiled or refused: none ends the process."""

import json
import threading

import pytest

from paceline.errors import ParameterError
from paceline.structured.depth import grammar_levels, schema_levels, with_deep_stack
from paceline.structured.grammars import Grammars
from paceline.types import Structured
from tests.unit.test_grammars import EOS, ByteVocabulary, accepts


def chain_of_refs(length):
    """A schema whose compiling goes down `length` references, each within a property."""
    link = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
            for i in range(length)}  # fmt: skip
    return {"$ref": "#/$defs/a0", "$defs": {**link, f"a{length}": {"type": "integer"}}}


def chain_of_rules(length, kind):
    rules = [f'{kind}{i}: "x" {kind}{i + 1}' for i in range(length)]
    return "\n".join([f"start: {kind}0", *rules, f'{kind}{length}: "y"'])


@pytest.fixture
def grammars():
    return Grammars(ByteVocabulary(), vocab_size=ByteVocabulary.vocab_size, eos_ids=(EOS,))


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        ({}, 1),
        ({"type": "object", "properties": {"a": {"enum": [1]}}}, 5),
        ({"$ref": "#"}, 2 + 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, 5 + 3),
        ({"$ref": "#/no/where", "anyOf": [{}, True, {"$ref": "elsewhere"}]}, 4 + 4 + 4),
        ({"allOf": [{"$ref": "#/$defs/a~1b%25"}], "$defs": {"a/b%": {}}}, 4 + 1),
    ],
)  # fmt: skip
def test_levels_are_those_with_each_reference_followed_once(schema, levels):
    assert schema_levels(schema) == levels


def test_schemas_within_a_grammar_count_by_themselves():
    source = (
        'start: a (b | "c")\na: %json {"type": "object", "properties": {}}\nb: %json{"a": [[]]}'
    )
    assert grammar_levels(source) == (4, 3, 0)
    assert grammar_levels('start: "%json {" a\na: "("') == (4, 0, 0)


@pytest.mark.parametrize(
    "structured",
    [
        Structured(json_schema=chain_of_refs(980)),
        Structured(grammar=f"start: %json {json.dumps(chain_of_refs(980))}"),
    ],
)
def test_a_long_chain_of_references_is_kept_to(grammars, structured):
    grammar = grammars.compile(structured)
    assert accepts(grammar, '{"x":{"x":{}}}')
    assert not accepts(grammar, '{"x":{"x":5}}')


@pytest.mark.parametrize("kind", ["r", "R"])
def test_a_long_chain_of_rules_is_kept_to(grammars, kind):
    grammar = grammars.compile(Structured(grammar=chain_of_rules(600, kind)))
    assert accepts(grammar, "x" * 600 + "y")
    assert not accepts(grammar, "x" * 599 + "y")


@pytest.mark.parametrize(
    ("structured", "says"),
    [
        (Structured(json_schema=chain_of_refs(2000)), "8008 levels where its references"),
        (Structured(grammar=chain_of_rules(4000, "r")), "4002 rules and groups: at most 1000"),
        (Structured(grammar=chain_of_rules(4000, "R")), "4002 rules and groups: at most 1000"),
        (Structured(grammar="start: " + "(" * 2000 + '"a"' + ")" * 2000), "rules and groups"),
    ],
)
def test_what_no_stack_could_hold_is_refused_before_it_is_compiled(grammars, structured, says):
    with pytest.raises(ParameterError, match=says):
        grammars.compile(structured)


def test_a_tools_schema_is_held_to_the_same(grammars):
    grammars.check_schema(chain_of_refs(980))
    with pytest.raises(ParameterError, match="at most 4000 are allowed"):
        grammars.check_schema(chain_of_refs(2000))


def test_a_structure_with_too_many_properties_is_refused(grammars):
    def wide(num):
        return {"type": "object", "properties": {f"p{i}": {} for i in range(num)}}

    halves = {"anyOf": [wide(1001), wide(1000)]}
    for structured in (
        Structured(json_schema=halves),
        Structured(grammar=f"start: %json {json.dumps(halves)}"),
    ):
        with pytest.raises(ParameterError, match="has 2001 properties: at most 2000 are allowed"):
            grammars.compile(structured)
    with pytest.raises(ParameterError, match="2001 properties"):
        grammars.check_schema(halves)


def test_what_happens_on_the_deep_stack_comes_back():
    usual = threading.stack_size()
    assert with_deep_stack(5000, threading.current_thread) is not threading.current_thread()
    assert with_deep_stack(5, threading.current_thread) is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        with_deep_stack(5000, lambda: 1 // 0)
    assert threading.stack_size() == usual
