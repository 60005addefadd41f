"""From `--speculate` to a proposer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.config import parse_spec
from paceline.engine.speculation.base import MAX_NODES
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.engine.speculation.base import Proposer

NAMES = ("off", "ngram")
_DEFAULT_MAX = 15  # with the known token a step of 16 rows: whole tiles of the kernels


def parse_speculate(spec: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options in a spec. Raises ParameterError naming what is wrong."""
    try:
        name, options = parse_spec(spec)
    except ParameterError as error:
        raise ParameterError(f"speculate: {error}", param="speculate") from None
    if name not in NAMES:
        raise ParameterError(
            f"speculate is {spec!r}: choose one of {', '.join(NAMES)}, with options as in "
            "ngram:max=8",
            param="speculate",
        )
    known = {"off": (), "ngram": ("max",)}[name]
    for key in options:
        if key not in known:
            choice = f"known is {', '.join(known)}" if known else "it has none"
            raise ParameterError(
                f"speculate {name!r} has no option {key!r}: {choice}", param="speculate"
            )
    _max_tokens(options)
    return name, options


def _max_tokens(options: Mapping[str, str]) -> int:
    text = options.get("max", str(_DEFAULT_MAX))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_NODES:
        raise ParameterError(
            f"speculate has max={text}: it must be an integer from 1 to {MAX_NODES}",
            param="speculate",
        )
    return int(text)


def load_proposer(spec: str) -> Proposer | None:
    """Return the proposer that "ngram:max=8" means; None for "off"."""
    name, options = parse_speculate(spec)
    if name == "off":
        return None
    from paceline.engine.speculation.ngram import NgramProposer

    return NgramProposer(_max_tokens(options))
