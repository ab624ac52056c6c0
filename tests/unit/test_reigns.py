"""When a control plane of several begins and ends its reigns, by what its elector says."""

from __future__ import annotations

from typing import Any

import pytest

from crossdock.common import rpc
from crossdock.control.leader import TERM_KEY, Replica


class Elector:
    """Leads when the test says so."""

    term, leader = 0, ""

    def __init__(self) -> None:
        self.told: list[int] = []

    def hear(self, term: int) -> None:
        self.told.append(term)


class Reign:
    """In the place of a ControlPlane."""

    group = "a group"
    stopped = False

    def tick(self) -> None:
        assert not self.stopped

    def stop(self) -> None:
        self.stopped = True

    async def Heartbeat(self, request: Any, context: Any) -> str:  # noqa: N802
        if not request:
            raise rpc.NotFound("unknown")
        return "answer"

    async def Topology(self, request: Any, context: Any) -> str:  # noqa: N802
        return "answer"


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
        replica._reign()


class Call:
    """With a term that its caller claims."""

    def __init__(self, term: str) -> None:
        self.term = term

    def invocation_metadata(self) -> tuple[tuple[str, str]]:
        return ((TERM_KEY, self.term),)


async def test_only_a_call_that_a_member_may_make_tells_of_a_term(world: Any) -> None:
    replica, elector, _, _ = world
    with pytest.raises(rpc.Unavailable):
        await replica.Heartbeat("member", Call("9"))
    elector.term = 7
    replica.tick()
    assert await replica.Topology("anybody", Call("9")) == "answer"
    with pytest.raises(rpc.NotFound):
        await replica.Heartbeat("", Call("9"))
    assert elector.told == []
    for term in ("9", "9" * 11, "-1", "x", ""):
        assert await replica.Heartbeat("member", Call(term)) == "answer"
    assert elector.told == [9, 0, 0, 0, 0]
