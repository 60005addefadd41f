"""What a policy is: the order in which sequences get tokens, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from msgspec import Struct
from msgspec.structs import fields

from paceline.config import parse_spec
from paceline.errors import ParameterError
from paceline.loading import load

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

Options = TypeVar("Options", bound=Struct)


class Budget(Struct):
    """What a step has given out so far, and what it may still give."""

    num_left: int  # tokens
    num_decodes: int = 0  # sequences that get their one next token
    num_prefill: int = 0  # tokens of sequences that catch up


class Policy(Protocol):
    """A scheduling rule. It never touches a sequence; the scheduler enforces memory and limits."""

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now_ns: int) -> list[Sequence]:
        """Return all sequences, the most important first; preemption begins at the end."""

    def quota(self, seq: Sequence, budget: Budget) -> int:
        """Return how many tokens `seq`, which catches up, may compute in this step."""

    def observe(self, num_tokens: int, forward_s: float) -> None:
        """Learn what a step cost."""


def load_policy(spec: str) -> Policy:
    """Return the policy that "name:key=value,…" means."""
    name, options = parse_spec(spec)
    return cast(Policy, load("policies", name).create(options))


def parse_options(cls: type[Options], policy: str, options: Mapping[str, str]) -> Options:
    """Return `cls`, a Struct of float fields, filled from a spec's options."""
    known = [f.name for f in fields(cls)]
    values: dict[str, float] = {}
    for key, text in options.items():
        if key not in known:
            choice = f"known are {', '.join(known)}" if known else "it has none"
            raise ParameterError(
                f"policy {policy!r} has no option {key!r}: {choice}", param="policy"
            )
        try:
            values[key] = float(text)
        except ValueError:
            raise ParameterError(
                f"option {key} of policy {policy!r} is {text!r}: it must be a number",
                param="policy",
            ) from None
    return cls(**values)
