"""From `--speculate` to what it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.config import EngineConfig, parse_spec
from paceline.engine.speculation.base import MAX_NODES
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.engine.speculation.base import Proposer
    from paceline.engine.speculation.draft_load import DraftWeights

_OPTIONS = {
    "off": (),
    "ngram": ("max",),
    "draft": ("model", "max", "window"),
    "draft+ngram": ("model", "max", "window"),
}
_MAX_WINDOW = 2**16


class Speculation(Struct, frozen=True, kw_only=True):
    """What a spec says. `max_tokens` bounds the guesses for a sequence in a step."""

    name: str
    model: str = ""  # of a draft model
    max_tokens: int = 15  # with the known token a step of 16 rows: whole tiles of the kernels
    window: int = 256  # tokens of a new text that a draft model reads at most

    @property
    def has_model(self) -> bool:
        return bool(self.model)


def parse_speculate(spec: str) -> Speculation:
    """Return what `spec` says. Raises ParameterError naming what is wrong."""
    try:
        name, options = parse_spec(spec)
    except ParameterError as error:
        raise ParameterError(f"speculate: {error}", param="speculate") from None
    if name not in _OPTIONS:
        raise ParameterError(
            f"speculate is {spec!r}: choose one of {', '.join(_OPTIONS)}, with options as in "
            "ngram:max=8",
            param="speculate",
        )
    known = _OPTIONS[name]
    for key in options:
        if key not in known:
            choice = f"known is {', '.join(known)}" if known else "it has none"
            raise ParameterError(
                f"speculate {name!r} has no option {key!r}: {choice}", param="speculate"
            )
    if "model" in known and "model" not in options:
        raise ParameterError(
            f"speculate is {spec!r}: name a small model, as in {name}:model=qwen2.5-coder-0.5b",
            param="speculate",
        )
    given = {}
    for key, field, most in (("max", "max_tokens", MAX_NODES), ("window", "window", _MAX_WINDOW)):
        if key in options:
            given[field] = _integer(options, key, most)
    return Speculation(name=name, model=options.get("model", ""), **given)


def _integer(options: Mapping[str, str], key: str, most: int) -> int:
    text = options[key]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise ParameterError(
            f"speculate has {key}={text}: it must be an integer from 1 to {most}",
            param="speculate",
        )
    return int(text)


def open_draft(speculation: Speculation, config: EngineConfig) -> DraftWeights | None:
    """Return the weights of the draft model, opened and not yet loaded; None if there is none."""
    if not speculation.has_model:
        return None
    from paceline.engine.speculation.draft_load import open_weights

    return open_weights(speculation, config)


def load_proposer(speculation: Speculation, draft_model: Proposer | None = None) -> Proposer | None:
    """Return the proposer that `speculation` means; None for "off"."""
    if speculation.name == "off" or (draft_model is not None and speculation.name == "draft"):
        return draft_model
    from paceline.engine.speculation.ngram import NgramProposer

    ngram = NgramProposer(speculation.max_tokens)
    if draft_model is None:
        return ngram
    from paceline.engine.speculation.either import Either

    return Either(ngram, draft_model)
