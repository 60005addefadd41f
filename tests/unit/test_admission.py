"""The queue's length, its prediction, and who is turned away."""

import pytest

from paceline.server.admission import Admission, Deadline, Limits
from paceline.server.errors import ApiError, error_response


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def admission(clock, **limits):
    return Admission(Limits(**limits), clock=clock)


def refusal(queue, num_requests=1, num_tokens=10, deadline=None):
    with pytest.raises(ApiError) as caught:
        queue.check(num_requests=num_requests, num_tokens=num_tokens, deadline=deadline)
    assert caught.value.status == 429
    return caught.value


def serve(queue, clock, num_tokens, after_s):
    clock.now_s += after_s
    queue.leave(1, num_tokens, is_served=True)


def test_a_queue_without_history_promises_nothing(clock):
    queue = admission(clock)
    assert queue.predict_s(1, 1000) is None
    queue.check(num_requests=10**6, num_tokens=10**9, deadline=Deadline(1, 0.001))


def test_the_prediction_is_what_waits_by_the_rate_of_late(clock):
    queue = admission(clock)
    for _ in range(10):
        queue.enter(1, 100)
    for _ in range(5):
        serve(queue, clock, 100, after_s=2)
    assert queue.predict_s() == pytest.approx(10)
    assert queue.predict_s(1, 100) == pytest.approx(12)
    for _ in range(4):
        serve(queue, clock, 100, after_s=8)
    assert 2 < queue.predict_s() < 8  # of the one that is left: the rate has changed


def test_idle_time_is_not_counted(clock):
    queue = admission(clock)
    for _ in range(3):
        queue.enter(1, 100)
        serve(queue, clock, 100, after_s=1)
        clock.now_s += 1000
    assert queue.predict_s(1, 100) == pytest.approx(1)


def test_a_full_queue_says_when_to_come_back(clock):
    queue = admission(clock, max_requests=3)
    for _ in range(4):
        queue.enter(1, 100)
    serve(queue, clock, 100, after_s=2)
    error = refusal(queue)
    assert (error.code, error.retry_after_s) == ("queue_full", pytest.approx(6))
    assert error_response(error).headers["retry-after"] == "6"
    serve(queue, clock, 100, after_s=2)
    queue.check(num_requests=1, num_tokens=10, deadline=None)
    assert refusal(queue, num_requests=2).code == "queue_full"


def test_a_queue_is_full_by_tokens_too_but_an_empty_one_takes_anything(clock):
    queue = admission(clock, max_tokens=100)
    queue.check(num_requests=1, num_tokens=500, deadline=None)
    queue.enter(1, 80)
    queue.check(num_requests=1, num_tokens=20, deadline=None)
    error = refusal(queue, num_tokens=21)
    assert "80 prompt tokens wait" in str(error)
    assert error_response(error).headers["retry-after"] == "1"  # nothing is known yet


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once(clock):
    queue = admission(clock)
    for _ in range(3):
        queue.enter(1, 100)
    serve(queue, clock, 100, after_s=1)
    queue.check(num_requests=1, num_tokens=100, deadline=Deadline(3500, 3.5))
    error = refusal(queue, num_tokens=100, deadline=Deadline(2501, 2.5))
    assert (error.code, error.retry_after_s) == ("deadline_unreachable", pytest.approx(3))
    assert "deadline of 2501 ms" in str(error)  # as it was asked for, not what is left
    assert "about 3000 ms" in str(error)


def test_short_prompts_do_not_make_a_long_one_look_hopeless(clock):
    queue = admission(clock)
    for _ in range(5):
        queue.enter(1, 1)
        serve(queue, clock, 1, after_s=0.003)  # mostly overhead, not the price of a token
    queue.check(num_requests=1, num_tokens=2000, deadline=Deadline(500, 0.5))


def test_those_who_give_up_leave_the_queue_and_teach_nothing(clock):
    queue = admission(clock, max_requests=2, max_tokens=200)
    queue.enter(2, 200)
    assert refusal(queue).code == "queue_full"
    clock.now_s += 5
    queue.leave(2, 200, is_served=False)
    assert queue.predict_s(1, 1) is None
    queue.check(num_requests=1, num_tokens=10, deadline=None)


def test_a_tenant_waits_for_no_more_of_another_than_it_has_itself(clock):
    queue = admission(clock)
    for _ in range(20):
        queue.enter(1, 100, tenant="a")
    for _ in range(10):
        clock.now_s += 2
        queue.leave(1, 100, is_served=True, tenant="a")
    assert queue.predict_s(1, 100, tenant="a") == pytest.approx(22)
    assert queue.predict_s(1, 100, tenant="b") == pytest.approx(4)  # its own, and one of a
    assert queue.predict_s(15, 1500, tenant="b") == pytest.approx(50)
    queue.check(num_requests=1, num_tokens=100, deadline=Deadline(5000, 5), tenant="b")
    with pytest.raises(ApiError, match="deadline"):
        queue.check(num_requests=1, num_tokens=100, deadline=Deadline(5000, 5), tenant="a")


@pytest.mark.parametrize("size", [1, 10])
def test_one_tenant_cannot_fill_the_queue_of_all(clock, size):
    queue = Admission(Limits(max_requests=12), num_tenants=3, clock=clock)
    room = {"a": 8, "b": 2, "c": 2}  # half for all, and a share of the rest for each
    for tenant, num in room.items():
        for _ in range(num):
            queue.check(num_requests=1, num_tokens=size, deadline=None, tenant=tenant)
            queue.enter(1, size, tenant=tenant)
        with pytest.raises(ApiError, match=f"{num} of this key"):
            queue.check(num_requests=1, num_tokens=size, deadline=None, tenant=tenant)


def test_the_only_tenant_has_the_whole_queue(clock):
    queue = Admission(Limits(max_requests=5, max_tokens=50), num_tenants=1, clock=clock)
    for _ in range(5):
        queue.check(num_requests=1, num_tokens=10, deadline=None, tenant="a")
        queue.enter(1, 10, tenant="a")
    with pytest.raises(ApiError, match="5 prompts wait, 1 more"):
        queue.check(num_requests=1, num_tokens=10, deadline=None, tenant="a")
