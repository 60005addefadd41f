"""The probes of the machine: what they return is a speed, whatever the machine."""

from __future__ import annotations

import pytest

from paceline import _native
from paceline.measure.ceilings import measure_ceilings

_SECONDS = 0.005


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kind", ["int8", "f32"])
def test_every_isa_multiplies_bytes_and_floats(isa, kind):
    # A register holds 16 floats at most, and no core makes 10 G vectors a second.
    assert 1e6 < _native.peak_macs(kind, 1, _SECONDS, isa) < 1e13


def test_only_the_isa_with_bf16_products_has_a_peak_of_them():
    for isa in _native.isas():
        peak = _native.peak_macs("bf16", 1, _SECONDS, isa)
        assert (peak > 0) == (isa == "avx512bf16")


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", [4096 * 3, 2**20 + 12345])
def test_a_buffer_of_any_size_is_read_by_any_number_of_threads(size, num_threads):
    assert 1e6 < _native.read_bandwidth(size, num_threads, _SECONDS) < 1e14


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.peak_macs("int4", 1, _SECONDS),
        lambda: _native.peak_macs("int8", 0, _SECONDS),
        lambda: _native.peak_macs("int8", 1, float("nan")),
        lambda: _native.peak_macs("int8", 1, _SECONDS, "sse9"),
        lambda: _native.read_bandwidth(4096, 2, _SECONDS),
        lambda: _native.read_bandwidth(2**60, 1, _SECONDS),
        lambda: _native.read_bandwidth(2**20, 1, 0.0),
    ],
)
def test_what_cannot_be_measured_is_refused(call):
    with pytest.raises(ValueError, match=r"peak_macs|read_bandwidth|sse9"):
        call()


def test_ceilings_have_every_level_down_to_memory():
    found = measure_ceilings(1)
    levels = [read.level for read in found.reads]
    assert levels[-1] == "memory"
    assert levels[0] == "L1"
    assert all(read.bytes_s > 0 for read in found.reads)
    capacities = [read.capacity for read in found.reads]
    assert capacities == sorted(capacities)
    assert min(found.int8_macs_s, found.f32_macs_s) > 0
