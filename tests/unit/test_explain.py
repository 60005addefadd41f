"""Explaining planted ledgers: causes, percentiles, the cost of steps, levers, sources."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import typer
from msgspec.structs import replace

from paceline.catalog.shapes import named_shape
from paceline.cli.explain import find as find_source
from paceline.cli.explain import installed_model, looks_like_file, read_options
from paceline.cli.explain_text import print_explanation
from paceline.cli.serve import serve
from paceline.engine.memory import kv_token_bytes
from paceline.errors import PacelineError, ParameterError
from paceline.explain import costs
from paceline.explain.causes import WORDS, cause_of, find, gather, tpot_parts
from paceline.explain.costs import fit_steps, scaled_costs, table_seconds
from paceline.explain.facts import CallFacts, Facts, ServerFacts, StepFacts
from paceline.explain.levers import LEVERS, SMALLER_KV, options_of
from paceline.explain.predictions import curves_of, predicted
from paceline.explain.replay import plan_of_file, plan_of_run
from paceline.explain.report import advise, explain
from paceline.explain.situation import Situation, situation_of
from paceline.explain.sources import from_file, read_trace
from paceline.explain.verify import pool
from paceline.measure.ceilings import MachineCeilings
from paceline.measure.floors import chunk_work, floor_s, prefill_work
from paceline.measure.ledger import Part
from paceline.measure.machine import Machine
from paceline.measure.repeats import PromptRepeats
from paceline.measure.step_table import Curve, StepTable
from tests.unit.test_floors import CEILINGS, COSTS

SERVER = ServerFacts(
    model="m", isa="avx2", num_threads=2, machine_threads=2, max_num_seqs=8,
    max_batched_tokens=512, max_model_len=4096, block_size=16, num_blocks=1000, kv_dtype="f16",
    kv_token_bytes=1024, weight_bytes=4_500_000, num_parameters=8_000_000, policy="fcfs",
)  # fmt: skip
MACHINE = Machine(cpu="c", num_cores=2, quota=None, isa="avx2", version="0")
# 10 ms a step and 1 ms a token, exactly.
STEPS = tuple(
    StepFacts(num_tokens=n, num_decode=1, num_seqs=1, forward_s=s, duration_s=s)
    for n, s in ((n, 0.010 + n * 0.001) for n in (1, 1, 4, 64, 64, 512))
)


def call(
    first: dict[str, float],
    after: dict[str, float],
    *,
    num_prompt: int = 100,
    num_tokens: int = 11,
    others_prefill_ms: float = 0.0,
    began_at: float = 0.0,
    repeated: int = 0,
) -> CallFacts:
    """A call whose parts are those of its TTFT and those of what came after."""
    parts = {name: first.get(name, 0) + after.get(name, 0) for name in {*first, *after}}
    return CallFacts(
        wall_ms=sum(parts.values()),
        ttft_ms=sum(first.values()),
        parts=parts,
        first_parts=first,
        others_prefill_ms=others_prefill_ms,
        prompt_tokens=num_prompt,
        completion_tokens=num_tokens,
        repeated_tokens=repeated,
        began_at=began_at,
    )


def situation(*calls: CallFacts, steps=STEPS, **server) -> Situation:
    facts = Facts(
        source="x", calls=calls, steps=steps, server=ServerFacts(**{**as_dict(SERVER), **server})
    )
    return situation_of(facts, None)


def as_dict(server: ServerFacts) -> dict:
    return {name: getattr(server, name) for name in server.__struct_fields__}


def advice(situation: Situation, lever: str):
    return next((a for a in advise(situation) if a.lever == lever), None)


def after(found, metric: str, percentile: int) -> float:
    return next(
        e.after_ms for e in found.expected if (e.metric, e.percentile) == (metric, percentile)
    )  # fmt: skip


# ---- causes ----


def test_every_part_of_the_ledger_has_one_cause_and_none_is_lost():
    parts = {part.label: float(part + 1) for part in Part} | {"residual": 0.5}
    causes = gather(parts)
    assert sum(causes.values()) == sum(parts.values())
    assert set(causes) <= set(WORDS)


def test_a_token_after_the_first_has_what_the_first_had_not():
    one = call({"prefill": 50, "queue_budget": 20}, {"decode": 100, "sample": 10}, num_tokens=11)
    assert gather(tpot_parts(one)) == {"prefill": 0, "queue": 0, "decode": 10, "overhead": 1,
                                       "others_decode": 0, "others_prefill": 0}  # fmt: skip
    assert one.tpot_ms == pytest.approx(11)


def test_a_token_of_several_choices_is_one_of_each():
    one = replace(call({"prefill": 50}, {"decode": 100}, num_tokens=44), num_choices=4)
    assert one.tpot_ms == pytest.approx(10)
    assert sum(gather(tpot_parts(one)).values()) == pytest.approx(10)


def test_what_others_cost_a_stream_is_divided_by_its_blame():
    one = call({"prefill_others": 30}, {"decode_others": 100}, others_prefill_ms=90)
    causes = gather(tpot_parts(one))
    # 30 of the blame were in the TTFT: 60 of the 100 are prompts, 40 are tokens.
    assert (causes["others_prefill"], causes["others_decode"]) == (6.0, 4.0)


def test_a_percentile_is_its_ranks_value_and_its_causes_sum_to_it():
    calls = [call({"prefill": i, "queue_budget": 2 * i}, {}) for i in range(1, 101)]
    for percentile, value in ((50, 3 * 51), (95, 3 * 95), (99, 3 * 99)):
        found = find(calls, "ttft", percentile)
        assert found.value_ms == value
        assert sum(found.causes.values()) == pytest.approx(value)
        assert found.main == "queue"
        assert found.share("queue") == pytest.approx(2 / 3)


def test_the_tail_can_have_another_cause_than_the_median():
    calls = [call({"prefill": 10}, {}) for _ in range(95)]
    calls += [call({"prefill": 10, "queue_kv": 500}, {}) for _ in range(5)]
    assert find(calls, "ttft", 50).main == "prefill"
    assert find(calls, "ttft", 99).main == "kv_memory"


@pytest.mark.parametrize(("waited_for", "cause"), [("queue_kv", "kv_memory"),
                                                   ("queue_budget", "queue")])  # fmt: skip
def test_what_is_computed_again_is_the_price_of_what_was_waited_for(waited_for, cause):
    lost = {waited_for: 10, "recompute": 500}
    found = situation(call({"prefill": 5, **lost}, {"decode": 5, **lost}))
    assert {finding.main for finding in found.findings} == {cause}
    assert all(sum(f.causes.values()) == pytest.approx(f.value_ms) for f in found.findings)


@pytest.mark.parametrize("part", [p.label for p in Part if cause_of(p.label) == "overhead"])
def test_overhead_is_told_by_the_parts_that_it_is_made_of(part, capsys):
    found = explain(situation(call({"prefill": 10, part: 70}, {"decode": 10, "sample": 5})))
    bound = found.bounds[0]
    assert (bound.bound, bound.overhead) == ("overhead", {part: 70})
    print_explanation(found)
    assert f"TTFT p50 is 80.0 ms: 88% of it is {WORDS['overhead']} ({part} 88%)" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("cached", "chunk", "bound"),
    [(0, 512, "compute"), (495, 512, "bandwidth"), (0, 4, "bandwidth")],
)
def test_a_prompt_whose_chunks_are_small_is_bound_by_bandwidth(cached, chunk, bound):
    """10 ms a step and 1 ms a token: chunks below 10 tokens take longer by being steps."""
    ran_s = 0.010 + chunk * 0.001
    prefill = replace(STEPS[0], num_tokens=chunk, num_decode=0, forward_s=ran_s, duration_s=ran_s)
    steps = (*STEPS, *[prefill] * 20_000)
    one = replace(call({"prefill": 500}, {}, num_prompt=500), cached_tokens=cached)
    assert explain(situation(one, steps=steps)).bounds[0].bound == bound


@pytest.mark.parametrize("part", ["load", "turn"])
def test_who_waits_for_another_model_is_bound_by_it_and_by_no_part_of_the_machine(part):
    found = explain(situation(call({"prefill": 10, part: 500}, {"decode": 10, part: 500})))
    assert {(bound.cause, bound.bound) for bound in found.bounds} == {("models", "other models")}


def test_a_floor_counts_only_what_the_cache_did_not_have():
    machine = costs.Machine(
        ceilings=MachineCeilings(
            machine=MACHINE, measured_at=0.0, busy_cores=0.0,
            by_threads=(replace(CEILINGS, num_threads=2),),
        ),
        costs=COSTS, num_threads=2, table=None,
    )  # fmt: skip
    whole, cached = call({"prefill": 1}, {}), call({"prefill": 1}, {})
    cached = replace(cached, cached_tokens=99)
    full, rest = (machine.floor_ms(find([c], "ttft", 50)) for c in (whole, cached))
    assert full == pytest.approx(floor_s(prefill_work(COSTS, 100), CEILINGS) * 1e3)
    last = chunk_work(COSTS, num_seqs=1, num_tokens=1, context=99, num_logit_rows=1)
    assert rest == pytest.approx(floor_s(last, CEILINGS) * 1e3)


def test_answers_of_one_token_have_no_tpot():
    assert find([call({"prefill": 1}, {}, num_tokens=1)], "tpot", 50) is None


# ---- costs ----


def test_the_line_through_steps_is_found():
    line = fit_steps(STEPS)
    assert line.base_s == pytest.approx(0.010)
    assert line.token_s == pytest.approx(0.001)
    assert line.seconds(2, 100) == pytest.approx(0.010 + 0.102)


def test_rows_that_decode_cost_their_own_where_there_were_several():
    steps = [
        StepFacts(num_tokens=d + p, num_decode=d, num_seqs=d, forward_s=0.0,
                  duration_s=0.010 + 0.001 * p + 0.003 * d)
        for d, p in ((1, 0), (8, 0), (3, 0), (0, 64), (1, 200))
    ]  # fmt: skip
    found = fit_steps(steps)
    assert found.seconds(4, 0) == pytest.approx(0.022)
    assert found.seconds(0, 100) == pytest.approx(0.110)


def test_guesses_are_rows_of_the_sequences_that_made_them():
    steps = [*STEPS, StepFacts(num_tokens=12, num_decode=12, num_seqs=4, num_guesses=8,
                               forward_s=0.0, duration_s=0.022)]  # fmt: skip
    found = fit_steps(steps)
    # 10 of the 18 rows were no guesses.
    assert found.rows_per_seq == pytest.approx(18 / 10)
    assert found.seconds(5, 0) == pytest.approx(0.019)


def test_a_stall_bends_the_line_little():
    stalled = (*STEPS * 5, StepFacts(num_tokens=1, num_decode=1, num_seqs=1, forward_s=0,
                                     duration_s=5.0))  # fmt: skip
    assert fit_steps(stalled).base_s == pytest.approx(0.010, rel=0.1)


def test_what_is_simulated_takes_as_long_as_what_ran():
    # Every fourth step of one row stalls: the median does not see it, and those that queue do.
    rows = [StepFacts(num_tokens=1, num_decode=1, num_seqs=1, forward_s=0, duration_s=s)
            for s in (0.011, 0.011, 0.011, 0.099)]  # fmt: skip
    steps = [*STEPS, *rows * 3]
    found = situation(call({"prefill": 110}, {"decode": 110}), steps=tuple(steps)).steps
    total = sum(found.seconds(step.num_decode, step.num_prefill) for step in steps)
    assert total == pytest.approx(sum(step.duration_s for step in steps))
    assert fit_steps(steps).seconds(1, 0) == pytest.approx(0.011, rel=0.1)


def test_steps_of_one_size_tell_no_line():
    assert fit_steps(STEPS[:2]) is None
    assert fit_steps(()) is None


def test_costs_are_never_negative():
    falling = [
        StepFacts(num_tokens=n, num_decode=0, num_seqs=1, forward_s=0, duration_s=s)
        for n, s in ((1, 0.02), (64, 0.01))
    ]
    found = fit_steps(falling)
    assert min(found.base_s, found.token_s, found.row_s) >= 0


# ---- levers ----


def test_every_change_is_an_option_of_serve():
    alone = typer.Typer()
    alone.command()(serve)
    params = typer.main.get_command(alone).params
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    calls = [
        call({"queue_kv": 100, "queue_budget": 100, "prefill": 100, "prefill_others": 200},
             {"decode": 100, "decode_others": 200}, others_prefill_ms=300)
    ]  # fmt: skip
    full = tuple(
        StepFacts(num_tokens=n, num_decode=8, num_seqs=8, forward_s=0, duration_s=0.01 + n / 1e3)
        for n in (8, 100)
    )
    options = dict(
        prefix_cache=False, kv_dtype="f32", block_size=64, num_threads=1, max_batched_tokens=300
    )
    proposed = situation(*calls, steps=full, **options)
    changes = [lever(proposed) for lever in LEVERS.values()]
    flags = {flag for proposal in changes if proposal for flag in proposal.change}
    assert flags == {
        "--prefix-cache", "--threads", "--kv-memory", "--max-batched-tokens", "--policy",
        "--max-num-seqs", "--block-size", "--kv-dtype",
    }  # fmt: skip
    assert flags <= known
    assert set(options_of(SERVER)) <= known


@pytest.mark.parametrize(
    ("before", "smaller", "gone"),
    [("f32", "f16", 0.5), ("f16", "int8", 0.48), ("bf16", "int8", 0.48), ("int8", "k8v4", 0.21),
     ("fp8", "k8v4", 0.21), ("k8v4", "int4", 0.27)],
)  # fmt: skip
def test_a_smaller_cache_is_advised_where_reading_it_takes_the_time(before, smaller, gone):
    # 110 tokens of 40,909 bytes are as many bytes as the weights: half of what is read.
    calls = [call({"prefill": 10}, {"decode": 100}, num_prompt=105)] * 4
    found = advice(situation(*calls, kv_dtype=before, kv_token_bytes=40_909), "kv-dtype")
    assert found.change == {"--kv-dtype": smaller}
    assert after(found, "tpot", 50) == pytest.approx(10 * (1 - gone / 2), rel=1e-3)
    assert advice(situation(*calls, kv_dtype=before, kv_token_bytes=100), "kv-dtype") is None
    assert advice(situation(*calls, kv_dtype="int4", kv_token_bytes=40_909), "kv-dtype") is None


@pytest.mark.parametrize("shape", ["smollm2-135m", "llama-3.1-8b"])  # heads of 64 and of 128
@pytest.mark.parametrize(("before", "smaller"), [(b, s) for b, (s, _) in SMALLER_KV.items()])
def test_a_smaller_cache_is_as_small_as_the_engines(shape, before, smaller):
    old, new = (kv_token_bytes(named_shape(shape), dtype) for dtype in (before, smaller))
    assert SMALLER_KV[before][1] == pytest.approx(new / old, abs=0.02)


def test_the_price_of_a_smaller_cache_is_that_of_its_page_and_names_the_model():
    page = (Path(__file__).parents[2] / "docs" / "levers" / "kv-quantisation.md").read_text()
    calls = [call({"prefill": 10}, {"decode": 100}, num_prompt=105)] * 4
    for before, (smaller, _) in SMALLER_KV.items():
        price = advice(situation(*calls, kv_dtype=before, kv_token_bytes=40_909), "kv-dtype").price
        found = re.search(rf"^\| SmolLM2-135M Q4_1 \| {smaller} \| (\S+) \|", page, re.MULTILINE)
        assert f"with SmolLM2-135M the mean KL to an f32 cache is {found[1]} nats" in price or (
            smaller == "f16"
        )
        assert f"--kv {before},{smaller}" in price or smaller == "f16"


@pytest.mark.parametrize(("before", "smaller"), [("int8", "k8v4"), ("k8v4", "int4")])
def test_calls_that_wait_for_kv_memory_share_it_in_a_smaller_format(before, smaller):
    tokens = dict(num_prompt=33, num_tokens=15)
    first = call({"prefill": 43}, {"decode": 154}, **tokens)
    second = call({"queue_kv": 197, "prefill": 43}, {"decode": 154}, **tokens)
    # A call takes 3 blocks: of 5 there is room for one, of 6 for both.
    found = advice(situation(first, second, num_blocks=5, kv_dtype=before), "kv-dtype")
    assert found.change == {"--kv-dtype": smaller}
    assert after(found, "ttft", 99) < 240 - 100
    assert advice(situation(first, second, num_blocks=3, kv_dtype=before), "kv-dtype") is None


def test_what_changes_answers_is_told_after_what_does_not():
    calls = [call({"prefill": 10}, {"decode": 100}, num_prompt=105)] * 4
    shared = dict(num_threads=1, kv_token_bytes=400_000)
    for before, order in (("f16", ["threads", "kv-dtype"]), ("int4", ["threads"])):
        told = [a.lever for a in advise(situation(*calls, kv_dtype=before, **shared))]
        assert told == order


def test_the_prefix_cache_spares_what_repeats():
    calls = [call({"prefill": 110}, {}, repeated=r, began_at=10.0 * i)
             for i, r in enumerate((0, 96, 96, 96))]  # fmt: skip
    found = advice(situation(*calls, prefix_cache=False), "prefix-cache")
    # 4 of 100 tokens are computed; the first call has nothing to find.
    assert after(found, "ttft", 50) == pytest.approx(14)
    assert all(e.percentile == 50 for e in found.expected)
    assert advice(situation(*calls), "prefix-cache") is None  # it is on
    cached = [replace(c, cached_tokens=c.repeated_tokens) for c in calls]
    assert situation(*calls).repeated_share == pytest.approx(0.72)
    assert situation(*cached).repeated_share == 0


def test_drafts_are_left_out_where_wrong_guesses_cost_more_than_little():
    one = replace(call({"prefill": 10}, {"decode": 80, "verify": 20}), rejected_ms=15.0)
    found = advice(situation(one, speculate="ngram"), "no drafts")
    assert found.change == {"--speculate": "off"}
    assert after(found, "tpot", 50) == pytest.approx(10 * 0.85)
    assert advice(situation(one), "no drafts") is None


def test_a_larger_budget_saves_the_steps_that_it_spares():
    one = call({"prefill": 792, "engine": 40}, {"decode": 110}, num_prompt=512)
    found = advice(situation(one, max_batched_tokens=16), "max-batched-tokens")
    # 32 steps and 512 tokens cost 832 ms, one step 522 ms.
    assert after(found, "ttft", 50) == pytest.approx(522)
    assert advice(situation(one, max_batched_tokens=512), "max-batched-tokens") is None


def test_kv_memory_lets_those_that_waited_share_the_steps():
    first = call({"prefill": 110}, {"decode": 110})
    second = call({"queue_kv": 220, "prefill": 110}, {"decode": 110})
    found = advice(situation(first, second, num_blocks=8), "kv-memory")
    # Both prompts are computed in one step of 210 ms, and two rows take 12 ms.
    assert after(found, "ttft", 99) == pytest.approx(210)
    assert after(found, "ttft", 50) == pytest.approx(210)
    assert after(found, "tpot", 50) == pytest.approx(12)
    # The longest of the calls for each seat: 111 tokens are 7 blocks.
    assert found.change == {"--kv-memory": "1M"}


def test_beginnings_that_were_given_up_ask_for_memory_that_keeps_them():
    """Three system prompts in turn, in a pool that holds two of them: each is computed again."""
    alone = call({"prefill": 310}, {"decode": 40}, num_prompt=320, num_tokens=5)
    calls = [
        replace(alone, began_at=i * 0.5, repeated_tokens=288 if i >= 3 else 0) for i in range(12)
    ]
    found = advice(situation(*calls, num_blocks=45), "kv-memory for prefixes")
    # 3 x 21 blocks of the first, and 3 for each of the others that none of them has.
    assert found.change == {"--kv-memory": f"{-(-(3 * 21 + 9 * 3) * 16 * 1024 // 2**20)}M"}
    assert "holds 720 tokens in all" in found.why
    assert after(found, "ttft", 50) < 0.3 * 310
    assert advice(situation(*calls, num_blocks=1000), "kv-memory for prefixes") is None
    without = situation(*calls, num_blocks=45, prefix_cache=False)
    assert advice(without, "kv-memory for prefixes") is None


def test_a_client_that_reads_slowly_is_no_matter_of_seats():
    calls = queued(num_tokens=31)
    slow = [replace(c, wall_ms=c.wall_ms + 600, parts={**c.parts, "send": 600.0}) for c in calls]
    prompt, late = (
        after(advice(situation(*c, steps=ONE_SEQ, max_num_seqs=1), "max-num-seqs"), "tpot", 50)
        for c in (calls, slow)
    )
    assert late == pytest.approx(prompt + 20)  # 600 ms over 30 gaps, as before


def beside_prompts(*lengths: int) -> Situation:
    """A stream of 101 tokens, and prompts that come together and fill its steps at 0.1 s."""
    total = sum(lengths)
    num_steps = -(-total // 511)
    stream = call({"prefill": 18}, {"decode": 11 * 100, "decode_others": total}, num_prompt=8,
                  num_tokens=101, others_prefill_ms=total)  # fmt: skip
    prompts = [call({"prefill": total + 11.0 * num_steps}, {}, num_prompt=n, num_tokens=1,
                    began_at=0.1) for n in lengths]  # fmt: skip
    return situation(stream, *prompts)


def test_a_bound_on_steps_is_above_what_the_streams_need():
    one = beside_prompts(10_000)
    found = advice(one, "policy")
    assert found.change == {"--policy": "slo:step_ms=27"}  # 17 tokens take 27 ms
    assert after(found, "tpot", 99) == pytest.approx(27, rel=0.1)
    bound = replace(one.facts, server=replace(SERVER, policy="slo:step_ms=50"))
    assert advice(situation_of(bound, None), "policy") is None


# What steps of one sequence tell.
ONE_SEQ = tuple(replace(step, num_seqs=1) for step in STEPS)


def queued(*, num_tokens: int) -> list[CallFacts]:
    """Four calls at once, on a server with one seat: each waits for those before it."""
    gaps_ms = 11.0 * (num_tokens - 1)
    return [
        call({"queue_budget": i * (110 + gaps_ms), "prefill": 110}, {"decode": gaps_ms},
             num_tokens=num_tokens)
        for i in range(4)
    ]  # fmt: skip


def test_a_bound_that_starves_prompts_is_advised_to_go():
    steps = tuple(replace(s, duration_s=0.010 + s.num_tokens * 1e-4) for s in STEPS)
    stream = call({"prefill": 11}, {"decode": 1100}, num_prompt=1, num_tokens=101)
    starved = call({"prefill": 375}, {}, num_prompt=500, num_tokens=1)
    calls = (stream, *(replace(starved, began_at=0.1 * i) for i in (1, 2, 3)))
    bound = situation(*calls, steps=steps, policy="slo:step_ms=1", prefix_cache=False)
    found = advice(bound, "policy without a bound")
    assert found.change == {"--policy": "fcfs"}
    assert after(found, "ttft", 50) < 0.5 * 375
    assert advice(situation(*calls, steps=steps), "policy without a bound") is None


def test_seats_help_those_that_wait_for_them_and_slow_the_others():
    seated = situation(*queued(num_tokens=31), steps=ONE_SEQ, max_num_seqs=1)
    found = advice(seated, "max-num-seqs")
    assert found.change == {"--max-num-seqs": "4"}
    # All four prompts are computed in one step, and four rows in each of those after it.
    assert after(found, "ttft", 50) == pytest.approx(410)
    assert after(found, "ttft", 99) == pytest.approx(410)
    assert after(found, "tpot", 50) == pytest.approx(14)
    empty = situation(*queued(num_tokens=31), max_num_seqs=8)  # steps of one sequence
    assert advice(empty, "max-num-seqs") is None


def test_seats_are_told_as_a_trade_where_rows_that_share_a_step_spare_nothing():
    # 11 ms a token, however many share a step: as they would on a machine bound by compute.
    steps = tuple(replace(step, duration_s=step.num_tokens * 0.011) for step in ONE_SEQ)
    calls = [replace(one, prompt_tokens=10) for one in queued(num_tokens=31)]
    seated = situation(*calls, steps=steps, max_num_seqs=1)
    found = advice(seated, "max-num-seqs")
    assert found.whole_gain < 0
    assert after(found, "ttft", 99) == pytest.approx(440)  # all four prompts in one step
    assert after(found, "tpot", 50) == pytest.approx(44)
    # Where streams already slow each other down more seats would only add to it.
    crowded = [replace(one, parts={**one.parts, "decode": 100.0, "decode_others": 230.0})
               for one in calls]  # fmt: skip
    both = tuple(replace(step, num_seqs=2) for step in steps)
    assert advice(situation(*crowded, steps=both, max_num_seqs=2), "max-num-seqs") is None


def test_fewer_seats_make_those_wait_that_have_none():
    # Eight streams of 101 tokens: a step of theirs takes 18 ms.
    streams = [
        call({"prefill": 20, "prefill_others": 70}, {"decode": 1100, "decode_others": 700},
             num_prompt=10, num_tokens=101)
        for _ in range(8)
    ]  # fmt: skip
    full = tuple(replace(step, num_seqs=8) for step in STEPS)
    shared = situation(*streams, steps=full)
    proposal = LEVERS["fewer max-num-seqs"](shared)
    assert proposal.change == {"--max-num-seqs": "4"}
    predict = proposal.effect(shared)
    ttft, tpot = (find(shared.facts.calls, metric, 99) for metric in ("ttft", "tpot"))
    assert predict(tpot) == pytest.approx(14)
    # Four wait for the prompts and all tokens of the four before them, 14 ms each.
    assert predict(ttft) == pytest.approx(50 + 100 * 14 + 50)
    assert advice(shared, "fewer max-num-seqs") is None  # calls get longer in all


def test_the_percentiles_of_a_prediction_are_those_of_one_distribution():
    calls = [call({"prefill": float(i)}, {}) for i in range(1, 101)]
    turned = predicted(lambda finding: 101 - finding.value_ms, curves_of(calls))
    # Who was slowest is fastest now: the tail is still the tail.
    assert (turned.at("ttft", 0), turned.at("ttft", 100)) == (1, 100)


def test_a_change_that_makes_calls_longer_in_all_is_no_advice():
    long, short = (situation(*queued(num_tokens=n), steps=ONE_SEQ, max_num_seqs=1) for n in (31, 2))
    assert advice(long, "max-num-seqs").whole_gain > 0
    # One after the other has 1 to 4 prompts to wait for, together all wait for 4.
    predict = LEVERS["max-num-seqs"](short).effect(short)
    assert any(predict(f) < 0.9 * f.value_ms for f in short.findings)
    assert advice(short, "max-num-seqs") is None


def test_a_run_that_the_model_replays_badly_is_said_to_be_predicted_roughly():
    near = situation(call({"prefill": 110}, {"decode": 110}))
    far = situation(call({"prefill": 110, "queue_budget": 5000}, {"decode": 110}))
    assert explain(near).bounds[0].model_ms == pytest.approx(110)
    assert not any("rough" in note for note in explain(near).notes)
    assert any("TTFT p50 of this run is 110 ms by the model" in n for n in explain(far).notes)


def test_who_is_bound_by_the_prompts_of_others_is_advised_what_those_would_pay(capsys):
    one = beside_prompts(500, 500, 500, 500)
    found = advice(one, "policy")
    assert found.whole_gain < 0
    assert after(found, "tpot", 50) < 0.95 * find(one.facts.calls, "tpot", 50).value_ms
    print_explanation(explain(one))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "--policy" in x]
    assert "the mean call gets" in line


def test_what_a_change_makes_slower_is_said(capsys):
    seated = situation(*queued(num_tokens=31), steps=ONE_SEQ, max_num_seqs=1)
    print_explanation(explain(seated))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "--max-num-seqs" in x]
    gains, losses = line.split("; but slower: ")
    assert ("TTFT" in gains, "TPOT" in gains) == (True, False)
    assert ("TTFT" in losses, "TPOT p95" in losses) == (False, True)
    assert "% more. Price:" in losses


def test_threads_are_advised_only_where_cores_are_idle():
    one = call({"prefill": 100}, {"decode": 100})
    found = advice(situation(one, num_threads=1, machine_threads=4), "threads")
    assert found.change == {"--threads": "4"}
    assert after(found, "ttft", 50) == 25
    assert advice(situation(one), "threads") is None


def test_another_format_comes_after_every_option():
    one = call({"prefill": 100}, {"decode": 1000})
    found = advise(situation(one, weight_bytes=32_000_000, num_threads=1))
    assert [a.lever for a in found] == ["threads", "format"]
    assert found[1].change == {}
    assert after(found[1], "tpot", 50) == pytest.approx(100 * 4.6 / 32)
    assert advice(situation(one), "format") is None  # 4.5 bits already


def test_a_quiet_server_is_advised_nothing():
    found = explain(situation(call({"prefill": 100}, {"decode": 100})))
    assert found.advice == ()
    assert [b.bound for b in found.bounds] == ["compute"] * 3 + ["bandwidth"] * 3


def test_without_a_server_no_lever_pulls(capsys):
    facts = Facts(source="x", calls=(call({"queue_kv": 100}, {"decode": 100}),))
    found = explain(situation_of(facts, None))
    assert found.bounds[0].bound == "KV memory"
    assert found.advice == ()
    assert "--model" in found.notes[0]  # floors
    assert "paceline trace" in found.notes[1]
    print_explanation(found)
    printed = capsys.readouterr().out
    assert "No option was evaluated: what was recorded does not tell the server's op" in printed
    assert "No option of this build" not in printed
    print_explanation(explain(situation(call({"prefill": 100}, {"decode": 100}))))
    assert "No option of this build" in capsys.readouterr().out


def test_no_answered_call_is_an_error_with_the_remedy():
    with pytest.raises(PacelineError, match=r"no answered call .3 others.*--last"):
        situation_of(Facts(source="x", calls=(), num_failed=3), None)


def test_a_server_of_another_version_is_explained_as_far_as_this_one_knows_it():
    seated = situation(*queued(num_tokens=31), steps=ONE_SEQ, max_num_seqs=1, policy="edf:x=1")
    found = explain(seated)
    assert found.bounds[1].bound == "queue"
    assert found.bounds[1].model_ms is None  # what the policy does is not known
    assert found.advice == ()


def test_a_call_that_took_no_time_is_explained(capsys):
    print_explanation(explain(situation(replace(call({}, {}), ttft_ms=0.0, wall_ms=0.0))))
    assert "TTFT p50 is 0.00 ms" in capsys.readouterr().out


# ---- sources and plans ----


def test_a_bench_log_is_read_with_the_parts_that_the_server_told(tmp_path):
    path = tmp_path / "log.jsonl"
    line = {
        "type": "request", "warmup": False, "outcome": "ok", "e2e_ms": 300.0, "ttft_ms": 100.0,
        "input_tokens": 50, "output_tokens": 21, "scheduled_s": 1.0,
        "server_ms": {"prefill": 60.0, "queue_budget": 35.0, "decode": 180.0, "residual": 0.1},
    }  # fmt: skip
    lines = [line, {**line, "warmup": True}, {**line, "outcome": "timeout"}, {"type": "summary"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    facts = from_file(path)
    assert (len(facts.calls), facts.num_failed) == (1, 1)
    assert facts.calls[0].first_parts == {"prefill": 60.0, "queue_budget": 35.0}
    assert find(facts.calls, "tpot", 50).main == "decode"
    line["server_ms"] |= {"wall": 290.0, "ttft": 98.0, "tpot": 9.0, "ttft_parts.prefill": 60.0,
                          "ttft_parts.send": 4.0, "decode_others": 80.0, "blame.prefill": 50.0,
                          "blame.decode": 30.0}  # fmt: skip
    path.write_text(json.dumps(line))
    (read,) = from_file(path).calls
    assert read.first_parts == {"prefill": 60.0, "send": 4.0}
    assert set(read.parts) == {"prefill", "queue_budget", "decode", "decode_others", "residual"}
    causes = gather(tpot_parts(read))
    assert (causes["others_prefill"], causes["others_decode"]) == (2.5, 1.5)
    line["server_ms"] = {"dur": 5.0}
    path.write_text(json.dumps(line))
    with pytest.raises(ParameterError, match="--server-timings"):
        from_file(path)


def test_a_summary_of_nothing_is_refused(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"version": 1, "stages": []}, indent=2))
    with pytest.raises(ParameterError, match="no stage"):
        from_file(path)


def test_a_workload_is_no_recording(tmp_path):
    path = tmp_path / "work.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}\n')
    assert from_file(path) is None
    (planned,) = plan_of_file(path)
    assert (planned.route, planned.at_s) == ("/chat/completions", None)
    assert planned.body["max_tokens"] == 3


def test_a_trace_of_lengths_is_planned_at_its_times(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 5, "input_length": 7, "output_length": 9}\n{"at_s": 6.5}\n')
    first, second = plan_of_file(path)
    assert (len(first.body["prompt"]), first.body["max_tokens"], first.at_s) == (7, 9, 0.0)
    assert second.at_s == 1.5
    path.write_text("nonsense")
    with pytest.raises(ParameterError):
        plan_of_file(path)


def test_a_run_is_planned_with_its_lengths_and_times_and_other_tokens():
    calls = [call({"prefill": 1}, {}, num_prompt=n, began_at=100.0 + n) for n in (5, 3)]
    first, second = plan_of_run(Facts(source="x", calls=tuple(calls)))
    assert [len(p.body["prompt"]) for p in (first, second)] == [3, 5]
    assert [p.at_s for p in (first, second)] == [0.0, 2.0]
    assert first.body["prompt"] != second.body["prompt"][:3]


def test_a_replay_repeats_the_beginnings_that_repeated():
    calls = [
        call({"prefill": 1}, {}, num_prompt=n, began_at=float(i), repeated=r)
        for i, (n, r) in enumerate(((100, 0), (90, 64), (80, 0)))
    ]
    first, second, third = (
        p.body["prompt"] for p in plan_of_run(Facts(source="x", calls=tuple(calls)))
    )
    assert first[:64] == second[:64]
    assert first[64:80] != second[64:80]
    assert third[:32] != first[:32]
    assert [len(p) for p in (first, second, third)] == [100, 90, 80]


def test_rounds_are_pooled():
    one = call({"prefill": 1000}, {}, began_at=70.0)
    facts = Facts(source="x", calls=(one,), steps=STEPS, num_failed=1)
    together = pool([facts, facts])
    assert (len(together.calls), len(together.steps), together.num_failed) == (2, 12, 2)
    # Between two rounds another server ran: that time is nobody's.
    assert [c.began_at for c in together.calls] == [0.0, 1.0]


def test_options_of_serve_have_a_value_or_none():
    assert read_options("--max-num-seqs 2 --no-prefix-cache --threads 1") == {
        "--threads": "1", "--max-num-seqs": "2", "--no-prefix-cache": "",
    }  # fmt: skip
    assert list(read_options("")) == ["--threads"]
    with pytest.raises(ParameterError, match="value of no option"):
        read_options("--max-num-seqs 2 3")
    with pytest.raises(ParameterError, match="needs a number"):
        read_options("--threads --no-prefix-cache")
    with pytest.raises(ParameterError, match=r"--serve is \"'x\".*No closing.*close what"):
        read_options("'x")


def test_a_name_of_a_file_is_not_taken_for_a_hosts(tmp_path):
    for name in ("trce.json", "a.JSONL", "access.log", "./trace", "logs/trace", "/tmp/a:80/b"):
        assert looks_like_file(name), name
    for address in ("localhost", "10.0.0.5", "pod.example.com", "localhost/v1", "box.log:8000",
                    "http://a.json", "localhost:8000/v1", "[::1]:8000"):  # fmt: skip
        assert not looks_like_file(address), address
    os.mkfifo(tmp_path / "pipe.json")
    for source, what in (
        (tmp_path / "trce.json", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "pipe.json", "is no regular file"),
    ):
        with pytest.raises(ParameterError, match=f"file {source} {what}"):
            find_source(
                str(source), last_s=1.0, api_key=None, model=None, serve="-a", concurrency=1,
                say=lambda text: None,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "given", "text"),
    [
        ("--api-key", {"api_key": "k"}, "{}"),
        ("--last", {"last_s": 5.0}, "{}"),
        ("--concurrency", {"concurrency": 3}, '{"traceEvents": []}'),
        ("--serve", {"serve": "--threads 1"}, '{"traceEvents": []}'),
    ],
)
def test_an_option_that_a_file_has_no_use_for_is_refused_by_name(tmp_path, option, given, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    none = {"last_s": None, "api_key": None, "model": None, "serve": "", "concurrency": None}
    with pytest.raises(ParameterError, match=f"{option} is for a"):
        find_source(str(path), **{**none, **given}, say=lambda text: None)


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": null}',
        '{"traceEvents": [5]}',
        '{"traceEvents": [{"ph": 5}], "otherData": 5}',
        '{"traceEvents": [{"args": {"parts_ms": {}, "outcome": "ok"}}]}',
        '{"traceEvents": [{"args": {"forward_ms": 1, "tokens": [], "num_seqs": 1}}]}',
        '{"traceEvents": [{"args": {"forward_ms": 1, "tokens": {"decode": -1}, "num_seqs": 1}}]}',
        json.dumps(
            {"traceEvents": [], "otherData": {"paceline": {**as_dict(SERVER), "block_size": 0}}}
        ),
        '{"stages": [5], "version": 1}',
        '{"stages": [{"requests": {"measured": 1, "ok": "x"}}]}',
        '{"type": "request", "outcome": "ok", "server_ms": 5, "ttft_ms": "x"}',
        '{"outcome": "ok", "parts_ms": {"decode": "x"}, "wall_ms": 4}',
    ],
)
def test_a_recording_that_is_broken_is_named_with_what_is_wrong_in_it(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ParameterError, match=r"a\.json is broken: .*; record it anew"):
        from_file(path)


@pytest.mark.parametrize(
    "line", ['"at_s": "soon"', '"at_s": -5', '"max_tokens": 0', '"max_tokens": "many"']
)
def test_a_line_of_a_workload_that_cannot_be_sent_is_refused_before_a_server_starts(tmp_path, line):
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": "x", ' + line + "}\n")
    with pytest.raises(ParameterError, match=r"work\.jsonl is broken: .*\$\.(at_s|max_tokens)"):
        plan_of_file(path)


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"null", b'{"data": []}', b'{"traceEvents": 1}']
)
def test_an_answer_that_is_no_trace_is_said_to_be_none(body):
    with pytest.raises(PacelineError, match=r"http://x (answers no trace|is broken)"):
        read_trace(body, "http://x")


def test_floors_are_reckoned_unasked_only_for_a_catalogue_model_of_this_machine(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    served = ServerFacts(**{**as_dict(SERVER), "model": "smollm2-135m"})
    for source, server in (
        ("http://10.0.0.5:8000", served),  # another machine
        ("trace.json", served),
        ("http://127.0.0.1:8000", SERVER),  # no model of the catalogue
        ("http://127.0.0.1:8000", served),  # not installed, and no ceilings are known
        ("http://127.0.0.1:8000", None),
    ):
        assert installed_model(Facts(source=source, calls=(), server=server)) is None


# ---- repeats ----


def test_only_a_common_beginning_of_whole_blocks_is_a_repeat():
    repeats = PromptRepeats()
    shared = list(range(100))
    assert repeats.see([*shared, *range(500, 600)]) == 0
    assert repeats.see([*shared, *range(700, 800)]) == 96
    assert repeats.see([1, *shared]) == 0  # shifted
    assert repeats.see([*shared, 1], salt="another tenant") == 0
    assert repeats.see(shared[32:]) == 0  # the middle of one is no beginning
    assert repeats.see(shared) == 96
    assert repeats.see([]) == 0


def test_old_beginnings_are_forgotten_first():
    repeats = PromptRepeats(max_blocks=2)
    first, second, third = ([i] * 32 for i in range(3))
    repeats.see(first)
    repeats.see(second)
    repeats.see(first)
    repeats.see(third)
    assert repeats.see(first) == 32
    assert repeats.see(second) == 0


def test_a_known_table_is_scaled_to_the_steps_that_ran():
    curve = Curve(kind="prefill", context=0, points=((1, 0.01), (8, 0.02), (256, 0.2), (512, 0.6)))
    decode = Curve(kind="decode", context=0, points=((1, 0.01), (4, 0.013)))
    table = StepTable(
        model="m", machine=MACHINE, num_threads=2, kv_dtype="f16", block_size=16,
        curves=(curve, decode),
    )  # fmt: skip
    slow = [
        StepFacts(num_tokens=n, num_decode=0, num_seqs=1, forward_s=s, duration_s=s + 0.001)
        for n, s in ((1, 0.02), (8, 0.04), (8, 9.0), (8, 0.04))
    ]
    scaled = scaled_costs(table, slow)
    assert scaled.scale == pytest.approx(2.0)
    assert scaled.python_s == pytest.approx(0.001)
    # A line through steps of 1 and 8 tokens would expect a step of 512 to take 1.5 s.
    assert scaled.seconds(0, 512) == pytest.approx(0.001 + 1.2)
    assert scaled.seconds(0, 8) == pytest.approx(0.001 + 0.04)
    assert scaled.seconds(4, 0) == pytest.approx(0.001 + 0.026)


def test_f32_activations_are_told_where_a_table_says_what_steps_cost_without():
    table = table_of(
        ("prefill", 0, ((1, 0.01), (8, 0.02), (512, 0.6))), ("decode", 0, ((1, 0.01),))
    )  # fmt: skip
    machine = costs.Machine(
        ceilings=MachineCeilings(machine=MACHINE, measured_at=0, busy_cores=0, by_threads=()),
        costs=COSTS, num_threads=2, table=table,
    )  # fmt: skip
    steps = tuple(
        replace(STEPS[0], num_decode=0, forward_s=0.05, duration_s=0.05) for _ in range(4)
    )
    one = call({"prefill": 50, "parse": 10}, {"decode": 500})
    facts = Facts(source="x", calls=(one,), steps=steps, server=replace(SERVER, activations="f32"))
    slow = situation_of(facts, machine)
    found = advice(slow, "activations")
    assert found.change == {"--activations": "q8"}
    assert after(found, "ttft", 50) == pytest.approx(10 + 50 / 5)
    assert after(found, "tpot", 50) == pytest.approx(10)
    quick = situation_of(replace(facts, server=SERVER), machine)
    assert advice(quick, "activations") is None
    assert advice(situation(one, steps=steps, activations="f32"), "activations") is None


def table_of(*curves: tuple[str, int, tuple[tuple[int, float], ...]]) -> StepTable:
    return StepTable(
        model="m", machine=MACHINE, num_threads=2, kv_dtype="f16", block_size=16,
        curves=tuple(Curve(kind=k, context=c, points=points) for k, c, points in curves),
    )  # fmt: skip


def test_rows_beside_a_prompt_cost_what_more_of_its_tokens_do_and_their_logits():
    prompts = ("prefill", 0, ((1, 0.010), (16, 0.025), (512, 0.521)))  # 1 ms a token
    memory = table_of(prompts, ("decode", 0, ((1, 0.010), (32, 0.010))))
    # Alone three rows are as fast as one: all wait for the weights. A prompt's step does not.
    assert table_seconds(memory, 3, 0) == pytest.approx(0.010)
    assert table_seconds(memory, 3, 16) == pytest.approx(0.028)
    logits = table_of(prompts, ("decode", 0, ((1, 0.010), (5, 0.018))))  # 1 ms a row on top
    assert table_seconds(logits, 4, 16) == pytest.approx(0.029 + 0.004)


def test_steps_grow_with_the_keys_that_their_tokens_attend_to():
    table = table_of(
        ("prefill", 0, ((1, 0.010), (512, 0.521))), ("prefill", 1024, ((1, 0.020), (512, 1.043))),
        ("decode", 0, ((1, 0.010), (8, 0.017))), ("decode", 1024, ((1, 0.020), (8, 0.097))),
    )  # fmt: skip
    assert table_seconds(table, 4, 0, 513) == pytest.approx(
        table.seconds(4, 512, kind="decode")
    )  # fmt: skip
    # 16 tokens after 256: the first attends to 257 keys, the last to 272.
    assert table_seconds(table, 0, 16, 264.5) == pytest.approx(table.seconds(16, 256))
    # 8 prompts of 64 tokens attend to fewer keys than one of 512 does.
    assert table_seconds(table, 0, 512, 32.5) < table.seconds(512)
    steps = [
        StepFacts(num_tokens=2, num_decode=2, num_seqs=2, forward_s=s, duration_s=s, mean_keys=keys)
        for keys, s in ((1, 0.022), (1025, 0.062))
    ]
    assert scaled_costs(table, steps).scale == pytest.approx(2.0)


# ---- what is known of steps ----


@pytest.mark.parametrize(("times", "is_guess"), [(1, True), (3, False)])
def test_sizes_are_said_to_be_guesses_where_few_sizes_of_steps_ran(times, is_guess, capsys):
    found = explain(situation(*queued(num_tokens=31), steps=ONE_SEQ * times, max_num_seqs=1))
    assert found.advice[0].lever == "max-num-seqs"
    assert found.are_sizes_guesses == is_guess
    assert (
        any("`paceline roofline MODEL --kv-dtype f16` measures them" in n for n in found.notes)
        == is_guess
    )
    print_explanation(found)
    assert ("by how much is a guess" in capsys.readouterr().out) == is_guess


def test_the_command_that_measures_steps_has_the_servers_options():
    shared = dict(steps=STEPS[:2], num_threads=1, kv_dtype="int8")
    assert any("MODEL --threads 1 --kv-dtype int8`" in n for n in notes_of(**shared))
    assert not any("paceline roofline" in n for n in notes_of(**shared, block_size=32))
    assert any("is a guess" in n for n in notes_of(**shared, block_size=32))


def notes_of(**options) -> tuple[str, ...]:
    return explain(situation(call({"prefill": 100}, {"decode": 100}), **options)).notes


def test_a_measured_table_is_no_guess_however_few_sizes_ran():
    machine = costs.Machine(
        ceilings=MachineCeilings(
            machine=MACHINE, measured_at=0.0, busy_cores=0.0,
            by_threads=(replace(CEILINGS, num_threads=2),),
        ),
        costs=COSTS, num_threads=2,
        table=table_of(("prefill", 0, ((1, 0.011), (512, 0.522))),
                       ("decode", 0, ((1, 0.011), (8, 0.018)))),
    )  # fmt: skip
    facts = Facts(source="x", calls=(call({"prefill": 110}, {"decode": 110}),), server=SERVER,
                  steps=STEPS[:2])  # fmt: skip
    one = situation_of(facts, machine)
    assert not explain(one).are_sizes_guesses
    assert one.steps.known == ((1, 0.011), (512, 0.522))
