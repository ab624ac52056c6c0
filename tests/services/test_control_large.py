"""What keeps large groups quiet: the table of regions once for each member, watchers woken a few at a time, leases that
any word of a worker renews."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from crossdock.common.config import ControlConfig
from crossdock.control.server import watchers
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2
from crossdock.worker.group.control_client import ControlPlaneClient
from tests.services.control_world import (
    TIMEOUT_S,
    FakeWorker,
    InProcess,
    exchange,
    form,
    in_process,
    newest_view,
    watch_until,
)

Stream = grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.GroupView]


@pytest.fixture
async def control() -> AsyncIterator[InProcess]:
    async with in_process(ControlConfig(world_size=3, recover_s=0.01)) as made:
        made.clock.now += 1.0
        made.service.tick()
        yield made


def _watch(control: InProcess, worker: FakeWorker) -> Stream:
    stream: Stream = control.stub.Watch(
        pb.WatchRequest(worker=worker.id, brief=True, table_once=True), timeout=TIMEOUT_S
    )
    return stream


async def _read(stream: Stream) -> pb.GroupView:
    view = await stream.read()
    assert isinstance(view, pb.GroupView), "the stream ended without an error"
    return view


def _regions(view: pb.GroupView) -> list[bytes]:
    return [member.region for member in view.members if member.region]


async def _published(control: InProcess) -> list[FakeWorker]:
    """Three workers whose regions are all in; none is ready."""
    workers = [FakeWorker(control.stub, f"a/{local}") for local in range(3)]
    for worker in workers:
        await worker.register()
    view = await newest_view(control.stub)
    for worker in workers:
        await worker.publish(view)
    return workers


async def test_the_table_comes_once_in_an_epoch(control: InProcess) -> None:
    workers = await _published(control)
    stream = _watch(control, workers[1])
    table = await _read(stream)
    assert _regions(table) == [worker.region for worker in workers]
    for worker in workers:
        await worker.get_ready()
    serving = await watch_until(stream, pb.SERVING)
    assert [(member.rank, member.worker.uid, member.region) for member in serving.members] == [(1, "a/1", b"")]
    assert (serving.epoch, serving.num_members) == (table.epoch, 3)
    await workers[0].beat(2)
    view = await newest_view(control.stub)
    assert view.epoch == table.epoch + 1
    for worker in workers:
        await worker.publish(view)
    while not _regions(again := await _read(stream)):
        assert again.state in {pb.EXCHANGING, pb.FORMING}
    assert _regions(again) == [worker.region for worker in workers]
    assert again.epoch == table.epoch + 1
    stream.cancel()


async def test_who_watches_anew_gets_the_table_as_long_as_it_may_be_needed(control: InProcess) -> None:
    workers = await _published(control)
    for _ in range(2):
        stream = _watch(control, workers[0])
        assert len(_regions(await _read(stream))) == 3
        stream.cancel()
    for worker in workers:
        await worker.get_ready()
    stream = _watch(control, workers[0])
    view = await _read(stream)
    assert (view.state, _regions(view)) == (pb.SERVING, [])
    stream.cancel()


async def test_ranks_that_go_on_with_an_earlier_table_are_sent_none() -> None:
    async with in_process(ControlConfig(world_size=3, recover_s=0.01, elastic=True)) as control:
        control.clock.now += 1.0
        control.service.tick()
        workers = await form(control.stub, "a/0", "a/1", "a/2")
        await workers[2].leave()
        stream = _watch(control, workers[0])
        view = await _read(stream)
        assert (view.state, list(view.active_ranks), _regions(view)) == (pb.EXCHANGING, [0, 1], [])
        assert [member.rank for member in view.members] == [0]
        stream.cancel()


async def test_a_workers_link_keeps_the_table_when_later_views_have_none(control: InProcess) -> None:
    workers = [FakeWorker(control.stub, f"a/{local}") for local in range(2)]
    registration = pb.RegisterRequest(
        worker=pb.WorkerId(uid="a/2", incarnation=1), host=topology_pb2.HostFacts(hostname="a"), local_rank=2,
        address="a:1", http_address="a:2", transport="cpu", abi="a", model="m",
    )  # fmt: skip
    client = ControlPlaneClient(control.address, registration, pb.WorkerStats)
    client.start()
    try:
        for worker in workers:
            await worker.register()
        async with asyncio.timeout(TIMEOUT_S):
            view = await client.wait(lambda view: view.state == pb.EXCHANGING)
            await client.publish_region(view.epoch, 2, b"mine")
            for worker in workers:
                await worker.publish(await newest_view(control.stub))
            assert await client.region_table(view.epoch) == [workers[0].region, workers[1].region, b"mine"]
            await client.ready(view.epoch, view.placement)
            for worker in workers:
                await worker.get_ready()
            serving = await client.wait(lambda view: view.state == pb.SERVING)
            assert len(serving.members) == 1
            assert await client.region_table(view.epoch) == [workers[0].region, workers[1].region, b"mine"]
            await workers[0].beat(1)
            await client.wait(lambda newer: newer.epoch > view.epoch)
            assert await client.region_table(view.epoch) is None, "that epoch is over"
    finally:
        await client.close()


async def test_every_watcher_is_woken_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "NOTIFY_BATCH", 3)
    async with in_process(ControlConfig(world_size=2, recover_s=0.01)) as control:
        streams = [control.stub.Watch(pb.WatchRequest(), timeout=TIMEOUT_S) for _ in range(10)]
        for stream in streams:
            await _read(stream)
        control.clock.now += 1.0
        control.service.tick()
        await FakeWorker(control.stub, "a/0").register()
        for stream in streams:
            while not (await _read(stream)).num_members:
                pass
            stream.cancel()


async def test_a_region_and_a_ready_renew_the_lease(control: InProcess) -> None:
    workers = [FakeWorker(control.stub, f"a/{local}") for local in range(3)]
    for worker in workers:
        await worker.register()
    lease_s = control.service.group.settings.lease_s
    await control.wait(0.75 * lease_s)
    await exchange(control.stub, workers)
    await control.wait(0.75 * lease_s)
    assert control.service.group.phase.value == "SERVING", "a lease and a half after Register, nobody has beaten"
    await control.wait(0.5 * lease_s)
    assert control.service.group.members == ()
