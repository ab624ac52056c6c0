"""Bytes that wait at a worker: per client, over all its streams, and in all."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from crossdock.worker.requests.budget import Budget, BudgetExceeded, StreamQuota


def share_of(budget: Budget, client: Hashable) -> StreamQuota:
    return budget.open(client, lambda: None)


def test_in_all() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=150)
    a, b = share_of(budget, "a"), share_of(budget, "b")
    a.charge(90)
    with pytest.raises(BudgetExceeded, match="at most 150 bytes waiting here, this request would make it 151"):
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


def test_streams_hear_of_room() -> None:
    budget = Budget(max_bytes_per_client=100, max_bytes=1000)
    heard: list[str] = []
    first = budget.open("a", lambda: heard.append("first"))
    budget.open("a", lambda: heard.append("second"))
    budget.open("b", lambda: heard.append("other"))
    first.charge(10)
    assert heard == []
    first.close()
    assert heard == ["first", "second"]
