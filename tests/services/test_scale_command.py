"""`crossdock scale` against the real service: refusals, what it waits for, which placements workers prepare for. And
the supervisor that follows the number, without processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from crossdock.common import rpc
from crossdock.common.call_errors import FailedPrecondition, InvalidArgument
from crossdock.common.config import ControlConfig, PlacementConfig, WorkerConfig
from crossdock.host.child import Child
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1 import control_pb2 as pb
from tests.services.control_world import TIMEOUT_S, FakeWorker, InProcess, exchange, form, in_process, newest_view
from tests.services.test_cordon import command, over

CONFIG = ControlConfig(world_size=2, min_workers=2, max_workers=4, recover_s=0.01)


async def scale(control: InProcess, workers: int) -> pb.ScaleResponse:
    answer: pb.ScaleResponse = await rpc.call(control.stub.Scale, pb.ScaleRequest(workers=workers), timeout_s=TIMEOUT_S)
    return answer


async def say(control: InProcess, worker: FakeWorker, **fields: object) -> None:
    """A heartbeat of a worker that has loaded, or cannot."""
    request = pb.HeartbeatRequest(worker=worker.id, epoch=worker.epoch, **fields)  # type: ignore[arg-type]
    await rpc.call(control.stub.Heartbeat, request, timeout_s=TIMEOUT_S)


async def test_the_command_waits_until_so_many_serve_and_says_what_for() -> None:
    async with in_process(CONFIG) as control, asyncio.timeout(TIMEOUT_S):
        over(control)
        members = await form(control.stub, "a/0", "a/1")
        running = asyncio.create_task(command(control, "scale", "--workers", "3"))
        while not (await newest_view(control.stub)).scaling:
            await asyncio.sleep(0.01)
        assert (await newest_view(control.stub)).scaling == "scaling from 2 to 3 workers: 2 of 3 are here"
        third = FakeWorker(control.stub, "a/2")
        await third.register()
        for worker in (*members, third):
            await say(control, worker, loaded=True)
        await exchange(control.stub, [*members, third])
        done = await running
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "epoch 2: 3 workers"
        assert control.sample("crossdock_world_size") == control.sample("crossdock_wanted_workers") == 3
        late = await command(control, "scale", "--workers", "4", "--wait", "0", "--json")
        assert (late.returncode, json.loads(late.stdout)["wanted"]) == (1, 4)


async def test_numbers_that_cannot_be_are_refused_before_anything_changes() -> None:
    placement = PlacementConfig(redundant_experts=12)
    async with in_process(ControlConfig(world_size=4, max_workers=6, recover_s=0.01, placement=placement)) as control:
        over(control)
        with pytest.raises(FailedPrecondition, match="expected a group that has formed"):
            await scale(control, 5)
        workers = [FakeWorker(control.stub, f"a/{local}") for local in range(4)]
        for worker in workers:
            await worker.register(num_experts=8, moe_layers=[0])
        await exchange(control.stub, workers)
        for number, words in ((7, r"workers: expected 1\.\.6, got 7"), (0, r"workers: expected 1\.\.6, got 0")):
            with pytest.raises(InvalidArgument, match=words):
                await scale(control, number)
        with pytest.raises(InvalidArgument, match=r"expected at most 8, E \* \(R - 1\), got 12, R = 2"):
            await scale(control, 2)
        assert (await newest_view(control.stub)).wanted.workers == 4
        assert (await scale(control, 3)).workers == 3


async def test_workers_prepare_for_one_placement_and_say_so_by_its_version() -> None:
    """A version of another one, or none, does not count; who cannot load says why, and who leaves is told."""
    async with in_process(ControlConfig(world_size=3, recover_s=0.01)) as control:
        over(control)
        workers = [FakeWorker(control.stub, f"a/{local}") for local in range(3)]
        for worker in workers:
            await worker.register(num_experts=6, moe_layers=[0])
        await exchange(control.stub, workers)
        before = (await newest_view(control.stub)).placement
        await scale(control, 2)
        view = await newest_view(control.stub)
        assert view.next_placement == before + 1

        async def planned(worker: FakeWorker) -> pb.PlacementResponse:
            request = pb.PlacementRequest(epoch=view.epoch, next_of=worker.id)
            answer: pb.PlacementResponse = await rpc.call(control.stub.Placement, request, timeout_s=TIMEOUT_S)
            return answer

        first, second, third = [await planned(worker) for worker in workers]
        assert [(one.rank, one.world_size, len(one.layers)) for one in (first, second, third)] == [
            (0, 2, 1), (1, 2, 1), (0, 2, 0),
        ]  # fmt: skip
        assert sorted(first.layers[0].experts) == list(range(6))
        await say(control, workers[0], loaded=True, prepared=view.next_placement)
        await say(control, workers[1], loaded=True, prepared=before)
        await say(control, workers[1], unprepared="no room for 3 experts")
        control.service.tick()
        assert "1 of 2 have loaded their experts; a/1: no room" in (await newest_view(control.stub)).scaling
        with pytest.raises(FailedPrecondition, match="scaling from 3 to 2"):
            await rpc.call(control.stub.Rebalance, pb.RebalanceRequest(), timeout_s=TIMEOUT_S)
        await say(control, workers[1], loaded=True, prepared=view.next_placement)
        view = await newest_view(control.stub)
        assert (view.state, view.world_size, view.placement) == (pb.EXCHANGING, 2, before + 1)
        assert control.sample("crossdock_members_lost_total", cause="scaled") == 1


def test_a_supervisor_starts_and_ends_workers_as_the_group_is_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Child, "start", lambda child: said.append(f"start {child.name}"))
    monkeypatch.setattr(Child, "terminate", lambda child: said.append(f"end {child.name}"))
    workers = [WorkerConfig(model="m", local_rank=rank, uid=f"w/{rank}") for rank in range(4)]
    host = Supervisor(ControlConfig(world_size=2, max_workers=4), workers, tmp_path, num_workers=2)

    def view(size: int, wanted: int, *inside: int, state: int = pb.SERVING) -> pb.GroupView:
        members = [pb.Member(rank=i, worker=pb.WorkerId(uid=f"w/{rank}")) for i, rank in enumerate(inside)]
        return pb.GroupView(
            epoch=1,
            state=state,
            world_size=size,
            members=members,
            wanted=pb.Wanted(workers=wanted),  # type: ignore[arg-type]
        )

    host.follow(view(2, 4, 0, 1))
    host.follow(view(2, 4, 0, 1))
    assert said == ["start worker-2", "start worker-3"]
    assert host.names == ["control", "worker-0", "worker-1"], "those that are to come need not be ready"
    host.follow(view(4, 4, 0, 1, 2, 3))
    assert host.names[-2:] == ["worker-2", "worker-3"]
    said.clear()
    host.follow(view(4, 3, 0, 1, 2, 3))
    host.follow(view(3, 3, 0, 3, 1, state=pb.EXCHANGING))
    assert not said, "all still serve, or do not yet without it"
    host.follow(view(3, 3, 0, 3, 1))
    assert said == ["end worker-2"], "whichever the group left out"
    host.check()
    host.follow(view(3, 4, 0, 3, 1))
    assert said == ["end worker-2", "start worker-2"]


async def test_who_has_served_is_named_to_who_loads() -> None:
    """With the address that it registered; not who comes, not who gives nothing, and not a process that is gone."""
    fields = {"num_experts": 4, "moe_layers": [0]}
    place = pb.Holder(port=9, socket="s", host="h", address="elsewhere:1")
    async with in_process(CONFIG) as control, asyncio.timeout(TIMEOUT_S):
        workers = [FakeWorker(control.stub, f"a/{number}") for number in range(3)]
        await workers[0].register(**fields, holder=place)
        await workers[1].register(**fields)
        view = await newest_view(control.stub)

        async def named(epoch: int, **of: object) -> list[pb.Holder]:
            request = pb.PlacementRequest(epoch=epoch, **of)  # type: ignore[arg-type]
            answer = await rpc.call(control.stub.Placement, request, timeout_s=TIMEOUT_S)
            return list(answer.holders)

        assert await named(view.epoch) == [], "nobody has served"
        await exchange(control.stub, workers[:2])
        served = [pb.Holder(port=9, socket="s", host="h", address="a:1")]
        assert await named(view.epoch) == served
        await scale(control, 3)
        await workers[2].register(**fields, holder=place)
        assert await named(view.epoch, next_of=workers[2].id) == served
        await FakeWorker(control.stub, "a/0", incarnation=2).register(**fields, holder=place)
        assert await named((await newest_view(control.stub)).epoch) == [], "its successor holds nothing yet"


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (pb.Holder(port=1 << 16), "holder.port: expected <= 65535"),
        (pb.Holder(socket="x" * 300), "holder.socket: expected at most"),
        (pb.Holder(host="a\nb"), "holder.host: expected printable"),
    ],
)
async def test_a_place_that_is_none_is_refused(holder: pb.Holder, words: str) -> None:
    async with in_process(CONFIG) as control:
        with pytest.raises(InvalidArgument, match=words):
            await FakeWorker(control.stub, "a/0").register(holder=holder)
