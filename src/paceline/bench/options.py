"""Options of a spec such as "chat:turns=real,max_input=2000", read by type."""

from __future__ import annotations

from paceline.bench.lengths import MAX_LENGTH, Length, parse_length
from paceline.bench.units import parse_integer, parse_positive
from paceline.config import parse_spec
from paceline.errors import ParameterError


class SpecOptions:
    """The options of one spec; each is taken once, and `close` refuses what nobody took."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.name, self._left = parse_spec(spec)
        self._known: list[str] = []

    def text(self, key: str, default: str | None = None) -> str | None:
        self._known.append(key)
        return self._left.pop(key, default)

    def required(self, key: str, why: str) -> str:
        value = self.text(key)
        if value is None:
            raise ParameterError(f"{self.spec!r} needs {key}={why}")
        return value

    def integer(self, key: str, default: int, *, low: int = 1) -> int:
        value = self.text(key)
        if value is None:
            return default
        return parse_integer(value, key, low, MAX_LENGTH)

    def number(self, key: str, default: float) -> float:
        value = self.text(key)
        return default if value is None else parse_positive(value, key)

    def length(self, key: str, default: str) -> Length:
        return parse_length(self.text(key, default) or default)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Return one of `choices`; the first is the default."""
        value = self.text(key, choices[0])
        assert value is not None
        if value not in choices:
            raise ParameterError(f"{key} is {value!r}: choose one of {', '.join(choices)}")
        return value

    def close(self) -> None:
        if self._left:
            known = ", ".join(self._known) or "none"
            raise ParameterError(
                f"{self.name} has no option {next(iter(self._left))!r}: its options are {known}"
            )
