"""Paceline: an LLM inference engine and server that shows where every millisecond goes.

Names are imported on first use, so that `import paceline` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.errors import PacelineError
    from paceline.llm import LLM, Choice, Completion
    from paceline.types import SamplingParams, Structured, Timings, TokenLogprob, Usage

__version__ = "0.1.0"

_HOME = {
    "LLM": "paceline.llm",
    "Choice": "paceline.llm",
    "Completion": "paceline.llm",
    "EngineConfig": "paceline.config",
    "PacelineError": "paceline.errors",
    "SamplingParams": "paceline.types",
    "Structured": "paceline.types",
    "Timings": "paceline.types",
    "TokenLogprob": "paceline.types",
    "Usage": "paceline.types",
}

__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "EngineConfig",
    "PacelineError",
    "SamplingParams",
    "Structured",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
