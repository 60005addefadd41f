"""Whole garbage collections wait for a moment without calls."""

import gc
import weakref

import pytest

from paceline.server.collecting import IdleCollector


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def old_garbage():
    """Return a reference to what only a whole collection frees."""
    gc.collect()
    cycle = Cycle()
    gc.collect()  # it is among the oldest now
    return weakref.ref(cycle)


def pass_time(num_young):
    for _ in range(num_young):
        gc.collect(1)


def test_old_garbage_waits_while_a_call_is_open_and_goes_when_none_is(old_garbage):
    with IdleCollector() as collector:
        pass_time(20)
        collector.look(is_idle=False)
        assert old_garbage() is not None
        collector.look(is_idle=True)
        assert old_garbage() is None


def test_nothing_is_collected_before_anything_was_made(old_garbage):
    with IdleCollector() as collector:
        pass_time(5)
        collector.look(is_idle=True)
        assert old_garbage() is not None


def test_a_server_that_is_never_idle_collects_in_the_end(old_garbage):
    with IdleCollector(many=30) as collector:
        pass_time(30)
        collector.look(is_idle=False)
        assert old_garbage() is not None
        pass_time(1)
        collector.look(is_idle=False)
        assert old_garbage() is None


def test_python_collects_by_itself_outside_alone():
    before = gc.get_threshold()
    with IdleCollector():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 10**6
    assert gc.get_threshold() == before
