"""When a control plane of several begins and ends its leadership, by the word of its elector."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from crossdock.common.call_errors import NotFound, Unavailable
from crossdock.common.config import ControlConfig
from crossdock.common.control_channel import TERM_KEY
from crossdock.common.metrics import ControlMetrics
from crossdock.control.leader.leader import Replica
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb


class Elector:
    """Leads when the test says so."""

    term, leader = 0, ""

    def __init__(self) -> None:
        self.told: list[int] = []

    def note_term(self, term: int) -> None:
        self.told.append(term)


class FakeService:
    """In the place of a ControlPlane."""

    group = "a group"
    stopped = False

    def tick(self) -> None:
        assert not self.stopped

    def stop(self) -> None:
        self.stopped = True

    async def Heartbeat(self, request: Any, context: Any) -> str:  # noqa: N802
        if not request:
            raise NotFound("unknown")
        return "answer"

    async def Topology(self, request: Any, context: Any) -> str:  # noqa: N802
        return "answer"


@pytest.fixture
def world() -> tuple[Any, Elector, list[FakeService], list[int]]:
    elector, made, told = Elector(), [], []

    def make() -> Any:
        made.append(FakeService())
        return made[-1]

    return Replica(make, elector, told.append), elector, made, told  # type: ignore[arg-type]


def test_each_reign_begins_with_nothing(world: Any) -> None:
    replica, elector, made, told = world
    for term in (0, 7, 7, 0, 9):
        elector.term = term
        replica.tick()
    assert [one.stopped for one in made] == [True, False]
    assert told == [7, 0, 9]


def test_a_reign_that_could_not_begin_is_begun_again(world: Any) -> None:
    replica, elector, made, told = world
    make, replica._make = replica._make, lambda: 1 / 0
    elector.term = 7
    with pytest.raises(ZeroDivisionError):
        replica.tick()
    replica._make = make
    replica.tick()
    assert (len(made), told) == (1, [7])


def test_a_lease_that_comes_when_the_process_stops_begins_no_reign(world: Any) -> None:
    replica, elector, made, told = world
    replica.stop()
    elector.term = 7  # won in the round that was under way
    replica.tick()
    assert (made, replica.group) == ([], None)
    assert told == [0]
    with pytest.raises(Unavailable, match="is a standby"):
        replica._active_service()


class Call:
    """With a term that its caller claims."""

    def __init__(self, term: str) -> None:
        self.term = term

    def invocation_metadata(self) -> tuple[tuple[str, str]]:
        return ((TERM_KEY, self.term),)


async def test_only_a_call_that_a_member_may_make_tells_of_a_term(world: Any) -> None:
    replica, elector, _, _ = world
    with pytest.raises(Unavailable):
        await replica.Heartbeat("member", Call("9"))
    elector.term = 7
    replica.tick()
    assert await replica.Topology("anybody", Call("9")) == "answer"
    with pytest.raises(NotFound):
        await replica.Heartbeat("", Call("9"))
    assert elector.told == []
    for term in ("9", "9" * 11, "-1", "x", ""):
        assert await replica.Heartbeat("member", Call(term)) == "answer"
    assert elector.told == [9, 0, 0, 0, 0]


async def test_a_former_leader_measures_its_group_no_more() -> None:
    """Else the alert for an outage sees a group that serves as long as the process lives."""
    metrics, elector = ControlMetrics(), Elector()
    config = ControlConfig(world_size=1, recover_s=0.001)
    replica: Any = Replica(lambda: ControlPlane(config, metrics), elector, lambda term: None)  # type: ignore[arg-type]
    elector.term = 3
    replica.tick()
    worker = pb.WorkerId(uid="h/0", incarnation=1)
    await replica.Register(pb.RegisterRequest(worker=worker), Call(""))
    await asyncio.sleep(0.01)
    replica.tick()
    of_group = {"worker": worker, "epoch": replica.group.epoch}
    await replica.PublishRegion(pb.PublishRegionRequest(region=b"r", **of_group), Call(""))
    await replica.Ready(pb.ReadyRequest(**of_group), Call(""))
    views = replica.Watch(pb.WatchRequest(), Call(""))
    await anext(views)

    def told(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"crossdock_{name}", labels)

    names = ("members", "epoch", "active_ranks", "watch_streams")
    assert told("group_state", state="SERVING") == 1
    assert all(told(name) for name in names)
    former = replica._service
    elector.term = 0
    replica.tick()
    former.tick()
    with pytest.raises(Unavailable):
        await anext(views)
    assert told("group_state", state="SERVING") is None
    assert not any(told(name) for name in names)
    elector.term = 4
    replica.tick()
    assert told("group_state", state="FORMING") == 1
