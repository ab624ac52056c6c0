"""A control plane to talk to, in this process or in one of its own, and workers that only speak the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc.aio

from crossdock.common import announce, rpc
from crossdock.common.config import ControlConfig
from crossdock.common.control_channel import SERVICE_NAME
from crossdock.common.metrics import ControlMetrics
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc, topology_pb2

TIMEOUT_S = 120.0
"""Deadline of calls, and of processes that start or end; nothing is expected to take so long."""


async def until(condition: Callable[[], bool]) -> None:
    """Return when it holds. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


_RUN = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "transformers", "ep_kernels"}:
            raise ImportError(f"{name}: the control plane must run without it")

sys.meta_path.insert(0, NoTorch())
from crossdock.common.config import ControlConfig, load
from crossdock.control.process import run_control
sys.exit(run_control(load(ControlConfig, None, sys.argv[1:])))
"""


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class InProcess:
    """A real gRPC server on this event loop, with a clock of the test's own; time passes in `wait`."""

    service: ControlPlane
    metrics: ControlMetrics
    address: str
    channel: grpc.aio.Channel
    clock: Clock
    stub: control_pb2_grpc.ControlPlaneStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = control_pb2_grpc.ControlPlaneStub(self.channel)

    async def wait(self, seconds: float, *beating: FakeWorker) -> None:
        """Let time pass in eighths of a lease, while some workers beat."""
        step_s = self.service.group.settings.lease_s / 8
        for _ in range(round(seconds / step_s)):
            self.clock.now += step_s
            for worker in beating:
                await worker.beat()
            self.service.tick()

    def sample(self, name: str, **labels: str) -> float | None:
        """One value of /metrics."""
        value: float | None = self.metrics.registry.get_sample_value(name, labels)
        return value


@contextlib.asynccontextmanager
async def in_process(config: ControlConfig) -> AsyncIterator[InProcess]:
    """Serve `config` on a free port of 127.0.0.1."""
    clock, metrics = Clock(), ControlMetrics()
    service = ControlPlane(config, metrics, clock)
    health = rpc.Health([SERVICE_NAME])
    server = await rpc.server(config.max_message_bytes, health)
    control_pb2_grpc.add_ControlPlaneServicer_to_server(service, server)
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    health.set(True)
    async with rpc.aio_channel(address) as channel:
        yield InProcess(service, metrics, address, channel, clock)
    service.stop()
    await server.stop(0)


@dataclass
class FakeWorker:
    """A member without a data plane."""

    stub: control_pb2_grpc.ControlPlaneStub
    uid: str
    incarnation: int = 1
    epoch: int = 0
    rank: int = -1
    region: bytes = b""
    ready: bool = False

    @property
    def id(self) -> pb.WorkerId:
        return pb.WorkerId(uid=self.uid, incarnation=self.incarnation)

    async def register(self, *, boot_id: str = "", **fields: Any) -> pb.RegisterResponse:
        """Register; with its memory of the group when it has one."""
        host, _, local = self.uid.partition("/")
        request = pb.RegisterRequest(
            worker=self.id,
            host=topology_pb2.HostFacts(hostname=host, boot_id=boot_id),
            local_rank=int(local or 0),
            **{
                "address": f"{host}:1",
                "http_address": f"{host}:2",
                "transport": "cpu",
                "abi": "a",
                "model": "m",
                **fields,
            },
        )
        if self.epoch:
            prior = pb.PriorMembership(epoch=self.epoch, rank=self.rank, region=self.region, ready=self.ready)
            request.prior.CopyFrom(prior)
        return await rpc.call(self.stub.Register, request, timeout_s=TIMEOUT_S, retry_s=TIMEOUT_S)

    async def publish(self, view: pb.GroupView) -> None:
        """Take rank and epoch from the view and publish a region for them."""
        self.epoch, self.ready = view.epoch, False
        self.rank = next(member.rank for member in view.members if member.worker.uid == self.uid)
        self.region = f"{self.uid} in {self.epoch}".encode()
        request = pb.PublishRegionRequest(worker=self.id, epoch=self.epoch, region=self.region)
        await rpc.call(self.stub.PublishRegion, request, timeout_s=TIMEOUT_S)

    async def get_ready(self) -> None:
        """Say that all is mapped."""
        await rpc.call(self.stub.Ready, pb.ReadyRequest(worker=self.id, epoch=self.epoch), timeout_s=TIMEOUT_S)
        self.ready = True

    async def beat(self, *silent_ranks: int, fault: str = "") -> int:
        """One heartbeat; the epoch of the control plane."""
        stats = pb.WorkerStats(tokens_total=7, num_experts=2)
        request = pb.HeartbeatRequest(
            worker=self.id, epoch=self.epoch, silent_ranks=silent_ranks, fault=fault, stats=stats
        )
        return (await rpc.call(self.stub.Heartbeat, request, timeout_s=TIMEOUT_S)).epoch

    async def leave(self) -> None:
        """Go on purpose."""
        await rpc.call(self.stub.Leave, pb.LeaveRequest(worker=self.id, reason="drained"), timeout_s=TIMEOUT_S)


async def newest_view(stub: control_pb2_grpc.ControlPlaneStub, worker: pb.WorkerId | None = None) -> pb.GroupView:
    """The view as it is now."""
    call = stub.Watch(pb.WatchRequest(worker=worker), timeout=TIMEOUT_S)
    view = await call.read()
    call.cancel()
    assert isinstance(view, pb.GroupView)
    return view


async def watch_until(call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.GroupView], state: int) -> pb.GroupView:
    """Read views until one is in `state`."""
    while True:
        view = await call.read()
        assert isinstance(view, pb.GroupView), "the stream ended without an error"
        if view.state == state:
            return view


async def form(stub: control_pb2_grpc.ControlPlaneStub, *uids: str) -> list[FakeWorker]:
    """Workers, registered and serving."""
    workers = [FakeWorker(stub, uid) for uid in uids]
    for worker in workers:
        await worker.register()
    await exchange(stub, workers)
    return workers


async def exchange(stub: control_pb2_grpc.ControlPlaneStub, workers: list[FakeWorker]) -> None:
    """All publish, all get ready."""
    view = await newest_view(stub)
    for worker in workers:
        await worker.publish(view)
    for worker in workers:
        await worker.get_ready()


class ControlProcess:
    """`run_control` in a process of its own in which torch cannot be imported."""

    def __init__(self, *overrides: str) -> None:
        self._overrides = overrides
        self.start(f"127.0.0.1:{lasting_port()}")

    def start(self, listen: str) -> None:
        """Start on an address and wait until it listens."""
        self._process = spawn(f"listen={listen}", *self._overrides)
        try:
            self.addresses = wait_announced(self._process)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT_S)

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; exit status and stderr."""
        self._process.send_signal(signal.SIGTERM)
        _, errors = self._process.communicate(timeout=TIMEOUT_S)
        return self._process.returncode, errors

    def __enter__(self) -> ControlProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.kill()


_HELD: list[socket.socket] = []


def lasting_port() -> int:
    """A port that is nobody else's until this process ends, not even while a killed process is away.

    A socket is bound to it that never listens: who connects is refused. SO_REUSEADDR, which servers set too, lets them
    listen there.
    """
    held = socket.socket()
    _HELD.append(held)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    return port


def spawn(*overrides: str, enter: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a control plane, by a command that begins with `enter`; http on a free port unless the overrides say
    otherwise."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [*enter, sys.executable, "-c", _RUN, "http_listen=127.0.0.1:0", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PATH": "/usr/bin:/bin"},
    )


def wait_announced(process: subprocess.Popen[str]) -> announce.Addresses:
    """Wait for the line that says where it listens."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    line = process.stdout.readline() if ready else ""
    addresses = announce.parse(line)
    if addresses is None:
        process.kill()
        raise AssertionError(f"expected the ready line, got {line!r}: {process.communicate(timeout=TIMEOUT_S)[1]}")
    return addresses


@contextlib.contextmanager
def unused_address() -> Iterator[str]:
    """host:port at which nobody listens and nobody will: who connects is refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextlib.contextmanager
def occupied_port() -> Iterator[str]:
    """host:port on which somebody else listens and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
