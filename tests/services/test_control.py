"""The control plane over real gRPC: its service, its limits, invalid input in every call."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from crossdock.common import rpc
from crossdock.common.call_errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unimplemented,
    error_of,
)
from crossdock.common.config import ControlConfig
from crossdock.common.control_channel import SERVICE_NAME
from crossdock.control.placement import views
from crossdock.control.server import watchers
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2
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


def settings(*pairs: tuple[str, str]) -> list[pb.CommunicatorSetting]:
    """Of a communicator, as a registration has them."""
    return [pb.CommunicatorSetting(name=name, value=value) for name, value in pairs]


METHODS = ("Register", "PublishRegion", "Ready", "Heartbeat", "Leave")


@pytest_asyncio.fixture
async def control() -> AsyncIterator[InProcess]:
    async with in_process(ControlConfig(world_size=3, lease_s=4, recover_s=5)) as made:
        yield made


async def test_health_says_serving_for_the_process_and_the_service(control: InProcess) -> None:
    stub = health_pb2_grpc.HealthStub(control.channel)
    for name in ("", SERVICE_NAME):
        answer = await rpc.call(stub.Check, health_pb2.HealthCheckRequest(service=name), timeout_s=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(NotFound):
        await rpc.call(stub.Check, health_pb2.HealthCheckRequest(service="nobody"), timeout_s=TIMEOUT_S)


async def test_reflection_lists_and_describes_the_service(control: InProcess) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(control.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
    ]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=TIMEOUT_S)]
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert any(b"PublishRegion" in file for file in described.file_descriptor_response.file_descriptor_proto)


async def test_a_group_forms_and_serves(control: InProcess) -> None:
    workers = [FakeWorker(control.stub, uid) for uid in ("b/0", "a/1", "a/0")]
    watch = control.stub.Watch(pb.WatchRequest(worker=workers[0].id), timeout=TIMEOUT_S)
    assert (await watch.read()).members == []
    for worker in workers:
        assert (await worker.register()).lease_s == 4
    view = await watch_until(watch, pb.EXCHANGING)
    assert [member.worker.uid for member in view.members] == ["a/0", "a/1", "b/0"]
    for worker in workers:
        await worker.publish(view)
    table = await watch.read()
    assert [member.region for member in table.members] == [b"a/0 in 1", b"a/1 in 1", b"b/0 in 1"]
    for worker in workers:
        await worker.get_ready()
    view = await watch_until(watch, pb.SERVING)
    assert (view.epoch, view.world_size, view.model, list(view.lost_ranks)) == (1, 3, "m", [])
    assert view.members[2].address == "b:1"
    assert view.version > table.version
    watch.cancel()


async def test_only_members_see_regions(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    stranger = pb.WorkerId(uid="a/0", incarnation=0)
    for worker, expected in [(None, False), (pb.WorkerId(uid="x"), False), (workers[0].id, True)]:
        view = await newest_view(control.stub, worker)
        assert view.state == pb.SERVING
        assert [bool(member.region) for member in view.members] == [expected] * 3
    with pytest.raises(AlreadyExists, match="newer process"):
        await _read(control, stranger)


async def test_fields_that_nobody_knows_are_in_no_view(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    unknown = bytes([0xFA, 0x06, 5]) + b"stray"  # field 111, five bytes
    request = pb.HeartbeatRequest(worker=workers[0].id, epoch=1, stats=pb.WorkerStats.FromString(unknown))
    await rpc.call(control.stub.Heartbeat, request, timeout_s=TIMEOUT_S)
    assert b"stray" in request.SerializeToString()
    assert b"stray" not in (await newest_view(control.stub)).SerializeToString()


async def test_heartbeats_carry_stats_and_hold_the_lease(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    await control.wait(6, *workers)
    view = await newest_view(control.stub)
    assert view.state == pb.SERVING
    assert [member.stats.tokens_total for member in view.members] == [7, 7, 7]
    assert all(member.heartbeat_age_s < 1 for member in view.members)
    await control.wait(6, *workers[:2])
    view = await newest_view(control.stub)
    assert (view.state, view.epoch, list(view.lost_ranks), list(view.broken_ranks)) == (pb.FORMING, 2, [2], [2])
    assert view.reason == "rank 2 (c/0) lost: lease expired"
    with pytest.raises(NotFound):
        await workers[2].beat()


async def test_a_second_host_of_one_name_is_refused_while_the_first_serves(control: InProcess) -> None:
    first = FakeWorker(control.stub, "a/0")
    await first.register(boot_id="one")
    second = FakeWorker(control.stub, "a/0", incarnation=2)
    with pytest.raises(AlreadyExists, match=r"alive on another host of this name.*set worker\.uid"):
        await second.register(boot_id="two")
    await first.beat()


async def test_a_replaced_worker_is_told_on_every_way(control: InProcess) -> None:
    old = (await form(control.stub, "a/0", "b/0", "c/0"))[1]
    watch = control.stub.Watch(pb.WatchRequest(worker=old.id), timeout=TIMEOUT_S)
    await watch.read()
    new = FakeWorker(control.stub, "b/0", incarnation=2)
    await new.register()
    with pytest.raises(grpc.RpcError) as raised:
        await watch_until(watch, pb.GROUP_STATE_UNSPECIFIED)
    assert isinstance(error_of(raised.value), AlreadyExists)
    for attempt in (old.register, old.beat, old.get_ready):
        with pytest.raises(AlreadyExists, match="newer process"):
            await attempt()
    view = await newest_view(control.stub)
    assert (view.state, view.epoch, list(view.broken_ranks)) == (pb.EXCHANGING, 2, [1])


async def test_a_group_without_a_rank_says_why_its_successor_was_refused(control: InProcess) -> None:
    """Also one that came before the lease of the former process had ended, and has stopped for good."""
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    with pytest.raises(FailedPrecondition, match="model: expected"):
        await FakeWorker(control.stub, "c/0", incarnation=2).register(model="other")
    assert "refused" not in (await newest_view(control.stub)).reason
    await control.stub.Leave(pb.LeaveRequest(worker=workers[2].id))
    why = "rank 2 (c/0) left; refused: worker c/0: model: expected 'm' as rank 0 (a/0) has, got 'other'"
    for viewer in (None, workers[0].id):
        assert (await newest_view(control.stub, *[viewer] * bool(viewer))).reason == why
    with pytest.raises(FailedPrecondition, match="model: expected"):
        await FakeWorker(control.stub, "d/0").register(model="third")
    assert (await newest_view(control.stub)).reason.endswith("got 'third'")
    await FakeWorker(control.stub, "c/0", incarnation=3).register()
    assert (await newest_view(control.stub)).reason == "rank 2 (c/0) joined"


async def test_refusals_have_the_status_that_tells_what_to_do(control: InProcess) -> None:
    first = FakeWorker(control.stub, "a/0")
    await first.register()
    with pytest.raises(FailedPrecondition, match="model: expected 'm' as rank 0"):
        await FakeWorker(control.stub, "b/0").register(model="other")
    await FakeWorker(control.stub, "b/0").register()
    await FakeWorker(control.stub, "c/0").register()
    with pytest.raises(ResourceExhausted, match="all 3 slots"):
        await FakeWorker(control.stub, "d/0").register()
    first.epoch = 5
    with pytest.raises(FailedPrecondition, match="epoch: expected 1, got 5"):
        await first.get_ready()
    with pytest.raises(InvalidArgument, match="silent_ranks: expected < 3"):
        await first.beat(3)


async def test_fault_reports_raise_the_epoch_once(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    epochs = [await worker.beat(2, fault="PeerTimeout: peer 2\nsilent") for worker in workers[:2]]
    assert epochs == [2, 2]
    view = await newest_view(control.stub)
    assert view.reason == "rank 0 (a/0) reported silent: rank 2 (c/0): PeerTimeout: peer 2 silent"
    await exchange(control.stub, workers)
    assert (await newest_view(control.stub)).state == pb.SERVING


async def test_a_slow_watcher_gets_the_newest_view_only(control: InProcess) -> None:
    stream = control.service.Watch(pb.WatchRequest(), None)
    first = await anext(stream)
    worker = FakeWorker(control.stub, "a/0")
    for worker.incarnation in range(1, 51):
        await worker.register()
    second = await anext(stream)
    assert second.members[0].worker.incarnation == 50
    assert second.version >= first.version + 50
    third = asyncio.ensure_future(anext(stream))
    await newest_view(control.stub)
    assert not third.done()
    await worker.leave()
    assert not (await third).members
    await stream.aclose()


async def test_watchers_are_counted_and_forgotten(control: InProcess) -> None:
    calls = [control.stub.Watch(pb.WatchRequest(), timeout=TIMEOUT_S) for _ in range(2)]
    for call in calls:
        await call.read()
    assert control.sample("crossdock_watch_streams") == 2
    for call in calls:
        call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while control.sample("crossdock_watch_streams"):
            await asyncio.sleep(0.01)


async def test_a_member_watches_twice_and_no_more(control: InProcess) -> None:
    """Two streams a rank, for one may be dying."""
    calls = []
    worker = FakeWorker(control.stub, "a/0")
    await worker.register()
    for _ in range(2 * 3):
        calls.append(control.stub.Watch(pb.WatchRequest(worker=worker.id), timeout=TIMEOUT_S))
        assert (await calls[-1].read()).members
    with pytest.raises(ResourceExhausted, match="watch: expected at most 6 members, got one more"):
        await _read(control, worker.id)
    for call in calls:
        call.cancel()


async def test_metrics_follow_the_group(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    await control.wait(8, *workers[1:])
    assert control.sample("crossdock_epoch") == 2
    assert control.sample("crossdock_members") == 2
    assert control.sample("crossdock_world_size") == 3
    assert control.sample("crossdock_group_state", state="FORMING") == 1
    assert control.sample("crossdock_group_state", state="SERVING") == 0
    assert control.sample("crossdock_members_lost_total", cause="lease") == 1
    assert control.sample("crossdock_group_state_transitions_total", to="SERVING") == 1
    assert control.sample("crossdock_heartbeats_total") == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker": pb.WorkerId()}, "worker.uid: expected a name"),
        ({"worker": pb.WorkerId(uid="x" * 300)}, "worker.uid: expected at most 256 characters, got 300"),
        ({"worker": pb.WorkerId(uid="a\nERROR forged")}, "worker.uid: expected printable"),
        ({"address": "x" * 257}, "address: expected at most 256"),
        ({"model": "\x1b[2J"}, "model: expected printable"),
        ({"host": topology_pb2.HostFacts(hostname="h\x00")}, "host.hostname: expected printable"),
        ({"local_rank": 1 << 31}, "local_rank: expected <="),
        ({"network": topology_pb2.Network()}, "network.provider: expected a name, got none"),
        ({"network": topology_pb2.Network(provider="\x1b[2J")}, "network.provider: expected printable"),
        ({"network": topology_pb2.Network(provider="tcp", domain="x" * 257)}, "network.domain: expected at most 256"),
        ({"communicator": settings(("topk", "8\n"))}, "communicator.value: expected printable"),
        ({"communicator": settings(("\x1b[2J", "8"))}, "communicator.name: expected printable"),
        ({"communicator": settings(("topk", "x" * 257))}, "communicator.value: expected at most 256"),
        ({"communicator": settings(("topk", ""))}, "communicator: expected names and values, got 'topk' = ''"),
        ({"communicator": settings(("", "8"))}, "communicator: expected names and values, got '' = '8'"),
        ({"communicator": settings(("topk", "8"), ("topk", "8"))}, "communicator: expected different names"),
        (
            {"communicator": settings(*((f"a{n}", "1") for n in range(65)))},
            "communicator: expected at most 64 settings, got 65",
        ),
        (
            {"communicator": settings(*((f"a{n}", "x" * 200) for n in range(20)))},
            "communicator: expected at most 4096 bytes, got 41",
        ),
        ({"prior": pb.PriorMembership(epoch=0)}, "prior.epoch: expected 1"),
        ({"prior": pb.PriorMembership(epoch=(1 << 64) - 1)}, "prior.epoch: expected 1"),
        ({"prior": pb.PriorMembership(epoch=1, region=bytes(70_000))}, "prior.region: expected at most 65536 bytes"),
    ],
)
async def test_a_bad_registration_is_refused_by_name(
    control: InProcess, change: dict[str, object], message: str
) -> None:
    before = control.service.group
    request = pb.RegisterRequest(**{"worker": pb.WorkerId(uid="a/0"), **change})
    with pytest.raises(InvalidArgument) as raised:
        await rpc.call(control.stub.Register, request, timeout_s=TIMEOUT_S)
    assert str(raised.value).startswith(message)
    assert control.service.group is before


async def test_a_region_that_is_too_large_or_empty_is_refused(control: InProcess) -> None:
    worker = (await form(control.stub, "a/0", "b/0", "c/0"))[0]
    for region in (bytes(views.MAX_REGION_BYTES + 1), b""):
        request = pb.PublishRegionRequest(worker=worker.id, epoch=1, region=region)
        with pytest.raises(InvalidArgument, match="region: expected"):
            await rpc.call(control.stub.PublishRegion, request, timeout_s=TIMEOUT_S)
    assert (await newest_view(control.stub)).state == pb.SERVING


async def test_hostile_bytes_end_only_their_own_call(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "b/0", "c/0")
    before = control.service.group
    allowed = (InvalidArgument, NotFound, FailedPrecondition, AlreadyExists)
    draw = random.Random()
    whole = pb.HeartbeatRequest(worker=workers[0].id, epoch=1, fault="x").SerializeToString()
    for method in METHODS:
        raw = control.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
        for size in (0, 1, 2, 30, 3000):
            with pytest.raises(allowed):
                await rpc.call(raw, b"\xff" + draw.randbytes(size), timeout_s=TIMEOUT_S)
        with pytest.raises(InvalidArgument):
            await rpc.call(raw, whole[:5], timeout_s=TIMEOUT_S)
        with pytest.raises(ResourceExhausted):
            await rpc.call(raw, bytes(5 << 20), timeout_s=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as raised:
        _ = [view async for view in control.channel.unary_stream(f"/{SERVICE_NAME}/Watch")(b"\xff" * 9)]
    assert isinstance(error_of(raised.value), InvalidArgument)
    host, _, port = control.address.rpartition(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", draw.randbytes(4096)):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(noise)
    assert control.service.group is before
    assert (await newest_view(control.stub)).state == pb.SERVING


async def test_calls_that_do_not_exist_are_unimplemented(control: InProcess) -> None:
    raw = control.channel.unary_unary(f"/{SERVICE_NAME}/SelfDestruct")
    with pytest.raises(Unimplemented):
        await rpc.call(raw, b"", timeout_s=TIMEOUT_S)


async def _read(control: InProcess, worker: pb.WorkerId | None) -> None:
    try:
        await newest_view(control.stub, worker)
    except grpc.RpcError as error:
        raise error_of(error) from None


async def test_topology_tells_hosts_once_seats_by_rank_and_forgets_who_left(control: InProcess) -> None:
    host = topology_pb2.HostFacts(hostname="a", boot_id="boot", gpus=[topology_pb2.Gpu(index=n) for n in range(2)])
    for local in (1, 0):
        request = pb.RegisterRequest(
            worker=pb.WorkerId(uid=f"a/{local}", incarnation=1), host=host, local_rank=local, model="m"
        )
        await rpc.call(control.stub.Register, request, timeout_s=TIMEOUT_S)
    answer = await rpc.call(control.stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
    assert [one.hostname for one in answer.hosts] == ["a"]
    assert [(seat.rank, seat.uid, seat.gpu, seat.on_gpu) for seat in answer.seats] == [
        (0, "a/0", 0, True),
        (1, "a/1", 1, True),
    ]
    leave = pb.LeaveRequest(worker=pb.WorkerId(uid="a/0", incarnation=1))
    await rpc.call(control.stub.Leave, leave, timeout_s=TIMEOUT_S)
    answer = await rpc.call(control.stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
    assert [seat.uid for seat in answer.seats] == ["a/1"]


async def test_the_network_of_members_is_shown_and_its_provider_is_that_of_all(control: InProcess) -> None:
    boxes = "boxes in pinned host memory: provider tcp sends from host memory"
    network = topology_pb2.Network(provider="tcp", address="10.0.0.1:7700", domain="d", boxes=boxes)

    def request(uid: str, **fields: Any) -> pb.RegisterRequest:
        return pb.RegisterRequest(worker=pb.WorkerId(uid=uid, incarnation=1), **fields)

    await rpc.call(control.stub.Register, request("a/0", network=network), timeout_s=TIMEOUT_S)
    assert (await newest_view(control.stub)).members[0].network == network
    answer = await rpc.call(control.stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
    assert answer.seats[0].network == network
    words = "worker b/0: network: expected 'tcp' as rank 0 .a/0. has, got 'none'"
    with pytest.raises(FailedPrecondition, match=words):  # a worker without one
        await rpc.call(control.stub.Register, request("b/0"), timeout_s=TIMEOUT_S)
    other = topology_pb2.Network(provider="efa")
    with pytest.raises(FailedPrecondition, match=r"network: expected .tcp. .* got .efa."):
        await rpc.call(control.stub.Register, request("b/0", network=other), timeout_s=TIMEOUT_S)
    await rpc.call(
        control.stub.Register, request("b/0", network=topology_pb2.Network(provider="tcp")), timeout_s=TIMEOUT_S
    )


@pytest.mark.parametrize(
    ("host", "named"),
    [
        (topology_pb2.HostFacts(gpus=[topology_pb2.Gpu()] * 65), "64 GPUs, got 65"),
        (topology_pb2.HostFacts(nics=[topology_pb2.Nic()] * 65), "64 NICs, got 65"),
        (topology_pb2.HostFacts(no_gpus_reason="x" * (64 << 10)), "65536 bytes"),
        (topology_pb2.HostFacts(no_gpus_reason="x" * 300), "host.no_gpus_reason: expected at most 256"),
        (topology_pb2.HostFacts(gpus=[topology_pb2.Gpu(pcie_path=["ok", "\x1b[31m"])]), "host.gpus.pcie_path"),
        (
            topology_pb2.HostFacts(gpus=[topology_pb2.Gpu(peers=[topology_pb2.GpuPeer(nvlink="\r")])]),
            "host.gpus.peers.nvlink",
        ),
        (topology_pb2.HostFacts(boot_id="a\nb"), "host.boot_id"),
        (topology_pb2.HostFacts(gpus=[topology_pb2.Gpu(fabric_cluster="\x00")]), "host.gpus.fabric_cluster"),
        (topology_pb2.HostFacts(nics=[topology_pb2.Nic(name="\x1b[2J")]), "host.nics.name"),
    ],
)
async def test_facts_that_are_too_much_or_odd_are_refused(
    control: InProcess, host: topology_pb2.HostFacts, named: str
) -> None:
    request = pb.RegisterRequest(worker=pb.WorkerId(uid="a/0", incarnation=1), host=host)
    with pytest.raises(InvalidArgument, match=named.replace(".", r"\.")):
        await rpc.call(control.stub.Register, request, timeout_s=TIMEOUT_S)


async def test_a_brief_watcher_sees_itself_then_the_table(control: InProcess) -> None:
    workers = [FakeWorker(control.stub, f"a/{local}") for local in range(3)]
    await workers[0].register()
    stream = control.stub.Watch(pb.WatchRequest(worker=workers[0].id, brief=True), timeout=TIMEOUT_S)
    first = await stream.read()
    assert [(member.rank, member.worker.uid) for member in first.members] == [(0, "a/0")]
    assert (first.num_members, list(first.lost_ranks)) == (1, [1, 2])
    for worker in workers[1:]:
        await worker.register()
    forming = await watch_until(stream, pb.EXCHANGING)
    assert [member.worker.uid for member in forming.members] == ["a/0"]
    assert forming.num_members == 3
    view = await newest_view(control.stub)
    for worker in workers:
        await worker.publish(view)
    while len((view := await stream.read()).members) < 3:
        assert view.state == pb.EXCHANGING
    assert [member.region for member in view.members] == [worker.region for worker in workers]
    assert [(member.rank, member.worker.uid) for member in view.members] == [(0, "a/0"), (1, "a/1"), (2, "a/2")]
    assert not any(member.address for member in view.members)


async def test_a_stranger_gets_no_regions_by_asking_for_a_brief_view(control: InProcess) -> None:
    workers = await form(control.stub, "a/0", "a/1", "a/2")
    for watcher in (pb.WorkerId(uid="a/0", incarnation=99), pb.WorkerId(uid="nobody"), None):
        stream = control.stub.Watch(pb.WatchRequest(worker=watcher, brief=True), timeout=TIMEOUT_S)
        view = await stream.read()
        stream.cancel()
        assert len(view.members) == len(workers)
        assert not any(member.region for member in view.members)


async def test_many_changes_at_once_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large group: those who come and go before the table is complete; that all are there is told soon."""
    size = 2 * watchers.DEBOUNCE_FROM_RANKS
    monkeypatch.setattr(watchers, "NOTIFY_DEBOUNCE_S_PER_RANK", 3600.0 / size)
    monkeypatch.setattr(watchers, "FULL_NOTIFY_DEBOUNCE_S_PER_RANK", 1.0 / size)
    async with in_process(ControlConfig(world_size=size, lease_s=60, recover_s=0.01)) as control:
        control.clock.now += 1.0
        control.service.tick()
        stream = control.stub.Watch(pb.WatchRequest(), timeout=TIMEOUT_S)
        views = [await stream.read()]
        workers = [FakeWorker(control.stub, f"a/{local}") for local in range(size)]
        for worker in workers:
            await worker.register()
        while views[-1].state != pb.EXCHANGING:
            views.append(await stream.read())
        assert len(views) < size / 2
        assert views[-1].num_members == size
        replaced = [FakeWorker(control.stub, worker.uid, incarnation=2) for worker in workers[: size // 2]]
        for worker in replaced:
            await worker.register()
        count = 0
        while not {(m.worker.uid, m.worker.incarnation) for m in views[-1].members} >= {(w.uid, 2) for w in replaced}:
            views.append(await stream.read())
            count += 1
        assert count < size / 4
        assert views[-1].epoch == 1
        stream.cancel()
