"""The expert service on GPUs: what it answers, what a killed rank costs, what an idle group does, and the demo."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import grpc
import pytest
import torch
from rich.console import Console

from crossdock.common.call_errors import code_number
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.host.supervisor import Supervisor, SupervisorError
from crossdock.protocol import wire
from crossdock.protocol.v1.control_pb2 import SERVING
from tests.services.cluster import ANSWER_S, FORM_S, LAYERS, Answer, Batch, Cluster, check, cluster, write_model
from tests.waiting import until

NUM_WORKERS, MAX_TOKENS = 2, 64
UNAVAILABLE = code_number(grpc.StatusCode.UNAVAILABLE)
MAX_ERROR = 0.01
"""Largest root-mean-square error of bf16 answers relative to the answers: five roundings of 2^-9 each."""

two_gpus = [pytest.mark.gpu(NUM_WORKERS), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers, one per GPU, that serve in bfloat16 what is float32 on disk."""
    folder = tmp_path_factory.mktemp("gpu")
    options = {"transport": "nvlink", "dtype": "bfloat16", "max_tokens_per_step": MAX_TOKENS, "step_timeout_s": 10.0}
    with contextmanager(cluster)(folder, num_workers=NUM_WORKERS, lease_s=3.0, **options) as made:
        yield replace(made, tensors={name: tensor.bfloat16().float() for name, tensor in made.tensors.items()})


def bf16_batch(num_tokens: int, layer: int = 1) -> Batch:
    batch = Batch.random(num_tokens, layer)
    return replace(batch, x=batch.x.bfloat16())


def bf16_rows(answer: Answer) -> torch.Tensor:
    assert not answer.HasField("error"), answer.error
    return wire.decode(answer.y, name="y", dtypes=(torch.bfloat16,), ndim=2)


def check_bf16(answer: Answer, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
    got, expected = bf16_rows(answer).double(), batch.expected(tensors)
    error, size = (got - expected).square().mean().sqrt(), expected.square().mean().sqrt()
    assert got.isfinite().all()
    assert error <= MAX_ERROR * size, f"{batch.x.shape[0]} tokens: error {error:.3g} of {size:.3g}"


def serving_after(group: Cluster, epoch: int) -> Cluster:
    """Wait until the group serves at a newer epoch; the cluster with the addresses of then."""
    deadline = time.monotonic() + FORM_S
    for view in group.supervisor.views():
        assert time.monotonic() < deadline, view.reason
        if view.state == SERVING and view.epoch > epoch:
            return Cluster(group.supervisor, group.tensors, view)
    raise AssertionError("unreachable")


def current(group: Cluster) -> Cluster:
    return next(
        Cluster(group.supervisor, group.tensors, view) for view in group.supervisor.views() if view.state == SERVING
    )


def page(group: Cluster, rank: int, name: str) -> str:
    address = next(member.http_address for member in group.view.members if member.rank == rank)
    with build_opener(ProxyHandler({})).open(f"http://{address}/{name}", timeout=10) as response:
        return response.read().decode()  # type: ignore[no-any-return]


def counted(group: Cluster, metric: str) -> float:
    """Sum of a counter over ranks and labels."""
    pages = [page(group, rank, "metrics") for rank in range(NUM_WORKERS)]
    return sum(float(value) for text in pages for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.M))


def used_bytes() -> list[int]:
    """Memory in use on each GPU, by everybody."""
    nvml = pytest.importorskip("pynvml")
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(NUM_WORKERS)]
        return [int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    finally:
        nvml.nvmlShutdown()


class TestOneGroup:
    """Everything that one group of two workers can show, in the order of the page."""

    pytestmark = two_gpus

    def test_answers_are_the_dense_layers(self, group: Cluster) -> None:
        for rank in range(NUM_WORKERS):
            with group.caller(rank) as caller:
                for num_tokens in (1, 2, 9, MAX_TOKENS, 3 * MAX_TOKENS + 5):
                    batches = [bf16_batch(num_tokens, layer) for layer in range(1, LAYERS)]
                    answers = [caller.ask(batch) for batch in batches]
                    for answer, batch in zip(answers, batches, strict=True):
                        check_bf16(answer.result(ANSWER_S), batch, group.tensors)

    def test_tokens_without_an_expert_are_zero_and_no_tokens_are_answered(self, group: Cluster) -> None:
        nobody = bf16_batch(5)
        nobody.ids.fill_(-1)
        with group.caller(0) as caller:
            assert not bf16_rows(caller.forward(nobody)).any()
            assert bf16_rows(caller.forward(bf16_batch(0))).shape[0] == 0

    def test_the_same_step_gives_the_same_bits(self, group: Cluster) -> None:
        batch = bf16_batch(MAX_TOKENS)
        with group.caller(1) as caller:
            first, *others = (bf16_rows(caller.forward(batch)) for _ in range(10))
        for other in others:
            assert torch.equal(first.view(torch.int16), other.view(torch.int16))

    def test_many_clients_at_once_get_their_own_rows(self, group: Cluster) -> None:
        faults: list[str] = []

        def ask(rank: int) -> None:
            try:
                with group.caller(rank) as caller:
                    for _ in range(10):
                        batches = [bf16_batch(random.randint(1, 100), random.randint(1, 2)) for _ in range(4)]
                        answers = [caller.ask(batch) for batch in batches]
                        for answer, batch in zip(answers, batches, strict=True):
                            check_bf16(answer.result(ANSWER_S), batch, group.tensors)
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=ask, args=(number % NUM_WORKERS,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * ANSWER_S)
        assert not faults

    def test_health_and_metrics_are_those_of_any_worker(self, group: Cluster) -> None:
        with group.caller(0) as caller:
            for _ in range(3):
                caller.forward(bf16_batch(MAX_TOKENS))
        assert page(group, 0, "readyz").startswith("serving")
        until = time.monotonic() + ANSWER_S
        while not counted(group, "crossdock_operation_duration_seconds_count"):
            assert time.monotonic() < until, "no latency samples"
            threading.Event().wait(0.1)
        assert counted(group, "crossdock_step_phase_duration_seconds_sum") > 0
        assert counted(group, "crossdock_expert_rows_total") > 0
        assert counted(group, "crossdock_expert_weights_bytes") == sum(
            tensor.numel() * 2 for tensor in group.tensors.values()
        )

    def test_a_killed_worker_costs_an_epoch_and_nothing_else(self, group: Cluster) -> None:
        group = current(group)
        memory: list[int] = []
        for victim in (1, 0, 1, 0):
            before, epoch = group.supervisor.worker_pids(), group.view.epoch
            member = next(member for member in group.view.members if member.rank == victim)
            index = int(member.worker.uid.removeprefix("w"))
            with group.caller(1 - victim) as caller:
                load = [caller.ask(bf16_batch(3 * MAX_TOKENS)) for _ in range(100)]
                load[0].result(ANSWER_S)
                os.kill(before[index], signal.SIGKILL)
                answers = [answer.result(ANSWER_S) for answer in load]
            errors = [answer.error for answer in answers if answer.HasField("error")]
            assert errors, "requests were in flight when the rank died"
            for error in errors:
                assert (error.code, list(error.lost_ranks)) == (UNAVAILABLE, [victim]), error
            group = serving_after(group, epoch)
            assert group.view.epoch == epoch + 1
            pids = group.supervisor.worker_pids()
            assert [pid != then for pid, then in zip(pids, before, strict=True)] == [i == index for i in range(2)]
            for rank in range(NUM_WORKERS):
                batch = bf16_batch(MAX_TOKENS + 1)
                with group.caller(rank) as caller:
                    check_bf16(caller.forward(batch), batch, group.tensors)
            memory.append(sum(used_bytes()))
        assert memory[-1] <= memory[1] + (64 << 20), f"a re-formed group keeps memory of the old one: {memory}"


def taken(group: Cluster, rank: int) -> dict[str, float]:
    """Of a rank so far: steps, and operations whose samples were collected, or lost before."""
    text = page(group, rank, "metrics")

    def total(pattern: str) -> float:
        return sum(map(float, re.findall(rf"^crossdock_{pattern} (\S+)$", text, re.M)))

    ended, lost = 'operation_duration_seconds_count{.*op="%s",.*phase="total".*}', 'samples_dropped_total{.*op="%s"}'
    operations = {op: total(ended % op) + total(lost % op) for op in ("exchange", "dispatch", "combine")}
    return {"step": total("steps_total{.*}"), **operations}


@pytest.mark.parametrize("transport", ["cpu", pytest.param("nvlink", marks=pytest.mark.gpu(NUM_WORKERS))])
@pytest.mark.timeout(240)
def test_an_idle_group_launches_nothing(transport: str, tmp_path: Path) -> None:
    """Each request is a step of both ranks, with one launch of each kind, and between them is nothing. Samples are
    collected when the device lets them be, in the order of the operations: those of a step after those before it."""
    options = {"transport": transport, "dtype": "bfloat16", "max_tokens_per_step": MAX_TOKENS}
    with contextmanager(cluster)(tmp_path, num_workers=NUM_WORKERS, **options) as group, group.caller(0) as caller:
        for number in (1, 2):
            bf16_rows(caller.forward(bf16_batch(3)))
            for rank in range(NUM_WORKERS):
                until(lambda rank=rank, number=number: min(taken(group, rank).values()) >= number)
                found = taken(group, rank)
                assert found.pop("exchange") < 20 * number, "a request may call for more than one"
                assert found == {"step": number, "dispatch": number, "combine": number}
            threading.Event().wait(2.0 if number == 1 else 0.0)


@pytest.mark.gpu(2)
@pytest.mark.timeout(240)
def test_float32_is_as_exact_as_on_a_cpu(tmp_path: Path) -> None:
    options = {"transport": "nvlink", "max_tokens_per_step": MAX_TOKENS}
    with contextmanager(cluster)(tmp_path, num_workers=2, **options) as group:
        for rank in range(2):
            with group.caller(rank) as caller:
                for num_tokens in (1, 40, 200):
                    batch = Batch.random(num_tokens)
                    check(caller.forward(batch), batch, group.tensors)


@pytest.mark.gpu(2)
@pytest.mark.timeout(240)
def test_a_silent_worker_is_named_at_the_deadline_and_may_come_back(tmp_path: Path) -> None:
    options = {"transport": "nvlink", "max_tokens_per_step": MAX_TOKENS, "step_timeout_s": 2.0}
    with contextmanager(cluster)(tmp_path, num_workers=2, **options) as group:
        member = next(member for member in group.view.members if member.rank == 1)
        pid = group.supervisor.worker_pids()[int(member.worker.uid.removeprefix("w"))]
        with group.caller(0) as caller:
            load = [caller.ask(Batch.random(3 * MAX_TOKENS)) for _ in range(100)]
            load[0].result(ANSWER_S)
            os.kill(pid, signal.SIGSTOP)
            answers = [answer.result(ANSWER_S) for answer in load]
            os.kill(pid, signal.SIGCONT)
        errors = [answer.error for answer in answers if answer.HasField("error")]
        assert errors, "requests were in flight when the rank fell silent"
        for error in errors:
            assert (error.code, list(error.lost_ranks)) == (UNAVAILABLE, [1]), error
        with serving_after(group, group.view.epoch).caller(1) as caller:
            batch = Batch.random(MAX_TOKENS)
            check(caller.forward(batch), batch, group.tensors)


def failure_to_serve(folder: Path, device: int) -> str:
    """Why one nvlink worker that is given this device cannot serve."""
    write_model(folder / "model")
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=1)
    worker = WorkerConfig(model=str(folder / "model"), transport="nvlink", device=device)
    with Supervisor(control, [worker], folder / "logs") as group, pytest.raises(SupervisorError) as caught:
        group.wait_serving(FORM_S)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs a machine without GPUs")
def test_no_gpu_is_said_and_ends_the_wait(tmp_path: Path) -> None:
    said = failure_to_serve(tmp_path, 0)
    assert "ended with exit status 2 and is not restarted" in said
    assert "worker.transport: expected a CUDA device for each worker, or transport cpu, got 'no CUDA device'" in said


@pytest.mark.gpu(1)
def test_more_workers_than_gpus_is_said_with_both_numbers(tmp_path: Path) -> None:
    present = torch.cuda.device_count()
    said = failure_to_serve(tmp_path, present)
    assert f"device in 0..{present - 1} (this process sees {present}), got {present}" in said


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from crossdock.demo import run

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    printed = Console(file=io.StringIO(), width=200, record=True)
    status = run.run_demo(["qwen3_moe"], printed, transport="nvlink", num_workers=2)
    assert status == 0, printed.export_text()
    words = printed.export_text()
    for part in ("2 workers (nvlink)", "cuda:0", "128/128", "rms logit error", "every criterion met"):
        assert part in words
