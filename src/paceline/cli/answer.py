"""One answer on a terminal: its text as it comes, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from paceline.completion import Choice, ChoiceBuilder
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel


def answer(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    is_shown: bool = True,
) -> Choice:
    """Run one prompt, write its text to stdout as it comes, and return the whole answer."""
    from paceline.llm import new_request, stream

    builder = ChoiceBuilder(0, params.logprobs is not None)
    with closing(stream(loaded.engine, [new_request(token_ids, params)])) as deltas:
        for delta in deltas:
            builder.add(delta)
            if is_shown and delta.text:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    return builder.choice()


def measure(loaded: LoadedModel, choice: Choice) -> dict[str, Any]:
    """Return the timings of an answer, its speed, and the share of the read bandwidth reached."""
    timings: dict[str, Any] = {**asdict(choice.timings), "load_s": loaded.load_s}
    tpot_s = choice.timings.tpot_s
    timings["tokens_per_s"] = None if not tpot_s else 1.0 / tpot_s
    timings["bandwidth_fraction"] = None
    if tpot_s and loaded.config.backend == "native":
        from paceline.engine.memory import kv_token_bytes
        from paceline.measure.bandwidth import (
            bandwidth_fraction,
            decode_weight_bytes,
            read_bandwidth,
        )

        assert loaded.config.num_threads is not None
        model = loaded.checkpoint.config
        num_gaps = choice.usage.completion_tokens - 1
        num_saved = choice.timings.num_accepted + choice.timings.num_forced
        num_steps = max(num_gaps - num_saved, 1)  # a right draft saves its step
        mean_context = choice.usage.prompt_tokens + choice.usage.completion_tokens / 2
        timings["bandwidth_fraction"] = bandwidth_fraction(
            weight_bytes=decode_weight_bytes(model, loaded.checkpoint.tensors),
            kv_bytes=mean_context * kv_token_bytes(model, loaded.config.kv_dtype),
            seconds_per_step=tpot_s * num_gaps / num_steps,
            peak_bytes_per_s=read_bandwidth(loaded.config.num_threads),
        )
    return timings


def timing_line(choice: Choice, timings: dict[str, Any]) -> str:
    """Return one line: where the time of the answer went."""
    usage = choice.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"{usage.prompt_tokens}{cached} + {usage.completion_tokens} tokens",
        f"load {timings['load_s'] * 1e3:.0f} ms",
        f"queue {timings['queue_s'] * 1e3:.1f} ms",
        f"TTFT {timings['ttft_s'] * 1e3:.1f} ms",
    ]
    if timings["tpot_s"]:
        parts.append(f"TPOT {timings['tpot_s'] * 1e3:.2f} ms")
        parts.append(f"{timings['tokens_per_s']:.1f} tok/s")
    if choice.timings.num_drafted:
        accepted, drafted = choice.timings.num_accepted, choice.timings.num_drafted
        parts.append(f"{accepted}/{drafted} drafted tokens right")
    if timings["bandwidth_fraction"] is not None:
        parts.append(f"{timings['bandwidth_fraction']:.0%} of the read bandwidth")
    return " · ".join(parts)
