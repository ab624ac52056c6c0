"""When a control plane of several begins and ends its reigns, by what its elector says."""

from __future__ import annotations

from typing import Any

import pytest

from crossdock.common import rpc
from crossdock.control.leader import Replica


class Elector:
    """Leads when the test says so."""

    term, leader = 0, ""

    def hear(self, term: int) -> None:
        """What workers have seen does not matter here."""


class Reign:
    """In the place of a ControlPlane."""

    group = "a group"
    stopped = False

    def tick(self) -> None:
        assert not self.stopped

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def world() -> tuple[Any, Elector, list[Reign], list[int]]:
    elector, made, told = Elector(), [], []

    def make() -> Any:
        made.append(Reign())
        return made[-1]

    return Replica(make, elector, told.append), elector, made, told  # type: ignore[arg-type]


def test_each_reign_begins_with_nothing(world: Any) -> None:
    replica, elector, made, told = world
    for term in (0, 7, 7, 0, 9):
        elector.term = term
        replica.tick()
    assert [one.stopped for one in made] == [True, False]
    assert told == [7, 0, 9]


def test_a_lease_that_comes_when_the_process_stops_begins_no_reign(world: Any) -> None:
    replica, elector, made, told = world
    replica.stop()
    elector.term = 7  # won in the round that was under way
    replica.tick()
    assert (made, replica.group) == ([], None)
    assert told == [0]
    with pytest.raises(rpc.Unavailable, match="stands by"):
        replica._reign(_Call())


class _Call:
    def invocation_metadata(self) -> tuple[()]:
        return ()
