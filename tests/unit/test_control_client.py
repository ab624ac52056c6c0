"""What a worker remembers of the group, and tells a control plane that has forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio

from crossdock.common.call_errors import CallError, DeadlineExceeded, NotFound, PermissionDenied, Unavailable
from crossdock.common.control_channel import ControlPlaneChannel
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.worker.group import control_client as client_module
from crossdock.worker.group.control_client import ControlPlaneClient
from crossdock.worker.process import EXIT_BROKEN, _Process
from crossdock.worker.steps.work import Fault

ME, OTHER = pb.WorkerId(uid="h/0", incarnation=7), pb.WorkerId(uid="h/1", incarnation=9)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[ControlPlaneClient]:
    made = ControlPlaneClient("127.0.0.1:1", pb.RegisterRequest(worker=ME), pb.WorkerStats)
    await serve(made, 1)
    yield made
    await made.close()


def view(epoch: int, state: int, *members: pb.WorkerId) -> pb.GroupView:
    seats = [pb.Member(rank=rank, worker=worker) for rank, worker in enumerate(members)]
    return pb.GroupView(epoch=epoch, state=state, world_size=2, members=seats, version=epoch + 1)  # type: ignore[arg-type]


async def serve(client: ControlPlaneClient, epoch: int) -> None:
    """As if `epoch` had come to serve."""
    await client._take_view(view(epoch, pb.EXCHANGING, ME, OTHER))
    client._prior = pb.PriorMembership(epoch=epoch, rank=0, region=b"mine")
    client.serving(epoch)


async def test_a_serving_group_is_remembered(client: ControlPlaneClient) -> None:
    assert client._prior == pb.PriorMembership(epoch=1, rank=0, region=b"mine", ready=True)


async def test_a_newer_epoch_makes_the_memory_void(client: ControlPlaneClient) -> None:
    await client._take_view(view(2, pb.FORMING, ME))
    assert client._prior == pb.PriorMembership(epoch=2, rank=0, world_size=2)


async def test_so_does_a_newer_epoch_without_a_seat(client: ControlPlaneClient) -> None:
    """Else a control plane that restarts just then is told that the old epoch serves on, and nobody serves in it."""
    await client._take_view(view(2, pb.FORMING, OTHER))
    assert client._prior is not None
    assert (client._prior.epoch, client._prior.ready) == (1, False)


async def test_who_goes_on_remembers_its_region_and_with_whom(client: ControlPlaneClient) -> None:
    """Else a new control plane does not know that the group serves without a rank, and all wait for it."""
    later = view(2, pb.EXCHANGING, ME)
    later.active_ranks.append(0)
    await client._take_view(later)
    assert client._prior == pb.PriorMembership(epoch=2, rank=0, region=b"mine", active_ranks=[0], world_size=2)
    outside = view(3, pb.EXCHANGING, ME)
    outside.active_ranks.append(1)
    await client._take_view(outside)
    assert client._prior == pb.PriorMembership(epoch=3, rank=0, active_ranks=[1], world_size=2)


async def test_a_fault_of_the_epoch_before_says_nothing_of_this_one(client: ControlPlaneClient) -> None:
    await serve(client, 2)
    client.report(1, Fault("silent", (1,)))
    assert client._prior is not None
    assert client._prior.ready
    assert client._heartbeat().silent_ranks == [1]


async def test_heartbeats_that_are_refused_are_said_now_and_then_and_named_when_the_lease_is_lost(
    client: ControlPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, object]] = []
    monkeypatch.setattr(
        client_module._log, "warning", lambda what, **more: said.append((what, more.get("heartbeats_refused")))
    )
    answers: list[CallError] = [*[PermissionDenied("expected its own certificate")] * 3, NotFound("h/0")]

    async def call(*_: object, **__: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(client, "_call", call)
    while answers:
        await client._send_heartbeat()
    refused = "PERMISSION_DENIED: expected its own certificate"
    assert said == [("heartbeat refused", None), ("lease lost", refused)]
    assert client._register_again.is_set()


async def test_an_older_view_of_a_restarted_control_plane_does_not(client: ControlPlaneClient) -> None:
    await client._take_view(view(0, pb.FORMING))
    assert client._prior is not None
    assert client._prior.ready


async def test_a_fault_does(client: ControlPlaneClient) -> None:
    client.report(1, Fault("silent", (1,)))
    assert client._prior is not None
    assert not client._prior.ready


async def test_a_view_of_a_lower_term_is_not_taken(client: ControlPlaneClient) -> None:
    """It was said before another control plane began to lead, and comes late."""
    later = view(3, pb.FORMING, ME)
    later.term = 9
    await client._take_view(later)
    late = view(8, pb.SERVING, ME, OTHER)
    late.term = 8
    with pytest.raises(Unavailable, match="a view of term 8 is outdated: term 9 has begun"):
        await client._take_view(late)
    assert client.view.epoch == 3
    assert ("crossdock-term", "9") in client._metadata()


async def test_a_replica_that_is_silent_is_not_waited_for_while_none_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register waits 5 s for a leader. While none leads, the replica asked last may be unreachable, and the next leader
    recovers for `recover_s`, 5 s: a worker that waits as long for the former one is late, and the group re-forms."""
    calls: list[tuple[str, float]] = []
    leading: set[str] = set()

    async def leads(channel: ControlPlaneChannel, address: str) -> str:
        return address if address in leading else ""

    async def call(method: str, request: object, timeout_s: float) -> None:
        calls.append((made._channel.address, timeout_s))
        if len(calls) == 3:
            leading.add("b:2")
        await asyncio.sleep(0 if len(calls) < 4 else 100.0)
        raise DeadlineExceeded("silent")

    monkeypatch.setattr(ControlPlaneChannel, "_leads", leads)
    made = ControlPlaneClient("a:1,b:2", pb.RegisterRequest(worker=ME), pb.WorkerStats)
    monkeypatch.setattr(made, "_call", call)
    made.start()
    async with asyncio.timeout(60.0):
        while len(calls) < 4:
            await asyncio.sleep(0.01)
    await made.close()
    assert calls == [("a:1", 1.0), ("a:1", 2.0), ("a:1", 4.0), ("b:2", client_module._CALL_S)]


async def test_an_answer_of_a_control_plane_that_is_gone_is_dropped(
    client: ControlPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may use the same version for other tables."""
    asked, answers = asyncio.Event(), [asyncio.get_running_loop().create_future() for _ in range(2)]
    calls = iter(answers)

    async def call(method: str, *args: object, **more: object) -> pb.PlacementResponse:
        assert method == "Placement"
        asked.set()
        answer: pb.PlacementResponse = await next(calls)
        return answer

    monkeypatch.setattr(client, "_call", call)
    stream = asyncio.create_task(client._follow())
    placement = asyncio.create_task(client.placement(1))
    await asked.wait()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    answers[0].set_result(pb.PlacementResponse(version=6, num_slots=1))
    answers[1].set_result(pb.PlacementResponse(version=6, num_slots=2))
    assert (await placement).num_slots == 2


async def test_a_task_that_ends_by_a_bug_is_told(client: ControlPlaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the worker would stay "joining" for ever."""

    async def broken() -> None:
        raise ValueError("no")

    monkeypatch.setattr(client, "_heartbeat_loop", broken)
    client.start()
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="no"):
            await client.supervise()


async def test_and_ends_the_process(client: ControlPlaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise ValueError("no")

    async def for_ever() -> None:
        await asyncio.Future()

    monkeypatch.setattr(client, "_heartbeat_loop", broken)
    process = object.__new__(_Process)
    process._control, process._stop = client, asyncio.Event()
    process._session = SimpleNamespace(run=for_ever)  # type: ignore[assignment]
    async with asyncio.timeout(30):
        assert await process._live() == EXIT_BROKEN
