"""Replay: the load of a run or of a workload file, sent to a server of our own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from paceline.bench.conversation import Message
from paceline.bench.http import ConnectionBrokenError, Origin, request_bytes, send
from paceline.bench.servers import Settings, running
from paceline.bench.traces import read_trace
from paceline.bench.workload_files import read_lines
from paceline.errors import PacelineError, ParameterError
from paceline.explain.facts import Facts
from paceline.explain.load import load_of, prompts_of
from paceline.explain.recordings import checked
from paceline.explain.sources import from_server

_IDS = (32, 250)  # token ids that every vocabulary has; ordinary bytes in ours
_DEFAULT_OUTPUT = 128
_SETTLE_S = 0.3  # a call is known a moment after its last byte


class Planned(Struct, frozen=True, kw_only=True):
    """A request to send; without `at_s` as soon as one before it has ended.

    `at_s` counts from the begin of all, or from the end of the request at the place `after`.
    """

    route: str
    body: dict[str, Any]
    at_s: float | None = None
    after: int | None = None


def plan_of_run(facts: Facts, seed: int = 0) -> list[Planned]:
    """Return requests as long as those that were recorded, when they came: of random tokens.

    Prompts that repeated a beginning begin like one before them, as far as they did.
    """
    load = load_of(facts.calls)
    prompts = prompts_of(load, lambda i, count: _random_ids(seed + i, count))
    planned = []
    for asked, prompt in zip(load, prompts, strict=True):
        request = _planned(prompt, asked.num_output, asked.delay_s, asked.after)
        request.body["n"] = asked.num_choices
        planned.append(request)
    return planned


def plan_of_file(path: Path) -> list[Planned]:
    """Return the requests of a workload: conversations, prompts, or a trace of lengths."""
    if path.suffix != ".csv":
        lines = read_lines(str(path))
        if any("messages" in line or "prompt" in line for line in lines):
            return [_spoken(line, path) for line in lines]
    return [
        _planned(
            _random_ids(i, item.input_tokens or 1), item.output_tokens or _DEFAULT_OUTPUT, item.at_s
        )
        for i, item in enumerate(read_trace(str(path)))
    ]


def _random_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(*_IDS) for _ in range(count)]


def _planned(prompt: list[int], num_output: int, at_s: float, after: int | None = None) -> Planned:
    body = {**_body(max(num_output, 1)), "prompt": prompt or [_IDS[0]]}
    return Planned(route="/completions", body=body, at_s=at_s, after=after)


class _Line(Struct, kw_only=True):
    """A request of a workload; one of the first two."""

    messages: list[Message] | None = None
    prompt: str | list[Any] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = _DEFAULT_OUTPUT
    at_s: Annotated[float, Meta(ge=0)] | None = None


def _spoken(line: Mapping[str, Any], path: Path) -> Planned:
    request = checked(line, _Line, str(path))
    body = _body(request.max_tokens)
    if request.messages is not None:
        route, body["messages"] = "/chat/completions", request.messages
    elif request.prompt is not None:
        route, body["prompt"] = "/completions", request.prompt
    else:
        raise ParameterError(
            f"{path} mixes requests with other lines: give each messages or a prompt"
        )
    return Planned(route=route, body=body, at_s=request.at_s)


def _body(num_output: int) -> dict[str, Any]:
    return {
        "max_tokens": num_output, "stream": True, "temperature": 0, "ignore_eos": True
    }  # fmt: skip


def run(
    model: Path, options: Mapping[str, str], planned: Sequence[Planned], *, concurrency: int
) -> Facts:
    """Start a server with these options, send it the plan, and return what its ledgers say."""
    others = {name: value for name, value in options.items() if name != "--threads"}
    arguments = [text for option in others.items() for text in option if text]
    settings = Settings(
        model=model, num_threads=int(options["--threads"]), serve_arguments=arguments
    )  # fmt: skip
    with running(["paceline"], settings) as servers:
        url = servers[0][1]
        origin = Origin.parse(url)
        # The first call of a server also makes its first touch of everything.
        asyncio.run(_send_all(origin, [_planned(_random_ids(-2, 8), 2, 0.0)], concurrency=1))
        begin = time.monotonic()
        asyncio.run(_send_all(origin, planned, concurrency=concurrency))
        time.sleep(_SETTLE_S)
        return from_server(url, time.monotonic() - begin)


async def _send_all(origin: Origin, planned: Sequence[Planned], *, concurrency: int) -> None:
    model = await _model(origin)
    loop = asyncio.get_running_loop()
    begin, seats = loop.time(), asyncio.Semaphore(concurrency)
    ended = [asyncio.Event() for _ in planned]

    async def one(i: int, item: Planned) -> None:
        if item.at_s is None:
            async with seats:
                await _ask(origin, model, item)
        elif item.after is None:
            await asyncio.sleep(begin + item.at_s - loop.time())
            await _ask(origin, model, item)
        else:
            await ended[item.after].wait()
            await asyncio.sleep(item.at_s)
            await _ask(origin, model, item)
        ended[i].set()

    await asyncio.gather(*(one(i, item) for i, item in enumerate(planned)))


async def _model(origin: Origin) -> str:
    answer = _Answer()
    await send(origin, request_bytes(origin, "GET", "/models", {}), answer)
    return str(msgspec.json.decode(bytes(answer.body))["data"][0]["id"])


async def _ask(origin: Origin, model: str, item: Planned) -> None:
    body = msgspec.json.encode({**item.body, "model": model})
    answer = _Answer()
    try:
        await send(origin, request_bytes(origin, "POST", item.route, {}, body), answer)
    except ConnectionBrokenError as error:
        raise PacelineError(f"the replay lost its server: {error}") from None
    if answer.status >= 400:
        text = bytes(answer.body[:300]).decode(errors="replace")
        raise ParameterError(f"the server refuses a request of the workload: {text}")


class _Answer:
    """Reads a response at once, and keeps it."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def on_connected(self, now: float) -> None:
        pass

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> bool:
        self.body += data
        return True
