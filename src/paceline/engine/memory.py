"""How much memory the KV cache may take, and how many blocks that is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.models.base import ModelConfig

logger = logging.getLogger(__name__)

KV_SHARE = 0.5  # of the memory that is left beside the weights, where --kv-memory says nothing
_ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4}  # of formats without scales
_SCALE_BYTES = 2  # of a token's K, or V, in one head, where that is codes
_NIBBLE_GROUP = 32  # columns of an int4 head that share a step and a base, a byte each
_NIBBLES = {"k8v4": 1, "int4": 2}  # how many of K and V are kept in 4 bits
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a huge number


class KVSize(Struct, frozen=True, kw_only=True):
    """A KV pool that fits: `num_blocks` of `block_bytes`, for sequences up to `max_model_len`."""

    num_blocks: int
    block_bytes: int
    max_model_len: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def kv_token_bytes(model: ModelConfig, kv_dtype: str) -> int:
    """Bytes of K and V that one token takes with their scales, all layers together."""
    dim, narrow = model.head_dim, _NIBBLES.get(kv_dtype, 0)
    code_bytes = dim + _SCALE_BYTES
    nibble_bytes = dim // 2 + _SCALE_BYTES + 2 * -(-dim // _NIBBLE_GROUP)
    if kv_dtype in _ITEM_BYTES:
        head_bytes = 2 * dim * _ITEM_BYTES[kv_dtype]
    else:
        head_bytes = narrow * nibble_bytes + (2 - narrow) * code_bytes
    return model.num_layers * model.num_kv_heads * head_bytes


def size_kv(
    model: ModelConfig, config: EngineConfig, *, weight_bytes: int, available_bytes: int
) -> KVSize:
    """Return the KV pool for `config` when `available_bytes` are free and the weights need theirs.

    Without --kv-memory the pool takes KV_SHARE of what the weights leave, and never more than
    max_num_seqs sequences of the full length can fill. A pool too small for one sequence of the
    model's context shortens max_model_len, unless the caller asked for a length: then it refuses.
    """
    wanted_len = config.max_model_len or model.max_context
    if wanted_len > model.max_context:
        raise ParameterError(
            f"max_model_len is {wanted_len}, the model's context is {model.max_context} tokens: "
            "lower --max-model-len",
            param="max_model_len",
        )
    block_bytes = kv_token_bytes(model, config.kv_dtype) * config.block_size
    blocks_per_seq = -(-wanted_len // config.block_size)
    free = max(0, available_bytes - weight_bytes)
    if config.kv_memory_bytes is None:
        budget = int(free * KV_SHARE)
        num_blocks = min(budget // block_bytes, config.max_num_seqs * blocks_per_seq)
    else:
        budget = config.kv_memory_bytes
        if budget > free:
            raise ParameterError(
                f"kv_memory is {format_bytes(budget)}, but {format_bytes(free)} are free beside "
                f"the weights ({format_bytes(weight_bytes)}): lower --kv-memory",
                param="kv_memory_bytes",
            )
        num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ParameterError(
            f"the KV cache may take {format_bytes(budget)}, one block of {config.block_size} "
            f"tokens needs {format_bytes(block_bytes)}: raise --kv-memory, free memory, or choose "
            "a smaller --block-size",
            param="kv_memory_bytes",
        )
    pool_tokens = num_blocks * config.block_size
    if config.max_model_len is not None and pool_tokens < config.max_model_len:
        raise ParameterError(
            f"max_model_len is {config.max_model_len}, but the KV pool holds {pool_tokens} tokens "
            f"({format_bytes(num_blocks * block_bytes)}): raise --kv-memory or lower "
            "--max-model-len",
            param="max_model_len",
        )
    return KVSize(
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        max_model_len=min(wanted_len, pool_tokens),
    )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still use: MemAvailable, within every cgroup limit above it."""
    available = _meminfo_available(proc / "meminfo")
    rooms = list(_cgroup_rooms(proc / "self" / "cgroup", cgroup))
    return max(0, min([available, *rooms]))


def _meminfo_available(path: Path) -> int:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    logger.warning("%s says nothing about free memory: taking 1 GiB as free", path)
    return 2**30


def _cgroup_rooms(membership: Path, root: Path) -> Iterator[int]:
    """Yield limit minus use, for the process's cgroup (v1 and v2) and each of its parents.

    File pages that the kernel can drop count as free. In a container the path may lie outside what
    is mounted; the walk then begins at the mount's root, which is the container's own group.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
            inactive_key = "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            inactive_key = "total_inactive_file"
        else:
            continue
        folder = base / path.strip("/")
        while True:
            limit_bytes = _number(_read(folder / limit))
            if limit_bytes is not None and limit_bytes < _UNLIMITED:
                used = _number(_read(folder / usage)) or 0
                stat = dict(row.split(" ", 1) for row in _read(folder / "memory.stat").splitlines())
                yield limit_bytes - used + int(stat.get(inactive_key, 0))
            if folder == base:
                break
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def format_bytes(count: float) -> str:
    """Return "1.5 GiB", "512.0 MiB", "23.0 KiB" or "12 B"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
