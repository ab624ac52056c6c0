"""Bytes that wait at a worker: per client, over all its streams, and in all."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from crossdock.worker.requests.budget import Budget, StreamQuota
from crossdock.worker.steps.work import Refused


def share_of(budget: Budget, client: Hashable) -> StreamQuota:
    return budget.open(client, lambda: None)


def test_in_all() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=150)
    a, b = share_of(budget, "a"), share_of(budget, "b")
    a.charge(90)
    with pytest.raises(Refused, match="at most 150 bytes waiting here, this request would make it 151"):
        b.charge(61)
    assert budget.num_bytes == 90
    b.charge(60)
    a.release(90)
    assert budget.num_bytes == 60
    b.close()
    b.close()
    assert budget.num_bytes == 0


def test_one_request_may_be_larger_than_its_client_may_hold() -> None:
    quota = share_of(Budget(max_bytes_per_client=100, max_bytes=1000), "a")
    assert quota.has_room()
    quota.charge(300)
    assert not quota.has_room()
    quota.release(300)
    assert quota.has_room()


def test_the_streams_of_a_client_share_its_account_and_leave_the_rest_to_others() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=1000)
    streams = [share_of(budget, "a") for _ in range(50)]
    for quota in streams:
        for _ in range(10):
            if quota.has_room(30):
                quota.charge(30)
    assert budget.num_bytes <= 200, "twice the limit of one client, however many streams it has"
    other = share_of(budget, "b")
    assert other.has_room(30)
    other.charge(30)


def test_a_stream_that_has_nothing_here_may_bring_one_request() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=1000)
    first, second = share_of(budget, "a"), share_of(budget, "a")
    first.charge(100)
    assert not first.has_room()
    assert second.has_room(10)
    assert not second.has_room(101), "twice the limit of the client"
    second.charge(10)
    assert not second.has_room(10)


def test_a_stream_that_has_nothing_is_read_where_one_of_the_largest_has_room() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=1000)
    first, second = share_of(budget, "a"), share_of(budget, "a")
    assert second.unread_bytes == 0, "nothing is known of this client"
    for size in (20, 90, 40):
        first.charge(size)
    assert (first.unread_bytes, second.unread_bytes) == (0, 90)
    assert not second.has_room(second.unread_bytes), "150 and 90 are past twice the limit"
    first.release(40)
    assert second.has_room(second.unread_bytes)
    second.charge(30)
    assert second.unread_bytes == 0, "its own requests may be cancelled"
    assert share_of(budget, "b").unread_bytes == 0


def test_streams_hear_of_room_in_the_order_in_which_they_began_to_wait() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=1000)
    heard: list[str] = []
    first = budget.open("a", lambda: heard.append("first"))
    second, third, large, other = (
        budget.open(client, lambda name=name: heard.append(name))  # type: ignore[misc]
        for client, name in (("a", "second"), ("a", "third"), ("a", "large"), ("b", "other"))
    )
    other.wait(10)
    first.charge(150)
    for quota, size in ((large, 60), (third, 40), (second, 40), (third, 40)):
        quota.wait(size)
    assert heard == []
    first.release(10)
    assert heard == ["large"], "it has nothing here, and fits twice the limit"
    large.stop_waiting()
    first.release(40)
    assert heard == ["large", "third"]
    third.stop_waiting()
    third.charge(40)
    assert heard == ["large", "third", "second"], "there is room for another one"
    second.close()
    first.close()
    first.release(10)
    assert (heard, budget.num_bytes) == (["large", "third", "second"], 40)


def test_the_stream_that_is_blocked_longest_makes_room() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=1000)
    given_up: list[tuple[str, float]] = []

    def opened(client: str, stalled_s: float) -> StreamQuota:
        return budget.open(client, lambda: None, lambda: stalled_s, lambda why: given_up.append((client, stalled_s)))

    refused, slow = opened("a", 1.0), opened("a", 3.0)
    opened("b", 9.0)
    budget.make_room(refused, of_client=True)
    budget.make_room(refused, of_client=False)
    budget.make_room(slow, of_client=True)
    assert given_up == [("a", 3.0), ("b", 9.0)], "one that moves is given up for nobody"
