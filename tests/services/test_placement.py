"""Experts that move while real processes serve: every answer is right, nobody waits, and who cannot load says so."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from crossdock.common import rpc
from crossdock.common.config import ControlConfig, PlacementConfig, WorkerConfig
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.protocol.v1.control_pb2 import SERVING
from tests.services.cluster import ANSWER_S, FORM_S, STEP_S, TEST_S, Batch, Cluster, E, check, cluster, write_model
from tests.services.forked import forked_children

pytestmark = pytest.mark.timeout(TEST_S)
REDUNDANT = 4
PLACEMENT = PlacementConfig(redundant_experts=REDUNDANT, load_half_life_s=5.0)
LEASE_S = 4.5
"""Loads are told three times in it."""


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers with four slots each for eight experts, from first to last; loads are forgotten fast."""
    folder = tmp_path_factory.mktemp("placement")
    yield from cluster(folder, num_workers=3, lease_s=LEASE_S, placement=PLACEMENT, max_tokens_per_step=64)


_CANNOT_LOAD = """
import sys
from crossdock.common.config import WorkerConfig
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.process import run_worker

def stage(*args, **kwargs):
    raise OSError("gone")

ExpertMLPs.stage = stage
_, control, _, model, _, step_s = sys.argv[1:]
config = WorkerConfig(model=model, control=control, local_rank=2, uid="w2", step_timeout_s=float(step_s))
sys.exit(run_worker(config))
"""


def skewed(num_tokens: int, layer: int, hot: int) -> Batch:
    """Half of all choices are one expert, another one in each layer."""
    batch = Batch.random(num_tokens, layer)
    batch.ids[:, 0] = (hot + layer) % E
    batch.ids[:, 1] = (hot + layer + 1 + torch.randint(0, E - 1, (num_tokens,))) % E
    return batch


class Control:
    """The control plane's calls about experts."""

    def __init__(self, group: Cluster) -> None:
        self._group = group

    def experts(self) -> pb.ExpertsResponse:
        with rpc.channel(self._group.supervisor.control_address) as channel:
            stub = control_pb2_grpc.ControlPlaneStub(channel)
            return stub.Experts(pb.ExpertsRequest(), timeout=ANSWER_S)

    def rebalance(self) -> pb.RebalanceResponse:
        with rpc.channel(self._group.supervisor.control_address) as channel:
            stub = control_pb2_grpc.ControlPlaneStub(channel)
            return stub.Rebalance(pb.RebalanceRequest(), timeout=ANSWER_S)

    def until(self, wanted: Callable[[pb.ExpertsResponse], bool]) -> pb.ExpertsResponse:
        deadline = time.monotonic() + FORM_S
        while not wanted(found := self.experts()):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found


def serve(group: Cluster, wanted: Callable[[], bool], rank: int = 0, hot: int = 5) -> None:
    """Ask without a pause, check every answer, until `wanted`."""
    deadline = time.monotonic() + FORM_S
    with group.caller(rank) as caller:
        while not wanted():
            assert time.monotonic() < deadline
            for layer in (1, 2):
                batch = skewed(40, layer, hot)
                check(caller.forward(batch), batch, group.tensors)


def serve_some(group: Cluster, rank: int) -> None:
    """Ask a few times."""
    turns = itertools.count()
    serve(group, lambda: next(turns) == 10, rank)


def load(group: Cluster, hot: int = 5) -> pb.ExpertsResponse:
    """Serve until the control plane has heard which experts are hot, and that moving them pays; what it then says."""
    control, heard = Control(group), pb.ExpertsResponse()

    def is_heard() -> bool:
        heard.CopyFrom(control.experts())
        rows = [list(layer.load) for layer in heard.layers]
        hottest = [one.index(max(one)) == (hot + layer) % E for layer, one in enumerate(rows, 1)]
        pays = heard.imbalance > 1.05 and heard.imbalance_if_moved < heard.imbalance - 0.03
        return all(hottest) and pays and heard.would_move > 0

    serve(group, is_heard, hot=hot)
    return heard


def rebalance(group: Cluster, hot: int) -> pb.RebalanceResponse:
    """Start a move. What pays is planned anew from the loads of now, so it is asked for until something moves."""
    found: list[pb.RebalanceResponse] = []

    def is_started() -> bool:
        load(group, hot)
        found.append(Control(group).rebalance())
        return found[-1].moves > 0

    serve(group, is_started, hot=hot)
    return found[-1]


def copies(found: pb.ExpertsResponse, layer: int) -> list[int]:
    return [list(found.layers[layer].slots).count(expert) for expert in range(E)]


def test_hot_experts_get_copies_while_requests_are_served(group: Cluster) -> None:
    group = group.now()
    control = Control(group)
    first = control.until(lambda found: found.version > 0)
    assert first.num_slots == E + REDUNDANT
    assert first.num_experts == E
    loaded = load(group)
    started = rebalance(group, hot=5)
    assert started.version == first.version + 1
    serve(group, lambda: control.experts().last_change.startswith("moved in"))
    moved = control.experts()
    assert moved.layers_moving == 0
    for number, layer in enumerate((1, 2)):
        assert copies(moved, number)[(5 + layer) % E] >= 2
        assert min(copies(moved, number)) >= 1
    serve(group, lambda: control.experts().imbalance < loaded.imbalance - 0.03, rank=2)
    view = group.look()
    assert (view.epoch, view.state) == (group.view.epoch, SERVING), "nobody formed anew"


def test_an_idle_group_moves_too_and_a_restarted_control_plane_learns_of_it(group: Cluster) -> None:
    group = group.now()
    control = Control(group)
    before = control.experts()
    version = rebalance(group, hot=2).version
    moved = control.until(lambda found: found.last_change.startswith("moved in"))
    killed = group.supervisor.control_pid
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + FORM_S
    while group.supervisor.control_pid == killed:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    group = group.now()
    found = control.until(lambda found: found.version == version)
    assert [list(row.slots) for row in found.layers] == [list(row.slots) for row in moved.layers]
    assert [list(row.slots) for row in found.layers] != [list(row.slots) for row in before.layers]
    serve_some(group, rank=1)


def test_a_worker_that_cannot_load_turns_the_move_back(tmp_path: Path) -> None:
    """The third worker is one whose checkpoint cannot be read a second time."""
    tensors = write_model(tmp_path / "model")
    control = ControlConfig(
        listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=3, lease_s=LEASE_S, placement=PLACEMENT
    )
    configs = [
        WorkerConfig(model=str(tmp_path / "model"), local_rank=rank, uid=f"w{rank}", step_timeout_s=STEP_S)
        for rank in range(3)
    ]
    with forked_children(), Supervisor(control, configs[:2], tmp_path / "logs") as supervisor:
        where = ["--control", supervisor.control_address, "--model", str(tmp_path / "model")]
        where += ["--step-timeout", str(STEP_S)]
        third = subprocess.Popen([sys.executable, "-c", _CANNOT_LOAD, *where], stdout=subprocess.DEVNULL)
        try:
            group = Cluster(supervisor, tensors, supervisor.wait_serving(FORM_S))
            found = move_that_fails(group)
            assert re.fullmatch("rolled back: rank [0-2]: layer [12]: OSError: gone", found.last_change)
            assert Control(group).until(lambda found: found.layers_moving == 0).last_change == found.last_change
            for rank in range(3):
                serve_some(group, rank)
        finally:
            third.terminate()
            third.wait(FORM_S)


def move_that_fails(group: Cluster) -> pb.ExpertsResponse:
    """Move to and fro until the third worker has something to load; what is said then."""
    control = Control(group)
    for hot in itertools.cycle((5, 2, 0)):
        rebalance(group, hot)
        found = control.until(lambda found: found.last_change.startswith(("moved in", "rolled back")))
        if found.last_change.startswith("rolled back"):
            return found
    raise AssertionError("unreachable")


def test_a_killed_worker_loads_what_its_place_holds_now(group: Cluster) -> None:
    group = group.now()
    control = Control(group)
    rebalance(group, hot=0)
    moved = control.until(lambda found: found.last_change.startswith("moved in"))
    with group.killed(1):
        pass
    again = group.until(lambda view: view.state == SERVING and view.epoch > group.view.epoch)
    for rank in range(3):
        serve_some(again, rank)
    found = control.experts()
    assert [list(row.slots) for row in found.layers] == [list(row.slots) for row in moved.layers]
