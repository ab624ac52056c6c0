"""Three control planes and one lease, with real processes: who leads, who is sent on, and nobody notices a change."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from crossdock.client import Client, connection
from crossdock.common import rpc
from crossdock.common.call_errors import Unavailable, error_of
from crossdock.common.control_channel import TERM_KEY
from crossdock.protocol.v1.control_pb2 import TopologyRequest
from crossdock.protocol.v1.control_pb2_grpc import ControlPlaneStub
from tests.services.cluster import ANSWER_S, FORM_S, TEST_S, Batch, Cluster
from tests.services.control_world import TIMEOUT_S
from tests.services.replicas import Replica, Replicas, leads, replicated_cluster, term_of, wait

pytestmark = pytest.mark.timeout(TEST_S)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is only slow to say that it is there is not given up."""
    monkeypatch.setattr(connection, "ALIVE_S", ANSWER_S)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with Replicas(tmp_path_factory.mktemp("replicas")) as made:
        yield made


@pytest.fixture(scope="module")
def group(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from replicated_cluster(tmp_path_factory.mktemp("group"), replicas, max_tokens_per_step=64)


class Load:
    """One client that asks without a pause, of all control planes; every answer is compared."""

    def __init__(self, group: Cluster, target: str) -> None:
        self._group, self._target = group, target
        self.num_good, self.broken = 0, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_good(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(ANSWER_S)

    def wait_good(self, number: int) -> None:
        """Wait for so many more right answers."""
        goal = self.num_good + number
        wait(lambda: self.broken or self.num_good >= goal, ANSWER_S)
        assert self.broken == ""

    def _run(self) -> None:
        try:
            with Client(self._target, retry=False) as client:
                client.describe(ANSWER_S)
                while not self._stop.is_set():
                    self._ask(client)
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"

    def _ask(self, client: Client) -> None:
        batch = Batch.random(20)
        y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=ANSWER_S)
        torch.testing.assert_close(y.double(), batch.expected(self._group.tensors), rtol=1e-4, atol=1e-5)
        self.num_good += 1


def serves_on(replicas: Replicas, epoch: int) -> None:
    """The leader knows, or learns from the workers, that the group serves: nobody formed anew."""
    assert replicas.serving() == epoch


def terms(replicas: Replicas) -> list[int]:
    """Of every write that began a reign."""
    return [term for holder, term in replicas.api.writes if holder]


def refusal(replica: Replica, *metadata: tuple[str, str]) -> Unavailable | None:
    """How it refuses to decide; None: it does not."""
    with rpc.channel(replica.address) as channel:
        try:
            ControlPlaneStub(channel).Topology(TopologyRequest(), timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            refused = error_of(error)
            assert isinstance(refused, Unavailable)
            assert "is a standby" in str(refused)
            return refused
    return None


def test_one_leads_and_the_others_send_callers_there(replicas: Replicas) -> None:
    def settled() -> bool:
        """As soon as the others have read the lease."""
        leader = replicas.leader()
        words = f"this control plane is a standby; {leader.address} leads"
        told = [refusal(replica) for replica in replicas.all if replica is not leader]
        view = replicas.view()
        known = [refused is not None and (refused.leader, str(refused)) == (leader.address, words) for refused in told]
        return all(known) and view is not None and view.term == term_of(leader) == replicas.api.term

    wait(settled)


def test_kill_9_of_the_leader_under_load_loses_no_request(replicas: Replicas, group: Cluster) -> None:
    epoch = replicas.serving()
    with Load(group, replicas.target) as load:
        for _ in range(2):
            former = replicas.leader()
            former.end()
            load.wait_good(10)  # while nobody leads, too
            replicas.leader(beside=former)
            serves_on(replicas, epoch)
            load.wait_good(10)
            former.start()
    assert load.broken == ""
    assert terms(replicas) == sorted(terms(replicas))


def test_a_leader_that_stands_still_decides_nothing_when_it_goes_on(replicas: Replicas, group: Cluster) -> None:
    epoch, former = replicas.serving(), replicas.leader()
    with Load(group, replicas.target) as load:
        former.send(signal.SIGSTOP)
        old = replicas.api.term
        try:
            replicas.leader(beside=former)
            serves_on(replicas, epoch)
        finally:
            former.send(signal.SIGCONT)
        for _ in range(20):  # from its first moment on, unless it was elected again
            assert not 0 < term_of(former) <= old
            assert refusal(former) is not None or replicas.api.term > old
        load.wait_good(10)
    serves_on(replicas, epoch)


def test_without_the_api_server_nobody_leads_and_the_group_serves_on(replicas: Replicas, group: Cluster) -> None:
    def nobody_leads() -> bool:
        return not any(leads(replica) for replica in replicas.all)

    epoch = replicas.serving()
    with Load(group, replicas.target) as load:
        replicas.api.away = True
        wait(nobody_leads)
        load.wait_good(20)
        wait(nobody_leads)
        replicas.api.away = False
        replicas.leader()
        serves_on(replicas, epoch)
        replicas.api.delete()
        wait(lambda: replicas.api.holder)
        replicas.leader()
        serves_on(replicas, epoch)
        load.wait_good(10)
    assert load.broken == ""
    assert len({term for holder, term in replicas.api.writes}) >= 3


def test_a_worker_that_dies_while_the_leader_stands_still_is_replaced(replicas: Replicas, group: Cluster) -> None:
    """Both at once: the clients, too, must find the control plane that knows of the new worker."""
    epoch, former = replicas.serving(), replicas.leader()
    with Client(replicas.target) as client:
        client.describe(ANSWER_S)
        former.send(signal.SIGSTOP)
        try:
            os.kill(group.supervisor.worker_pids()[0], signal.SIGKILL)
            batch = Batch.random(20)
            y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=FORM_S)
        finally:
            former.send(signal.SIGCONT)
    torch.testing.assert_close(y.double(), batch.expected(group.tensors), rtol=1e-4, atol=1e-5)
    assert replicas.serving() > epoch


def test_a_worker_and_the_leader_killed_at_once_are_both_replaced(replicas: Replicas, group: Cluster) -> None:
    """The leader stands still from before the worker's end until its own: it never knew."""
    epoch, former = replicas.serving(), replicas.leader()
    before = group.supervisor.worker_pids()
    with Client(replicas.target) as client:
        client.describe(ANSWER_S)
        former.send(signal.SIGSTOP)
        os.kill(before[1], signal.SIGKILL)
        former.send(signal.SIGKILL)
        former.end()
        batch = Batch.random(20)
        y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=FORM_S)
        former.start()
    torch.testing.assert_close(y.double(), batch.expected(group.tensors), rtol=1e-4, atol=1e-5)
    assert replicas.serving() > epoch
    after = group.supervisor.worker_pids()
    assert (after[0], after[1] != before[1]) == (before[0], True)


def test_a_term_that_anybody_claims_uses_up_no_terms(replicas: Replicas) -> None:
    before = replicas.api.term
    for claimed in (before + 10_000, (1 << 31) - 3000, 10**9, 10**18):
        assert refusal(replicas.leader(), (TERM_KEY, str(claimed))) is None
    assert term_of(replicas.leader()) < before + 10_000


def test_a_leader_that_is_told_to_stop_hands_over(tmp_path: Path) -> None:
    """The next one finds a lease that nobody holds."""
    with Replicas(tmp_path, "election.lease_s=20", number=0) as replicas:
        replicas.api.offer(lease_s=1)
        former = replicas.add()
        assert replicas.leader() is former
        errors = former.end(signal.SIGTERM)
        assert former.process.returncode == 0
        assert "Traceback" not in errors
        assert replicas.api.holder == ""
        assert replicas.add() is replicas.leader(beside=former)
