"""At a full server: which call gets a permit, and whose permit is revoked."""

from __future__ import annotations

import asyncio

import pytest

from crossdock.common.call_limits import (
    IDLE_S,
    MIN_READING_PER_PEER,
    UNFINISHED_BYTES_PER_PEER,
    CallLimits,
    CallPermits,
    LimitReached,
    Permit,
    PermitPool,
)
from tests.services.control_world import Clock


class Hall:
    """PermitPool, and the names of the calls whose permit was revoked, in order."""

    def __init__(self, max_total: int, max_per_peer: int) -> None:
        self.clock, self.revoked = Clock(), list[str]()
        self.pool = PermitPool(max_total, max_per_peer, self.clock)

    def acquire(self, peer: str, connection: str, name: str = "") -> Permit | None:
        return self.pool.acquire(peer, connection, lambda: self.revoked.append(name))


def test_a_connection_that_holds_most_gives_way_to_another_of_its_peer() -> None:
    hall = Hall(100, 4)
    for number in range(4):
        assert hall.acquire("a", "greedy", f"greedy {number}")
    assert hall.acquire("a", "modest")
    assert hall.revoked == ["greedy 0"]
    assert hall.acquire("a", "third")
    assert hall.acquire("a", "fourth")
    assert hall.acquire("a", "fifth") is None, "each has one, and all are busy"
    assert hall.acquire("b", "other"), "another peer has its own share"
    assert len(hall.pool) == 5


def test_a_connection_cannot_push_out_the_busy_calls_of_others() -> None:
    hall = Hall(100, 2)
    hall.acquire("a", "one")
    hall.acquire("a", "two")
    for _ in range(10):
        assert hall.acquire("a", "greedy") is None
    assert hall.revoked == []


def test_among_equals_the_call_that_stands_still_longest_gives_way() -> None:
    hall = Hall(100, 2)
    active, idle = hall.acquire("a", "1", "active"), hall.acquire("a", "2", "idle")
    assert active is not None
    hall.clock.now += IDLE_S
    hall.pool.progress(active)
    assert hall.acquire("a", "3", "new")
    assert (hall.revoked, idle.revoked if idle else None) == (["idle"], True)
    assert hall.acquire("a", "4") is None
    hall.pool.release(active)
    hall.pool.release(active)
    assert hall.acquire("a", "4")
    assert len(hall.pool) == 2


def test_where_all_places_are_taken_the_greediest_peer_gives_way() -> None:
    hall = Hall(4, 3)
    for number in range(3):
        hall.acquire("greedy", "g", f"greedy {number}")
    assert hall.acquire("b", "b")
    assert hall.acquire("c", "c")
    assert hall.revoked == ["greedy 0"]


def test_a_kept_place_is_never_lost() -> None:
    hall = Hall(2, 2)
    for connection in ("1", "1"):
        permit = hall.acquire("a", connection)
        assert permit is not None
        permit.pinned = True
    hall.clock.now += 100
    assert hall.acquire("a", "2") is hall.acquire("b", "1") is None
    assert hall.revoked == []


@pytest.mark.parametrize("size", [1, 1 << 20, 2 << 20, 4 << 20, 64 << 20])
def test_unfinished_messages_of_one_peer_are_bounded(size: int) -> None:
    limits = CallLimits.of(size, 1024)
    assert 0 < limits.reading_per_peer <= limits.calls_per_peer == 256
    assert (
        limits.reading_per_peer * size <= UNFINISHED_BYTES_PER_PEER or limits.reading_per_peer == MIN_READING_PER_PEER
    )


async def test_few_calls_of_a_peer_wait_to_be_read_and_one_connection_does_not_fill_the_queue() -> None:
    """The rest is refused at once: each call that waits holds a part of its request."""
    opened, reading, waiting = PermitPool(100, 100), PermitPool(1, 1), PermitPool(8, 2)

    def call(connection: str) -> asyncio.Task[CallPermits]:
        async def run() -> CallPermits:
            permits = CallPermits(opened, reading, waiting, "peer", connection)
            await permits.acquire_reading()
            return permits

        return asyncio.create_task(run())

    first = await call("a")
    queued = [call("a"), call("a")]
    await asyncio.sleep(0)
    assert len(waiting) == 2
    async with asyncio.timeout(0.5):
        with pytest.raises(LimitReached, match="expected at most 1 requests under way"):
            await call("a")
    other = call("b")
    await asyncio.wait(queued, return_when=asyncio.FIRST_COMPLETED)
    assert [task.cancelled() for task in queued] == [True, False], "the oldest of the connection that has most"
    first.release()
    done, _ = await asyncio.wait([queued[1], other], return_when=asyncio.FIRST_COMPLETED)
    done.pop().result().release()
    await asyncio.wait([queued[1], other])
    assert len(waiting) == 0
