"""Experts that move while real processes serve: every answer is right, nobody waits, and who cannot load says so."""

from __future__ import annotations

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
from crossdock.supervisor import Supervisor, current_view
from crossdock.v1 import control_pb2 as pb
from crossdock.v1 import control_pb2_grpc
from crossdock.v1.control_pb2 import SERVING
from tests.services.cluster import ANSWER_S, FORM_S, Batch, Cluster, E, check, cluster, write_model

WAIT_S = 30.0
REDUNDANT = 4


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers with four slots each for eight experts, from first to last; loads are forgotten fast."""
    placement = PlacementConfig(redundant_experts=REDUNDANT, load_half_life_s=2.0)
    folder = tmp_path_factory.mktemp("placement")
    yield from cluster(folder, num_workers=3, lease_s=3.0, placement=placement, max_tokens_per_step=64)


_CANNOT_LOAD = """
import sys
from crossdock.common.config import WorkerConfig
from crossdock.worker.experts import Experts
from crossdock.worker.process import run_worker

def stage(*args, **kwargs):
    raise OSError("gone")

Experts.stage = stage
_, control, _, model = sys.argv[1:]
sys.exit(run_worker(WorkerConfig(model=model, control=control, local_rank=2, uid="w2")))
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
        deadline = time.monotonic() + WAIT_S
        while not wanted(found := self.experts()):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found


def serve(group: Cluster, wanted: Callable[[], bool], rank: int = 0, hot: int = 5) -> list[float]:
    """Ask without a pause, check every answer, until `wanted`; the seconds that each took."""
    deadline, took_s = time.monotonic() + WAIT_S, []
    with group.caller(rank) as caller:
        while not wanted():
            assert time.monotonic() < deadline
            for layer in (1, 2):
                batch = skewed(40, layer, hot)
                begun = time.monotonic()
                check(caller.forward(batch), batch, group.tensors)
                took_s.append(time.monotonic() - begun)
    return took_s


def load(group: Cluster, hot: int = 5) -> pb.ExpertsResponse:
    """Serve until the control plane has heard which experts are hot."""
    control = Control(group)

    def heard() -> bool:
        found = control.experts()
        rows = [list(layer.load) for layer in found.layers]
        hottest = [one.index(max(one)) == (hot + layer) % E for layer, one in enumerate(rows, 1)]
        return all(hottest) and found.imbalance > 1.05 and found.would_move > 0

    serve(group, heard, hot=hot)
    return control.experts()


def copies(found: pb.ExpertsResponse, layer: int) -> list[int]:
    return [list(found.layers[layer].slots).count(expert) for expert in range(E)]


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_hot_experts_get_copies_while_requests_are_served(group: Cluster) -> None:
    control = Control(group)
    first = control.until(lambda found: found.version > 0)
    assert first.num_slots == E + REDUNDANT
    assert first.num_experts == E
    loaded = load(group)
    assert loaded.imbalance_if_moved < loaded.imbalance - 0.03
    started = control.rebalance()
    assert started.moves > 0
    assert started.version == first.version + 1
    serve(group, lambda: control.experts().last_change.startswith("moved in"))
    moved = control.experts()
    assert moved.layers_moving == 0
    for number, layer in enumerate((1, 2)):
        assert copies(moved, number)[(5 + layer) % E] >= 2
        assert min(copies(moved, number)) >= 1
    serve(group, lambda: control.experts().imbalance < loaded.imbalance - 0.03, rank=2)
    with rpc.channel(group.supervisor.control_address) as channel:
        view = current_view(channel, ANSWER_S)
    assert (view.epoch, view.state) == (group.view.epoch, SERVING), "nobody formed anew"


def test_an_idle_group_moves_too_and_a_restarted_control_plane_learns_of_it(group: Cluster) -> None:
    control = Control(group)
    before = load(group, hot=2)
    version = control.rebalance().version
    moved = control.until(lambda found: found.last_change.startswith("moved in"))
    os.kill(group.supervisor.control_pid, signal.SIGKILL)
    group.supervisor.wait_serving(FORM_S)
    found = control.until(lambda found: found.version == version)
    assert [list(row.slots) for row in found.layers] == [list(row.slots) for row in moved.layers]
    assert [list(row.slots) for row in found.layers] != [list(row.slots) for row in before.layers]
    serve(group, after(0.5), rank=1)


def test_a_worker_that_cannot_load_turns_the_move_back(tmp_path: Path) -> None:
    """The third worker is one whose checkpoint cannot be read a second time."""
    tensors = write_model(tmp_path / "model")
    placement = PlacementConfig(redundant_experts=REDUNDANT, load_half_life_s=2.0)
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=3, placement=placement)
    configs = [WorkerConfig(model=str(tmp_path / "model"), local_rank=rank, uid=f"w{rank}") for rank in range(3)]
    with Supervisor(control, configs[:2], tmp_path / "logs") as supervisor:
        where = ["--control", supervisor.control_address, "--model", str(tmp_path / "model")]
        third = subprocess.Popen([sys.executable, "-c", _CANNOT_LOAD, *where], stdout=subprocess.DEVNULL)
        try:
            group = Cluster(supervisor, tensors, supervisor.wait_serving(FORM_S))
            before = load(group)
            version = Control(group).rebalance().version
            assert version == before.version + 1
            serve(group, lambda: Control(group).experts().version > version)
            found = Control(group).experts()
            assert re.fullmatch("turned back: rank [0-2]: layer [12]: OSError: gone", found.last_change)
            assert found.layers_moving == 0
            for rank in range(3):
                serve(group, after(0.3), rank)
        finally:
            third.terminate()
            third.wait(WAIT_S)


def test_a_killed_worker_loads_what_its_place_holds_now(group: Cluster) -> None:
    control = Control(group)
    load(group, hot=0)
    control.rebalance()
    moved = control.until(lambda found: found.last_change.startswith("moved in"))
    os.kill(group.supervisor.worker_pids()[1], signal.SIGKILL)
    deadline = time.monotonic() + FORM_S
    for view in group.supervisor.views():
        assert time.monotonic() < deadline
        if view.state == SERVING and view.epoch > group.view.epoch:
            break
    again = Cluster(group.supervisor, group.tensors, view)
    for rank in range(3):
        serve(again, after(0.3), rank)
    found = control.experts()
    assert [list(row.slots) for row in found.layers] == [list(row.slots) for row in moved.layers]
