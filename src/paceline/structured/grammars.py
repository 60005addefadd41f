"""Grammars: what `SamplingParams.structured` asks for, compiled for one model's vocabulary.

The work is done by llguidance, which is imported with the first grammar: it is a light wheel, but
few processes ever need it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paceline.errors import ParameterError
from paceline.structured.depth import (
    MAX_GRAMMAR_PARTS,
    MAX_PROPERTIES,
    MAX_SCHEMA_LEVELS,
    grammar_levels,
    num_properties,
    schema_levels,
    with_deep_stack,
)
from paceline.structured.grammar import Grammar
from paceline.types import Structured

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 256 * 1024  # of a schema, a regex or a grammar
MAX_CACHED = 64
MAX_CHECKED = 4096  # schemas whose problems are remembered: a digest and a line each
# Between the parts of JSON: one space, or a new line with an indentation of up to six levels. A
# model that likes blanks too well would else write nothing but blanks, all of them valid.
WHITESPACE = r"(\n {0,12}|\n\t{0,6}| )?"
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,  # a keyword that cannot be kept to is refused, not ignored
}
_MAX_PROBLEM_CHARS = 300
_MAX_LEXER_STATES = 50_000  # one to two kB each


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...

    def token_bytes(self, token_id: int, *, skip_special: bool = ...) -> bytes: ...


class Grammars:
    """Compiles and keeps the grammars of one model. Safe to use from several threads.

    The first grammar of a model takes the time to index its vocabulary: 0.5 s for 49,152 tokens,
    1.5 s for 151,936. Later ones take milliseconds, and one that was asked for lately none.
    """

    json_options = _JSON_OPTIONS

    def __init__(self, tokenizer: Vocabulary, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = min(vocab_size, tokenizer.vocab_size)
        self._eos_ids = sorted(i for i in set(eos_ids) if 0 <= i < self._vocab_size)
        self._lock = threading.Lock()
        self._index: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._checked: OrderedDict[bytes, str] = OrderedDict()

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end an answer."""
        return self._eos_ids

    def compile(self, structured: Structured) -> Grammar:
        """Return the grammar of `structured`. Raises ParameterError saying what is wrong in it."""
        source, levels = _source(structured)
        with self._lock:
            grammar = self._compiled.get(source)
            if grammar is not None:
                self._compiled.move_to_end(source)
                return grammar
            if self._index is None:
                self._index = self._new_index()
        index = self._index
        # Others' need not wait for this one.
        grammar = with_deep_stack(levels, lambda: self._compile(index, source))
        with self._lock:
            self._compiled[source] = grammar
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def check_schema(self, schema: Mapping[str, Any]) -> None:
        """Raise ParameterError where `schema` could not be compiled; needs no vocabulary."""
        text = _bounded(_schema_text(schema), "json_schema")
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        with self._lock:
            problem = self._checked.get(digest)
        if problem is None:
            levels = _levels_of(schema)
            problem = with_deep_stack(levels, lambda: _problem(text))
            with self._lock:
                self._checked[digest] = problem
                if len(self._checked) > MAX_CHECKED:
                    self._checked.popitem(last=False)
        if problem:
            raise _not_kept(problem)

    def _compile(self, index: LLTokenizer, source: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(index, source, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        probe.compute_bitmask()  # a grammar that allows no text at all is found out here
        if probe.is_error():
            raise _not_kept(matcher.get_error() or "it allows no text")
        return Grammar(matcher, eos_ids=self._eos_ids)

    def _new_index(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = self._tokenizer
        if not self._eos_ids:
            raise ParameterError(
                "the model has no end token, so no structure could ever end: leave out structured",
                param="structured",
            )
        source = _TokenSource(tokenizer, self._vocab_size, self._eos_ids[0])
        return LLTokenizer(
            TokenizerWrapper(source), n_vocab=self._vocab_size, eos_token=self._eos_ids
        )


class _TokenSource:
    """What llguidance reads of a tokenizer."""

    json_options = _JSON_OPTIONS

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i, skip_special=False) for i in range(vocab_size)]
        special = tokenizer.special_tokens.values()
        self.special_token_ids = sorted(i for i in special if i < vocab_size)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(text, add_special=False)


def _source(structured: Structured) -> tuple[str, int]:
    """Return llguidance's own form of a grammar, equal for structures that are equal, and how deep
    compiling it goes.
    """
    from llguidance import LLMatcher

    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(_bounded(structured.regex, "regex")), 0
    if structured.grammar is not None:
        grammar = _bounded(structured.grammar, "grammar")
        return LLMatcher.grammar_from_lark(grammar), _grammar_levels(grammar)
    if structured.choice:
        # One token of the grammar, not a rule: of the branches of a rule there may be 2,000 only.
        texts = "|".join(msgspec.json.encode(text).decode() for text in structured.choice)
        return LLMatcher.grammar_from_lark(_bounded(f"start: CHOICE\nCHOICE: {texts}", "choice")), 0
    schema = '{"type":"object"}' if structured.json_object else _schema_text(structured.json_schema)
    schema = _bounded(schema, "json_schema")
    return _schema_source(schema), _levels_of(msgspec.json.decode(schema))


def _grammar_levels(grammar: str) -> int:
    num_parts, levels, properties = grammar_levels(grammar)
    _check_properties(properties, "grammar")
    if num_parts > MAX_GRAMMAR_PARTS:
        raise _refusal(
            "grammar", f"has {num_parts} rules and groups: at most {MAX_GRAMMAR_PARTS} are allowed"
        )
    return num_parts + _checked_levels(levels)


def _levels_of(schema: Any) -> int:
    _check_properties(num_properties(schema), "json_schema")
    return _checked_levels(schema_levels(schema))


def _check_properties(properties: int, name: str) -> None:
    if properties > MAX_PROPERTIES:
        raise _refusal(name, f"has {properties} properties: at most {MAX_PROPERTIES} are allowed")


def _checked_levels(levels: int) -> int:
    if levels > MAX_SCHEMA_LEVELS:
        raise _refusal(
            "json_schema",
            f"has {levels} levels where its references are followed: at most {MAX_SCHEMA_LEVELS} "
            "are allowed",
        )
    return levels


def _schema_source(schema_text: str) -> str:
    from llguidance import LLMatcher

    try:
        source: str = LLMatcher.grammar_from_json_schema(schema_text, overrides=_JSON_OPTIONS)
    except ValueError as error:  # it nests more deeply than llguidance reads
        raise _not_kept(str(error)) from None
    return source


def _problem(schema_text: str) -> str:
    """Return what is wrong with a schema, "" if nothing is."""
    from llguidance import LLMatcher

    source = _schema_source(schema_text)
    problem: str = LLMatcher.validate_grammar(source, None)
    return problem[:_MAX_PROBLEM_CHARS]


def _not_kept(problem: str) -> ParameterError:
    said = " ".join(problem.split())[:_MAX_PROBLEM_CHARS]
    return ParameterError(f"the structure cannot be kept to: {said}", param="structured")


def _schema_text(schema: object) -> str:
    if isinstance(schema, bool):  # true allows any value, false none
        return "{}" if schema else '{"enum":[]}'
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        parsed = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, TypeError, UnicodeError) as error:
        raise _refusal("json_schema", f"is no JSON: {error or 'it nests too deeply'}") from None
    if not isinstance(parsed, dict):
        raise _refusal("json_schema", f"is {text[:80]}: it must be a JSON object")
    return text


def _bounded(source: str, name: str) -> str:
    num_bytes = len(source.encode(errors="replace"))
    if num_bytes > MAX_SOURCE_BYTES:
        raise _refusal(name, f"has {num_bytes} bytes: at most {MAX_SOURCE_BYTES} are allowed")
    return source


def _refusal(name: str, problem: str) -> ParameterError:
    told = name.removeprefix("json_")  # "schema", whatever field it came from
    return ParameterError(f"the {told} {problem}", param="structured")
