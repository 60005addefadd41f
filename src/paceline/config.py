"""EngineConfig: one flat frozen record of everything the engine can be told."""

from __future__ import annotations

import os
from typing import Literal

from msgspec import Struct, field

from paceline import _native
from paceline.errors import ParameterError

KVDtype = Literal["f16", "bf16", "f32", "int8", "fp8", "k8v4", "int4"]
KV_DTYPES: tuple[KVDtype, ...] = ("f16", "bf16", "f32", "int8", "fp8", "k8v4", "int4")
Activations = Literal["q8", "f32"]
ACTIVATIONS: tuple[Activations, ...] = ("q8", "f32")
MAX_STEP = 2**20  # tokens and sequences of one step


def usual_kv_dtype() -> KVDtype:
    """Return bf16 where the CPU multiplies it, so that attention takes two products at once."""
    isa = os.environ.get("PACELINE_ISA") or _native.isas()[0]
    return "bf16" if isa == "avx512bf16" else "f16"


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Options of one engine. None means: chosen from the model and the machine at start."""

    max_model_len: int | None = None  # tokens; default: the model's own context, within the pool
    max_num_seqs: int = 32  # sequences running at once
    max_batched_tokens: int = 512  # token budget of a step
    block_size: int = 16  # tokens a KV block
    kv_dtype: KVDtype = field(default_factory=usual_kv_dtype)
    kv_memory_bytes: int | None = None  # default: a share of the memory that is free
    activations: Activations = "q8"  # what linears over quantised weights read
    prefix_cache: bool = True  # begin a prompt after what has been computed of it before
    kv_tier: str | None = None  # a spec: where blocks go that the KV cache gives up
    num_threads: int | None = None  # default: affinity mask and cgroup quota
    policy: str = "fcfs"  # a spec, e.g. "slo:step_ms=50"
    backend: str = "native"
    speculate: str = "off"  # how to draft ahead: a spec, e.g. "ngram:max=8"
    seed: int = 0  # base of the seeds of requests that bring none
    ledger: bool = False  # book where each request's time goes

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_batched_tokens", "block_size")
        optional = ("max_model_len", "kv_memory_bytes", "num_threads")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{name} is {value!r}: it must be at least 1", param=name)
            if name in positive and value > MAX_STEP:
                raise ParameterError(
                    f"{name} is {value}: it must be at most {MAX_STEP}", param=name
                )
        for name, kind in (
            ("policy", str), ("backend", str), ("seed", int), ("ledger", bool),
            ("prefix_cache", bool), ("speculate", str),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ParameterError(
                    f"{name} is {value!r}: it must be a {kind.__name__}", param=name
                )
        for name, choices in (("kv_dtype", KV_DTYPES), ("activations", ACTIVATIONS)):
            value = getattr(self, name)
            if value not in choices:
                raise ParameterError(
                    f"{name} is {value!r}: choose one of {', '.join(choices)}", param=name
                )
        if self.kv_tier is not None and not isinstance(self.kv_tier, str):
            raise ParameterError(
                f"kv_tier is {self.kv_tier!r}: it must be a text like disk:path=DIR,size=4G",
                param="kv_tier",
            )
        if self.kv_tier is not None and not self.prefix_cache:
            raise ParameterError(
                "kv_tier needs the prefix cache: leave out --no-prefix-cache", param="kv_tier"
            )
        if self.block_size % 16 or self.block_size > 256:
            raise ParameterError(
                f"block_size is {self.block_size}: choose a multiple of 16, at most 256",
                param="block_size",
            )


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split "ngram:k=4,mode=fast" into ("ngram", {"k": "4", "mode": "fast"})."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, eq, value = item.partition("=")
        if not eq or not key or not value:
            raise ParameterError(f"option {item!r} in {spec!r} is not of the form key=value")
        if key in options:
            raise ParameterError(f"option {key!r} appears twice in {spec!r}")
        options[key] = value
    if not name:
        raise ParameterError(f"{spec!r} names nothing: write name or name:key=value,…")
    return name, options


def parse_bytes(text: str) -> int:
    """Return the bytes that "512M", "2G", "1.5GiB" or "4096" means (powers of 1024)."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    body = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = body[-1:] if body[-1:] in units else ""
    try:
        value = float(body.removesuffix(unit)) * units[unit]
    except ValueError:
        value = -1.0
    if not 1 <= value < 2**60:
        raise ParameterError(f"{text!r} is no size: write for example 512M or 2G")
    return int(value)
