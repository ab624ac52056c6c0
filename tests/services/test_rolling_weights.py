"""Another checkpoint for a group that serves, with real processes.

No request fails, none is wrong, and whatever dies in between, all layers end on one checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.client import Client, ModelMismatch
from crossdock.client.dialling import KnownWorker
from crossdock.common import rpc
from crossdock.common.call_errors import CallError
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc, expert_pb2
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from tests.services.cluster import ANSWER_S, FORM_S, LAYERS, TEST_S, Batch, Cluster, cluster, write_model

pytestmark = pytest.mark.timeout(TEST_S)
Tensors = dict[str, torch.Tensor]
PLACES = ("here", "elsewhere")
"""Where clients are, of their workers' host."""


class Elsewhere(KnownWorker):
    """A worker as clients of another host know it."""

    def _is_here(self, about: expert_pb2.DescribeResponse) -> bool:
        return False


def client_at(place: str, target: str, **settings: Any) -> Client:
    client = Client(target, **settings)
    if place == "elsewhere":
        client._requests._worker = lambda service, number: Elsewhere(  # type: ignore[method-assign]
            service.workers[number][1], service.workers[number][0], service.epoch, None
        )
    return client


class World:
    """A group, and checkpoints for it."""

    def __init__(self, group: Cluster, folder: Path) -> None:
        self.group, self.folder, self.tensors, self._number = group, folder, group.tensors, 0

    def checkpoint(self) -> tuple[Path, Tensors]:
        """A fresh one of the same shape."""
        self._number += 1
        path = self.folder / f"new-{self._number}"
        return path, write_model(path)

    def call(self, method: str, request: object) -> object:
        with rpc.channel(self.group.supervisor.control_address) as channel:
            stub = control_pb2_grpc.ControlPlaneStub(channel)
            return rpc.call_sync(getattr(stub, method), request, timeout_s=ANSWER_S)

    def load(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        self.call("Load", pb.LoadRequest(path=str(path), fingerprint=checkpoint.spec.fingerprint))
        checkpoint.close()

    def until_settled(self) -> str:
        """The outcome, once nothing is under way and all ranks have said twice that all their layers are of one
        checkpoint."""
        deadline, times = time.monotonic() + FORM_S, 0
        while True:
            assert time.monotonic() < deadline
            try:
                found = self.call("Experts", pb.ExpertsRequest())
                members = self.group.look().members
            except CallError:
                time.sleep(0.1)
                continue
            assert isinstance(found, pb.ExpertsResponse)
            known, held = found.checkpoints, [[one.fingerprint for one in m.stats.models] for m in members]
            settled = found.version and not found.layers_moving and known.settled == known.wanted
            times = times + 1 if settled and len(held) == 2 and held[0] == held[1] and len(held[0]) == 1 else 0
            if times == 2:
                return found.last_change
            time.sleep(1.2 if times else 0.05)  # longer than between two heartbeats


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("rolling")
    for group in cluster(folder, num_workers=2, lease_s=3.0, recover_s=3.0, max_tokens_per_step=24):
        yield World(group, folder)


class Asking:
    """Threads that ask without a pause, at each place; every answer must be that of one of two checkpoints, as a whole.
    Many need more than one step, or both workers."""

    def __init__(self, target: str, before: Tensors, after: Tensors) -> None:
        self._clients = [client_at(place, target, min_tokens_per_worker=16) for place in PLACES]
        self._known, self._stop = (before, after), threading.Event()
        self.counts, self.wrong = [0, 0], list[object]()
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in self._clients]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()

    def _ask(self, client: Client) -> None:
        while not self._stop.is_set():
            batch = Batch.random(int(torch.randint(1, 40, ())), 1 + int(torch.randint(0, LAYERS - 1, ())))
            try:
                y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=ANSWER_S).double()
            except Exception as error:
                self.wrong.append(error)
                return
            same = [torch.allclose(y, batch.expected(tensors), rtol=1e-4, atol=1e-4) for tensors in self._known]
            if not any(same):
                self.wrong.append(batch)
            self.counts[same[1]] += 1


def check_all(world: World, tensors: Tensors) -> None:
    world.tensors = tensors
    with Client(world.group.supervisor.control_address) as client:
        for layer in range(1, LAYERS):
            batch = Batch.random(9, layer)
            y = client.forward(layer, batch.x, batch.ids, batch.weights).double()
            torch.testing.assert_close(y, batch.expected(tensors), rtol=1e-4, atol=1e-4)


def test_no_request_fails_and_none_is_wrong_while_weights_change(world: World) -> None:
    path, tensors = world.checkpoint()
    with Asking(world.group.supervisor.control_address, world.tensors, tensors) as asking:
        while not asking.counts[0] and not asking.wrong:
            time.sleep(0.01)
        world.load(path)
        assert world.until_settled().startswith("loaded in")
        before = asking.counts[1]
        while asking.counts[1] < before + 20 and not asking.wrong:
            time.sleep(0.01)
    assert not asking.wrong
    check_all(world, tensors)


def test_who_expects_a_checkpoint_gets_no_rows_of_another(world: World) -> None:
    old, (path, tensors) = world.tensors, world.checkpoint()
    refused, wrong = dict[str, str](), list[object]()

    def ask(place: str, client: Client) -> None:
        while place not in refused and not wrong:
            batch = Batch.random(9, LAYERS - 1)
            try:
                y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=ANSWER_S).double()
            except ModelMismatch as error:
                refused[place] = str(error)
            except Exception as error:
                wrong.append(error)
            else:
                if not torch.allclose(y, batch.expected(old), rtol=1e-4, atol=1e-4):
                    wrong.append(batch)

    with Client(world.group.supervisor.control_address) as client:
        fingerprint = client.describe().model
    target = world.group.supervisor.control_address
    clients = {place: client_at(place, target, model=fingerprint) for place in PLACES}
    threads = [threading.Thread(target=ask, args=each) for each in clients.items()]
    for thread in threads:
        thread.start()
    world.load(path)
    assert world.until_settled().startswith("loaded in")
    for thread in threads:
        thread.join()
    for client in clients.values():
        client.close()
    assert not wrong
    assert all("expected" in words and f"got {fingerprint}" in words for words in refused.values())
    check_all(world, tensors)


def test_another_shape_is_refused_with_expected_and_got(world: World) -> None:
    path = world.folder / "other"
    write_model(path)
    config = (path / "config.json").read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 3')
    (path / "config.json").write_text(config)
    done = command(world, path)
    assert done.returncode == 1, done.stderr
    assert "topk: expected 2 as in the model that is served, got 3" in done.stdout
    assert world.until_settled().startswith("rolled back")
    check_all(world, world.tensors)


def command(world: World, path: Path) -> subprocess.CompletedProcess[str]:
    """`crossdock load`."""
    words = ["load", "--model", str(path), "--target", world.group.supervisor.control_address]
    return subprocess.run(
        [sys.executable, "-m", "crossdock", *words], capture_output=True, text=True, timeout=FORM_S, check=False
    )


def test_the_command_waits_until_all_layers_have_it(world: World) -> None:
    path, tensors = world.checkpoint()
    done = command(world, path)
    assert done.returncode == 0, done.stderr
    assert "loaded in" in done.stdout
    check_all(world, tensors)


def test_other_weights_than_the_fingerprint_says_are_refused(world: World) -> None:
    path, _ = world.checkpoint()
    other, _ = world.checkpoint()
    fingerprint = Checkpoint.open(other).spec.fingerprint
    world.call("Load", pb.LoadRequest(path=str(path), fingerprint=fingerprint))
    assert f"fingerprint: expected {fingerprint}" in world.until_settled()
    shutil.rmtree(other)
    world.call("Load", pb.LoadRequest(path=str(other), fingerprint=fingerprint))
    assert "no such directory" in world.until_settled()
    check_all(world, world.tensors)


@pytest.mark.parametrize("victim", ["rank", "leader", "both"])
def test_whatever_dies_in_between_all_layers_end_on_one_checkpoint(world: World, victim: str) -> None:
    path, tensors = world.checkpoint()
    supervisor, group = world.group.supervisor, world.group.now()
    pid = supervisor.worker_pids()[group.place(1)]
    with Asking(supervisor.control_address, world.tensors, tensors) as asking:
        os.kill(pid, signal.SIGSTOP)  # so it has not loaded what the other has
        try:
            world.load(path)
            if victim != "rank":
                os.kill(supervisor.control_pid, signal.SIGKILL)
        finally:
            os.kill(pid, signal.SIGKILL if victim != "leader" else signal.SIGCONT)
        world.group.now()
        world.until_settled()
    assert not asking.wrong
    held = {one.fingerprint for member in world.group.look().members for one in member.stats.models}
    new = Checkpoint.open(path).spec.fingerprint
    assert len(held) == 1
    check_all(world, tensors if held == {new} else world.tensors)
    if victim == "rank":
        assert held == {new}, "the same leader goes on"
