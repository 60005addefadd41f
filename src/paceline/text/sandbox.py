"""A Jinja environment for templates that nobody vouches for: no Python internals, bounded work.

Time is bounded by a deadline that every loop turn, call and filter checks; memory by refusing an
operation whose result would be too large before it is made. What one step may cost is thereby a
few milliseconds, so a hostile template ends about a second after it began.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 16 << 20  # of any text and of the whole output
MAX_ITEMS = 1 << 17  # of any list, nested ones counted through
MAX_WIDTH = 1 << 12  # a number that pads, indents or repeats by formatting
MAX_BITS = 1 << 12  # of any integer
TIME_LIMIT_S = 1.0

_WIDE = re.compile(r"\d{5,}|\*")  # a width or precision in a format string
# Filters that reach into objects, need no place in a prompt, or multiply their input.
_REMOVED_FILTERS = (
    "attr", "center", "filesizeformat", "forceescape", "pprint", "random", "striptags", "urlize",
    "wordwrap", "xmlattr",
)  # fmt: skip
_FREE_NUMBERS = frozenset({"abs", "d", "default", "float", "int", "round", "string", "sum"})


class LimitError(jinja2.TemplateRuntimeError):
    """The template asked for more time or memory than a prompt needs."""


class Refusal(jinja2.TemplateError):
    """The template called raise_exception: the messages are not what its model was trained on."""


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant said for training; here the text itself."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Immutable sandbox with a deadline, and limits on every value."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _Generation],
            finalize=self._finalized,
        )
        self._clock = threading.local()
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": jinja2.utils.Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters["tojson"] = _tojson
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._guarded(name, f) for name, f in self.filters.items()}
        self.filters["_turns"] = self._turns
        self.filters["_sized"] = _sized

    def start_clock(self) -> None:
        """Give this thread's next render (or compilation) its full time.

        It is the processor's: a good template is not refused because the machine is busy.
        """
        self._clock.deadline = time.monotonic() + TIME_LIMIT_S
        self._clock.cpu_deadline = time.thread_time() + TIME_LIMIT_S

    def tick(self) -> None:
        """Raise LimitError once this thread's time is over."""
        clock = self._clock
        if time.monotonic() <= getattr(clock, "deadline", 0.0):
            return  # six times as quick to read
        if time.thread_time() > getattr(clock, "cpu_deadline", 0.0):
            raise LimitError(f"the template ran for more than {TIME_LIMIT_S:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_turns")
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = _filtered(block.filter, "_sized")
        for parent in list(tree.find_all(nodes.Node)):
            _wrap_children(parent)
        tree.set_environment(self)
        return tree

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, method.__name__, args, kwargs)
        return _sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter with the clock and the checks of its arguments and result."""

        @functools.wraps(function)  # keeps the mark by which jinja2 passes its context
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            values = [v for v in args if not isinstance(v, _JINJA_OWN)]
            for value in (*values, *kwargs.values()):
                weigh(value)
            if name not in _FREE_NUMBERS:
                _check_numbers((*values[1:], *kwargs.values()))
            if name == "replace" and len(values) >= 3:
                _check_replace(str(values[0]), str(values[1]), str(values[2]))
            elif name == "join":
                separator = kwargs.get("d", values[1] if len(values) > 1 else "")
                _check_join(str(separator), values[0])
            elif name == "indent":
                width = kwargs.get("width", values[1] if len(values) > 1 else 4)
                _check_product(str(values[0]).count("\n") + 1, _length(width))
            elif name == "format":
                _check_format(str(values[0]))
            return _sized(function(*args, **kwargs))

        return guarded

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """Pass the items of a loop on, checking the clock at each."""
        for item in items:
            self.tick()
            yield item

    def _finalized(self, value: Any) -> Any:
        weigh(value)
        return value

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_ITEMS:
            raise LimitError(f"range of {len(numbers)} numbers: at most {MAX_ITEMS}")
        return numbers


_JINJA_OWN = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _wrap_children(parent: nodes.Node) -> None:
    """Put `_sized` around each concatenation and list that `parent` holds."""
    for field, value in parent.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(parent, field, _filtered(value, "_sized"))
        elif isinstance(value, list):
            value[:] = [
                _filtered(item, "_sized") if isinstance(item, nodes.Concat) else item
                for item in value
            ]


def weigh(value: Any) -> None:
    """Raise LimitError where `value` written out is larger than the limits. O(limit)."""
    if isinstance(value, str):
        _check_product(len(value), 1)
    elif isinstance(value, list | tuple | Mapping):
        budget = [MAX_ITEMS, MAX_CHARS]
        _weigh_nested(value, budget)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise LimitError("a number grew beyond bounds")


def _weigh_nested(value: Any, budget: list[int]) -> None:
    budget[0] -= 1
    if isinstance(value, str):
        budget[1] -= len(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            budget[1] -= len(key) if isinstance(key, str) else 0
            _weigh_nested(item, budget)
    elif isinstance(value, list | tuple):
        for item in value:
            _weigh_nested(item, budget)
    if budget[0] < 0 or budget[1] < 0:
        raise LimitError(f"a value has more than {MAX_ITEMS} items or {MAX_CHARS} characters")


def _sized(value: Any) -> Any:
    """Return `value`, refused where it is a text, list or number beyond the limits."""
    if isinstance(value, str):
        _check_product(len(value), 1)
    elif isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
        raise LimitError(f"a list has more than {MAX_ITEMS} items")
    return value


def _check_product(count: int, length: int) -> None:
    if count * length > MAX_CHARS:
        raise LimitError(f"a text has more than {MAX_CHARS} characters")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str) and isinstance(times, int):
                _check_product(len(repeated), times)
            elif isinstance(repeated, list | tuple) and isinstance(times, int):
                _check_items(len(repeated) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        weigh(right if isinstance(right, list | tuple | Mapping) else [right])
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            _check_product(len(left) + len(right), 1)
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _check_items(len(left) + len(right))


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise LimitError(f"a list has more than {MAX_ITEMS} items")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise LimitError("a number grew beyond bounds")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise LimitError(f"{value} as a width or count: at most {MAX_WIDTH}")


def _check_format(pattern: str) -> None:
    if _WIDE.search(pattern):
        raise LimitError(f"a format asks for more than {MAX_WIDTH} characters")


def _check_replace(text: str, old: str, new: str) -> None:
    _check_product(text.count(old), len(new))


def _check_join(separator: str, items: Any) -> None:
    if isinstance(items, list | tuple):
        _check_product(len(items), len(separator))
        _check_product(sum(len(item) for item in items if isinstance(item, str)), 1)


def _check_text_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a call of a str method whose result would be beyond the limits."""
    values = (*args, *kwargs.values())
    for value in values:
        weigh(value)
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_numbers(values)
        _check_product(text.count("\t") + 1, MAX_WIDTH if name == "expandtabs" else 1)
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        _check_join(text, args[0])
    elif name in ("format", "format_map"):
        _check_numbers(values)
        _check_format(text)
    elif name == "translate":
        raise LimitError("str.translate is not available in templates")


def _length(width: Any) -> int:
    return len(width) if isinstance(width, str) else int(width)


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    if not isinstance(pattern, str) or len(pattern) > 256 or re.search(r"\d{3}", pattern):
        raise LimitError("strftime_now: the format is too long")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, text as it is."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
