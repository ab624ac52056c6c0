"""A group that goes on without a rank, and takes its successor in: real processes, real kills, right answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def killed(group: Cluster, *ranks: int) -> Iterator[None]:
    """kill -9, all at once. The supervisor starts successors, which are held until the block ends."""
    uids = {member.rank: member.worker.uid for member in view_of(group).members}
    places = [int(uids[rank].removeprefix("w")) for rank in ranks]
    dead = group.supervisor.worker_pids()
    for place in places:
        os.kill(dead[place], signal.SIGKILL)
    held = [_successor(group, place, dead[place]) for place in places]
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)


def _successor(group: Cluster, place: int, dead: int) -> int:
    deadline = time.monotonic() + FORM_S
    while (pid := group.supervisor.worker_pids()[place]) == dead:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return pid


def ask(group: Cluster, batch: Batch, wanted: Callable[[Answer], bool], rank: int = 0) -> Answer:
    """Ask a rank until an answer is as wanted. A right answer or UNAVAILABLE, nothing else, may come before it."""
    deadline = time.monotonic() + WAIT_S
    with group.caller(rank) as caller:
        while not wanted(answer := caller.forward(batch)):
            assert answer.error.code == UNAVAILABLE, answer.error
            assert time.monotonic() < deadline, answer.error
            time.sleep(0.01)
    return answer


def is_good(answer: Answer) -> bool:
    return not answer.HasField("error")


def test_copies_take_over_and_successors_are_taken_in(covered: Cluster) -> None:
    before = until(covered, whole)
    with Load(covered, rank=0) as load:
        load.wait_good(time.monotonic())
        with killed(covered, 2):
            degraded = until(covered, lambda view: view.epoch > before.epoch and view.state == SERVING)
            assert set(degraded.active_ranks) == {0, 1, 3}
            for _ in range(3):
                load.wait_good(time.monotonic())
        again = until(covered, lambda view: whole(view) and view.epoch > degraded.epoch)
        load.wait_good(time.monotonic())
    assert {m.worker.uid: m.rank for m in again.members} == {m.worker.uid: m.rank for m in before.members}
    here = Cluster(covered.supervisor, covered.tensors, again)
    for rank in range(4):
        with here.caller(rank) as caller:
            batch = Batch.random(9)
            check(caller.forward(batch), batch, covered.tensors)


def test_an_idle_group_goes_on_without_two_at_once(covered: Cluster) -> None:
    before = until(covered, whole)
    with killed(covered, 0, 1):
        degraded = until(covered, lambda view: set(view.active_ranks) == {2, 3} and view.state == SERVING)
        assert degraded.epoch > before.epoch
        answered = 0
        for expert in range(E):
            batch, lost = Batch.random(5), f"experts {expert} of layer"
            batch.ids[:] = expert

            def settled(answer: Answer, lost: str = lost) -> bool:
                return is_good(answer) or lost in answer.error.message

            answer = ask(covered, batch, settled, rank=3)
            if is_good(answer):
                check(answer, batch, covered.tensors)
                answered += 1
        assert answered, "ranks 2 and 3 hold experts"
    until(covered, whole)


def test_requests_of_lost_experts_fail_clearly_and_the_others_are_served(bare: Cluster) -> None:
    before = until(bare, whole)
    lost, kept = Batch.random(6), Batch.random(6)
    lost.ids[:] = 7
    kept.ids[:] = kept.ids.clamp(max=5)
    with killed(bare, 3):
        until(bare, lambda view: view.epoch > before.epoch and view.state == SERVING)
        error = ask(bare, lost, lambda answer: "experts 7" in answer.error.message).error
        check(ask(bare, kept, is_good), kept, bare.tensors)
    assert error.code == UNAVAILABLE
    assert list(error.lost_ranks) == [3]
    assert "no other rank has a copy" in error.message
    until(bare, whole)
    check(ask(bare, lost, is_good), lost, bare.tensors)
