"""Several ranks of an elastic group lost at once, and several that come back in one epoch, against a real server with a
clock of the test's own: how many epochs that costs, who goes on, and who is taken in when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from crossdock.common import rpc
from crossdock.common.config import ControlConfig
from crossdock.protocol.v1 import control_pb2 as pb
from tests.services.control_world import TIMEOUT_S, FakeWorker, InProcess, form, in_process, newest_view

SIZE = 6


@pytest.fixture
async def control() -> AsyncIterator[InProcess]:
    config = ControlConfig(world_size=SIZE, recover_s=0.01, elastic=True)
    async with in_process(config) as made:
        made.clock.now += 1.0
        made.service.tick()
        yield made


async def _serving(control: InProcess) -> list[FakeWorker]:
    return await form(control.stub, *(f"a/{local}" for local in range(SIZE)))


async def _go_on(control: InProcess, survivors: Sequence[FakeWorker]) -> pb.GroupView:
    """The survivors are told to go on, and do."""
    view = await newest_view(control.stub)
    for worker in survivors:
        worker.epoch = view.epoch
        await worker.get_ready()
    return await newest_view(control.stub)


async def _load(control: InProcess, worker: FakeWorker) -> None:
    """A successor says that it holds its experts."""
    request = pb.HeartbeatRequest(worker=worker.id, loaded=True)
    await rpc.call(control.stub.Heartbeat, request, timeout_s=TIMEOUT_S)


async def _come_back(control: InProcess, *gone: FakeWorker) -> list[FakeWorker]:
    """Successors in the places of those: registered, not loaded."""
    successors = [FakeWorker(control.stub, worker.uid, incarnation=2) for worker in gone]
    for worker in successors:
        await worker.register()
    return successors


async def _meet(control: InProcess, workers: Sequence[FakeWorker]) -> pb.GroupView:
    """All exchange regions in the newest epoch."""
    view = await newest_view(control.stub)
    for worker in workers:
        await worker.publish(view)
    for worker in workers:
        await worker.get_ready()
    return await newest_view(control.stub)


async def test_three_whose_leases_end_at_once_cost_one_epoch_and_so_does_their_return(control: InProcess) -> None:
    workers = await _serving(control)
    first = (await newest_view(control.stub)).epoch
    left, gone = [workers[0], workers[2], workers[5]], [workers[1], workers[3], workers[4]]
    await control.wait(1.5 * control.service.group.settings.lease_s, *left)
    view = await newest_view(control.stub)
    assert (view.epoch, list(view.active_ranks), list(view.lost_ranks)) == (first + 1, [0, 2, 5], [1, 3, 4])
    view = await _go_on(control, left)
    assert (view.epoch, view.state) == (first + 1, pb.SERVING)
    successors = await _come_back(control, *gone)
    for worker in successors[:2]:
        await _load(control, worker)
    view = await newest_view(control.stub)
    assert (view.epoch, view.state, list(view.active_ranks)) == (first + 1, pb.SERVING, [0, 2, 5]), "one still loads"
    await _load(control, successors[2])
    view = await newest_view(control.stub)
    assert (view.epoch, view.state, list(view.active_ranks)) == (first + 2, pb.EXCHANGING, [])
    everybody = [*left, *successors]
    view = await _meet(control, everybody)
    assert (view.epoch, view.state, len(view.members)) == (first + 2, pb.SERVING, SIZE)
    assert {worker.uid: worker.rank for worker in everybody} == {f"a/{local}": local for local in range(SIZE)}


async def test_many_reports_of_the_same_losses_cost_one_epoch_each_loss_at_most(control: InProcess) -> None:
    workers = await _serving(control)
    first = (await newest_view(control.stub)).epoch
    for reporter in workers[2:]:
        await reporter.beat(0, 1)
    view = await newest_view(control.stub)
    assert (view.epoch, list(view.active_ranks)) == (first + 1, [2, 3, 4, 5]), "the later reports are old news"
    await control.wait(1.5 * control.service.group.settings.lease_s, *workers[2:])
    view = await newest_view(control.stub)
    assert (view.epoch, list(view.lost_ranks)) == (first + 1, [0, 1]), "that their leases end, too, costs nothing"


async def test_another_loss_before_the_survivors_have_met_leaves_the_others(control: InProcess) -> None:
    workers = await _serving(control)
    first = (await newest_view(control.stub)).epoch
    await workers[0].leave()
    await workers[1].leave()
    view = await newest_view(control.stub)
    assert (view.epoch, view.state, list(view.active_ranks)) == (first + 2, pb.EXCHANGING, [2, 3, 4, 5])
    view = await _go_on(control, workers[2:])
    assert (view.epoch, view.state) == (first + 2, pb.SERVING)


async def test_a_loss_while_successors_load_does_not_let_them_in(control: InProcess) -> None:
    workers = await _serving(control)
    first = (await newest_view(control.stub)).epoch
    for worker in workers[:2]:
        await worker.leave()
    await _go_on(control, workers[2:])
    successors = await _come_back(control, *workers[:2])
    await _load(control, successors[0])
    await workers[5].leave()
    await _load(control, successors[1])
    view = await _go_on(control, workers[2:5])
    assert (view.epoch, view.state, list(view.active_ranks)) == (first + 3, pb.SERVING, [2, 3, 4])
    (last,) = await _come_back(control, workers[5])
    assert (await newest_view(control.stub)).epoch == first + 3
    await _load(control, last)
    view = await newest_view(control.stub)
    assert view.epoch == first + 3 + 1, "all three in one epoch"
    view = await _meet(control, [*successors, *workers[2:5], last])
    assert (view.state, len(view.members), list(view.active_ranks)) == (pb.SERVING, SIZE, [])


async def test_all_but_one_lost_at_once(control: InProcess) -> None:
    workers = await _serving(control)
    first = (await newest_view(control.stub)).epoch
    await control.wait(1.5 * control.service.group.settings.lease_s, workers[3])
    view = await _go_on(control, workers[3:4])
    assert (view.epoch, view.state, list(view.active_ranks)) == (first + 1, pb.SERVING, [3])
    successors = await _come_back(control, *workers[:3], *workers[4:])
    for worker in successors:
        await _load(control, worker)
    view = await _meet(control, [workers[3], *successors])
    assert (view.epoch, view.state, list(view.active_ranks)) == (first + 2, pb.SERVING, [])
