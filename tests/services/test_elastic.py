"""A group that goes on without a rank, and takes its successor in: real processes, real kills, right answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from crossdock.common.call_errors import code_number
from crossdock.common.config import PlacementConfig
from crossdock.protocol.v1.control_pb2 import SERVING
from tests.services.cluster import ANSWER_S, FORM_S, STEP_S, TEST_S, Answer, Batch, Cluster, E, check, cluster

pytestmark = pytest.mark.timeout(TEST_S)
LEASE_S = 6.0
"""Of groups in which a rank stands still, or none is asked. Others lose a rank as soon as one is asked."""
UNAVAILABLE = code_number(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture(scope="module")
def covered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers that hold two copies of every expert. Those of an idle group are missed when their lease ends."""
    placement = PlacementConfig(redundant_experts=E, min_copies=2)
    folder = tmp_path_factory.mktemp("covered")
    yield from cluster(folder, lease_s=LEASE_S, placement=placement, elastic=True, max_tokens_per_step=64)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers, one copy of each expert."""
    yield from cluster(tmp_path_factory.mktemp("bare"), elastic=True, max_tokens_per_step=64)


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
        deadline = time.monotonic() + FORM_S
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


def ask(group: Cluster, batch: Batch, wanted: Callable[[Answer], bool], rank: int = 0) -> Answer:
    """Ask a rank until an answer is as wanted. A right answer or UNAVAILABLE, nothing else, may come before it."""
    deadline = time.monotonic() + FORM_S
    with group.caller(rank) as caller:
        while not wanted(answer := caller.forward(batch)):
            assert answer.error.code == UNAVAILABLE, answer.error
            assert time.monotonic() < deadline, answer.error
            time.sleep(0.01)
    return answer


def is_good(answer: Answer) -> bool:
    return not answer.HasField("error")


def test_copies_take_over_and_successors_are_taken_in(covered: Cluster) -> None:
    group = covered.now()
    with Load(group, rank=0) as load:
        load.wait_good(time.monotonic())
        with group.killed(2):
            degraded = group.until(lambda view: view.epoch > group.view.epoch and view.state == SERVING).view
            assert set(degraded.active_ranks) == {0, 1, 3}
            for _ in range(3):
                load.wait_good(time.monotonic())
        again = group.now()
        load.wait_good(time.monotonic())
    assert again.view.epoch > degraded.epoch
    assert {m.worker.uid: m.rank for m in again.view.members} == {m.worker.uid: m.rank for m in group.view.members}
    for rank in range(4):
        with again.caller(rank) as caller:
            batch = Batch.random(9)
            check(caller.forward(batch), batch, again.tensors)


def test_one_that_stands_still_is_waited_for_as_long_as_its_lease_and_not_as_the_step(covered: Cluster) -> None:
    group = covered.now()
    with Load(group, rank=0) as load:
        load.wait_good(time.monotonic())
        with group.stopped(2):
            began = time.monotonic()
            group.until(lambda view: set(view.active_ranks) == {0, 1, 3} and view.state == SERVING)
            took_s = load.wait_good(time.monotonic()) - began
        group.now()
        load.wait_good(time.monotonic())
    assert took_s < STEP_S / 2


def test_nor_is_one_that_stands_still_while_the_others_agree_to_go_on_without_the_first(covered: Cluster) -> None:
    group = covered.now()
    with group.stopped(2):
        began = time.monotonic()
        group.until(lambda view: view.members[2].heartbeat_age_s > LEASE_S / 3 and view.members[3].heartbeat_age_s < 1)
        with group.stopped(3):
            degraded = group.until(lambda view: set(view.active_ranks) == {0, 1} and view.state == SERVING).view
            assert time.monotonic() - began < STEP_S / 2
    assert degraded.epoch > group.view.epoch + 1, "rank 3 was to go on at first"
    again = group.now()
    batch = Batch.random(9)
    check(ask(again, batch, is_good, rank=2), batch, again.tensors)


def test_an_idle_group_goes_on_without_two_at_once(covered: Cluster) -> None:
    group = covered.now()
    with group.killed(0, 1):
        degraded = group.until(lambda view: set(view.active_ranks) == {2, 3} and view.state == SERVING)
        assert degraded.view.epoch > group.view.epoch
        answered = 0
        for expert in range(E):
            batch, lost = Batch.random(5), f"experts {expert} of layer"
            batch.ids[:] = expert

            def settled(answer: Answer, lost: str = lost) -> bool:
                return is_good(answer) or lost in answer.error.message

            answer = ask(group, batch, settled, rank=3)
            if is_good(answer):
                check(answer, batch, group.tensors)
                answered += 1
        assert answered, "ranks 2 and 3 hold experts"
    group.now()


def test_requests_of_lost_experts_fail_clearly_and_the_others_are_served(bare: Cluster) -> None:
    group = bare.now()
    lost, kept = Batch.random(6), Batch.random(6)
    lost.ids[:] = 7
    kept.ids[:] = kept.ids.clamp(max=5)
    with group.caller(0) as caller, group.killed(3):
        assert list(caller.forward(kept).error.lost_ranks) == [3]
        group.until(lambda view: view.epoch > group.view.epoch and view.state == SERVING)
        error = ask(group, lost, lambda answer: "experts 7" in answer.error.message).error
        check(ask(group, kept, is_good), kept, group.tensors)
    assert error.code == UNAVAILABLE
    assert list(error.lost_ranks) == [3]
    assert "no other rank has a copy" in error.message
    check(ask(group.now(), lost, is_good), lost, group.tensors)
