"""Turns: who waits goes by whose tenant was served least."""

from __future__ import annotations

import pytest

from paceline.engine.engine import Engine
from paceline.policies.base import load_policy
from paceline.types import SamplingParams
from tests.unit.scripted_engine import Answers, Clock, make_engine, make_request
from tests.unit.test_scheduler import make_scheduler

POLICIES = ["fcfs", "priority", "slo:step_ms=12"]


class Shop:
    """An engine that serves one at a time, and the order in which requests end."""

    def __init__(self, policy: str = "fcfs", **options: object) -> None:
        clock = Clock()
        options = {"max_num_seqs": 1, "num_blocks": 256, **options}
        self.engine: Engine = make_engine(policy=policy, clock=clock, **options)
        self.answers = Answers()
        self.num_sent = 0

    def send(
        self, tenant: str, *, num_prompt: int = 10, num_tokens: int = 4, priority: int = 0
    ) -> None:
        self.num_sent += 1
        request = make_request(
            f"{tenant}{self.num_sent}",
            (1,) * num_prompt,
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
            tenant=tenant,
            priority=priority,
        )
        self.engine.submit(request, self.answers)

    def ended(self) -> list[str]:
        return [request_id for (request_id, _), a in self.answers.items() if a.is_finished]

    def serve(self, num_requests: int) -> str:
        """Run until so many requests have ended in all; return their tenants."""
        while len(self.ended()) < num_requests:
            self.engine.step()
        return "".join(request_id[0] for request_id in self.ended())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_tenant_holds_nobody_else_up(policy: str) -> None:
    shop = Shop(policy)
    for _ in range(20):
        shop.send("a")
    shop.engine.step()
    for _ in range(3):
        shop.send("b")
    assert shop.serve(8) == "abababaa"


def test_turns_are_by_tokens_and_not_by_requests() -> None:
    shop = Shop()
    for _ in range(10):
        shop.send("a", num_prompt=200, num_tokens=1)
    for _ in range(40):
        shop.send("b", num_prompt=20, num_tokens=1)
    order = shop.serve(22)
    assert 18 <= order.count("b") <= 20  # ten of them are as much as one of the other
    assert "bb" * 4 in order


def test_generated_tokens_weigh_too() -> None:
    shop = Shop()
    for _ in range(12):
        shop.send("a", num_tokens=40)
        shop.send("b", num_tokens=3)
    order = shop.serve(12)
    assert order.count("b") > 2 * order.count("a")


def test_to_be_away_earns_nothing() -> None:
    shop = Shop()
    for tenant in "abb":
        shop.send(tenant)
    shop.serve(3)  # two know each other, and one is ahead
    for _ in range(30):
        shop.send("a")
    shop.serve(13)
    for _ in range(10):
        shop.send("b")
    assert shop.serve(23)[13:].count("b") in (4, 5, 6)


def test_who_comes_late_does_not_make_up_for_what_others_had() -> None:
    shop = Shop()
    for tenant in "abababababab":
        shop.send(tenant)
    shop.serve(10)
    for tenant in "abcabcabcabcabcabc":
        shop.send(tenant)
    assert shop.serve(19)[10:].count("c") in (3, 4)


def test_one_tenant_is_served_in_the_order_of_submission() -> None:
    scheduler = make_scheduler()
    policy = load_policy("fcfs")
    shop = Shop(max_num_seqs=4)
    for i in range(12):
        shop.send("a", num_prompt=200 - 9 * i)
    shop.serve(12)
    assert sorted(shop.ended(), key=lambda name: int(name[1:])) == shop.ended()
    assert policy.order(scheduler.waiting, scheduler.running, 0) == []


def test_priorities_come_before_turns() -> None:
    shop = Shop("priority")
    for tenant, priority in (("a", 1), ("a", 0), ("a", 0), ("b", 1), ("b", 1), ("c", 0)):
        shop.send(tenant, priority=priority)
    assert sorted(shop.serve(3)) == ["a", "a", "c"]


def test_the_books_forget_who_is_gone() -> None:
    shop = Shop(max_num_seqs=4)
    turns = shop.engine._scheduler.policy._turns
    for i in range(200):
        shop.send(f"{i:c}" if i > 32 else "a")
        shop.engine.step()
    shop.serve(200)
    shop.send("z")
    shop.serve(201)
    shop.send("z")
    shop.serve(202)
    assert len(turns._charged) <= 2
    assert len(turns._served) <= 2
