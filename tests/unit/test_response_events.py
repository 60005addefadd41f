"""The events that are kept of responses in the background."""

import asyncio

import pytest

from paceline.server.delivery import ClientGoneError
from paceline.server.errors import ApiError
from paceline.server.responses.events import EventLogs


def event(number, size=0):
    return b"event: e\ndata: " + b"%d" % number + b"x" * size + b"\n\n"


async def read_all(follower):
    return b"".join([data async for data in follower.events()])


def test_every_reader_gets_every_event_after_its_number_however_the_log_was_written():
    logs = EventLogs()
    logs.open("r", "key")
    logs.add("r", b"".join(map(event, range(600))))
    logs.add("r", event(600))
    logs.end("r")
    for number in (0, 1, 255, 256, 600, 601, 10**6):
        wanted = b"".join(event(i) for i in range(number, 601))
        assert asyncio.run(read_all(logs.follow("r", number))) == wanted


def test_readers_wait_for_what_is_still_to_come():
    async def run():
        logs = EventLogs()
        logs.open("r", "key")
        silent = asyncio.Event()
        followers = [logs.follow("r", number) for number in (0, 0, 3)]

        async def read(follower):
            async with follower.attended(silent.wait):
                return await read_all(follower)

        tasks = [asyncio.create_task(read(follower)) for follower in followers]
        for number in range(5):
            await asyncio.sleep(0)
            logs.add("r", event(number))
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        logs.end("r")
        return await asyncio.gather(*tasks), logs.find("r").followers

    texts, left = asyncio.run(run())
    everything = b"".join(map(event, range(5)))
    assert texts == [everything, everything, event(3) + event(4)]
    assert not left


def test_a_reader_that_hangs_up_is_let_go_while_nothing_comes():
    async def run():
        logs = EventLogs()
        logs.open("r", "key")

        async def receive():
            return {"type": "http.disconnect"}

        follower = logs.follow("r", 0)
        with pytest.raises(ClientGoneError):
            async with follower.attended(receive):
                await read_all(follower)
        return logs.find("r").followers

    assert not asyncio.run(run())


def test_who_holds_most_loses_its_oldest_events_and_numbers_go_on():
    logs = EventLogs(max_bytes=4000)
    for name, tenant in (("a", "one"), ("b", "one"), ("c", "two")):
        logs.open(name, tenant)
        logs.add(name, event(0, 1000))
    logs.add("c", event(1, 700))
    assert logs.find("a").num_forgotten == 1  # "one" holds more than "two"
    assert (logs.find("b").num_forgotten, logs.find("c").num_forgotten) == (0, 0)
    logs.add("a", event(1))
    logs.end("a")
    assert asyncio.run(read_all(logs.follow("a", 1))) == event(1)
    with pytest.raises(ApiError, match="the first 1 events") as refused:
        logs.follow("a", 0)
    assert refused.value.param == "starting_after"


def test_a_reader_that_is_overtaken_is_told_so():
    async def run():
        logs = EventLogs(max_bytes=2000)
        logs.open("r", "key")
        logs.add("r", event(0))
        follower = logs.follow("r", 0)
        for number in range(1, 4):
            logs.add("r", event(number, 1000))
        with pytest.raises(ApiError) as refused:
            await read_all(follower)
        return follower.failure(refused.value)

    assert b'"code"' in asyncio.run(run())


def test_what_has_ended_and_was_pushed_out_is_not_kept_at_all():
    logs = EventLogs(max_bytes=2000)
    for name in ("a", "b"):
        logs.open(name, "key")
        logs.add(name, event(0, 1500))
        logs.end(name)
    assert logs.find("a") is None
    assert asyncio.run(read_all(logs.follow("b", 0))) == event(0, 1500)
    with pytest.raises(ApiError) as refused:
        logs.follow("a", 0)
    assert (refused.value.status, refused.value.param) == (400, "stream")


def test_readers_are_bounded():
    async def run():
        logs = EventLogs(max_followers=2)
        logs.open("r", "key")
        silent = asyncio.Event()
        first, second = logs.follow("r", 0), logs.follow("r", 0)
        async with first.attended(silent.wait), second.attended(silent.wait):
            with pytest.raises(ApiError) as refused:
                logs.follow("r", 0)
        logs.follow("r", 0)
        return refused.value

    assert asyncio.run(run()).status == 429
