"""The loader beside the steps: an epoch ends at once, whatever is being read just then."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.worker.experts.expert_tables import ExpertTables
from crossdock.worker.experts.placement import Placement
from crossdock.worker.group.expert_mover import ExpertMover
from crossdock.worker.group.seat import Seat

E, R, LAYERS = 4, 2, (1,)
BEFORE, AFTER = (Placement(version, R, {1: row}) for version, row in ((1, (0, 1, 2, 3)), (2, (1, 0, 2, 3))))
DEADLINE_S = 30.0


class Disk:
    """In the place of a Model: reads hang until the test lets them go on."""

    def __init__(self) -> None:
        self.reads = 0
        self.reading, self.works = threading.Event(), threading.Event()

    def stage(self, layer: int, ids: object, progress: Callable[[int, int], None], *about: object) -> None:
        self.reads += 1
        self.reading.set()
        assert self.works.wait(DEADLINE_S)
        progress(1, 1)


class Quiet:
    """In the places of a ControlPlaneClient without news and of an Engine."""

    view = pb.GroupView()

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def wait(self, wanted: object) -> None:
        await asyncio.Event().wait()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self.woken.set)


def moving() -> ExpertTables:
    """Of a rank whose engine has taken up the next placement."""
    tables = ExpertTables(BEFORE, E, 0, None)
    tables.set_target(AFTER)
    tables.progress()
    return tables


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_an_epoch_ends_while_a_read_hangs_and_the_next_one_moves_when_that_has_ended() -> None:
    disk, quiet = Disk(), Quiet()
    given: Any = quiet
    model: Any = disk
    mover = ExpertMover(given, model, given, given)
    async with asyncio.timeout(DEADLINE_S):
        former = moving()
        task = asyncio.create_task(mover.run(Seat(1, 0, R), former))
        await asyncio.to_thread(disk.reading.wait)
        await cancelled(task)
        assert mover.report() is None

        later = moving()
        task = asyncio.create_task(mover.run(Seat(2, 0, R), later))
        for _ in range(10):
            await asyncio.sleep(0)
        assert disk.reads == 1, "one loader at a time"
        assert later.progress() == (2 << 16, False), "nothing is loaded"

        quiet.woken.clear()
        disk.works.set()
        while later.progress() != ((2 << 16) + 1, True):
            await quiet.woken.wait()
            quiet.woken.clear()
        assert disk.reads == 2
        assert former.progress() == (2 << 16, False), "what came too late was dropped"
        await cancelled(task)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_placement_that_is_not_newer_is_not_aimed_at(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another control plane may have answered than the one that named the version."""
    given: Any = Quiet()
    mover, tables = ExpertMover(given, given, given, given), moving()

    async def fetch(seat: Seat) -> Placement:
        return Placement(version, R, {1: (3, 2, 1, 0)})

    monkeypatch.setattr(mover, "fetch", fetch)
    await mover._set_target(Seat(1, 0, R), tables)
    assert not tables.has_pending_change()


async def test_a_loader_that_ends_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is awaited only in the next epoch, and the other ranks wait for its rank to move."""
    given: Any = Quiet()
    mover = ExpertMover(given, given, given, given)
    monkeypatch.setattr(ExpertTables, "next_task", lambda self: 1 / 0)
    task = asyncio.create_task(mover.run(Seat(1, 0, R), moving()))
    async with asyncio.timeout(DEADLINE_S):
        while "the expert loader ended; this is a bug" not in [record.message for record in caplog.records]:
            await asyncio.sleep(0.01)
    await cancelled(task)
