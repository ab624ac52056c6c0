"""Which call gets a place at a full server, and which one has to give its own up."""

from __future__ import annotations

import pytest

from crossdock.common.call_limits import IDLE_S, MIN_READING_OF_PEER, UNFINISHED_BYTES_OF_PEER, CallLimits, Place, Places
from tests.services.control_world import Clock


class Hall:
    """Places, and the names of the calls that lost theirs, in order."""

    def __init__(self, most: int, most_of_peer: int) -> None:
        self.clock, self.lost = Clock(), list[str]()
        self.places = Places(most, most_of_peer, self.clock)

    def take(self, peer: str, connection: str, name: str = "") -> Place | None:
        return self.places.take(peer, connection, lambda: self.lost.append(name))


def test_a_connection_that_holds_most_gives_way_to_another_of_its_peer() -> None:
    hall = Hall(100, 4)
    for number in range(4):
        assert hall.take("a", "greedy", f"greedy {number}")
    assert hall.take("a", "modest")
    assert hall.lost == ["greedy 0"]
    assert hall.take("a", "third")
    assert hall.take("a", "fourth")
    assert hall.take("a", "fifth") is None, "each has one, and all are busy"
    assert hall.take("b", "other"), "another peer has its own share"
    assert len(hall.places) == 5


def test_a_connection_cannot_push_out_the_busy_calls_of_others() -> None:
    hall = Hall(100, 2)
    hall.take("a", "one")
    hall.take("a", "two")
    for _ in range(10):
        assert hall.take("a", "greedy") is None
    assert hall.lost == []


def test_among_equals_the_call_that_stands_still_longest_gives_way() -> None:
    hall = Hall(100, 2)
    active, idle = hall.take("a", "1", "active"), hall.take("a", "2", "idle")
    assert active is not None
    hall.clock.now += IDLE_S
    hall.places.progress(active)
    assert hall.take("a", "3", "new")
    assert (hall.lost, idle.lost if idle else None) == (["idle"], True)
    assert hall.take("a", "4") is None
    hall.places.leave(active)
    hall.places.leave(active)
    assert hall.take("a", "4")
    assert len(hall.places) == 2


def test_where_all_places_are_taken_the_greediest_peer_gives_way() -> None:
    hall = Hall(4, 3)
    for number in range(3):
        hall.take("greedy", "g", f"greedy {number}")
    assert hall.take("b", "b")
    assert hall.take("c", "c")
    assert hall.lost == ["greedy 0"]


def test_a_kept_place_is_never_lost() -> None:
    hall = Hall(2, 2)
    for connection in ("1", "1"):
        place = hall.take("a", connection)
        assert place is not None
        place.kept = True
    hall.clock.now += 100
    assert hall.take("a", "2") is hall.take("b", "1") is None
    assert hall.lost == []


@pytest.mark.parametrize("size", [1, 1 << 20, 2 << 20, 4 << 20, 64 << 20])
def test_unfinished_messages_of_one_peer_are_bounded(size: int) -> None:
    limits = CallLimits.of(size, 1024)
    assert 0 < limits.reading_of_peer <= limits.calls_of_peer == 256
    assert limits.reading_of_peer * size <= UNFINISHED_BYTES_OF_PEER or limits.reading_of_peer == MIN_READING_OF_PEER
