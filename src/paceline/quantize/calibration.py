"""Calibration: windows of a text, for which weights are rounded or choices are made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from paceline.errors import ParameterError
from paceline.text.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from paceline.quantize.source import Source

WINDOW = 512  # tokens that see each other
DEFAULT_TOKENS = 4096
GPTQ_TOKENS = 8192  # it corrects by what inputs have in common, and needs to see more of them
_MAX_CHARACTERS = 1 << 20  # of a long text its beginning is enough


class Calibration(Struct, frozen=True):
    """Windows of token ids, each a sequence of its own; all of one length."""

    windows: tuple[tuple[int, ...], ...]

    def summary(self) -> dict[str, Any]:
        """What config.json says of it, and what a run that goes on must have the same."""
        ids = np.array(self.windows, np.int64)
        return {
            "windows": len(self.windows), "window_tokens": len(self.windows[0]),
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        }  # fmt: skip


def read_calibration(
    path: Path, source: Source, *, num_tokens: int = DEFAULT_TOKENS
) -> Calibration:
    """Return windows of the text in `path`, about `num_tokens` in all, spread evenly over it.

    Raises ParameterError where the text is not there, is no text, or does not fill one window.
    """
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as text: {error}", param="calibrate") from None
    config = source.checkpoint.config
    tokenizer = build_tokenizer(source.checkpoint.tokenizer)
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    size = min(WINDOW, config.max_context) - len(start)
    ids = tokenizer.encode(text, add_special=False)
    if len(ids) < size:
        raise ParameterError(
            f"the text in {path} has {len(ids)} tokens: calibration needs {size} at least, and "
            f"{num_tokens} or more are better",
            param="calibrate",
        )
    count = max(1, min(num_tokens, len(ids)) // size)
    begins = np.linspace(0, len(ids) - size, count).astype(int).tolist()
    return Calibration(tuple(tuple(start + ids[b : b + size]) for b in begins))
