"""ChatTemplate: messages to a prompt, by the template that the model brings, in a sandbox.

Control markers that come from the template become control tokens. Markers that stand in what
users and tools wrote are ordinary text: each is cut by a private character before rendering, and
the tokenizer matches no marker across such a cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import jinja2

from paceline.errors import TemplateError
from paceline.text.messages import (
    Message,
    check_none_dropped,
    has_tool_calls,
    normalize,
    with_text_arguments,
)
from paceline.text.sandbox import MAX_CHARS, BoundedEnvironment, Refusal, weigh
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_SOURCE_CHARS = 1 << 18
_FIRST_PRIVATE, _LAST_PRIVATE = 0x100000, 0x10FFFD
_REMEDY = "give another one with --chat-template FILE"


class ChatTemplate:
    """A compiled template. `bos` and `eos` are the texts it may write; None: the tokenizer's."""

    def __init__(self, source: str, *, bos: str | None = None, eos: str | None = None) -> None:
        if not source.strip():
            raise TemplateError(
                f"the model has no chat template: {_REMEDY}, or use plain completion"
            )
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters, the limit is "
                f"{MAX_SOURCE_CHARS}: {_REMEDY}"
            )
        self.source = source
        self._bos = bos
        self._eos = eos
        self._environment = BoundedEnvironment()
        self._knows_developer = "developer" in source
        self._template = self._guard("cannot be compiled", self._compile)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises TemplateError with the template's own message."""
        special = {"bos_token": self._bos or "", "eos_token": self._eos or ""}
        normal = normalize(messages, knows_developer=self._knows_developer)
        given = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        prompt = self._render(normal, tools, {**given, **special})
        check_none_dropped(normal, prompt)
        return prompt

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        on_rendered: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Return the ids of the prompt; the begin token is there where the template writes it.

        `on_rendered` is called between the template's work and the tokenizer's.
        """
        special = {
            "bos_token": _text_of(tokenizer, tokenizer.bos_id) if self._bos is None else self._bos,
            "eos_token": _text_of(tokenizer, tokenizer.eos_id) if self._eos is None else self._eos,
        }
        normal = normalize(messages, knows_developer=self._knows_developer)
        texts: list[str] = []
        _collect_strings((normal, tools, variables), texts)
        cut = _unused_char([self.source, *texts])

        def marked(text: str) -> str:
            return _insert(text, tokenizer.markers.cuts(text), cut)

        given = _map_strings({**(variables or {})}, marked)
        given["add_generation_prompt"] = add_generation_prompt
        rendered = self._render(
            _map_strings(normal, marked), _map_strings(tools, marked), {**given, **special}
        )
        prompt, cuts = _remove(rendered, cut)
        check_none_dropped(normal, prompt)
        on_rendered()
        return tokenizer.encode(prompt, add_special=False, parse_special=True, cuts=cuts)

    def _render(self, messages: list[Message], tools: Any, variables: dict[str, Any]) -> str:
        weigh_input(messages, tools, variables)
        values = {"documents": None, **variables, "tools": tools or None}
        try:
            return self._guard("failed", lambda: self._written(messages, values))
        except TemplateError as error:
            if not isinstance(error.__cause__, TypeError) or not has_tool_calls(messages):
                raise
            # Such a template adds the arguments to a string: it wants them as text.
            text_messages = with_text_arguments(messages)
            return self._guard("failed", lambda: self._written(text_messages, values))

    def _written(self, messages: list[Message], values: dict[str, Any]) -> str:
        self._environment.start_clock()
        chunks: list[str] = []
        size = 0
        for chunk in self._template.generate(messages=messages, **values):
            self._environment.tick()
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_CHARS:
                raise TemplateError(
                    f"the chat template wrote more than {MAX_CHARS} characters: send less, or "
                    f"{_REMEDY}"
                )
        return "".join(chunks)

    def _compile(self) -> jinja2.Template:
        self._environment.start_clock()
        return self._environment.from_string(self.source)

    def _guard(self, verb: str, work: Callable[[], T]) -> T:
        """Return `work()`; what a template can raise becomes a TemplateError that quotes it."""
        try:
            return work()
        except TemplateError:
            raise
        except Refusal as error:
            message = f"the chat template refuses the messages: {error}"
            raise TemplateError(message, param="messages") from error
        except jinja2.TemplateSyntaxError as error:
            problem = f"{error.message} (line {error.lineno})"
            raise TemplateError(f"the chat template {verb}: {problem}; {_REMEDY}") from error
        except RecursionError as error:
            raise TemplateError(f"the chat template {verb}: it nests too deeply") from error
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError,
                SyntaxError, TypeError, ValueError) as error:  # fmt: skip
            detail = str(error) or type(error).__name__
            raise TemplateError(f"the chat template {verb}: {detail}", param="messages") from error


def weigh_input(messages: object, tools: object, variables: object) -> None:
    """Refuse conversations that are larger than any prompt may become."""
    try:
        weigh([messages, tools, variables])
    except (jinja2.TemplateError, RecursionError):
        raise TemplateError(
            f"messages and tools hold more than {MAX_CHARS} characters or nest too deeply: "
            "send less",
            param="messages",
        ) from None


def _text_of(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of JSON-like `value` with every string changed, keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_map_strings(item, change) for item in value]
    return value


def _collect_strings(value: Any, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            texts.append(str(key))
            _collect_strings(item, texts)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            _collect_strings(item, texts)


def _unused_char(texts: Sequence[str]) -> str:
    """Return a private-use character that stands in none of the texts."""
    for code in range(_LAST_PRIVATE, _FIRST_PRIVATE, -1):
        char = chr(code)
        if not any(char in text for text in texts if not text.isascii()):
            return char
    raise TemplateError("messages use every private character of Unicode", param="messages")


def _insert(text: str, cuts: Sequence[int], char: str) -> str:
    if not cuts:
        return text
    bounds = [0, *cuts, len(text)]
    return char.join(text[a:b] for a, b in pairwise(bounds))


def _remove(rendered: str, char: str) -> tuple[str, list[int]]:
    """Return the prompt without `char`, and the positions in it where `char` stood."""
    # A template may ask tojson for ASCII; there the character has become two escapes.
    escaped = char.encode("utf-16-be").hex()
    rendered = re.sub(rf"(?i)\\u{escaped[:4]}\\u{escaped[4:]}", char, rendered)
    parts = rendered.split(char)
    cuts: list[int] = []
    position = 0
    for part in parts[:-1]:
        position += len(part)
        cuts.append(position)
    return "".join(parts), cuts
