"""Epochs and placement versions that a worker names: believed as far as a real group can have come, and no further. One
wrong number must not bring a group, or the control planes after this one, to where every right one is refused."""

from __future__ import annotations

import pytest

from crossdock.common.call_errors import InvalidArgument
from crossdock.common.config import ControlConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control.group.group_state import Phase
from crossdock.control.group.recovery import MAX_LEAP
from crossdock.control.placement import views
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2

NOW_S = 1.8e9
UIDS = ("h/0", "h/1")
FAR = [1 << 62, (1 << 64) - 1, 1 << 40, 1 << 22]


@pytest.fixture(autouse=True)
def clock_and_leap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every control plane makes the greatest leap."""
    monkeypatch.setattr("crossdock.control.server.server.time.time", lambda: NOW_S)
    monkeypatch.setattr("crossdock.control.server.server.secrets.randbelow", lambda bound: bound - 1)


class Plane:
    """A control plane whose recovery has ended, and what its two workers say."""

    def __init__(self) -> None:
        self.now = 1.0
        self.control = ControlPlane(ControlConfig(world_size=2, recover_s=5.0), ControlMetrics(), lambda: self.now)

    @property
    def epoch(self) -> int:
        return self.control.group.epoch

    async def register(self, uid: str, epoch: int = 0) -> None:
        request = pb.RegisterRequest(
            worker=pb.WorkerId(uid=uid, incarnation=1), host=topology_pb2.HostFacts(hostname="h"), num_experts=4,
            moe_layers=[1], local_rank=int(uid[-1]),
        )  # fmt: skip
        if epoch:
            request.prior.CopyFrom(pb.PriorMembership(epoch=epoch, rank=int(uid[-1]), region=b"r", ready=True))
        await self.control.Register(request, None)

    async def serve(self) -> None:
        for uid in UIDS:
            worker = pb.WorkerId(uid=uid, incarnation=1)
            await self.control.PublishRegion(
                pb.PublishRegionRequest(worker=worker, epoch=self.epoch, region=b"r"), None
            )
        for uid in UIDS:
            worker = pb.WorkerId(uid=uid, incarnation=1)
            await self.control.Ready(pb.ReadyRequest(worker=worker, epoch=self.epoch, placement=1), None)
        assert self.control.group.phase is Phase.SERVING

    async def recover(self) -> None:
        """Let the recovery end, while both workers beat."""
        for _ in range(11):
            self.now += 0.5
            for uid in UIDS:
                await self.beat(uid, self.epoch)
            self.control.tick()

    async def beat(self, uid: str, epoch: int, version: int = 0) -> None:
        request = pb.HeartbeatRequest(worker=pb.WorkerId(uid=uid, incarnation=1), epoch=epoch)
        if version:
            request.experts.version = version
            request.experts.layers.add(experts=[0, 1])
        await self.control.Heartbeat(request, None)


async def serving() -> Plane:
    plane = Plane()
    for uid in UIDS:
        await plane.register(uid)
    await plane.serve()
    return plane


@pytest.mark.parametrize("far", FAR)
async def test_a_far_epoch_changes_nothing(far: int) -> None:
    plane = await serving()
    before = plane.control.group
    with pytest.raises(InvalidArgument, match=rf"^epoch: expected 0\.\.{1 + (1 << 20)}, got {far}$"):
        await plane.beat("h/0", far)
    with pytest.raises(InvalidArgument, match=rf"^prior\.epoch: expected 1\.\.{1 + (1 << 20)}, got {far}$"):
        await plane.register("h/2", far)
    assert plane.control.group == before
    for uid in UIDS:
        await plane.beat(uid, plane.epoch)


async def test_a_worker_may_be_ahead_of_a_control_plane_that_missed_some_epochs() -> None:
    plane = await serving()
    await plane.beat("h/0", plane.epoch + 1000)
    assert plane.epoch == 1002 + MAX_LEAP


@pytest.mark.parametrize("epoch", [1, 70_000, 3 << 20, 1 << 33])
async def test_a_new_control_plane_believes_what_a_long_life_has_counted(epoch: int) -> None:
    plane = Plane()
    for uid in UIDS:
        await plane.register(uid, epoch)
    assert (plane.control.group.phase, plane.epoch) == (Phase.SERVING, epoch)


async def test_nor_does_it_need_a_report_in_time() -> None:
    """All workers come after the recovery has ended."""
    plane = Plane()
    for _ in range(11):
        plane.now += 0.5
        plane.control.tick()
    assert plane.epoch == 1
    for uid in UIDS:
        await plane.register(uid, 3 << 20)
    await plane.serve()
    assert plane.epoch == (3 << 20) + 1 + MAX_LEAP


async def test_the_worst_number_that_is_believed_is_believed_by_the_next_control_plane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worst, plane = int(NOW_S * 1e3), Plane()
    with pytest.raises(InvalidArgument, match=f"expected 1..{worst}, got {worst + 1}"):
        await plane.register("h/0", worst + 1)
    await plane.register("h/0", worst)
    await plane.register("h/1")
    await plane.recover()
    assert plane.epoch == worst + 1 + MAX_LEAP
    await plane.serve()
    for uid in UIDS:
        await plane.beat(uid, plane.epoch)
    monkeypatch.setattr("crossdock.control.server.server.time.time", lambda: NOW_S + 1.0)
    successor = Plane()
    for uid in UIDS:
        await successor.register(uid, plane.epoch)
    assert (successor.control.group.phase, successor.epoch) == (Phase.SERVING, plane.epoch)


async def test_a_worker_that_repeats_the_number_of_the_group_causes_one_leap_at_most() -> None:
    plane = await serving()
    for number in range(20):
        worker = pb.WorkerId(uid="h/1", incarnation=1)
        await plane.control.Leave(pb.LeaveRequest(worker=worker), None)
        await plane.register("h/1", plane.epoch)
        assert plane.epoch <= 1 + MAX_LEAP + 2 * (number + 1)


@pytest.mark.parametrize("far", FAR)
async def test_a_far_version_of_the_placement_changes_nothing(far: int) -> None:
    """A version is a part of a 64-bit word of the data plane."""
    plane = await serving()
    with pytest.raises(InvalidArgument, match=rf"^experts\.version: expected <= {1 + (1 << 20)}, got {far}$"):
        await plane.beat("h/0", plane.epoch, version=far)
    await plane.beat("h/0", plane.epoch, version=1)


def test_a_clock_that_was_never_set_refuses_no_real_number() -> None:
    assert views.greatest(None, 0.0) == 1 << 40
    assert views.greatest(1 << 41, 0.0) == 1 << 41, "nor the group's own"
