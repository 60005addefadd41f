"""The definition of what a KV cache keeps of a number, by format, in float32 NumPy."""

from __future__ import annotations

import numpy as np

from paceline.backends.base import F32

NIBBLE_GROUP = 32  # columns of an int4 head that share a step and a base
PART_DTYPES = {"k8v4": ("int8", "int4")}  # of keys and of values, where they differ


def round_to(dtype: str, x: F32) -> F32:
    """x as it comes back from a KV cache of `dtype`; its last axis is the columns of one head."""
    if dtype == "f32":
        return x
    if dtype in ("int8", "fp8"):
        return _round_to_codes(dtype, x)
    if dtype == "int4":
        return mix_columns(round_to_nibbles(mix_columns(x)))
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def _round_to_codes(dtype: str, x: F32) -> F32:
    """scale * code, one scale, max|x| / largest code as f16, for each token and head.

    Codes are the integers in [-127, 127], or numbers of E4M3. A head with a value that is not
    finite comes back as NaN, and so does one beyond f16's scales.
    """
    top = np.float32(127 if dtype == "int8" else 448)
    with np.errstate(over="ignore", invalid="ignore"):
        amax = np.abs(x).max(axis=-1, keepdims=True)
        scale = (amax / top).astype(np.float16).astype(np.float32)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        codes = np.clip(x * inverse, -top, top)
        codes = np.rint(codes) if dtype == "int8" else _round_to_e4m3(codes)
        rounded: F32 = np.where(np.isfinite(scale), codes * scale, np.float32(np.nan))
    return rounded


def mix_columns(x: F32) -> F32:
    """x H: a Hadamard matrix over sqrt(p) on each run of p columns; H is its own inverse.

    p is the largest power of two that divides the columns. (QuaRot, Ashkboos 2024.)
    """
    run = x.shape[-1] & -x.shape[-1]
    y, half = x.reshape(*x.shape[:-1], -1, run), 1
    with np.errstate(invalid="ignore", over="ignore"):
        while half < run:
            pairs = y.reshape(*x.shape[:-1], -1, 2, half)
            a, b = pairs[..., :1, :], pairs[..., 1:, :]
            y, half = np.concatenate([a + b, a - b], axis=-2), 2 * half
        root = np.float32(0.707106781 if run.bit_length() % 2 == 0 else 1)
        mixed: F32 = y.reshape(x.shape) * np.ldexp(root, -((run.bit_length() - 1) // 2))
    return mixed


def round_to_nibbles(x: F32) -> F32:
    """scale * (base + step * nibble), whose second factor is a code of int8.

    The scale, max|x| / 127 as f16, is that of a token and head. A group of columns has a step, from
    1 to 16, that cuts at most half of itself off at both ends, and a base. Values that are not
    finite, or past f16's scales: as in `_round_to_codes`.
    """
    rounded = np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
        scale = scale.astype(np.float32)
        is_useful = (scale > 0) & np.isfinite(scale)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=is_useful)
        for begin in range(0, x.shape[-1], NIBBLE_GROUP):
            group = x[..., begin : begin + NIBBLE_GROUP]
            codes = np.where(is_useful, np.clip(group * inverse, -127, 127), np.float32(0))
            low, high = codes.min(axis=-1, keepdims=True), codes.max(axis=-1, keepdims=True)
            step = np.maximum(np.ceil((high - low) * np.float32(0.0625)), np.float32(1))
            base = np.rint(np.float32(0.5) * (low + high) - np.float32(7.5) * step)
            base = np.clip(base, -127, 127 - 15 * step)
            nibbles = np.rint(np.clip((codes - base) * (np.float32(1) / step), 0, 15))
            rounded[..., begin : begin + NIBBLE_GROUP] = (base + step * nibbles) * scale
    return np.where(np.isfinite(scale), rounded, np.float32(np.nan))


def _round_to_e4m3(x: F32) -> F32:
    """x, up to 448, with three bits behind the first one; from 2^-6 down in steps of 2^-9."""
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)
    step = np.ldexp(np.float32(1), exponent - 3)
    rounded: F32 = np.rint(x / step) * step
    return rounded
