"""Workers that an operator drains, or that the group keeps out: the real service, the worker's client, the command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from crossdock.common import rpc
from crossdock.common.call_errors import ResourceExhausted
from crossdock.common.config import ControlConfig
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.worker.group.control_client import ControlPlaneClient
from tests.services.control_world import TIMEOUT_S, FakeWorker, InProcess, exchange, form, in_process, newest_view

CONFIG = ControlConfig(world_size=3, recover_s=0.01)


def client_of(control: InProcess, uid: str, incarnation: int = 1) -> ControlPlaneClient:
    host, _, local = uid.partition("/")
    registration = pb.RegisterRequest(
        worker=pb.WorkerId(uid=uid, incarnation=incarnation), transport="cpu", abi="a", model="m", address="h:1"
    )
    registration.host.hostname, registration.local_rank = host, int(local or 0)
    return ControlPlaneClient(control.address, registration, pb.WorkerStats)


def over(control: InProcess) -> None:
    """The recovery of a control plane that has just started ends."""
    control.clock.now += 1.0
    control.service.tick()


async def command(control: InProcess, *args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "crossdock", *args, "--target", control.address]
    return await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


async def test_a_drained_worker_leaves_and_waits_until_it_is_uncordoned() -> None:
    async with in_process(CONFIG) as control, asyncio.timeout(TIMEOUT_S):
        over(control)
        client, told = client_of(control, "b/0"), asyncio.Event()
        client.on_drain = told.set
        client.start()
        await client.wait_first_answer()
        draining = asyncio.create_task(command(control, "drain", "b", "--reason", "new memory", "--json"))
        await told.wait()
        await client.leave("drained")
        await client.close()
        done = await draining
        assert (done.returncode, json.loads(done.stdout)["stayed"]) == (0, [])

        again = client_of(control, "b/0", 2)
        again.start()
        await again.wait_first_answer()
        assert (again.spare, again.registered) == (True, False)
        assert again.trouble == "cordoned: new memory, until `crossdock uncordon b/0`"
        view = await newest_view(control.stub)
        assert [(one.uid, one.cause, one.reason) for one in view.barred] == [("b/0", "cordoned", "new memory")]
        assert control.sample("crossdock_excluded_workers", cause="cordoned") == 1
        assert (await command(control, "uncordon", "b/0")).stdout == "b/0 on b: may come back\n"
        await again.wait(lambda view: view.version > 0)
        assert not again.spare
        await again.close()
        assert control.sample("crossdock_excluded_workers", cause="cordoned") == 0


async def test_a_waiting_worker_tells_the_next_control_plane_that_it_is_cordoned() -> None:
    async with in_process(CONFIG) as old, in_process(CONFIG) as new:
        for control in (old, new):
            over(control)
        member = await one_more(old, "b/0")
        await rpc.call(old.stub.Cordon, pb.CordonRequest(name="b/0", reason="why", drain=True), timeout_s=TIMEOUT_S)
        await member.leave()
        request = pb.RegisterRequest(worker=pb.WorkerId(uid="b/0", incarnation=2), transport="cpu", abi="a", model="m")
        told = (await rpc.call(old.stub.Register, request, timeout_s=TIMEOUT_S)).barred
        assert (told.cause, told.reason, told.drain) == ("cordoned", "why", True)
        request.barred.CopyFrom(told)
        assert (await rpc.call(new.stub.Register, request, timeout_s=TIMEOUT_S)).barred.reason == "why"
        assert [one.uid for one in (await newest_view(new.stub)).barred] == ["b/0"]
        await rpc.call(old.stub.Uncordon, pb.UncordonRequest(name="b/0"), timeout_s=TIMEOUT_S)
        answer = await rpc.call(old.stub.Register, request, timeout_s=TIMEOUT_S)
        assert not answer.barred.cause, "it knows better than the worker what it has said itself"


async def one_more(control: InProcess, uid: str) -> FakeWorker:
    worker = FakeWorker(control.stub, uid)
    await worker.register()
    return worker


async def test_who_is_not_there_is_named_with_those_who_are() -> None:
    async with in_process(CONFIG) as control:
        over(control)
        await one_more(control, "a/0")
        for args, words in (
            (("drain", "z"), "expected a rank, a worker or a host of this group (a/0), got 'z'"),
            (("uncordon", "a/0"), "expected a cordoned or quarantined worker (none), got 'a/0'"),
        ):
            done = await command(control, *args)
            assert done.returncode == 1
            assert words in done.stderr.replace("\n", " ")


async def test_a_sick_rank_is_seen_and_quarantined_when_a_spare_waits() -> None:
    async with in_process(CONFIG) as control:
        over(control)
        a, b, c = await form(control.stub, "a/0", "b/0", "c/0")
        for _ in range(3):
            await a.beat(2)
            await b.beat(2)
            await exchange(control.stub, [a, b, c])
        control.service.tick()
        view = await newest_view(control.stub)
        assert view.members[2].sick == "reported silent in 3 epochs by a/0, b/0 within 600 s"
        assert control.sample("crossdock_sick_ranks") == 1
        assert control.sample("crossdock_silent_rank_reports_total", rank="2") == 6
        with pytest.raises(ResourceExhausted):
            await one_more(control, "d/0")
        await a.beat(2)
        await b.beat(2)
        assert control.sample("crossdock_members_lost_total", cause="quarantined") == 1
        assert control.sample("crossdock_excluded_workers", cause="quarantined") == 1
        control.service.tick()
        assert control.sample("crossdock_sick_ranks") == 0
        assert (await c.register()).barred.cause == "quarantined"
        await one_more(control, "d/0")
        assert [m.worker.uid for m in (await newest_view(control.stub)).members] == ["a/0", "b/0", "d/0"]
