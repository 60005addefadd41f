"""LiveView: the last minutes by the second, from steps and calls that are made up."""

from types import SimpleNamespace

import pytest

from paceline.engine.stats import EngineStats
from paceline.measure.ledger import Part
from paceline.measure.recorder import StepRecorder
from paceline.measure.steps import Chunk, StepRecord
from paceline.measure.work import StepWork
from paceline.server import live as live_module
from paceline.server.live import HISTORY_S, NUM_LISTED, LiveView
from tests.unit.test_calls import clock, make_call  # noqa: F401

MS = 1_000_000
WORK = StepWork(macs_per_token=100, macs_per_logit_row=10, macs_per_key=1, weight_bytes=1000,
                kv_bytes_per_token=2, layers_of_window=((0, 1),))  # fmt: skip


@pytest.fixture
def now(monkeypatch):
    """The view's clock in seconds, moved by hand."""
    now = SimpleNamespace(s=1000.5)
    fake = SimpleNamespace(monotonic_ns=lambda: int(now.s * 1e9))
    monkeypatch.setattr(live_module, "time", fake)
    return now


def stats(**changes):
    fields = {"num_running": 1, "num_waiting": 2, "num_free_blocks": 6, "num_live_blocks": 2,
              "num_cached_blocks": 0, "num_blocks": 8, "num_preemptions": 0, "num_steps": 0,
              "num_generated_tokens": 0}  # fmt: skip
    return EngineStats(**(fields | changes))


def step(end_s, *chunks, work_ms=4.0, **fields):
    end_ns = round(end_s * 1e9)
    built_ns = end_ns - int(work_ms * MS) - MS
    return StepRecord(
        end_ns=end_ns, start_ns=built_ns, built_ns=built_ns, work_ns=end_ns - MS,
        sampled_ns=end_ns, num_sampled=sum(chunk.is_last for chunk in chunks), chunks=chunks,
        **fields,
    )  # fmt: skip


def prompt(request_id, num_tokens, *, is_last=True):
    return Chunk(request_id, 0, num_tokens, 0, Part.PREFILL, is_last)


def token(request_id):
    return Chunk(request_id, 0, 1, 0, Part.DECODE, True)


def look(view, calls=(), *, after_s=0, by="wall", **changes):
    return view.look(stats(**changes), calls, after_s=after_s, by=by)


def at(seen, second, name):
    return seen["seconds"][name][seen["seconds"]["at_s"].index(second)]


def test_a_second_has_the_tokens_bytes_and_macs_of_its_steps(now):
    recorder = StepRecorder(WORK)
    recorder.log.add(step(999.2, prompt("a", 50, is_last=False), num_keys=7, kv_bytes=100))
    recorder.log.add(step(999.6, prompt("a", 6), token("b"), num_keys=3, kv_bytes=300))
    seen = look(LiveView(recorder))
    assert (at(seen, 999, "prefill"), at(seen, 999, "decode")) == (56, 1)
    assert (at(seen, 999, "steps"), at(seen, 999, "new_tokens")) == (2, 2)
    assert at(seen, 999, "read_bytes_per_s") == pytest.approx((2 * 1000 + 400) / 0.008)
    assert at(seen, 999, "macs_per_s") == pytest.approx((57 * 100 + 2 * 10 + 10) / 0.008)
    assert (at(seen, 998, "steps"), at(seen, 998, "read_bytes_per_s")) == (0, None)


def test_gaps_are_between_the_tokens_of_a_sequence_to_one_percent(now):
    recorder = StepRecorder(WORK)
    ends = [999.0]
    for gap_ms in [10] * 98 + [50, 200]:
        ends.append(ends[-1] + gap_ms / 1e3)
    for end_s in ends:
        recorder.log.add(step(end_s, token("a"), prompt("b", 5, is_last=False)))
    now.s = 1000.9
    seen = look(LiveView(recorder))
    assert seen["itl_ms"]["count"] == 100  # the first token and the prompt have none
    assert seen["itl_ms"]["p50"] == pytest.approx(10, rel=0.011)
    assert seen["itl_ms"]["p99"] == pytest.approx(50, rel=0.011)
    assert at(seen, 999, "itl_p50_ms") == pytest.approx(10, rel=0.011)


def test_tokens_that_drafts_foresaw_came_without_a_wait(now):
    recorder = StepRecorder(WORK)
    chunk = Chunk("a", 0, 4, 0, Part.DECODE, True, 3)
    recorder.log.add(step(999.1, token("a")))
    recorder.log.add(step(999.2, chunk, num_confirmed={("a", 0): 2}))
    seen = look(LiveView(recorder))
    assert at(seen, 999, "new_tokens") == 4
    assert (at(seen, 999, "decode"), at(seen, 999, "verify")) == (2, 3)
    assert seen["itl_ms"]["count"] == 3
    assert seen["itl_ms"]["p50"] < 0.002
    assert seen["itl_ms"]["p99"] == pytest.approx(100, rel=0.011)


def test_a_gap_over_a_long_stall_is_seen_in_the_second_of_its_end(now):
    recorder = StepRecorder(WORK)
    view = LiveView(recorder)
    recorder.log.add(step(990, token("a")))
    look(view)
    recorder.log.add(step(1000.2, token("a")))
    assert at(look(view), 1000, "itl_p99_ms") == pytest.approx(10_200, rel=0.011)


def test_each_step_counts_once_however_often_somebody_looks(now):
    recorder = StepRecorder(WORK)
    view = LiveView(recorder)
    for end_s in (999.1, 1000.2):
        recorder.log.add(step(end_s, token("a")))
        for _ in range(3):
            seen = look(view)
    assert (at(seen, 999, "decode"), at(seen, 1000, "decode")) == (1, 1)
    assert seen["itl_ms"]["count"] == 1


def test_only_the_seconds_after_the_one_that_is_known_are_told(now):
    view = LiveView(StepRecorder(WORK))
    assert look(view)["seconds"]["at_s"] == list(range(1000 - HISTORY_S + 1, 1001))
    now.s += 2
    assert look(view, after_s=1000)["seconds"]["at_s"] == [1001, 1002]
    assert look(view, after_s=5000)["seconds"]["at_s"] == []


def test_the_engines_state_is_known_for_the_seconds_in_which_somebody_looked(now):
    view = LiveView(StepRecorder(WORK))
    look(view, num_running=3)
    now.s += 2
    seen = look(view)
    assert [at(seen, second, "running") for second in (1000, 1001, 1002)] == [3, None, 1]
    assert (at(seen, 1000, "waiting"), at(seen, 1000, "kv_use")) == (2, 0.25)


def test_ttft_is_of_recent_answers_that_ended_well(now, clock):  # noqa: F811
    clock.ms = 400_000
    old = make_call(clock)
    clock.ms = 999_000
    calls = [old, make_call(clock), make_call(clock, status=500), make_call(clock, stream=True)]
    seen = look(LiveView(None), calls)
    assert seen["ttft_ms"] == {"count": 2, "p50": 15, "p95": 17, "p99": 17}
    assert at(seen, 999, "ttft_ms") == 15


def test_the_slowest_are_ranked_as_asked_without_those_that_were_refused(now, clock):  # noqa: F811
    clock.ms = 999_000
    calls = [make_call(clock), make_call(clock, stream=True), make_call(clock, tpot_s=0.5)]
    calls.append(make_call(clock, status=400))
    view = LiveView(None)
    by_ttft = look(view, calls, by="ttft")["slowest"]
    assert [call["id"] for call in by_ttft] == [calls[1].id, calls[0].id, calls[2].id]
    assert look(view, calls, by="tpot")["slowest"][0]["id"] == calls[2].id
    many = [make_call(clock) for _ in range(20)]
    assert len(look(LiveView(None), many)["slowest"]) == NUM_LISTED


def test_without_a_ledger_there_are_no_steps(now):
    seen = look(LiveView(None))
    assert "prefill" not in seen["seconds"]
    assert seen["itl_ms"]["count"] == 0


def test_memory_is_bounded_by_the_history(now):
    recorder = StepRecorder(WORK)
    view = LiveView(recorder)
    for _ in range(HISTORY_S + 100):
        now.s += 1
        chunks = [token(f"{now.s}-{number}") for number in range(12)]
        recorder.log.add(step(now.s, *chunks))
        look(view, after_s=int(now.s) - 1)
    assert len(view._seconds) == HISTORY_S
    assert len(view._last_ns) == live_module._MAX_SEQUENCES
