"""Calls whose arguments must be objects, as the Messages API has them."""

import pytest

from paceline.server.tools import Function, Tool, compile_calls, tool_use
from paceline.structured.grammars import Grammars
from tests.unit.test_grammars import EOS, ByteVocabulary, accepts

TAGGED, BARE = "{{ tools }}<tool_call>", "{{ tools }}"
SCHEMA = {"type": "object", "properties": {"zone": {"const": "UTC"}}}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(ByteVocabulary(), vocab_size=ByteVocabulary.vocab_size, eos_ids=(EOS,))


def grammar(grammars, template, *, wants_objects):
    tools = [Tool(type="function", function=Function(name="clock", parameters=SCHEMA))]
    use = tool_use(tools, None, None, wants_objects=wants_objects)
    return compile_calls(use, None, template, grammars)


@pytest.mark.parametrize(
    ("template", "form"),
    [(TAGGED, '<tool_call>\n{{"name": "clock", "arguments": {0}}}\n</tool_call>'),
     (BARE, '{{"name": "clock", "arguments": {0}}}')],
)  # fmt: skip
def test_a_free_call_is_bound_to_an_object_and_to_no_more(grammars, template, form):
    bound = grammar(grammars, template, wants_objects=True)
    for arguments in ("{}", '{"zone": "CET", "x": [1]}'):
        assert accepts(bound, form.format(arguments))
    for arguments in ("{zone: 1}", "5", '{"zone"}', '"{}"'):
        assert not accepts(bound, form.format(arguments))
    assert accepts(bound, "Just words.")


def test_where_text_will_do_a_free_call_has_no_grammar(grammars):
    assert grammar(grammars, TAGGED, wants_objects=False) is None
