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
    "draft": ("model", "max", "window", "vocab"),
    "draft+ngram": ("model", "max", "window", "vocab"),
}
_MAX_WINDOW = 2**16
_MAX_VOCAB = 2**24
NUM_VOCAB = 32768


class Speculation(Struct, frozen=True, kw_only=True):
    """What a spec says. `max_tokens` bounds the guesses for a sequence in a step."""

    name: str
    model: str = ""  # of a draft model
    max_tokens: int = 15  # with the known token a step of 16 rows: whole tiles of the kernels
    window: int = 256  # tokens of a new text that a draft model reads at most
    num_vocab: int | None = NUM_VOCAB  # ids that a draft model may guess, the first ones; None: all

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
    unset = Speculation(name=name)
    return Speculation(
        name=name,
        model=options.get("model", ""),
        max_tokens=_integer(options, "max", unset.max_tokens, most=MAX_NODES),
        window=_integer(options, "window", unset.window, most=_MAX_WINDOW),
        num_vocab=None
        if options.get("vocab") == "all"
        else _integer(options, "vocab", NUM_VOCAB, most=_MAX_VOCAB, also="all or "),
    )


def _integer(
    options: Mapping[str, str], key: str, default: int, *, most: int, also: str = ""
) -> int:
    text = options.get(key)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) < 10  # more is beyond any limit
    if not is_number or not 1 <= int(text) <= most:
        raise ParameterError(
            f"speculate has {key}={text}: it must be {also}an integer from 1 to {most}",
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
