"""The control plane's own tasks and threads: when one fails everything is closed, and the process says so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the client comes with the extra [control]")

from crossdock.common import helper_thread
from crossdock.common.addresses import split_address
from crossdock.common.announce import Addresses
from crossdock.common.config import ControlConfig, ElectionConfig, PlacementConfig
from crossdock.common.http import ask_http
from crossdock.common.metrics import ControlMetrics
from crossdock.control import process
from crossdock.control.group.group import new_group
from crossdock.control.group.group_state import Group, Settings
from crossdock.control.leader import kube, leader
from crossdock.control.leader.election import Lease
from crossdock.control.placement.placement_manager import PlacementManager
from crossdock.control.placement.placement_service import PlacementService
from crossdock.control.server.server import ControlPlane
from crossdock.control.topology import nodes
from tests.unit.test_elector import LeaseStore

FREE = "127.0.0.1:0"
ALONE = ControlConfig(listen=FREE, http_listen=FREE, world_size=1)
ONE_OF_SEVERAL = ControlConfig(listen=FREE, http_listen=FREE, world_size=1, election=ElectionConfig(lease_s=3))
TIMEOUT_S = 20.0


class Broken(RuntimeError):
    """What the stubs raise."""


def breaks(*_: object) -> Any:
    raise Broken


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[Addresses]:
    """Where the process listens."""
    said: list[Addresses] = []
    monkeypatch.setattr(process, "announce", lambda *told, https: said.append(Addresses(*told, https)))
    return said


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> LeaseStore:
    """A lease that any candidate may take at once."""
    place = LeaseStore()
    place.lease = Lease("", "", 7, 0.01, "0")
    monkeypatch.setattr(kube, "KubernetesLeaseStore", lambda config: place)
    return place


@contextlib.asynccontextmanager
async def running(config: ControlConfig, announced: list[Addresses]) -> AsyncIterator[asyncio.Task[int]]:
    task = asyncio.create_task(process._serve(config, ControlMetrics()))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: bool(announced) or task.done())
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def is_closed(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), 1.0).close()
    except OSError:
        return True
    return False


def livez(where: Addresses) -> tuple[int, str]:
    return ask_http(where.http_address, "/livez", TIMEOUT_S)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_when_ticking_fails_everything_is_closed_and_the_lease_given_back(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shared: LeaseStore,
    announced: list[Addresses],
) -> None:
    stopped: list[ControlPlane] = []
    stop = ControlPlane.stop
    monkeypatch.setattr(ControlPlane, "stop", lambda self: (stopped.append(self), stop(self)))
    async with running(ONE_OF_SEVERAL, announced) as task:
        await until(lambda: bool(shared.lease and shared.lease.holder))
        monkeypatch.setattr(ControlPlane, "tick", breaks)
        assert await task == process.EXIT_BROKEN
    assert shared.lease is not None
    assert (shared.lease.holder, len(stopped)) == ("", 1)
    where = announced[0]
    assert is_closed(where.address)
    assert is_closed(where.http_address)
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in told] == ["ticking ended; this is a bug"]


async def test_a_reign_that_cannot_begin_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, shared: LeaseStore, announced: list[Addresses]
) -> None:
    """The elector's news were once a callback of the loop, which only writes an error down: a leader without a group
    held the lease."""
    monkeypatch.setattr(process, "ControlPlane", breaks)
    monkeypatch.setattr(process, "MAX_TICK_S", TIMEOUT_S)
    monkeypatch.setattr(process, "TICKS_PER_LEASE", 0.001)
    async with running(ONE_OF_SEVERAL, announced) as task:
        assert await task == process.EXIT_BROKEN
    assert shared.lease is not None
    assert shared.lease.holder == ""


async def test_one_part_that_cannot_be_closed_keeps_no_other_open(
    monkeypatch: pytest.MonkeyPatch, shared: LeaseStore, announced: list[Addresses]
) -> None:
    monkeypatch.setattr(leader.Replica, "stop", breaks)
    monkeypatch.setattr(leader.Replica, "tick", breaks)
    async with running(ONE_OF_SEVERAL, announced) as task:
        with pytest.raises(Broken):
            await task
    await asyncio.to_thread(_join, "elector")
    where = announced[0]
    assert is_closed(where.address)
    assert is_closed(where.http_address)


async def test_a_start_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, shared: LeaseStore, announced: list[Addresses]
) -> None:
    """The elector was not started then."""
    made: list[Any] = []
    serve = process.serve_http
    monkeypatch.setattr(process, "serve_http", lambda *args: made.append(serve(*args)) or made[-1])
    monkeypatch.setattr(process, "announce", lambda *told, https: None)
    monkeypatch.setattr(process.Leadership, "ready", breaks)
    async with running(ONE_OF_SEVERAL, announced) as task:
        with pytest.raises(Broken):
            await task
    assert is_closed(made[0].address)


def test_whatever_else_ends_it_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process.logs, "setup", lambda config, role: None)
    monkeypatch.setattr(process, "grpc_core_log", lambda counter: contextlib.nullcontext())
    monkeypatch.setattr(process, "authorizer_of", breaks)
    assert process.run_control(ALONE) == process.EXIT_BROKEN
    assert [record.message for record in caplog.records] == ["the control plane ended; this is a bug"]


async def test_livez_is_dead_without_the_elector(
    monkeypatch: pytest.MonkeyPatch, shared: LeaseStore, announced: list[Addresses]
) -> None:
    ends = threading.Event()

    monkeypatch.setattr(helper_thread, "_ended", [])
    monkeypatch.setattr(leader.Elector, "_run", lambda self: breaks(ends.wait(TIMEOUT_S)))
    async with running(ONE_OF_SEVERAL, announced):
        where = announced[0]
        assert await asyncio.to_thread(livez, where) == (200, "ok\n")
        ends.set()
        await asyncio.to_thread(_join, "elector")
        assert await asyncio.to_thread(livez, where) == (503, "elector: ended\n")


async def test_livez_is_dead_without_the_nodes(monkeypatch: pytest.MonkeyPatch, announced: list[Addresses]) -> None:
    monkeypatch.setattr(nodes, "FIRST_LIST_S", 0.0)
    monkeypatch.setattr(nodes.Nodes, "start", lambda self: self._thread.start() or True)
    monkeypatch.setattr(helper_thread, "_ended", [])
    monkeypatch.setattr(nodes.Nodes, "_run", breaks)
    config = ControlConfig(listen=FREE, http_listen=FREE, world_size=1, kubernetes=process.KubernetesConfig())
    async with running(config, announced):
        await asyncio.to_thread(_join, "nodes")
        assert await asyncio.to_thread(livez, announced[0]) == (503, "nodes: ended\n")


def forming() -> Group:
    """A group that nobody has joined."""
    return new_group(Settings(2, 3.0, 600.0, 5.0), 0.0)


async def test_a_look_at_the_experts_that_fails_is_told_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experts = PlacementService(PlacementConfig(), 2, ControlMetrics(), lambda: 0.0, forming, lambda: None)

    async def plan() -> Any:
        return type("Made", (), {"plan": None})()

    monkeypatch.setattr(experts, "_rebalance", plan)
    monkeypatch.setattr(PlacementManager, "is_due", lambda self, now: True)
    monkeypatch.setattr(PlacementManager, "is_worth_it", breaks)
    for looks in (1, 2):
        experts.tick(serving=True)
        assert experts._rebalance_task is not None
        await asyncio.wait([experts._rebalance_task])
        await asyncio.sleep(0)
        told = [record.message for record in caplog.records]
        assert told == ["placement planning ended; this is a bug"] * looks


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
