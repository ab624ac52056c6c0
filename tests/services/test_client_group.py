"""The client against a real group: its rows are the dense model's, and a killed worker costs it only time."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from crossdock.client import Client, InvalidRequest, Unavailable, dialling
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1.control_pb2 import FORMING
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from tests.services.cluster import ANSWER_S, FORM_S, STEP_S, TEST_S, without_successors
from tests.services.fakes import dense
from tests.services.forked import forked_children
from tests.unit.moe_files import Sizes, draw_weights, write_files
from tests.waiting import until

pytestmark = pytest.mark.timeout(TEST_S)
SIZES = Sizes(num_experts=7, hidden=64, inner=32, layers=2)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Supervisor, ExpertMLPs]]:
    folder = tmp_path_factory.mktemp("group")
    path = write_files(folder / "model", "qwen3_moe", SIZES, draw_weights(SIZES))
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=2, lease_s=6.0)
    workers = [
        WorkerConfig(model=str(path), local_rank=rank, max_tokens_per_step=64, step_timeout_s=STEP_S)
        for rank in range(2)
    ]
    experts = ExpertMLPs.load(Checkpoint.open(path), range(7), dtype=torch.float32)
    with forked_children(), Supervisor(control, workers, folder / "logs") as supervisor:
        supervisor.wait_serving(FORM_S)
        yield supervisor, experts


def _sockets() -> set[str]:
    """Of this process, by inode."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{each}"))
    return {each for each in found if each.startswith("socket:")}


def _batch(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(num_tokens, 7).argsort(-1)[:, :2]
    ids[::5, 1] = -1
    return torch.randn(num_tokens, 64), ids, torch.rand(num_tokens, 2)


def _assert_serves(client: Client, experts: ExpertMLPs, num_tokens: int) -> None:
    for layer in (0, 1):
        x, ids, weights = _batch(num_tokens)
        expected = dense(experts, layer, x, ids, weights)
        torch.testing.assert_close(
            client.forward(layer, x, ids, weights, timeout_s=FORM_S), expected, rtol=1e-4, atol=1e-5
        )


@pytest.fixture(params=["near", "far"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where clients are: on the workers' host, or on no host that these know."""
    if request.param == "far":
        monkeypatch.setattr(dialling, "_own_host", str)
    return str(request.param)


def test_rows_are_the_dense_models(group: tuple[Supervisor, ExpertMLPs], place: str) -> None:
    supervisor, experts = group
    with Client(supervisor.control_address, min_tokens_per_worker=8) as client:
        for num_tokens in (1, 7, 64, 333):
            _assert_serves(client, experts, num_tokens)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: _assert_serves(client, experts, 10 + n), range(12)))
        for view in supervisor.views():  # heartbeats say it, sooner or later
            if all(member.stats.request_connections for member in view.members):
                break


def test_a_closed_client_leaves_no_connection(group: tuple[Supervisor, ExpertMLPs], place: str) -> None:
    supervisor, experts = group
    with Client(supervisor.control_address) as stays:  # and with it the loop that clients share
        _assert_serves(stays, experts, 64)
        gc.collect()
        before = _sockets()
        gc.disable()
        try:
            for _ in range(4):
                with Client(supervisor.control_address, min_tokens_per_worker=8) as client:
                    _assert_serves(client, experts, 64)
            until(lambda: len(_sockets() - before) == 0)
        finally:
            gc.enable()


def test_bad_requests_leave_the_service_up(group: tuple[Supervisor, ExpertMLPs], place: str) -> None:
    supervisor, experts = group
    x, ids, weights = _batch(5)
    with Client(supervisor.control_address) as client:
        for layer, batch in (
            (9, (x, ids, weights)),
            (0, (x[:, :32], ids, weights)),
            (0, (x.half(), ids, weights)),
            (0, (x, ids + 100, weights)),
            (0, (x, ids, weights * float("nan"))),
            (0, (x, ids[:, :1], weights[:, :1])),
        ):
            with pytest.raises(InvalidRequest, match="expected"):
                client.forward(layer, *batch)
        _assert_serves(client, experts, 5)


def test_a_killed_worker_costs_only_time(group: tuple[Supervisor, ExpertMLPs], place: str) -> None:
    supervisor, experts = group
    patient = Client(supervisor.control_address, min_tokens_per_worker=8)
    hasty = Client(supervisor.control_address, min_tokens_per_worker=8, retry=False)
    others, ended = Client(supervisor.control_address, min_tokens_per_worker=8), threading.Event()

    def ask_all_the_while() -> int:
        calls = 0
        while not ended.is_set():
            _assert_serves(others, experts, 40)
            calls += 1
        return calls

    with patient, hasty, others, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as at_last:
        at_last.callback(ended.set)
        _assert_serves(patient, experts, 40)
        all_the_while = pool.submit(ask_all_the_while)
        before = patient.describe().epoch
        with without_successors(supervisor, 1):
            os.kill(supervisor.worker_pids()[1], signal.SIGKILL)
            lost: set[int] = set()
            while 1 not in lost:
                try:
                    hasty.forward(0, *_batch(40), timeout_s=ANSWER_S)
                except Unavailable as error:
                    lost.update(error.lost_ranks)
        _assert_serves(patient, experts, 40)
        assert patient.describe().epoch > before
        ended.set()
        assert all_the_while.result() > 0


def test_a_worker_that_stood_still_takes_its_place_again(group: tuple[Supervisor, ExpertMLPs]) -> None:
    supervisor, experts = group
    with Client(supervisor.control_address, min_tokens_per_worker=8) as client:
        _assert_serves(client, experts, 40)
        before, pids = client.describe().epoch, supervisor.worker_pids()
        os.kill(pids[0], signal.SIGSTOP)
        try:
            next(view for view in supervisor.views() if view.state == FORMING)
        finally:
            os.kill(pids[0], signal.SIGCONT)
        _assert_serves(client, experts, 40)
        assert client.describe().epoch > before
        assert supervisor.worker_pids() == pids
