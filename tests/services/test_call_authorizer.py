"""What one caller can take from a server: calls a second, open calls, memory; and that others get in beside it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.common import interceptor, rpc
from crossdock.common.access import MAX_UID_CHARS, CallAuthorizer, RateLimiter
from crossdock.common.call_errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    error_of,
)
from crossdock.common.call_limits import IDLE_S, CallLimits
from crossdock.common.config import ControlConfig
from crossdock.common.control_channel import SERVICE_NAME
from crossdock.common.metrics import ControlMetrics
from crossdock.control.placement import views
from crossdock.control.placement.placement_service import PlacementService
from crossdock.control.server import server
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc, expert_pb2, expert_pb2_grpc
from tests.services.control_world import TIMEOUT_S, FakeWorker, until
from tests.services.http2 import Caller

FORWARD = "/crossdock.v1.ExpertService/Forward"
TOPOLOGY = "/crossdock.v1.ControlPlane/Topology"
MIB = 1 << 20


class Echo(expert_pb2_grpc.ExpertServiceServicer):
    """Echoes, one request at a time."""

    async def Forward(self, requests: Any, context: Any) -> AsyncIterator[expert_pb2.ForwardResponse]:  # noqa: N802
        async for request in requests:
            timing = expert_pb2.Timing(steps=int(context.peer().rpartition(":")[2]))  # the caller's port
            yield expert_pb2.ForwardResponse(id=request.id, timing=timing)


@contextlib.asynccontextmanager
async def served(authorizer: CallAuthorizer, max_message_bytes: int = 2 * MIB) -> AsyncIterator[str]:
    """A control plane and an expert service behind one authorizer; yields the address."""
    service = ControlPlane(ControlConfig(world_size=2), ControlMetrics())
    made = await rpc.server(max_message_bytes, rpc.Health([SERVICE_NAME]), authorizer=authorizer)
    control_pb2_grpc.add_ControlPlaneServicer_to_server(service, made)
    expert_pb2_grpc.add_ExpertServiceServicer_to_server(Echo(), made)
    address = rpc.bind(made, "127.0.0.1:0")
    await made.start()
    try:
        yield address
    finally:
        service.stop()
        await made.stop(0)


def limited(rate: float) -> CallAuthorizer:
    """An authorizer for which no time passes."""
    authorizer = CallAuthorizer(None, rate)
    for name in ("_rate_limiter", "_hosts", "_others"):
        setattr(authorizer, name, RateLimiter(getattr(authorizer, name).rate, lambda: 0.0))
    return authorizer


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def leave(stub: control_pb2_grpc.ControlPlaneStub, uid: str) -> None:
    request = pb.LeaveRequest(worker=pb.WorkerId(uid=uid, incarnation=1))
    await rpc.call(stub.Leave, request, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("uid", ["u" * (MAX_UID_CHARS + 1), "a\x1b[2J", "a\nb"])
async def test_a_uid_is_checked_before_it_is_kept(uid: str) -> None:
    reasons: list[str] = []
    authorizer = CallAuthorizer(None, 100.0, reasons.append)
    async with served(authorizer) as address, rpc.aio_channel(address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        with pytest.raises(InvalidArgument, match=r"worker\.uid: expected"):
            await leave(stub, uid)
        with pytest.raises(grpc.RpcError) as raised:
            await stub.Watch(pb.WatchRequest(worker=pb.WorkerId(uid=uid))).read()
        assert isinstance(error_of(raised.value), InvalidArgument)
        assert reasons == ["value", "value"]
        assert not authorizer._rate_limiter._left


async def test_a_new_uid_for_each_call_does_not_void_the_rate() -> None:
    async with served(limited(5.0)) as address, rpc.aio_channel(address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        for number in range(40):  # a burst of twice the rate of four callers
            await leave(stub, f"w{number}")
        with pytest.raises(ResourceExhausted, match="calls: expected at most 20 a second"):
            await leave(stub, "another")
        await rpc.call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), timeout_s=TIMEOUT_S)


async def test_the_limit_of_one_uid_leaves_calls_to_the_others_of_its_host() -> None:
    async with served(limited(5.0)) as address, rpc.aio_channel(address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        for _ in range(10):
            await leave(stub, "a")
        with pytest.raises(ResourceExhausted, match="calls: expected at most 5 a second"):
            await leave(stub, "a")
        await leave(stub, "b")


async def test_health_is_limited_and_takes_no_calls_from_the_service() -> None:
    authorizer = limited(5.0)
    async with served(authorizer) as address, rpc.aio_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(10):
            await rpc.call(check, health_pb2.HealthCheckRequest(), timeout_s=TIMEOUT_S)
        with pytest.raises(ResourceExhausted):
            await rpc.call(check, health_pb2.HealthCheckRequest(), timeout_s=TIMEOUT_S)
        await leave(control_pb2_grpc.ControlPlaneStub(channel), "a")


async def test_health_watchers_shut_nobody_out() -> None:
    """Not from the service, and not from health: the connection that has most gives way."""
    authorizer = CallAuthorizer(None)
    async with served(authorizer) as address, rpc.aio_channel(address) as first, rpc.aio_channel(address) as second:
        calls = [health_pb2_grpc.HealthStub(first).Watch(health_pb2.HealthCheckRequest()) for _ in range(100)]
        await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        assert (len(authorizer.others), len(authorizer.calls)) == (authorizer.others.max_per_peer, 0)
        await leave(control_pb2_grpc.ControlPlaneStub(second), "a")
        check = health_pb2_grpc.HealthStub(second).Check
        await rpc.call(check, health_pb2.HealthCheckRequest(), timeout_s=TIMEOUT_S)
        for call in calls:
            call.cancel()


async def test_a_health_watcher_that_reads_nothing_keeps_nobody_from_hearing() -> None:
    health = rpc.Health([SERVICE_NAME])
    deaf = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), None)
    await anext(deaf)  # and stands in the middle of its write
    hears = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), None)
    assert (await anext(hears)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    async with asyncio.timeout(TIMEOUT_S):
        health.set(True)
        assert (await anext(hears)).status == health_pb2.HealthCheckResponse.SERVING
        health.shut_down()
        health.set(True)
        assert (await anext(hears)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="x" * 1000), None)
    assert (await anext(unknown)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    with pytest.raises(NotFound, match="service: expected"):
        await health.Check(health_pb2.HealthCheckRequest(service="x"), None)
    for watch in (deaf, hears, unknown):
        await cast("AsyncGenerator[object, None]", watch).aclose()


async def test_watchers_of_one_connection_give_way_and_members_stay() -> None:
    authorizer = CallAuthorizer(None, limits=CallLimits(64, 16, 16, 16))
    async with served(authorizer) as address, contextlib.AsyncExitStack() as stack:
        stubs = [
            control_pb2_grpc.ControlPlaneStub(await stack.enter_async_context(rpc.aio_channel(address)))
            for _ in range(3)
        ]
        member = FakeWorker(stubs[0], "a/0")
        await member.register()
        watch = stubs[0].Watch(pb.WatchRequest(worker=member.id), timeout=TIMEOUT_S)
        await watch.read()
        flood = [stubs[1].Watch(pb.WatchRequest(), timeout=TIMEOUT_S) for _ in range(50)]
        await asyncio.gather(*(call.read() for call in flood), return_exceptions=True)
        assert len(authorizer.calls) == 16
        onlooker = stubs[2].Watch(pb.WatchRequest(), timeout=TIMEOUT_S)
        assert isinstance(await onlooker.read(), pb.GroupView)
        lost = [call for call in flood if call.done()]
        assert {await call.code() for call in lost} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        await member.leave()
        assert isinstance(await watch.read(), pb.GroupView)
        for call in (watch, onlooker, *flood):
            call.cancel()


async def test_an_incarnation_from_the_future_takes_no_seat() -> None:
    now, second = time.time_ns(), 10**9
    async with served(CallAuthorizer(None)) as address, rpc.aio_channel(address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        honest = FakeWorker(stub, "a/0", incarnation=now)
        await honest.register()
        for incarnation in (now + 3600 * second, now + 86400 * second, 2**64 - 1):
            wanted = r"worker\.incarnation: expected a start .* at most 600 s ahead"
            with pytest.raises(FailedPrecondition, match=wanted):
                await FakeWorker(stub, "a/0", incarnation=incarnation).register()
        await honest.beat()
        await FakeWorker(stub, "a/0", incarnation=now + 60 * second).register()
        with pytest.raises(AlreadyExists):
            await honest.beat()


async def test_the_topology_is_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = views.topology_response
    monkeypatch.setattr(views, "topology_response", lambda *args: made.append(1) or real(*args))  # type: ignore[func-returns-value]
    async with served(CallAuthorizer(None)) as address, rpc.aio_channel(address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        for number, uid in enumerate(("a/0", "b/0"), 1):
            await FakeWorker(stub, uid).register()
            for _ in range(3):
                topology = await rpc.call(stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
                assert [seat.uid for seat in topology.seats] == ["a/0", "b/0"][:number]
            assert len(made) == number
        await FakeWorker(stub, "b/0").register()  # the same again, which changes nothing but what it tells of its host
        await rpc.call(stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
        assert len(made) == 3


async def test_a_plan_that_takes_long_is_not_made_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def experts(self: PlacementService) -> pb.ExpertsResponse:
        asked.append(1)
        await asyncio.sleep(server._LONG_REBALANCE_S * 2)
        return pb.ExpertsResponse(world_size=2)

    monkeypatch.setattr(server, "_REBALANCE_PAUSES", 1e6)
    monkeypatch.setattr(PlacementService, "experts", experts)
    service = ControlPlane(ControlConfig(world_size=2), ControlMetrics())
    for _ in range(3):
        assert (await service.Experts(pb.ExpertsRequest(), None)).world_size == 2
    assert len(asked) == 1
    monkeypatch.setattr(PlacementService, "version", 7)
    await service.Experts(pb.ExpertsRequest(), None)
    assert len(asked) == 2


async def test_a_watcher_does_not_keep_its_request() -> None:
    """Unknown fields may be as large as a message, and streams last."""
    request = pb.WatchRequest(brief=True)
    held = sys.getrefcount(request)
    service = ControlPlane(ControlConfig(world_size=2), ControlMetrics())
    views = service.Watch(request, None)
    await anext(views)
    assert sys.getrefcount(request) == held
    await cast("AsyncGenerator[object, None]", views).aclose()


async def test_open_streams_keep_no_other_call_waiting() -> None:
    """Which ask where to connect to, for instance."""
    authorizer = CallAuthorizer(None, limits=CallLimits(64, 64, 2, 2))
    async with served(authorizer) as address, contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(rpc.aio_channel(address)) for _ in range(3)]
        streams = [expert_pb2_grpc.ExpertServiceStub(channel).Forward() for channel in channels[:2]]
        for number in (1, 2):
            for stream in streams:
                await stream.write(expert_pb2.ForwardRequest(id=number))
                assert (await stream.read()).id == number
            if number == 1:
                assert len(authorizer.streaming) == 2
                async with asyncio.timeout(IDLE_S / 2):
                    await leave(control_pb2_grpc.ControlPlaneStub(channels[2]), "a")
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("path", [FORWARD, TOPOLOGY])
async def test_unfinished_messages_cost_little_and_shut_nobody_out(path: str) -> None:
    """Sixty connections of one host, each with all of the largest message but its last byte."""
    size = 2 * MIB
    authorizer = CallAuthorizer(None, limits=CallLimits.of(size, 1024))
    async with served(authorizer, size) as address, rpc.aio_channel(address) as channel:
        before = resident()
        with ThreadPoolExecutor(60) as threads:
            loop = asyncio.get_running_loop()
            attacks = [loop.run_in_executor(threads, _attack, address, path, size) for _ in range(60)]
            callers = await asyncio.gather(*attacks)
        held = authorizer.streaming if path == FORWARD else authorizer.reading
        assert len(held) == held.max_per_peer == 24
        assert resident() - before < 64 * MIB
        await leave(control_pb2_grpc.ControlPlaneStub(channel), "a")
        late = expert_pb2_grpc.ExpertServiceStub(channel).Forward()
        await late.write(expert_pb2.ForwardRequest(id=7))
        assert (await late.read()).id == 7
        late.cancel()
        for caller in callers:
            await asyncio.to_thread(caller.close)


def _attack(address: str, path: str, size: int) -> Caller:
    caller = Caller(address)
    assert caller.send_part(caller.call(path), size, size - 1, IDLE_S / 2) > MIB // 32
    return caller


async def test_a_request_that_never_comes_whole_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "REQUEST_S", 0.1)
    authorizer = CallAuthorizer(None)
    async with served(authorizer) as address:
        caller = await asyncio.to_thread(Caller, address)
        stream = caller.call(TOPOLOGY)
        await asyncio.to_thread(caller.send_part, stream, 100, 99, TIMEOUT_S)
        assert await asyncio.to_thread(caller.wait_ended, stream, TIMEOUT_S)
        await asyncio.to_thread(caller.close)
        await until(lambda: (len(authorizer.calls), len(authorizer.reading)) == (0, 0))  # soon after
