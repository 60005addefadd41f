"""Look-up of levers by name: `load("policies", "fcfs")` imports `paceline.policies.fcfs`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from paceline.errors import ParameterError


def available(kind: str) -> list[str]:
    """Names that `load(kind, name)` accepts, sorted."""
    package = importlib.import_module(f"paceline.{kind}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base")


def load(kind: str, name: str) -> ModuleType:
    """Return the module `paceline.<kind>.<name>`. Raises ParameterError with the known names."""
    names = available(kind)
    if name not in names:
        raise ParameterError(f"there is no {name!r} in {kind}: choose one of {', '.join(names)}")
    return importlib.import_module(f"paceline.{kind}.{name}")
