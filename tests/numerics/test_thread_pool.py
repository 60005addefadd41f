"""The native thread pool: sleeps when idle, ends when closed, needs no core of its own."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.backends.native import NativeBackend
from paceline.errors import ParameterError
from tests.numerics.program_cases import Runner, Shape, decoder, random_tokens, random_weights

SHAPE = Shape()
PLAN = decoder(SHAPE)
WEIGHTS = random_weights(PLAN, SHAPE, "q8_0")
TOKENS = random_tokens(np.random.default_rng(0), 100, SHAPE.vocab)


def run(num_threads):
    """Logits of a prefill and thirty decodes, and the runner."""
    runner = Runner.load(NativeBackend(num_threads), PLAN, WEIGHTS)
    steps = [runner.step([(0, TOKENS)])[0]]
    steps += [runner.step([(0, [token])])[0] for token in TOKENS[:30]]
    return np.concatenate(steps), runner


def num_tasks():
    return len(os.listdir("/proc/self/task"))


def test_more_threads_than_cores_give_the_same_bits():
    want, _ = run(1)
    for num_threads in (2, 5, 16):
        np.testing.assert_array_equal(run(num_threads)[0], want)


def test_idle_pool_uses_no_cpu():
    _, runner = run(4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.02
    runner.backend.close()


def test_closing_ends_the_threads():
    before = num_tasks()
    _, runner = run(6)
    assert num_tasks() == before + 5
    runner.backend.close()
    deadline = time.monotonic() + 5
    while num_tasks() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # a joined thread may stay listed for a moment
    assert num_tasks() == before


def test_two_engines_run_side_by_side():
    want, _ = run(1)
    with ThreadPoolExecutor(2) as pool:
        for got, _ in pool.map(run, (2, 3)):
            np.testing.assert_array_equal(got, want)


SPIN = "import os\nos.sched_setaffinity(0, {%d})\nprint(flush=True)\nwhile True: pass"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_beside_a_busy_neighbour_two_threads_are_no_slower_than_one():
    """Threads that spin for each other take many times as long. Half as much again is noise."""
    big = Shape(layers=2, hidden=512, inter=2048, vocab=4096)
    plan = decoder(big)
    weights = random_weights(plan, big, "q8_0")
    one, two = (Runner.load(NativeBackend(num_threads), plan, weights) for num_threads in (1, 2))
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", SPIN % core], stdout=subprocess.PIPE) as spin:
        try:
            spin.stdout.readline()
            ratios = []
            while len(ratios) < 12 and min(ratios, default=2) > 1.5:
                alone_s = decoding_s(one)
                ratios.append(decoding_s(two) / alone_s)
        finally:
            spin.kill()
    assert min(ratios) <= 1.5, ratios


def decoding_s(runner):
    begin = time.perf_counter()
    for token in TOKENS:
        runner.step([(0, [token])])
    runner.lengths.clear()
    return time.perf_counter() - begin


def test_the_gil_is_free_during_a_step():
    big = Shape(layers=2, hidden=512, inter=2048, vocab=4096)
    plan = decoder(big)
    runner = Runner.load(NativeBackend(1), plan, random_weights(plan, big))
    ticks, done = 0, threading.Event()

    def step():
        runner.step([(0, random_tokens(np.random.default_rng(1), 300, big.vocab))])
        done.set()

    worker = threading.Thread(target=step)
    worker.start()
    while not done.wait(0.0005):
        ticks += 1
    worker.join()
    assert ticks > 3


@pytest.mark.parametrize("num_threads", [0, -1, 5000])
def test_absurd_thread_counts_are_refused(num_threads):
    with pytest.raises(ParameterError, match=f"num_threads is {num_threads}"):
        NativeBackend(num_threads)
