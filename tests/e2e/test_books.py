"""Every counter of docs/metrics.md against what clients of a mixed load counted for themselves."""

import random
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from paceline.server.admission import Limits
from tests.e2e.live import LiveServer, parse_events, script_model, wait_until
from tests.e2e.test_metrics import post_and_leave, scrape
from tests.e2e.test_tools import CLOCK, HERMES, HI, WEATHER
from tests.unit.proposers import eager_pace

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
SHARED = "0123456789" * 8  # of many prompts; it repeats itself, so that drafts are right
OUTCOMES = ("ok", "refused", "aborted", "failed")


class Read(dict):
    """What was scraped; remembers the names that somebody has looked at."""

    def __init__(self, server):
        super().__init__(scrape(server))
        self.names = set()

    def __getitem__(self, key):
        self.names.add(key[0])
        return super().__getitem__(key)

    def by(self, name, **wanted):
        """Return the sum of a series' samples; `at` and `label` choose those with a label."""
        self.names.add(name)
        return sum(
            value for (found, labels), value in self.items()
            if found == name and ("label" not in wanted or labels[wanted["at"]] == wanted["label"])
        )  # fmt: skip


class Seen:
    """What clients counted, each of its own calls."""

    def __init__(self):
        self.calls = Counter()  # by outcome
        self.reasons = Counter()  # of choices, as the engine calls them
        self.usage = Counter()  # sums over answers
        self.statuses = Counter()

    def answered(self, reasons, usage, n):
        self.calls["ok"] += 1
        self.reasons.update("stop" if r == "tool_calls" else r for r in reasons)
        figures = usage["paceline"]
        self.usage += Counter(
            prompt=usage["prompt_tokens"],
            completion=usage["completion_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            drafted=figures.get("drafted_tokens", 0),
            accepted=figures.get("accepted_tokens", 0),
            forced=figures.get("forced_tokens", 0),
            choices=n,
            gaps=usage["completion_tokens"] - n,
        )


def some_call(rng):
    """Return a path, a body, and how many answers it asks for."""
    n = rng.choice((1, 1, 2, 3))
    common = {"n": n, "temperature": 0, "timings": True}
    kind = rng.choice(("shared", "own", "long", "tools", "structure"))
    if kind == "tools":
        body = {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
        return "/v1/chat/completions", {**body, **common, "max_tokens": 80}, n
    if kind == "structure":
        structure = {"choice": ["yes, certainly", "no, by no means"]}
        body = {"prompt": "Well", "structured_outputs": structure, "max_tokens": 40}
        return "/v1/completions", {**body, **common}, n
    if kind == "long":  # some of these together outgrow the KV cache
        body = {"prompt": "".join(rng.choices("0123456789", k=12)), "max_tokens": 1000}
        return "/v1/completions", {**body, **common}, n
    prompt = SHARED if kind == "shared" else "".join(rng.choices("abcxyz", k=rng.randrange(1, 90)))
    body = {"prompt": prompt, "max_tokens": rng.randrange(1, 40)}
    return "/v1/completions", {**body, **common}, n


def ask(server, seen, seed):
    """Have an answer, whole or streamed, count it by what the client is told; return the status."""
    rng = random.Random(seed)
    path, body, n = some_call(rng)
    if rng.random() < 0.15:
        name, value = rng.choice((("bogus", 1), ("temperature", -1), ("model", "other")))
        body[name] = value
    if is_stream := rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    reply = server.client.post(path, json={"model": server.name, "stream": is_stream, **body})
    status = reply.status_code
    seen.statuses[status] += 1
    if status != 200:
        seen.calls["refused" if status < 500 else "failed"] += 1
        return status
    events = parse_events(reply.content) if is_stream else [reply.json()]
    events = [event for event in events if event != "[DONE]"]
    if any("error" in event for event in events):
        seen.calls["failed"] += 1
        return status
    reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    seen.answered(reasons, events[-1]["usage"], n)
    return status


def load(server, seen, seeds):
    """Make a call for each seed; one that finds the queue full comes again."""

    def ask_until_taken(seed):
        while ask(server, seen, seed) == 429:
            time.sleep(0.02)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask_until_taken, seeds))


def settled(server, seen):
    """Return the metrics when every call of the clients has been booked."""
    server.drain()
    wait_until(lambda: len(server.calls) == sum(seen.calls.values()))
    return Read(server)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    script = script_model(tmp_path_factory.mktemp("books"), max_context=4096)
    options = {"num_threads": 1, "max_num_seqs": 6, "block_size": 16, "kv_memory_bytes": 2**17}
    with (  # steps of this model are too short for drafts to pay: it drafts whatever it may
        patch("paceline.engine.speculation.speculator.Goodput", eager_pace()),
        LiveServer(script, chat_template=HERMES, speculate="ngram:max=6",
                   limits=Limits(max_requests=4), **options) as live,
    ):  # fmt: skip
        yield live


@pytest.fixture(scope="module")
def loaded(server):
    """A load of answers and refusals, then one with clients that leave, then one that fails."""
    seen = Seen()
    load(server, seen, range(150))
    answered = settled(server, seen), Counter(seen.usage), server.stats()
    for number in range(12):
        post_and_leave(server, {"prompt": "0", "max_tokens": 3000}, 0.004 * number)
        seen.calls["aborted"] += 1
    settled(server, seen)
    forward, num_steps = server.engine._backend.forward, 0

    def fail_at_times(step):
        nonlocal num_steps
        num_steps += 1
        if num_steps % 40 == 0:
            raise RuntimeError("no luck")
        return forward(step)

    server.engine._backend.forward = fail_at_times
    try:
        load(server, seen, range(1000, 1060))
    finally:
        server.engine._backend.forward = forward
    return seen, answered, settled(server, seen)


def test_the_load_had_everything_in_it(loaded):
    seen, (_, usage, _), _ = loaded
    assert all(seen.calls[outcome] for outcome in OUTCOMES), seen.calls
    assert {200, 400, 404, 429, 500} <= seen.statuses.keys()
    wanted = ("cached", "drafted", "accepted", "forced", "gaps")
    assert all(usage[name] for name in wanted), usage
    assert usage["choices"] > seen.statuses[200] / 2


def test_answers_balance_with_what_their_usage_said(loaded):
    """Before anybody left or anything failed each token is in the usage of somebody's answer."""
    _, (read, usage, stats), _ = loaded
    assert read["vllm:prefix_cache_queries_total", ()] == usage["prompt"]
    assert read["vllm:prefix_cache_hits_total", ()] == usage["cached"]
    assert read["vllm:prompt_tokens_total", ()] == usage["prompt"] - usage["cached"]
    assert read["vllm:generation_tokens_total", ()] == usage["completion"]
    assert read["vllm:inter_token_latency_seconds_count", ()] == usage["gaps"]
    assert read["vllm:spec_decode_num_draft_tokens_total", ()] == usage["drafted"]
    assert read["vllm:spec_decode_num_accepted_tokens_total", ()] == usage["accepted"]
    assert read.by("vllm:spec_decode_num_accepted_tokens_per_pos_total") == usage["accepted"]
    assert 0 < read["vllm:spec_decode_num_drafts_total", ()] <= usage["drafted"]
    assert read["paceline:forced_tokens_total", ()] == usage["forced"]
    assert read["vllm:request_generation_tokens_count", ()] == usage["choices"]
    assert read["vllm:request_generation_tokens_sum", ()] == usage["completion"]
    assert read["vllm:request_prompt_tokens_sum", ()] == usage["prompt"]
    assert read["vllm:request_params_n_sum", ()] == usage["choices"]
    assert stats.num_generated_tokens == usage["completion"]


def test_every_documented_counter_balances_in_the_end(loaded, server):
    seen, _, read = loaded
    calls, stats = list(server.calls), server.stats()
    for outcome in OUTCOMES:
        assert read["paceline:request_seconds_count", (outcome,)] == seen.calls[outcome], outcome
        parts = read.by("paceline:part_seconds_total", at=0, label=outcome)
        assert parts == pytest.approx(read["paceline:request_seconds_sum", (outcome,)])
    for kind in ("prompt", "completion"):
        assert read["paceline:tokens_total", (kind, "ok")] == seen.usage[kind]
    for reason in ("stop", "length"):
        ended = sum(e.finish_reason == reason for c in calls for e in c.choices.values())
        assert seen.reasons[reason] <= ended == read["vllm:request_success_total", (reason,)]
    num_choices = sum(len(call.choices) for call in calls)
    assert read.by("vllm:request_success_total") == num_choices

    made = read.by("paceline:tokens_total", at=0, label="completion")
    assert read["vllm:generation_tokens_total", ()] == made == stats.num_generated_tokens
    computed = read.by("paceline:step_tokens_total")
    assert computed == read["vllm:iteration_tokens_total_sum", ()]
    assert read["vllm:prompt_tokens_total", ()] == read["paceline:step_tokens_total", ("prefill",)]
    assert read["vllm:prefix_cache_hits_total", ()] == stats.num_prefix_hit >= seen.usage["cached"]
    assert read["vllm:prefix_cache_queries_total", ()] >= seen.usage["prompt"]
    lost = [e.timings.num_preemptions for c in calls for e in c.choices.values()]
    assert read["vllm:num_preemptions_total", ()] == stats.num_preemptions == sum(lost) > 0

    work = server.loaded.recorder.counters.work
    num_steps = read["paceline:step_seconds_count", ()]
    assert read["paceline:read_bytes_total", ("weights",)] == num_steps * work.weight_bytes
    assert read["paceline:read_bytes_total", ("kv",)] > 0
    assert read["paceline:macs_total", ()] > computed * work.macs_per_token
    phases = read.by("paceline:step_phase_seconds_total")
    assert phases == pytest.approx(read["paceline:step_seconds_sum", ()], rel=0.01)
    blame = [call.figures()["blame"] for call in calls if call.choices]
    for cause in ("prefill", "decode", "preemption"):
        told = sum(each[f"{cause}_ms"] for each in blame) / 1e3
        assert read["paceline:lost_seconds_total", (cause,)] == pytest.approx(told)
    assert read["paceline:lost_seconds_total", ("rejected_drafts",)] == pytest.approx(
        sum(each.get("rejected_drafts_ms", 0) for each in blame) / 1e3
    )
    assert read["paceline:kv_tier_blocks_stored_total", ()] == stats.num_blocks_stored
    assert read["paceline:kv_tier_blocks_restored_total", ()] == stats.num_blocks_restored
    assert read.by("paceline:embedding_tokens_total") == 0  # tests/e2e/test_embeddings.py has some
    assert read["paceline:model_loads_total", ()] == 1
    assert {read[f"vllm:num_requests_{state}", ()] for state in ("running", "waiting")} == {0}
    assert read["paceline:kv_blocks_live", ()] == 0


def test_no_documented_counter_is_left_out_of_the_balance():
    rows = re.findall(r"^\| (`.*`) \| counter \|", DOCS.read_text(), flags=re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(documented) > 15
    source = Path(__file__).read_text()
    assert {name for name in documented if f'"{name}"' not in source} == set()
