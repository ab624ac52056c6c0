"""Three control planes and one lease, with real processes: who leads, who is sent on, and nobody notices a change."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossdock.client import Client
from crossdock.common import rpc
from crossdock.v1.control_pb2 import SERVING, TopologyRequest
from crossdock.v1.control_pb2_grpc import ControlPlaneStub
from tests.services.cluster import ANSWER_S, Batch, Cluster
from tests.services.control_world import TIMEOUT_S, newest_view
from tests.services.replicas import LEASE_S, Replicas, leads, replicated_cluster, wait


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
        self.num_good, self.slowest_s, self.broken = 0, 0.0, ""
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
        batch, began = Batch.random(20), time.monotonic()
        y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=ANSWER_S)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        torch.testing.assert_close(y.double(), batch.expected(self._group.tensors), rtol=1e-4, atol=1e-5)
        self.num_good += 1


def serves_at(replicas: Replicas, epoch: int) -> bool:
    try:
        view = replicas.view()
    except rpc.CallError:
        return False
    assert view.epoch <= epoch, view.reason
    return view.state == SERVING and view.epoch == epoch


def terms(replicas: Replicas) -> list[int]:
    """Of every write that began a reign."""
    return [term for holder, term in replicas.api.writes if holder]


def test_one_leads_and_the_others_send_callers_there(replicas: Replicas) -> None:
    leader = replicas.leader()
    standby = replicas.standby(leader)
    words = f"this control plane stands by; {leader.address} leads"

    def sent_on() -> bool:
        """As soon as it has read the lease."""
        with rpc.channel(standby.address) as channel, pytest.raises(rpc.Unavailable, match="stands by") as raised:
            rpc.call_sync(ControlPlaneStub(channel).Topology, TopologyRequest(), timeout_s=TIMEOUT_S)
        return (raised.value.leader, str(raised.value)) == (leader.address, words)

    wait(sent_on)
    assert replicas.view().term == replicas.api.term
    assert [replica for replica in replicas.all if leads(replica)] == [leader]


def test_kill_9_of_the_leader_under_load_loses_no_request(replicas: Replicas, group: Cluster) -> None:
    epoch = replicas.view().epoch
    with Load(group, replicas.target) as load:
        for _ in range(2):
            former = replicas.leader()
            former.end()
            began = time.monotonic()
            following = replicas.leader(beside=former)
            took_s = time.monotonic() - began
            assert following is not former
            assert took_s < 3 * LEASE_S + 2
            wait(lambda: serves_at(replicas, epoch), ANSWER_S)
            load.wait_good(10)
            former.start()
    assert load.slowest_s < LEASE_S
    assert terms(replicas) == sorted(terms(replicas))


def test_a_leader_that_stands_still_decides_nothing_when_it_goes_on(replicas: Replicas, group: Cluster) -> None:
    epoch, former = replicas.view().epoch, replicas.leader()
    with Load(group, replicas.target) as load:
        former.send(signal.SIGSTOP)
        try:
            replicas.leader(beside=former)
            wait(lambda: serves_at(replicas, epoch), ANSWER_S)
        finally:
            former.send(signal.SIGCONT)
        for _ in range(20):  # from its first moment on
            assert not leads(former)
        with rpc.channel(former.address) as channel, pytest.raises(rpc.Unavailable):
            rpc.call_sync(ControlPlaneStub(channel).Topology, TopologyRequest(), timeout_s=TIMEOUT_S)
        load.wait_good(10)
    assert serves_at(replicas, epoch)


def test_without_the_api_server_nobody_leads_and_the_group_serves_on(replicas: Replicas, group: Cluster) -> None:
    epoch, leader = replicas.view().epoch, replicas.leader()
    with Load(group, replicas.target) as load:
        replicas.api.away = True
        wait(lambda: not leads(leader))
        load.wait_good(20)
        assert not any(leads(replica) for replica in replicas.all)
        replicas.api.away = False
        replicas.leader()
        wait(lambda: serves_at(replicas, epoch), ANSWER_S)
        replicas.api.lease = None
        wait(lambda: replicas.api.holder)
        replicas.leader()
        wait(lambda: serves_at(replicas, epoch), ANSWER_S)
        load.wait_good(10)
    assert len({term for holder, term in replicas.api.writes}) >= 3


def test_a_worker_that_dies_while_the_leader_stands_still_is_replaced(replicas: Replicas, group: Cluster) -> None:
    """Both at once: the clients, too, must find the control plane that knows of the new worker."""
    epoch, former = replicas.view().epoch, replicas.leader()
    with Client(replicas.target) as client:
        client.describe(ANSWER_S)
        former.send(signal.SIGSTOP)
        try:
            os.kill(group.supervisor.worker_pids()[0], signal.SIGKILL)
            batch = Batch.random(20)
            y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=2 * ANSWER_S)
        finally:
            former.send(signal.SIGCONT)
    torch.testing.assert_close(y.double(), batch.expected(group.tensors), rtol=1e-4, atol=1e-5)
    view = replicas.view()
    assert (view.state, view.epoch > epoch) == (SERVING, True)


async def test_a_leader_that_hears_of_a_later_term_stops(replicas: Replicas) -> None:
    leader = replicas.leader()
    before = replicas.api.term
    async with rpc.aio_channel(leader.address) as channel:
        stub = ControlPlaneStub(channel)
        term = (await newest_view(stub)).term
        later = (("crossdock-term", str(term + 100)),)
        with pytest.raises(rpc.Unavailable, match="stands by"):
            await rpc.call(stub.Topology, TopologyRequest(), timeout_s=TIMEOUT_S, metadata=later)
    wait(lambda: replicas.api.term > term + 100)
    assert replicas.leader()
    assert before < replicas.api.term


def test_a_leader_that_is_told_to_stop_hands_over(tmp_path: Path) -> None:
    with Replicas(tmp_path, number=2) as replicas:
        former = replicas.leader()
        assert former.process.poll() is None
        began = time.monotonic()
        errors = former.end(signal.SIGTERM)
        assert former.process.returncode == 0
        assert "Traceback" not in errors
        assert replicas.leader(beside=former)
        assert time.monotonic() - began < 2 * LEASE_S + 2
