"""What the control plane keeps of its members' experts and statistics: real gRPC, workers without a data plane."""

from __future__ import annotations

import math

import pytest

from crossdock.common import rpc
from crossdock.common.call_errors import InvalidArgument
from crossdock.common.config import ControlConfig, PlacementConfig
from crossdock.protocol.v1 import control_pb2 as pb
from tests.services.control_world import TIMEOUT_S, FakeWorker, InProcess, exchange, in_process, newest_view

EXPERTS = {"num_experts": 4, "moe_layers": [1, 3]}


async def _formed(control: InProcess, *uids: str) -> list[FakeWorker]:
    workers = [FakeWorker(control.stub, uid) for uid in uids]
    for worker in workers:
        await worker.register(**EXPERTS)
    await exchange(control.stub, workers)
    return workers


async def _placement(control: InProcess) -> pb.PlacementResponse:
    epoch = (await newest_view(control.stub)).epoch
    answer: pb.PlacementResponse = await control.stub.Placement(pb.PlacementRequest(epoch=epoch), timeout=TIMEOUT_S)
    return answer


async def test_workers_that_are_all_started_again_have_the_checkpoint_of_their_config() -> None:
    """Perhaps of another model: they would serve its weights, or could never load them."""
    async with in_process(ControlConfig(world_size=2, recover_s=0.01)) as control:
        control.clock.now += 1.0
        control.service.tick()
        workers = await _formed(control, "a/0", "a/1")
        await control.stub.Load(pb.LoadRequest(path="/models/new", fingerprint="beef"), timeout=TIMEOUT_S)
        for worker in workers:
            await worker.leave()
        await _formed(control, "a/0", "a/1")
        answer = await _placement(control)
        assert [layer.checkpoint for layer in answer.layers] == [0, 0]
        assert (answer.checkpoints.settled, answer.checkpoints.wanted) == (0, 0)


async def test_an_elastic_group_that_lost_a_rank_and_its_control_plane_keeps_slots_for_it() -> None:
    config = ControlConfig(
        world_size=3, recover_s=1.0, elastic=True, placement=PlacementConfig(redundant_experts=5, min_copies=2)
    )
    async with in_process(config) as control:
        for rank in (0, 1):
            worker = FakeWorker(control.stub, f"a/{rank}", epoch=7, rank=rank, region=b"r", ready=True)
            await worker.register(**EXPERTS)
        await control.wait(1.5, worker)
        view = await newest_view(control.stub)
        assert (view.state, list(view.active_ranks)) == (pb.EXCHANGING, [0, 1])
        rows = [list(layer.experts) for layer in (await _placement(control)).layers]
        assert all(len(set(row[first : first + 3])) == 3 for row in rows for first in (0, 3, 6)), rows


@pytest.mark.parametrize(
    "stats",
    [
        pb.WorkerStats(models=[pb.HeldModel(fingerprint="\x1b]0;owned\x07", layers=1)]),
        pb.WorkerStats(models=[pb.HeldModel(layers=1)] * 1000),
        pb.WorkerStats(tokens_per_s=math.nan),
    ],
    ids=["escapes", "many", "nan"],
)
async def test_statistics_that_views_cannot_show_are_refused(stats: pb.WorkerStats) -> None:
    async with in_process(ControlConfig(world_size=1, recover_s=0.01)) as control:
        worker = FakeWorker(control.stub, "a/0")
        await worker.register()
        request = pb.HeartbeatRequest(worker=worker.id, stats=stats)
        with pytest.raises(InvalidArgument, match=r"stats\."):
            await rpc.call(control.stub.Heartbeat, request, timeout_s=TIMEOUT_S)
        assert not (await newest_view(control.stub)).members[0].stats.models
