"""What a user asks for (int4, groups of 64, …), and the format that a tensor can have of it."""

from __future__ import annotations

from msgspec import Struct

from paceline.errors import ParameterError
from paceline.quantize.base import Blocks
from paceline.weights.tensor import BLOCK

GGUF_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
# format -> (symmetric, with a minimum): group -> format of blocks
_GROUPED = {
    "int4": (
        {32: "q4_0", 64: "i4_g64", 128: "i4_g128"},
        {32: "q4_1", 64: "i4m_g64", 128: "i4m_g128"},
    ),
    "int8": (
        {32: "q8_0", 64: "i8_g64", 128: "i8_g128"},
        {32: "i8m_g32", 64: "i8m_g64", 128: "i8m_g128"},
    ),
    "fp8": ({32: "f8_g32", 64: "f8_g64", 128: "f8_g128"}, {}),
}
FORMATS = (*_GROUPED, *GGUF_FORMATS)
GROUPS = ("32", "64", "128", "channel")
DEFAULT_GROUP = "64"
# What a K-quant becomes where columns are no multiple of 256.
_FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# What embedding and head get instead, if nothing else is asked for: their errors reach every token.
_EMBEDDING = {
    "int4": "int8", "q4_0": "q8_0", "q4_1": "q8_0", "q5_0": "q8_0", "q5_1": "q8_0",
    "q4_k": "q6_k", "q5_k": "q6_k",
}  # fmt: skip


class Target(Struct, frozen=True):
    """A format; for int4, int8 and fp8 the group of a scale, and whether it has a minimum too."""

    format: str
    group: str | None = None
    symmetric: bool = True

    @property
    def is_grouped(self) -> bool:
        return self.format in _GROUPED

    def for_embedding(self) -> Target:
        """The same, but in 8 bits (6 beside K-quants) where this one has fewer."""
        return Target(_EMBEDDING.get(self.format, self.format), self.group, self.symmetric)

    def fit(self, cols: int) -> tuple[Blocks | None, str]:
        """Return the blocks that rows of `cols` weights can have, and why not those asked for.

        None: no format fits, the tensor stays as it is.
        """
        if cols % 32:
            return None, f"{cols} columns are no multiple of 32"
        if not self.is_grouped:
            weights = BLOCK[self.format][0]
            if cols % weights == 0:
                return Blocks(self.format), ""
            return Blocks(_FALLBACK[self.format]), f"{cols} columns are no multiple of {weights}"
        formats = _GROUPED[self.format][0 if self.symmetric else 1]
        by_row = self.group == "channel"
        wanted = 128 if by_row else int(self.group or DEFAULT_GROUP)
        group = next(g for g in (128, 64, 32) if g <= wanted and cols % g == 0)
        reason = "" if by_row or group == wanted else f"{cols} columns are no multiple of {wanted}"
        return Blocks(formats[group], by_row), reason


def parse_target(fmt: str, group: str | None, symmetric: bool | None) -> Target:
    """Return the target of the options; raises ParameterError for what does not go together."""
    if fmt not in FORMATS:
        raise ParameterError(f"format is {fmt!r}: choose {', '.join(FORMATS)}", param="format")
    if fmt not in _GROUPED:
        if group is not None:
            raise ParameterError(
                f"{fmt} has groups of its own: leave --group out, or choose {', '.join(_GROUPED)}",
                param="group",
            )
        if symmetric is not None:
            raise ParameterError(
                f"{fmt} has scales of its own kind: leave --sym and --asym out, or choose int4 or "
                "int8",
                param="symmetric",
            )
        return Target(fmt)
    if group is not None and group not in GROUPS:
        raise ParameterError(f"group is {group!r}: choose {', '.join(GROUPS)}", param="group")
    if fmt == "fp8" and symmetric is False:
        raise ParameterError(
            "fp8 has a sign and no minimum: leave --asym out, or choose int8", param="symmetric"
        )
    return Target(fmt, group or DEFAULT_GROUP, symmetric is not False)
