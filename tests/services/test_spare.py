"""A spare worker waits beside a full group and takes the place of one that is lost: real processes, right answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from crossdock.common.config import ControlConfig
from crossdock.common.control_channel import ask_leader
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView, ScaleRequest
from crossdock.worker.group.control_client import ControlPlaneClient
from tests.chaos.load import Load
from tests.services.cluster import ANSWER_S, TEST_S, Batch, Cluster, check, cluster
from tests.services.control_world import TIMEOUT_S, form, in_process
from tests.services.replicas import wait

pytestmark = pytest.mark.timeout(TEST_S)


@pytest.fixture(scope="module", params=[False, True], ids=["waits for the lost", "elastic"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks and a spare. Leases are short: nobody asks an idle group, so only they tell who is gone."""
    folder = tmp_path_factory.mktemp("spare")
    yield from cluster(folder, num_workers=2, spares=1, lease_s=5.0, elastic=request.param, max_tokens_per_step=64)


def uids(view: GroupView) -> dict[int, str]:
    return {member.rank: member.worker.uid for member in view.members}


def why_not_ready(group: Cluster, place: int) -> str:
    """What a worker of the supervisor's says on /readyz; empty: it is ready, or does not listen yet."""
    listens = group.supervisor.addresses().get(f"worker-{place}")
    if listens is None:
        return ""
    try:
        with build_opener(ProxyHandler({})).open(f"http://{listens.http_address}/readyz", timeout=ANSWER_S):
            return ""
    except HTTPError as error:
        return error.read().decode()


def waits(group: Cluster, place: int) -> bool:
    return "all 2 slots have live members" in why_not_ready(group, place)


async def test_a_spare_is_heard_of_and_asks_until_there_is_a_place() -> None:
    """It is not given up after a while as one is that finds no control plane."""
    async with in_process(ControlConfig(world_size=1, recover_s=0.01)) as control:
        control.clock.now += 1.0
        control.service.tick()
        (member,) = await form(control.stub, "w0")
        registration = pb.RegisterRequest(
            worker=pb.WorkerId(uid="w1", incarnation=1), transport="cpu", abi="a", model="m", address="h:1"
        )
        client = ControlPlaneClient(control.address, registration, pb.WorkerStats)
        client.start()
        async with asyncio.timeout(TIMEOUT_S):
            await client.wait_first_answer()
            assert (client.spare, client.registered) == (True, False)
            assert client.trouble == "worker w1: all 1 slots have live members"
            await member.leave()
            view = await client.wait(lambda view: view.version > 0)
        assert (client.spare, view.members[0].worker.uid) == (False, "w1")
        await client.close()


def test_a_spare_takes_the_place_of_a_lost_rank_and_its_successor_is_the_next_spare(group: Cluster) -> None:
    """Rank 0 is killed, and nobody started in its place before the spare has it."""
    before, lost = uids(group.view), group.place(0)
    (spare,) = {0, 1, 2} - {group.place(rank) for rank in before}
    wait(lambda: waits(group, spare))
    with group.killed(0):
        after = group.until(
            lambda view: view.state == SERVING and not view.active_ranks and f"w{spare}" in uids(view).values()
        )
        assert uids(after.view) == {0: f"w{spare}", 1: before[1]}
        for rank in range(2):
            batch = Batch.random(9)
            with after.caller(rank) as caller:
                check(caller.forward(batch), batch, group.tensors)
    wait(lambda: waits(group, lost))


def test_a_spare_becomes_one_more_rank_and_leaves_again(group: Cluster) -> None:
    """The group is asked without a pause; every answer is right, and none fails."""
    before = group.now().view
    (spare,) = {0, 1, 2} - {group.now().place(rank) for rank in range(2)}
    wait(lambda: waits(group, spare))
    with Load(group.supervisor.control_address, group.tensors, 1) as load:
        for size in (3, 2):
            ask_leader(group.supervisor.control_address, None, "Scale", ScaleRequest(workers=size), TIMEOUT_S)
            after = group.until(lambda view, size=size: view.state == SERVING and view.world_size == size)  # type: ignore[misc]
            assert {rank: uid for rank, uid in uids(after.view).items() if rank < 2} == uids(before)
            good = load.tally.good
            wait(lambda good=good: load.tally.good > good + 10)  # type: ignore[misc]
            for rank in range(size):
                batch = Batch.random(9)
                with after.caller(rank) as caller:
                    check(caller.forward(batch), batch, group.tensors)
    assert after.view.epoch == before.epoch + 2
    assert (load.tally.wrong, load.tally.failed) == ([], 0)
    wait(lambda: waits(group, spare))
