"""Two ranks whose checkpoints differ where the fingerprint does not look. Processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from crossdock.common import rpc
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.process import EXIT_NOT_JOINED
from tests.services.cluster import ANSWER_S, FORM_S, TEST_S, write_model
from tests.services.test_faults import Process, one_line

pytestmark = pytest.mark.timeout(TEST_S)


def write_damaged(folder: Path, model: Path) -> Path:
    """The model with a changed last row of each down projection, and the same fingerprint."""
    tensors = write_model(model)
    folder.mkdir()
    for name, tensor in tensors.items():
        if "down_proj" in name:
            tensor[-1].neg_()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((model / "config.json").read_text())
    assert Checkpoint.open(folder).spec.fingerprint == Checkpoint.open(model).spec.fingerprint
    return folder


class Bed:
    """A control plane for two ranks, and workers for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[Process]()
        config = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=2, lease_s=15.0)
        self.started.append(Process(folder, "control", config))
        self.control = self.started[0].addresses().address

    def worker(self, rank: int, model: Path) -> Process:
        config = WorkerConfig(
            model=str(model), control=self.control, uid=f"w{rank}", local_rank=rank, transport="cpu",
            listen="127.0.0.1:0", http_listen="127.0.0.1:0",
        )  # fmt: skip
        self.started.append(Process(self.folder, "worker", config))
        return self.started[-1]

    def until(self, wanted: Callable[[GroupView], bool]) -> GroupView:
        deadline = time.monotonic() + FORM_S
        with rpc.channel(self.control) as channel:
            while not wanted(view := current_view(channel, ANSWER_S)):
                assert time.monotonic() < deadline, view
                time.sleep(0.02)
            return view


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    for process in made.started:
        process.kill()


def test_ranks_with_other_bytes_do_not_serve_on(tmp_path: Path, bed: Bed) -> None:
    """Rank 0 finds it once it has read all; a later one never serves; one with the same bytes does."""
    model = tmp_path / "model"
    damaged = write_damaged(tmp_path / "damaged", model)
    bed.worker(0, model)
    for attempt in range(2):
        bed.until(lambda view: len(view.members) == 1)
        log = bed.worker(1, damaged).end(expected=EXIT_NOT_JOINED)
        one_line(log, "weights of rank 1: expected")
        assert not attempt or "worker_status serving" not in log, log
    bed.until(lambda view: len(view.members) == 1)
    bed.worker(1, model)
    view = bed.until(lambda view: view.state == SERVING and bool(view.members[0].stats.weights))
    checkpoint = Checkpoint.open(model)
    digests = [checkpoint.digest(layer, expert) for layer in checkpoint.spec.moe_layers for expert in range(8)]
    assert view.members[0].stats.weights == f"{sum(digests) % 2**64:016x}"
