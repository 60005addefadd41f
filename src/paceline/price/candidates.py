"""Candidates: weights in a format, or in files of their own, beside a KV cache in a format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from paceline.config import KV_DTYPES
from paceline.engine.build import source_files
from paceline.errors import ParameterError
from paceline.quantize.formats import FORMATS, Target, parse_target
from paceline.weights.repack import source_fingerprint

SOURCE = "source"
DEFAULT_WEIGHTS = (SOURCE, "int8:64", "int4:64", "q4_k")
DEFAULT_METHOD = "rtn"
_BESIDE = (".json", ".jinja", ".txt", ".model", ".gguf")  # what a folder has beside its weights
_KINDS = {"sym": True, "asym": False}


class Weights(Struct, frozen=True, kw_only=True):
    """One way to have a model's weights: `path`, or what `paceline quantize` makes of the source.

    `name` is how the user asks for it: source, int4:64, gptq/int4:64:asym, or a path.
    """

    name: str
    path: Path | None = None
    method: str = DEFAULT_METHOD
    target: Target | None = None  # None where `path` says it

    def arguments(self) -> list[str]:
        """Options of `paceline quantize` that make these weights. Precondition: no `path`."""
        assert self.target is not None
        options = ["--method", self.method, "--format", self.target.format]
        if self.target.group is not None:
            options += ["--group", self.target.group]
        if not self.target.symmetric:
            options.append("--asym")
        return options


class Candidate(Struct, frozen=True, kw_only=True):
    """Weights and a KV format, measured together."""

    weights: Weights
    kv_dtype: str

    @property
    def name(self) -> str:
        return f"{self.weights.name}, KV {self.kv_dtype}"


def parse_weights(items: Iterable[str], source: Path, methods: Sequence[str]) -> list[Weights]:
    """Return the weights that `items` name, each once; raises ParameterError.

    An item is source, FORMAT[:GROUP][:sym|asym], METHOD/FORMAT… or the path of a model.
    """
    found: dict[str, Weights] = {}
    for item in items:
        name = item.strip()
        found.setdefault(name, _parse(name, source, methods))
    if not found:
        raise ParameterError("no weights are named: leave --weights out, or write int8:64,int4:64")
    return list(found.values())


def _parse(name: str, source: Path, methods: Sequence[str]) -> Weights:
    if name == SOURCE:
        return Weights(name=name, path=source)
    slash = name.rpartition("/")
    fmt, *rest = slash[2].split(":")
    method = slash[0] or DEFAULT_METHOD
    if fmt in FORMATS and method in methods:
        return _to_make(name, method, fmt, rest)
    path = Path(name).expanduser()
    if name and path.exists():
        return Weights(name=name, path=path)
    if fmt in FORMATS:
        raise ParameterError(
            f"{name!r} asks for method {method!r}: choose {', '.join(methods)}", param="weights"
        )
    raise ParameterError(
        f"{name!r} is neither a format nor a model on this disk: write {SOURCE}, a path, or "
        f"METHOD/FORMAT:GROUP with METHOD {', '.join(methods)} and FORMAT {', '.join(FORMATS)}",
        param="weights",
    )


def _to_make(name: str, method: str, fmt: str, rest: Sequence[str]) -> Weights:
    parts = list(rest)
    symmetric = _KINDS[parts.pop()] if parts and parts[-1] in _KINDS else None
    if len(parts) > 1:
        raise ParameterError(
            f"{name!r} has too many parts: write FORMAT:GROUP:asym", param="weights"
        )
    target = parse_target(fmt, parts[0] if parts else None, symmetric)
    return Weights(name=name, method=method, target=target)


def parse_kv(text: str) -> list[str]:
    """Return the KV formats of a list like f16,int8, each once; raises ParameterError."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in KV_DTYPES:
            raise ParameterError(
                f"KV format is {name!r}: choose {', '.join(KV_DTYPES)}", param="kv"
            )
    return names


def digest_of(*parts: str) -> str:
    """Return a short name for what `parts` say."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def fingerprint(path: Path) -> str:
    """Return what changes when the model at `path` does."""
    return source_fingerprint(source_files(path))


def disk_bytes(path: Path) -> int:
    """Return the bytes of a model's files: those that it is loaded from, and no others there."""
    files = source_files(path)
    if path.is_dir():
        files += [file for file in path.iterdir() if file.suffix in _BESIDE and file.is_file()]
    return sum(file.stat().st_size for file in files)
