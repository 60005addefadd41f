"""Conversation: what a workload asks of a server, turn by turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

_MAX_PREPARED = 4096

Message = dict[str, Any]
Expectation = Literal["text", "json", "tool_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: messages that are added to the conversation, and what is asked for.

    `reply` is what the history holds afterwards; None takes the server's own answer. `think_s`
    passes between the answer before and this turn.
    """

    messages: tuple[Message, ...]
    max_tokens: int | None
    reply: str | None = None
    think_s: float = 0.0
    expects: Expectation = "text"
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns of one user; `kind` is the class that objectives and reports tell apart."""

    kind: str
    turns: tuple[Turn, ...]


class Workload(Protocol):
    """A seeded, endless series of conversations."""

    @property
    def fixes_length(self) -> bool:
        """True where answers shall run to max_tokens, past the end token."""

    @property
    def kinds(self) -> Collection[str]:
        """The classes that its conversations are of."""

    def conversation(self, seed: str, idx: int) -> Conversation:
        """Return conversation `idx`: the same for the same seed, whoever is asked."""


class Source:
    """Hands out conversations in order; the first ones are made before the clock runs."""

    def __init__(self, workload: Workload, seed: str, num_prepared: int) -> None:
        self._workload = workload
        self._seed = seed
        self._next = 0
        count = min(num_prepared, _MAX_PREPARED)
        self._prepared = [workload.conversation(seed, idx) for idx in range(count)]

    def take(self) -> tuple[int, Conversation]:
        idx = self._next
        self._next += 1
        if idx < len(self._prepared):
            return idx, self._prepared[idx]
        return idx, self._workload.conversation(self._seed, idx)


def single(kind: str, text: str, max_tokens: int) -> Conversation:
    """Return a conversation of one user message."""
    message = {"role": "user", "content": text}
    return Conversation(kind=kind, turns=(Turn(messages=(message,), max_tokens=max_tokens),))
