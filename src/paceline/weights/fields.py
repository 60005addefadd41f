"""Fields: typed and bounded look-ups in a model's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from paceline.errors import ModelFormatError

MAX_INT = 2**31 - 1  # sizes end up in the native core's 32-bit integers


class Fields(Struct, frozen=True):
    """Metadata of the file or folder `where`. Every error names it, the key and the value.

    A look-up without default raises ModelFormatError when the key is absent or null.
    """

    values: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any, rule: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFormatError(f"{self.where}: {key} is missing: it must be {rule}")
        return value

    def _bad(self, key: str, value: object, rule: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where}: {key} is {str(value)[:80]!r}: it must be {rule}")

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT
    ) -> int:
        rule = f"an integer from {low} to {high}"
        value = self._get(key, default, rule)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(key, value, rule)
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12
    ) -> float:
        rule = f"a number from {low:g} to {high:g}"
        value = self._get(key, default, rule)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(key, value, rule)
        if not (math.isfinite(value) and low <= value <= high):
            raise self._bad(key, value, rule)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self._bad(key, value, "a string")
        return value

    def optional_integer(self, key: str, *, low: int = 0, high: int = MAX_INT) -> int | None:
        return self.integer(key, low=low, high=high) if self.has(key) else None

    def optional_number(self, key: str, *, low: float = 0.0, high: float = 1e12) -> float | None:
        return self.number(key, low=low, high=high) if self.has(key) else None

    def optional_flag(self, key: str) -> bool | None:
        return self.flag(key, False) if self.has(key) else None

    def table(self, key: str) -> Fields:
        """The object under `key`; an empty one where it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._bad(key, value, "an object")
        return Fields(value or {}, f"{self.where}: {key}")
