"""A group that goes on without a rank, and takes its successor in: real processes, real kills, right answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from crossdock.common import rpc
from crossdock.common.config import PlacementConfig
from crossdock.supervisor import current_view
from crossdock.v1.control_pb2 import SERVING, GroupView
from tests.services.cluster import ANSWER_S, FORM_S, Answer, Batch, Cluster, E, check, cluster

UNAVAILABLE = rpc.code_number(grpc.StatusCode.UNAVAILABLE)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def covered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers that hold two copies of every expert."""
    placement = PlacementConfig(redundant_experts=E, min_copies=2)
    folder = tmp_path_factory.mktemp("covered")
    yield from cluster(folder, lease_s=3.0, placement=placement, elastic=True, max_tokens_per_step=64)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers, one copy of each expert."""
    yield from cluster(tmp_path_factory.mktemp("bare"), lease_s=3.0, elastic=True, max_tokens_per_step=64)


@dataclass
class Load:
    """A client of one rank that asks without a pause; every answer is checked."""

    group: Cluster
    rank: int
    good_at: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(ANSWER_S)

    def wait_good(self, since: float) -> float:
        """When the first right answer after `since` came."""
        deadline = time.monotonic() + WAIT_S
        while not self.good_at or self.good_at[-1] < since:
            assert time.monotonic() < deadline, self.errors[-3:]
            time.sleep(0.005)
        return next(at for at in self.good_at if at >= since)

    def _run(self) -> None:
        with self.group.caller(self.rank) as caller:
            while not self._stop.is_set():
                batch = Batch.random(12)
                asked = time.monotonic()
                answer = caller.forward(batch)
                if answer.HasField("error"):
                    assert answer.error.code == UNAVAILABLE, answer.error
                    self.errors.append(answer.error.message)
                    time.sleep(0.01)
                    continue
                check(answer, batch, self.group.tensors)
                self.good_at.append(asked)


def view_of(group: Cluster) -> GroupView:
    with rpc.channel(group.supervisor.control_address) as channel:
        return current_view(channel, ANSWER_S)


def until(group: Cluster, wanted: Callable[[GroupView], bool]) -> GroupView:
    deadline = time.monotonic() + 2 * FORM_S
    while not wanted(view := view_of(group)):
        assert time.monotonic() < deadline, view
        time.sleep(0.05)
    return view


def whole(view: GroupView) -> bool:
    return view.state == SERVING and not view.active_ranks


def kill(group: Cluster, *ranks: int) -> None:
    """kill -9, all at once. The supervisor starts them again."""
    uids = {member.rank: member.worker.uid for member in view_of(group).members}
    pids = group.supervisor.worker_pids()
    for rank in ranks:
        os.kill(pids[int(uids[rank].removeprefix("w"))], signal.SIGKILL)


def test_copies_take_over_and_successors_are_taken_in(covered: Cluster) -> None:
    before = until(covered, whole)
    with Load(covered, rank=0) as load:
        load.wait_good(time.monotonic())
        begun = time.monotonic()
        kill(covered, 2)
        resumed = load.wait_good(begun + 0.02)
        degraded = until(covered, lambda view: view.epoch > before.epoch)
        again = until(covered, lambda view: whole(view) and view.epoch > before.epoch)
        taken_in = time.monotonic()
        load.wait_good(taken_in)
    assert resumed - begun < 5
    assert again.epoch >= before.epoch + 2, "one epoch without it, one with it"
    assert whole(degraded) or 2 not in degraded.active_ranks
    assert sum(resumed <= at < taken_in for at in load.good_at) >= 3, "it serves while the successor starts and loads"
    assert {m.worker.uid: m.rank for m in again.members} == {m.worker.uid: m.rank for m in before.members}
    here = Cluster(covered.supervisor, covered.tensors, again)
    for rank in range(4):
        with here.caller(rank) as caller:
            batch = Batch.random(9)
            check(caller.forward(batch), batch, covered.tensors)


def test_an_idle_group_goes_on_without_two_at_once(covered: Cluster) -> None:
    before = until(covered, whole)
    kill(covered, 0, 1)
    degraded = until(covered, lambda view: set(view.active_ranks) == {2, 3} and view.state == SERVING)
    assert degraded.epoch > before.epoch
    with Cluster(covered.supervisor, covered.tensors, degraded).caller(3) as caller:
        for _ in range(5):
            batch = Batch.random(5)
            answer = caller.forward(batch)
            if answer.HasField("error"):
                assert answer.error.code == UNAVAILABLE
            else:
                check(answer, batch, covered.tensors)


def test_requests_of_lost_experts_fail_clearly_and_the_others_are_served(bare: Cluster) -> None:
    before = until(bare, whole)
    kill(bare, 3)
    until(bare, lambda view: view.epoch > before.epoch and view.state == SERVING)
    lost, kept = Batch.random(6), Batch.random(6)
    lost.ids[:] = 7
    kept.ids[:] = kept.ids.clamp(max=5)
    seen: list[Answer] = []
    with bare.caller(0) as caller:
        while not whole(view_of(bare)):
            good = caller.forward(kept)
            if not good.HasField("error"):
                check(good, kept, bare.tensors)
            seen.append(caller.forward(lost))
    named = [answer.error for answer in seen if "experts 7" in answer.error.message]
    assert named, [answer.error.message for answer in seen][:5]
    assert all(error.code == UNAVAILABLE for error in named)
    assert list(named[0].lost_ranks) == [3]
    assert "no other rank has a copy" in named[0].message
    with bare.caller(0) as caller:
        check(caller.forward(lost), lost, bare.tensors)
