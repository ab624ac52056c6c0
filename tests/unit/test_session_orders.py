"""Two real workers' sessions and a real control plane, without wires, threads and a data plane. One worker is held when
it is answered a placement, before it loads, publishes, says that it is ready and takes its first step; a plan is held
while it is made, and epochs end; all of it goes on in every order."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from crossdock.common.call_errors import FailedPrecondition
from crossdock.common.config import ControlConfig, PlacementConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control.group.group_state import Phase
from crossdock.control.placement.rebalance import Rebalance, Snapshot
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2
from crossdock.worker.experts.expert_tables import ExpertTables
from crossdock.worker.experts.placement import Placement
from crossdock.worker.group.control_client import ControlPlaneClient
from crossdock.worker.group.expert_mover import ExpertMover
from crossdock.worker.group.session import Session
from crossdock.worker.steps.work import Fault
from tests.stepper import StepLoop, every_order

R, E, LAYERS = 2, 4, (1,)
HELD = "h/0"
"""The worker that is held; the other one is never late."""
Gate = Callable[[str], Any]


class Calls:
    """In the place of a stub: calls reach the control plane at once."""

    def __init__(self, control: ControlPlane, gate: Gate) -> None:
        self._control, self._gate = control, gate

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any, **_: object) -> Any:
            if method == "Ready":
                await self._gate("ready")
            answer = await getattr(self._control, method)(request, None)
            if method == "Placement":
                await self._gate("answered")
            return answer

        return call

    def Watch(self, request: pb.WatchRequest, **_: object) -> Any:  # noqa: N802
        return Views(self._control.Watch(request, None))


class Views:
    """A stream of views, as messages."""

    def __init__(self, source: AsyncIterator[pb.GroupView | bytes]) -> None:
        self._source = source

    async def __aiter__(self) -> AsyncIterator[pb.GroupView]:
        async for view in self._source:
            yield pb.GroupView.FromString(view) if isinstance(view, bytes) else view

    def cancel(self) -> None:
        """The test ends with its streams."""


class Node:
    """A worker: the real client, mover and session, around a model, an engine and a communicator that only note."""

    def __init__(self, uid: str, world: World) -> None:
        self.uid, self._world = uid, world
        registration = pb.RegisterRequest(
            worker=pb.WorkerId(uid=uid, incarnation=1), host=topology_pb2.HostFacts(hostname="h"),
            local_rank=int(uid[-1]), model="m", num_experts=E, moe_layers=LAYERS,
        )  # fmt: skip
        spec = SimpleNamespace(num_experts=E, moe_layers=LAYERS, fingerprint="f")
        self.client = ControlPlaneClient("127.0.0.1:1", registration, pb.WorkerStats, experts=self._report)
        stub: Any = Calls(world.control, self.gate)
        self.client._stub = stub
        model: Any = SimpleNamespace(node=self, spec=spec, num_bytes=0, load=self.load, connect=self.connect)
        model.sum, model.is_read, model.read_all = Mock(return_value=7), Mock(return_value=False), Mock()
        model.read_all.return_value = [7] * R, 9
        self.mover = ExpertMover(self.client, model, Mock(), Mock(take_rows=dict))
        engine: Any = Mock(run=self.step)
        self.session = Session(self.client, model, engine, Mock(), Mock(), self.mover)
        self.comm = Mock()
        self.loaded: Placement | None = None

    def _report(self) -> pb.ExpertReport | None:
        return self.mover.report()

    async def gate(self, name: str) -> None:
        if self.uid == HELD:
            await self._world.loop.gate(f"{self.uid} {name}")

    async def load(self, placement: Placement, rank: int, progress: object) -> Any:
        await self.gate("loads")
        self.loaded = placement
        return SimpleNamespace(ids={layer: placement.of_rank(layer, rank) for layer in LAYERS})

    async def connect(self, group: Any, num_slots: int) -> Any:
        await self.gate("connects")
        await group._gather(b"region of " + self.uid.encode())
        self.comm, ended = Mock(), asyncio.Event()
        self.comm.ended, self.comm.abort = ended, lambda reason: ended.set()
        return self.comm

    async def step(self, comm: Any, experts: Any, epoch: int, tables: ExpertTables) -> Fault:
        """The engine: steps until the communicator is aborted."""
        await self.gate("steps")
        assert self.loaded is not None
        self._world.serves(self.uid, epoch, (self.loaded.version, self.loaded.layers[1], experts.ids[1]))
        await comm.ended.wait()
        return Fault("aborted")


class World:
    """Everything, and which tables each worker served with."""

    def __init__(self, loop: StepLoop, metrics: ControlMetrics) -> None:
        self.loop = loop
        config = ControlConfig(world_size=R, recover_s=0.001, placement=PlacementConfig())
        self.control = ControlPlane(config, metrics, loop.time)
        self.served: dict[int, dict[str, tuple[Any, ...]]] = {}
        self.news = asyncio.Condition()
        self.nodes = [Node(f"h/{rank}", self) for rank in range(R)]

    def serves(self, uid: str, epoch: int, tables: tuple[Any, ...]) -> None:
        self.served.setdefault(epoch, {})[uid] = tables
        self.loop.create_task(self._tell())

    async def _tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    def all_serve(self) -> bool:
        group = self.control.group
        return group.phase is Phase.SERVING and len(self.served.get(group.epoch, {})) == R

    async def until_all_serve(self) -> None:
        async with self.news:
            await self.news.wait_for(self.all_serve)

    async def break_epoch(self) -> None:
        """The worker that is not held finds something broken."""
        await self.loop.gate("epoch ends")
        worker = pb.WorkerId(uid="h/1", incarnation=1)
        await self.control.Heartbeat(
            pb.HeartbeatRequest(worker=worker, epoch=self.control.group.epoch, fault="broken"), None
        )

    async def rebalance(self) -> None:
        await self.loop.gate("rebalance is asked for")
        try:
            await self.control.Rebalance(pb.RebalanceRequest(), None)
        except FailedPrecondition:
            return


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_thread(name: str, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        if name == "mover":
            return asyncio.ensure_future(asyncio.sleep(0))  # nothing is read here
        made = function(*args)
        return asyncio.ensure_future(made if inspect.isawaitable(made) else asyncio.sleep(0, made))

    async def to_thread(function: Any) -> Rebalance:
        snapshot: Snapshot = function.__self__
        await asyncio.get_running_loop().gate("plan is made")  # type: ignore[attr-defined]
        turned = tuple(table[::-1] for table in snapshot.tables)
        return Rebalance(snapshot.version, snapshot.tables, turned, 2.0, 1.0, moves=E)

    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # hundreds of lives are not worth reading
    monkeypatch.setattr("crossdock.worker.group.session.in_thread", in_thread)
    monkeypatch.setattr("crossdock.worker.group.expert_mover.in_thread", in_thread)
    monkeypatch.setattr("crossdock.worker.group.session.in_thread", in_thread)
    monkeypatch.setattr("crossdock.control.placement.placement_service.asyncio.to_thread", to_thread)
    monkeypatch.setattr(
        "crossdock.worker.group.control_client.ControlPlaneChannel",
        lambda target, security: Mock(has_several_targets=False),
    )
    monkeypatch.setattr("crossdock.worker.group.control_client.control_pb2_grpc.ControlPlaneStub", lambda channel: None)


def test_a_worker_is_held_anywhere_while_experts_move_and_an_epoch_ends() -> None:
    metrics, versions = ControlMetrics(), set()

    async def scenario(loop: StepLoop) -> None:
        world = World(loop, metrics)
        for node in world.nodes:
            node.client.start()
        lives = [asyncio.ensure_future(node.session.run()) for node in world.nodes]
        disturbed = [asyncio.ensure_future(world.break_epoch()), asyncio.ensure_future(world.rebalance())]
        await asyncio.gather(*disturbed)
        await world.until_all_serve()
        for epoch, tables in world.served.items():
            assert len({held[:2] for held in tables.values()}) == 1, f"epoch {epoch}: {tables}"
        for uid, (_, row, held) in world.served[world.control.group.epoch].items():
            rank = int(uid[-1])
            assert held == row[2 * rank : 2 * rank + 2], "what was loaded is what was fetched"
        assert not any(life.done() for life in lives)
        versions.add(max(version for tables in world.served.values() for version, *_ in tables.values()))

    assert every_order(scenario) > 90
    assert len(versions) > 1, "in some orders the experts moved before the epoch ended"
