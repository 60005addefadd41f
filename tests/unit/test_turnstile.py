"""Requests that come together, and who runs between them."""

from __future__ import annotations

import asyncio

from paceline.server.turnstile import Turnstile


def run(num_requests: int) -> tuple[list[int], list[int]]:
    """Start requests at once; return who began in which order, and in which turn of the loop."""
    order: list[int] = []
    turns: list[int] = []
    turn = 0

    async def app(scope, receive, send):
        order.append(scope["number"])
        turns.append(turn)
        await asyncio.sleep(0)

    async def main() -> None:
        nonlocal turn
        gate = Turnstile(app)
        tasks = [
            asyncio.create_task(gate({"type": "http", "number": i}, None, None))
            for i in range(num_requests)
        ]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)  # what a stream does that has a token to send
            turn += 1

    asyncio.run(main())
    return order, turns


def test_a_stream_gets_a_turn_between_any_two_requests_that_begin():
    order, turns = run(300)
    assert order == list(range(300))
    assert len(set(turns)) == 300


def test_a_request_alone_begins_in_the_next_turn():
    assert run(1)[1][0] <= 2


def test_a_request_that_fails_or_is_given_up_lets_the_next_one_in():
    async def app(scope, receive, send):
        raise ValueError

    async def main() -> list[object]:
        gate = Turnstile(app)
        calls = [asyncio.create_task(gate({"type": "http"}, None, None)) for _ in range(5)]
        await asyncio.sleep(0)
        calls[1].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    ends = asyncio.run(main())
    assert [type(end) for end in ends] == [
        ValueError, asyncio.CancelledError, ValueError, ValueError, ValueError,
    ]  # fmt: skip
