"""A worker with other communicator settings than its group: refused at the door while the group serves. Processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossdock.common.config import WorkerConfig, dump
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView
from crossdock.worker.process import EXIT_NOT_JOINED
from tests.services.cluster import ANSWER_S, TEST_S, Batch, Cluster, E, H, K, check, cluster
from tests.services.forked import crossdock
from tests.services.test_elastic import Load

pytestmark = pytest.mark.timeout(TEST_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[Cluster]:
    """Two ranks, elastic: a lost one leaves a slot that anybody may take who fits."""
    yield from cluster(folder, num_workers=2, lease_s=5.0, elastic=True, max_tokens_per_step=64)


def knock(group: Cluster, folder: Path, **fields: object) -> tuple[int, str]:
    """A worker of the group's model that asks for a rank, until it gives up; its exit status and log."""
    config = WorkerConfig(
        model=str(folder / "model"),
        control=group.supervisor.control_address,
        uid="stranger",
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        **fields,  # type: ignore[arg-type]
    )
    path = folder / "stranger.yaml"
    path.write_text(dump(config), encoding="utf-8")
    with path.with_suffix(".log").open("w+", encoding="utf-8") as log:
        code = crossdock("worker", "--config", str(path), stderr=log.fileno()).wait(ANSWER_S)
        log.seek(0)
        return code, log.read()


def seats(view: GroupView) -> list[tuple[int, str, int]]:
    return [(member.rank, member.worker.uid, member.worker.incarnation) for member in view.members]


def test_a_worker_with_other_settings_never_holds_a_rank(group: Cluster, folder: Path) -> None:
    group = group.now()
    before = group.look()
    with Load(group, 0) as load:
        load.wait_good(time.monotonic())
        code, said = knock(group, folder, max_tokens_per_step=128)
        assert code == EXIT_NOT_JOINED, said
        wanted = "communicator.max_tokens_per_rank: expected '64' as rank 0 (w0) has, got '128'"
        assert wanted in said
        after = group.look()
        assert (after.state, after.epoch, seats(after)) == (SERVING, before.epoch, seats(before))
        load.wait_good(time.monotonic())
        assert not load.errors


def test_it_takes_no_slot_of_a_lost_rank_either(group: Cluster, folder: Path) -> None:
    """The rest serves on without the lost rank, in one epoch, until a worker comes that fits."""
    group = group.now()
    with group.killed(1):
        rest = group.until(lambda view: view.state == SERVING and list(view.active_ranks) == [0])
        code, said = knock(group, folder, max_tokens_per_step=64, step_timeout_s=33.0)
        assert code == EXIT_NOT_JOINED, said
        assert "communicator." in said
        after = group.look()
        assert (after.state, after.epoch, seats(after)) == (SERVING, rest.view.epoch, seats(rest.view))
        batch = Batch(1, torch.randn(9, H), torch.randint(0, E // 2, (9, K)), torch.rand(9, K))  # experts of rank 0
        with rest.caller(0) as caller:
            check(caller.forward(batch), batch, group.tensors)
    healed = group.now()
    assert [uid for _, uid, _ in seats(healed.view)] == ["w0", "w1"]
