"""What a worker remembers of the group, and tells a control plane that has forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio

from crossdock.common import rpc
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.worker import control_client as links
from crossdock.worker.control_client import Link
from crossdock.worker.process import EXIT_BROKEN, _Process
from crossdock.worker.work import Fault

ME, OTHER = pb.WorkerId(uid="h/0", incarnation=7), pb.WorkerId(uid="h/1", incarnation=9)


@pytest_asyncio.fixture
async def link() -> AsyncIterator[Link]:
    made = Link("127.0.0.1:1", pb.RegisterRequest(worker=ME), pb.WorkerStats)
    await serve(made, 1)
    yield made
    await made.close()


def view(epoch: int, state: int, *members: pb.WorkerId) -> pb.GroupView:
    seats = [pb.Member(rank=rank, worker=worker) for rank, worker in enumerate(members)]
    return pb.GroupView(epoch=epoch, state=state, world_size=2, members=seats, version=epoch + 1)  # type: ignore[arg-type]


async def serve(link: Link, epoch: int) -> None:
    """As if `epoch` had come to serve."""
    await link._show(view(epoch, pb.EXCHANGING, ME, OTHER))
    link._prior = pb.PriorMembership(epoch=epoch, rank=0, region=b"mine")
    link.serving(epoch)


async def test_a_serving_group_is_remembered(link: Link) -> None:
    assert link._prior == pb.PriorMembership(epoch=1, rank=0, region=b"mine", ready=True)


async def test_a_newer_epoch_makes_the_memory_void(link: Link) -> None:
    await link._show(view(2, pb.FORMING, ME))
    assert link._prior == pb.PriorMembership(epoch=2, rank=0)


async def test_so_does_a_newer_epoch_without_a_seat(link: Link) -> None:
    """Else a control plane that restarts just then is told that the old epoch serves on, and nobody serves in it."""
    await link._show(view(2, pb.FORMING, OTHER))
    assert link._prior is not None
    assert (link._prior.epoch, link._prior.ready) == (1, False)


async def test_who_goes_on_remembers_its_region_and_with_whom(link: Link) -> None:
    """Else a new control plane does not know that the group serves without a rank, and all wait for it."""
    later = view(2, pb.EXCHANGING, ME)
    later.active_ranks.append(0)
    await link._show(later)
    assert link._prior == pb.PriorMembership(epoch=2, rank=0, region=b"mine", active_ranks=[0])
    outside = view(3, pb.EXCHANGING, ME)
    outside.active_ranks.append(1)
    await link._show(outside)
    assert link._prior == pb.PriorMembership(epoch=3, rank=0, active_ranks=[1])


async def test_a_fault_of_the_epoch_before_says_nothing_of_this_one(link: Link) -> None:
    await serve(link, 2)
    link.report(1, Fault("silent", (1,)))
    assert link._prior is not None
    assert link._prior.ready
    assert link._heartbeat().silent_ranks == [1]


async def test_heartbeats_that_are_refused_are_said_now_and_then_and_named_when_the_lease_is_lost(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, object]] = []
    monkeypatch.setattr(links._log, "warning", lambda what, **more: said.append((what, more.get("heartbeats_refused"))))
    answers: list[rpc.CallError] = [*[rpc.PermissionDenied("expected its own certificate")] * 3, rpc.NotFound("h/0")]

    async def call(*_: object, **__: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(link, "_call", call)
    while answers:
        await link._beat_once()
    refused = "PERMISSION_DENIED: expected its own certificate"
    assert said == [("heartbeat refused", None), ("lease lost", refused)]
    assert link._register_again.is_set()


async def test_an_older_view_of_a_restarted_control_plane_does_not(link: Link) -> None:
    await link._show(view(0, pb.FORMING))
    assert link._prior is not None
    assert link._prior.ready


async def test_a_fault_does(link: Link) -> None:
    link.report(1, Fault("silent", (1,)))
    assert link._prior is not None
    assert not link._prior.ready


async def test_a_view_of_a_lower_term_is_not_taken(link: Link) -> None:
    """It was said before another control plane began to lead, and comes late."""
    later = view(3, pb.FORMING, ME)
    later.term = 9
    await link._show(later)
    late = view(8, pb.SERVING, ME, OTHER)
    late.term = 8
    with pytest.raises(rpc.Unavailable, match="a view of term 8 came late: term 9 has begun"):
        await link._show(late)
    assert link.view.epoch == 3
    assert ("crossdock-term", "9") in link._metadata()


async def test_an_answer_of_a_control_plane_that_is_gone_is_dropped(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may use the same version for other tables."""
    asked, answers = asyncio.Event(), [asyncio.get_running_loop().create_future() for _ in range(2)]
    calls = iter(answers)

    async def call(method: str, *args: object, **more: object) -> pb.PlacementResponse:
        assert method == "Placement"
        asked.set()
        answer: pb.PlacementResponse = await next(calls)
        return answer

    monkeypatch.setattr(link, "_call", call)
    stream = asyncio.create_task(link._follow())
    placement = asyncio.create_task(link.placement(1))
    await asked.wait()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    answers[0].set_result(pb.PlacementResponse(version=6, num_slots=1))
    answers[1].set_result(pb.PlacementResponse(version=6, num_slots=2))
    assert (await placement).num_slots == 2


async def test_a_task_that_ends_by_a_bug_is_told(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the worker would stay "joining" for ever."""

    async def broken() -> None:
        raise ValueError("no")

    monkeypatch.setattr(link, "_beat", broken)
    link.start()
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="no"):
            await link.supervise()


async def test_and_ends_the_process(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise ValueError("no")

    async def for_ever() -> None:
        await asyncio.Future()

    monkeypatch.setattr(link, "_beat", broken)
    process = object.__new__(_Process)
    process._link, process._stop = link, asyncio.Event()
    process._session = SimpleNamespace(run=for_ever)  # type: ignore[assignment]
    async with asyncio.timeout(30):
        assert await process._live() == EXIT_BROKEN
