"""Levers: what an operator can change, and what the model of the steps expects of it.

LEVERS is the table. A lever is a function of a Situation: it returns a Proposal, or None where it
has nothing to offer. A new lever is a function and a line in the table. What changes the schedule
is predicted by a simulation (`rerun`), what makes all steps faster by the causes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from paceline.explain.causes import Finding
from paceline.explain.facts import ServerFacts
from paceline.explain.proposal import Predict, Proposal
from paceline.explain.reruns import rerun
from paceline.explain.situation import Situation

_ROOMY_BUDGET = 512
_MOST_SEATS = 256
_SEATS_FULL = 0.3  # share of the time from which on seats are taken for what is waited for
_FORGOTTEN = 0.1  # share of the prompt tokens that the prefix cache had, and has no more
_SMALL_BITS = 4.6  # a weight in the small formats: Q4_K_M, Q4_1
_SLO_MARGIN = 1.6  # a step may take so many times what the streams' own tokens take
_SLO_FLOOR = 17  # tokens: what `slo` always gives a prompt, and one stream

# KV format -> the next smaller one, and the share of its bytes that is left.
SMALLER_KV = {
    "f32": ("f16", 0.5),
    "f16": ("int8", 0.52),
    "bf16": ("int8", 0.52),
    "int8": ("k8v4", 0.79),
    "fp8": ("k8v4", 0.79),
    "k8v4": ("int4", 0.73),
}
# Mean KL to an f32 cache, in nats, of SmolLM2-135M: docs/levers/kv-quantisation.md.
_KV_PRICES = {"int8": "0.0011", "fp8": "0.0089", "k8v4": "0.0056", "int4": "0.048"}

Lever = Callable[[Situation], Proposal | None]


def use_prefix_cache(situation: Situation) -> Proposal | None:
    """What earlier prompts began with is found instead of computed."""
    server = situation.server
    if server is None or server.prefix_cache:
        return None
    share = situation.repeated_share
    repeats = f"{share:.0%} of the prompt tokens repeat how an earlier prompt began"
    return Proposal(
        change={"--prefix-cache": ""},
        text=repeats if share >= 0.01 else "who lost or found no seat computes its prompt again",
        effect=rerun(prefix_cache=True),
        price="none: the answers are the same bits",
    )


def raise_budget(situation: Situation) -> Proposal | None:
    """Prompts in larger chunks: fewer steps read the weights and pass through Python."""
    server = situation.server
    if server is None or server.max_batched_tokens >= _ROOMY_BUDGET:
        return None
    return Proposal(
        change={"--max-batched-tokens": str(_ROOMY_BUDGET)},
        text=f"prompts advance by at most {server.max_batched_tokens} tokens a step",
        effect=rerun(max_batched_tokens=_ROOMY_BUDGET),
        price="longer steps: streams beside a prompt wait longer for a token",
    )


def lower_budget(situation: Situation) -> Proposal | None:
    """Prompts take turns instead of sharing steps: the first is done sooner, the last as before."""
    server = situation.server
    if server is None or server.max_batched_tokens <= 64:
        return None
    ttft = [f for f in situation.findings if f.metric == "ttft"]
    if not ttft or max(f.share("others_prefill") for f in ttft) < 0.2:
        return None
    budget = max(64, 1 << int(math.log2(max(ttft[0].prompt_tokens, 64))))
    if budget >= server.max_batched_tokens:
        return None
    return Proposal(
        change={"--max-batched-tokens": str(budget)},
        text="several prompts share a step, so all of them end late",
        effect=rerun(max_batched_tokens=budget),
        price="more steps for a long prompt",
    )


def more_seats(situation: Situation) -> Proposal | None:
    """Calls that wait for a seat get one, and share the steps from then on."""
    server = situation.server
    if server is None or situation.full_seats < _SEATS_FULL:
        return None
    before, waiting = server.max_num_seqs, situation.mean_waiting("queue_budget")
    wanted = max(before + math.ceil(waiting), 2 * before)
    seats = min(1 << math.ceil(math.log2(wanted)), _MOST_SEATS)
    if seats <= before:
        return None
    return Proposal(
        change={"--max-num-seqs": str(seats)},
        text=f"all {before} seats are taken {situation.full_seats:.0%} of the time",
        effect=rerun(max_num_seqs=seats),
        price="each stream gets slower as more share the steps",
        is_trade=fewer_seats(situation) is None and _starts_sooner(situation, server, seats),
    )


def fewer_seats(situation: Situation) -> Proposal | None:
    """Fewer sequences share a step: each is faster, others wait."""
    server = situation.server
    tpot = [f for f in situation.findings if f.metric == "tpot"]
    if server is None or not tpot:
        return None
    running = situation.mean_seqs
    seats = max(1, int(running / 2))
    if max(f.share("others_decode") for f in tpot) < 0.3 or seats >= server.max_num_seqs:
        return None
    return Proposal(
        change={"--max-num-seqs": str(seats)},
        text=f"{running:.0f} sequences share a step",
        effect=rerun(max_num_seqs=seats),
        price="calls beyond the seats wait: TTFT grows",
    )


def more_kv_memory(situation: Situation) -> Proposal | None:
    """Nobody waits for blocks, nobody is preempted."""
    server = situation.server
    if server is None or not _suffers(situation, "kv_memory"):
        return None
    lengths = (call.prompt_tokens + call.answer_tokens for call in situation.facts.calls)
    longest = math.ceil(max(lengths))
    block_bytes = server.block_size * server.kv_token_bytes
    num_bytes = -(-longest // server.block_size) * server.max_num_seqs * block_bytes
    pool = server.num_blocks * block_bytes
    megabytes = max(math.ceil(num_bytes / 2**20), math.ceil(2 * pool / 2**20))
    return Proposal(
        change={"--kv-memory": f"{megabytes}M"},
        text=f"the KV cache holds {server.num_blocks * server.block_size} tokens in all",
        effect=rerun(num_blocks=megabytes * 2**20 // block_bytes),
        price=f"{megabytes - pool / 2**20:,.0f} MiB more memory",
        is_trade=any(finding.main == "kv_memory" for finding in situation.findings),
    )


def keep_prefixes(situation: Situation) -> Proposal | None:
    """The prefix cache has room for all that ran, and need not give up what comes again."""
    server = situation.server
    if server is None or not server.prefix_cache or _suffers(situation, "kv_memory"):
        return None
    num_blocks = sum(
        -(-(call.prompt_tokens + call.completion_tokens) // server.block_size)
        - max(call.repeated_tokens, call.cached_tokens) // server.block_size
        for call in situation.facts.calls
    )
    share = situation.repeated_share
    if share < _FORGOTTEN or num_blocks <= server.num_blocks:
        return None
    block_bytes = server.block_size * server.kv_token_bytes
    megabytes = math.ceil(num_blocks * block_bytes / 2**20)
    return Proposal(
        change={"--kv-memory": f"{megabytes}M"},
        text=f"the KV cache holds {server.num_blocks * server.block_size} tokens in all and gave "
        f"up beginnings that came again, {share:.0%} of the prompt tokens",
        effect=rerun(finds_all=True, num_blocks=megabytes * 2**20 // block_bytes),
        price=f"{megabytes - server.num_blocks * block_bytes / 2**20:,.0f} MiB more memory",
    )


def smaller_kv(situation: Situation) -> Proposal | None:
    """Keys and values in fewer bits: more tokens in the same memory, fewer bytes to read."""
    server = situation.server
    if server is None or server.kv_dtype not in SMALLER_KV:
        return None
    smaller, left = SMALLER_KV[server.kv_dtype]
    with_room = rerun(num_blocks=int(server.num_blocks / left))

    def effect(situation: Situation) -> Predict:
        after_waits = with_room(situation)

        def predict(finding: Finding) -> float:
            kv_bytes = finding.context_tokens * server.kv_token_bytes
            read = kv_bytes / (kv_bytes + server.weight_bytes)
            decode = _sum(finding, "decode") if finding.metric == "tpot" else 0.0
            return after_waits(finding) - (1 - left) * read * decode

        return predict

    return Proposal(
        change={"--kv-dtype": smaller},
        text=f"keys and values are kept in {server.kv_dtype}: {smaller} takes {left:.0%} of that",
        effect=effect,
        price=_kv_price(server.kv_dtype, smaller),
        is_lossy=smaller in _KV_PRICES,
    )


def _kv_price(before: str, smaller: str) -> str:
    """Return what a smaller format costs in quality, as far as it is known of another model."""
    if smaller not in _KV_PRICES:
        return "their rounding"
    already = f", {_KV_PRICES[before]} in {before}" if before in _KV_PRICES else ""
    return (
        f"quality: with SmolLM2-135M the mean KL to an f32 cache is {_KV_PRICES[smaller]} nats"
        f"{already}; `paceline price MODEL --text FILE --kv {before},{smaller}` tells your model's"
    )


def smaller_blocks(situation: Situation) -> Proposal | None:
    """Half a block is lost a sequence."""
    server = situation.server
    if server is None or server.block_size <= 16 or not _suffers(situation, "kv_memory"):
        return None
    lengths = [call.prompt_tokens + call.answer_tokens for call in situation.facts.calls]
    mean = sum(lengths) / len(lengths)
    num_tokens = server.num_blocks * server.block_size
    return Proposal(
        change={"--block-size": "16"},
        text=f"a sequence of {mean:.0f} tokens wastes half a block of {server.block_size}",
        effect=rerun(block_size=16, num_blocks=num_tokens // 16),
    )


def bound_steps(situation: Situation) -> Proposal | None:
    """A bound on the step's time spreads others' prompts thinner over a stream's tokens."""
    server, steps = situation.server, situation.steps
    hurt = [f for f in situation.findings if f.metric == "tpot" and f.share("others_prefill") > 0.2]
    if server is None or not hurt or server.policy.startswith("slo"):
        return None
    own_ms = max(_sum(f, "decode", "others_decode", "overhead") for f in hurt)
    least_ms = 0.0 if steps is None else steps.seconds(1, _SLO_FLOOR - 1) * 1e3
    step_ms = max(_SLO_MARGIN * own_ms, least_ms, 1.0)
    policy = f"slo:step_ms={math.ceil(round(step_ms, 3))}"
    return Proposal(
        change={"--policy": policy},
        text="prompts of others fill the steps of streams",
        effect=rerun(policy=policy),
        price="prompts beside streams take longer: their TTFT grows",
        is_trade=any(finding.main == "others_prefill" for finding in hurt),
    )


def free_steps(situation: Situation) -> Proposal | None:
    """Prompts fill the steps beside streams, too, where a bound on them let few tokens in."""
    server = situation.server
    if server is None or not server.policy.startswith("slo"):
        return None
    return Proposal(
        change={"--policy": "fcfs"},
        text=f"{server.policy} leaves prompts little of the steps beside streams",
        effect=rerun(policy="fcfs"),
        price="streams beside a prompt wait longer for a token",
    )


def stop_drafting(situation: Situation) -> Proposal | None:
    """Steps without drafts, where too many of them were wrong."""
    server, calls = situation.server, situation.facts.calls
    lost_ms = sum(call.rejected_ms for call in calls)
    if server is None or server.speculate == "off" or not lost_ms:
        return None
    decoding_ms = sum(call.wall_ms - (call.ttft_ms or 0.0) for call in calls)
    share = min(lost_ms / decoding_ms, 1.0) if decoding_ms else 0.0

    def predict(finding: Finding) -> float:
        return finding.value_ms * (1 - share) if finding.metric == "tpot" else finding.value_ms

    return Proposal(
        change={"--speculate": "off"},
        text=f"wrong guesses took {share:.0%} of the time of decoding",
        effect=lambda _: predict,
        price="what right guesses won",
    )


def more_threads(situation: Situation) -> Proposal | None:
    """All steps get faster, as far as the ceilings go."""
    server, machine = situation.server, situation.machine
    if server is None or server.num_threads >= server.machine_threads:
        return None
    before, after = server.num_threads, server.machine_threads
    compute = memory = before / after
    if machine is not None and (old := machine.at(before)) and (new := machine.at(after)):
        compute = min(old.int8_macs_s / new.int8_macs_s, 1.0)
        memory = min(old.memory_bytes_s / new.memory_bytes_s, 1.0)

    def predict(finding: Finding) -> float:
        multiplied = _sum(finding, "prefill", "others_prefill", "queue", "kv_memory")
        read = _sum(finding, "decode", "others_decode")
        return finding.value_ms - multiplied * (1 - compute) - read * (1 - memory)

    return Proposal(
        change={"--threads": str(after)},
        text=f"{before} of {after} cores compute",
        effect=lambda _: predict,
        price="cores that something else may want",
    )


def round_activations(situation: Situation) -> Proposal | None:
    """Integer multiply-adds, as the table of step costs was measured with."""
    server, steps = situation.server, situation.steps
    if server is None or server.activations != "f32" or steps is None or steps.table is None:
        return None
    left = min(1 / steps.scale, 1.0)

    def predict(finding: Finding) -> float:
        steps_ms = _sum(finding, "prefill", "decode", "others_prefill", "others_decode", "queue")
        return finding.value_ms - (1 - left) * steps_ms

    return Proposal(
        change={"--activations": "q8"},
        text=f"with f32 activations steps take {steps.scale:.1f} times as long",
        effect=lambda _: predict,
        price="quality: with SmolLM2-135M the mean KL to a float32 reference is 0.0030 nats",
        is_lossy=True,
    )


def smaller_weights(situation: Situation) -> Proposal | None:
    """Decoding reads all weights for a token: fewer bits are fewer bytes."""
    server = situation.server
    if server is None:
        return None
    bits = server.weight_bytes * 8 / server.num_parameters
    if bits < 1.5 * _SMALL_BITS:
        return None

    def predict(finding: Finding) -> float:
        if finding.metric == "ttft":
            return finding.value_ms
        return finding.value_ms - _sum(finding, "decode") * (1 - _SMALL_BITS / bits)

    return Proposal(
        change={},
        text=f"the weights have {bits:.1f} bits; a file of the same model in Q4_K_M has "
        f"{_SMALL_BITS}",
        effect=lambda _: predict,
        price="quality: compare perplexities first",
    )


# In the order in which equal gains are told: what costs least first.
LEVERS: Mapping[str, Lever] = {
    "prefix-cache": use_prefix_cache,
    "threads": more_threads,
    "kv-memory": more_kv_memory,
    "kv-memory for prefixes": keep_prefixes,
    "no drafts": stop_drafting,
    "max-batched-tokens": raise_budget,
    "policy": bound_steps,
    "policy without a bound": free_steps,
    "max-num-seqs": more_seats,
    "smaller max-batched-tokens": lower_budget,
    "block-size": smaller_blocks,
    "kv-dtype": smaller_kv,
    "fewer max-num-seqs": fewer_seats,
    "activations": round_activations,
    "format": smaller_weights,
}


def _sum(finding: Finding, *causes: str) -> float:
    return sum(finding.causes.get(cause, 0.0) for cause in causes)


def _starts_sooner(situation: Situation, server: ServerFacts, seats: int) -> bool:
    """Whether seats are most of what a TTFT waits for, and more of them make the median shorter."""
    if all(f.metric != "ttft" or f.main != "queue" for f in situation.findings):
        return False
    before, after = situation.simulated, situation.simulate(replace(server, max_num_seqs=seats))
    old_ms = None if before is None else before.at("ttft", 50)
    new_ms = None if after is None else after.at("ttft", 50)
    return old_ms is not None and new_ms is not None and new_ms < old_ms


def _suffers(situation: Situation, cause: str) -> bool:
    return any(finding.share(cause) > 0.05 for finding in situation.findings)


def options_of(server: ServerFacts) -> dict[str, str]:
    """Return the options of `paceline serve` that start a server like this one."""
    pool = server.num_blocks * server.block_size * server.kv_token_bytes
    return {
        "--threads": str(server.num_threads),
        "--max-num-seqs": str(server.max_num_seqs),
        "--max-batched-tokens": str(server.max_batched_tokens),
        "--kv-memory": str(pool),
        "--kv-dtype": server.kv_dtype,
        "--block-size": str(server.block_size),
        "--policy": server.policy,
        "--activations": server.activations,
        "--speculate": server.speculate,
        "--prefix-cache" if server.prefix_cache else "--no-prefix-cache": "",
    }
