"""Experts start to move, epochs end and ranks join, held at each `await` and released in every order: all ranks that
serve an epoch hold the same tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from crossdock.common.call_errors import FailedPrecondition
from crossdock.common.config import ControlConfig, PlacementConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control.group.group_state import Phase
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2
from tests.stepper import StepLoop, every_order

R, E, LAYERS = 2, 4, (1, 3)
UIDS = [f"h/{rank}" for rank in range(R)]
CONFIG = ControlConfig(world_size=R, recover_s=0.001, placement=PlacementConfig(rebalance_s=60))
Tables = tuple[int, tuple[tuple[int, ...], ...]]
"""Version, and experts by slot of each layer."""


class Group:
    """A real control plane, and two workers without a data plane."""

    def __init__(self, loop: StepLoop, metrics: ControlMetrics) -> None:
        self.loop, self.now = loop, 1.0
        self.control = ControlPlane(CONFIG, metrics, lambda: self.now)
        self.now = 2.0
        self.control.tick()

    def id(self, uid: str) -> pb.WorkerId:
        return pb.WorkerId(uid=uid, incarnation=1)

    @property
    def epoch(self) -> int:
        return self.control.group.epoch

    async def serve(self) -> None:
        """Both register and come to serve; rank 0's experts are hot, so that moving them pays."""
        for uid in UIDS:
            host = topology_pb2.HostFacts(hostname="h")
            await self.control.Register(
                pb.RegisterRequest(
                    worker=self.id(uid), host=host, local_rank=int(uid[-1]), model="m", num_experts=E, moe_layers=LAYERS
                ),
                None,
            )
        await self.publish()
        for uid in UIDS:
            await self.ready(uid, await self.fetch())
        assert self.control.group.phase is Phase.SERVING
        for rank, uid in enumerate(UIDS):
            beat = pb.HeartbeatRequest(worker=self.id(uid), epoch=self.epoch, experts=pb.ExpertReport(version=1))
            for _ in LAYERS:
                rows = [1000, 900] if rank == 0 else [1, 1]
                beat.experts.layers.add(experts=[2 * rank, 2 * rank + 1], rows=rows)
            await self.control.Heartbeat(beat, None)

    async def publish(self) -> None:
        for uid in UIDS:
            await self.control.PublishRegion(
                pb.PublishRegionRequest(worker=self.id(uid), epoch=self.epoch, region=b"r"), None
            )

    async def fetch(self) -> Tables:
        answer = await self.control.Placement(pb.PlacementRequest(epoch=self.epoch), None)
        return answer.version, tuple(tuple(layer.experts) for layer in answer.layers)

    async def ready(self, uid: str, tables: Tables) -> None:
        request = pb.ReadyRequest(worker=self.id(uid), epoch=self.epoch, placement=tables[0])
        await self.control.Ready(request, None)

    async def break_epoch(self) -> None:
        await self.control.Heartbeat(
            pb.HeartbeatRequest(worker=self.id(UIDS[0]), epoch=self.epoch, silent_ranks=[1]), None
        )


@pytest.fixture
def plan_at_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, made in a thread otherwise, are held like everything else."""

    async def to_thread(function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StepLoop)
        made = function()
        await loop.gate("plan is made")
        return made

    monkeypatch.setattr("crossdock.control.placement.placement_service.asyncio.to_thread", to_thread)


async def rejoin(group: Group, uid: str, held: dict[str, Tables]) -> None:
    """What a worker does between the epoch's table of regions and the view that the group serves."""
    await group.loop.gate(f"{uid} fetches")
    tables = await group.fetch()
    await group.loop.gate(f"{uid} gets ready")
    await group.ready(uid, tables)
    held[uid] = tables


@pytest.mark.usefixtures("plan_at_a_gate")
@pytest.mark.parametrize("unasked", [False, True], ids=["rebalance", "look"])
def test_an_epoch_that_begins_while_a_plan_is_made(unasked: bool) -> None:
    """The plan may be ready before the epoch ends, while ranks fetch the placement of the next, or when that serves."""
    metrics, ends = ControlMetrics(), set()

    async def scenario(loop: StepLoop) -> None:
        group, held = Group(loop, metrics), dict[str, Tables]()
        await group.serve()
        moving = asyncio.ensure_future(move(group))

        await loop.gate("epoch ends")
        await group.break_epoch()
        await group.publish()
        await asyncio.gather(*(rejoin(group, uid, held) for uid in UIDS))
        assert group.control.group.phase is Phase.SERVING
        assert group.epoch == 2
        assert len(set(held.values())) == 1, f"{held} in one epoch"
        ends.add(await moving)

    async def move(group: Group) -> str:
        if unasked:
            await group.loop.gate("time passes")
            for _ in range(2):
                group.now += 60.0
                for uid in UIDS:  # or their leases end
                    await group.control.Heartbeat(pb.HeartbeatRequest(worker=group.id(uid), epoch=group.epoch), None)
                group.control.tick()
            return "looked"
        await group.loop.gate("rebalance is asked for")
        try:
            return f"started: {bool((await group.control.Rebalance(pb.RebalanceRequest(), None)).moves)}"
        except FailedPrecondition as refused:
            return str(refused).partition(":")[2].partition(",")[0].strip()

    assert every_order(scenario) > 20
    assert unasked or ends >= {
        "started: True",
        "while it was computed: expected a complete serving group",
        "while it was computed: expected epoch 1",
        "expected a complete serving group",
    }, ends
