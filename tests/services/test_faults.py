"""Processes that die, and clients that must hear of it in time: real kills, under load."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from crossdock.cli import postmortem
from crossdock.common import config as configs
from crossdock.common import rpc
from crossdock.common.announce import Addresses, parse
from crossdock.common.call_errors import code_number
from crossdock.common.config import ControlConfig, LogConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.host import child
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.protocol.v1.control_pb2 import SERVING
from crossdock.worker.experts import device
from crossdock.worker.experts.device import DeviceLost
from crossdock.worker.process import run_worker
from tests.services import forked
from tests.services.cluster import ANSWER_S, FORM_S, TEST_S, Batch, Caller, Cluster, check, cluster, write_model
from tests.services.control_world import unused_address
from tests.waiting import until

pytestmark = pytest.mark.timeout(TEST_S)
DEADLINE_S = 60.0
UNAVAILABLE = code_number(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers that log to a full disk, from first to last. A killed one is started again without back-off."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_HEALTHY_S", 0.0)
        yield from cluster(folder, max_tokens_per_step=64, drain_timeout_s=ANSWER_S, log=LogConfig(file="/dev/full"))


def serving_at(group: Cluster, epoch: int) -> Cluster:
    """Wait until the group serves at `epoch`, and never at a later one; the cluster with the addresses of then."""
    found = group.until(lambda view: view.epoch > epoch or (view.state == SERVING and view.epoch == epoch))
    assert found.view.epoch == epoch, found.view.reason
    return found


@dataclass
class Load:
    """Clients that ask the given ranks without a pause, until they are left; every answer is kept.

    Attributes:
        num_good: answers that were right.
        errors: errors that came back in the stream.
        slowest_s: longest time from asking to answer.
        broken: what else went wrong.
    """

    group: Cluster
    ranks: tuple[int, ...]
    num_good: int = 0
    errors: list[expert_pb2.Error] = field(default_factory=list)
    slowest_s: float = 0.0
    broken: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_S + DEADLINE_S)

    def wait_good(self, number: int) -> None:
        """Wait until `number` more answers were right."""
        goal, deadline = self.num_good + number, time.monotonic() + ANSWER_S
        while self.num_good < goal:
            assert time.monotonic() < deadline, f"no answers any more: {self.broken} {self.errors[-1:]}"
            self._stop.wait(0.005)

    def wait_error(self) -> None:
        """Wait until an answer was an error."""
        deadline = time.monotonic() + ANSWER_S
        while not self.errors:
            assert time.monotonic() < deadline, f"nobody was told: {self.broken}"
            self._stop.wait(0.005)

    def _run(self, rank: int) -> None:
        try:
            with self.group.caller(rank) as caller:
                while not self._stop.is_set():
                    self._ask(caller)
        except Exception as error:
            self.broken.append(f"client of rank {rank}: {type(error).__name__}: {error}")

    def _ask(self, caller: Caller) -> None:
        batch = Batch.random(random.randint(1, 150), random.randint(1, 2))
        started = time.monotonic()
        answer = caller.ask(batch, timeout_ms=int(DEADLINE_S * 1000)).result(ANSWER_S)
        took_s = time.monotonic() - started
        good = not answer.HasField("error")
        if good:
            check(answer, batch, self.group.tensors)
        with self._lock:
            self.slowest_s = max(self.slowest_s, took_s)
            self.num_good += good
            if not good:
                self.errors.append(answer.error)
        if not good:
            self._stop.wait(0.05)


@pytest.mark.timeout(3 * TEST_S)
def test_kill_9_of_one_worker_again_and_again(group: Cluster) -> None:
    group = group.now()
    for victim in (*random.sample(range(4), 2), 0):
        before, epoch, control = group.supervisor.worker_pids(), group.view.epoch, group.supervisor.control_pid
        index = group.place(victim)
        others = tuple(rank for rank in range(4) if rank != victim)
        with Load(group, others) as load:
            load.wait_good(10)
            with group.killed(victim):
                load.wait_error()
            after = serving_at(group, epoch + 1)
            load.wait_good(10)
        assert load.broken == []
        assert load.slowest_s < DEADLINE_S
        for error in load.errors:
            assert error.code == UNAVAILABLE, error
            assert list(error.lost_ranks) == [victim], error
            assert f"rank {victim}" in error.message, error
            assert error.epoch in (epoch, epoch + 1), error
        pids = group.supervisor.worker_pids()
        assert [pid != then for pid, then in zip(pids, before, strict=True)] == [i == index for i in range(4)]
        assert group.supervisor.control_pid == control
        group = after
        for rank in range(4):
            batch = Batch.random(9)
            with group.caller(rank) as caller:
                check(caller.forward(batch), batch, group.tensors)


def lose(group: Cluster, first: tuple[int, ...], later: tuple[int, ...] = ()) -> None:
    """kill -9 of some ranks at once under load, and of others once the group re-forms without the first. Nobody
    restarts but them, nobody else is named, and all ranks serve again."""
    group = group.now()
    victims, before, epoch = {*first, *later}, group.supervisor.worker_pids(), group.view.epoch
    indices = {group.place(rank) for rank in victims}
    with Load(group, tuple(rank for rank in range(4) if rank not in victims)) as load:
        load.wait_good(10)
        with group.killed(*first):
            load.wait_error()
            if later:
                group.until(lambda view: view.epoch > epoch and view.state != SERVING)
                with group.killed(*later):
                    assert group.look().state != SERVING
        after = group.until(lambda view: view.epoch > epoch and view.state == SERVING)
        load.wait_good(10)
    assert load.broken == []
    assert load.slowest_s < DEADLINE_S
    for error in load.errors:
        assert error.code == UNAVAILABLE, error
        assert error.lost_ranks, error
        assert victims.issuperset(error.lost_ranks), error
    pids = group.supervisor.worker_pids()
    assert {i for i in range(4) if pids[i] != before[i]} == indices
    for rank in range(4):
        batch = Batch.random(9)
        with after.caller(rank) as caller:
            check(caller.forward(batch), batch, group.tensors)


def test_kill_9_of_two_workers_at_once(group: Cluster) -> None:
    lose(group, (1, 2))


def test_kill_9_of_a_worker_while_the_group_re_forms_without_another_one(group: Cluster) -> None:
    lose(group, (0,), (3,))


def test_the_survivors_of_the_last_kill_say_what_they_knew(group: Cluster) -> None:
    """`crossdock postmortem` of the group that the tests above have disturbed, and of its logs."""
    events = postmortem.fetch(group.supervisor.control_address, ANSWER_S, None)
    last = [event.record for event in events if event.record is not None][-1]
    assert last["gone"] or last["given_up"]
    assert last["rank"] != last["peer"]
    assert {last["op"], *last["waits_s"]} <= {"exchange", "dispatch", "combine"}
    told = postmortem.story(events)
    assert f"rank {last['peer']}" in told[-1]
    assert any("is SERVING" in line for line in told), "the changes of the group stand between them"


def test_kill_9_of_the_control_plane_disturbs_nobody(group: Cluster) -> None:
    group = group.now()
    pids, control = group.supervisor.worker_pids(), group.supervisor.control_pid
    with Load(group, (0, 1, 2, 3)) as load:
        load.wait_good(10)
        os.kill(control, signal.SIGKILL)
        deadline = time.monotonic() + FORM_S
        while group.supervisor.control_pid == control:
            assert time.monotonic() < deadline
            load.wait_good(1)
        after = serving_at(group, group.view.epoch)
        load.wait_good(50)
    assert load.broken == []
    assert load.errors == []
    assert group.supervisor.worker_pids() == pids
    assert {(m.rank, m.worker.uid) for m in after.view.members} == {(m.rank, m.worker.uid) for m in group.view.members}


def test_drain_finishes_what_is_queued_and_the_group_goes_on(group: Cluster) -> None:
    """Another rank stands still until all of it is queued and the drain has begun."""
    group = group.now()
    batches = [Batch.random(150, layer=1 + i % 2) for i in range(20)]
    with group.caller(1) as caller:
        with group.stopped(2):
            answers = [caller.ask(batch) for batch in batches]
            until(lambda: group.metric(1, "queued_requests") == len(batches))
            drained = caller.stub.Drain.future(expert_pb2.DrainRequest(), timeout=ANSWER_S)
            until(lambda: "draining" in group.page(1, "readyz"))
            late = caller.forward(Batch.random(1)).error
        for answer, batch in zip(answers, batches, strict=True):
            check(answer.result(ANSWER_S), batch, group.tensors)
        drained.result(ANSWER_S)
    assert late.code == UNAVAILABLE
    assert "draining" in late.message
    group = serving_at(group, group.view.epoch + 1)
    for rank in range(4):
        batch = Batch.random(9)
        with group.caller(rank) as caller:
            check(caller.forward(batch), batch, group.tensors)


class Process:
    """One `crossdock control` or `crossdock worker`, forked."""

    def __init__(self, folder: Path, verb: str, config: ControlConfig | WorkerConfig) -> None:
        path = folder / f"{verb}-{time.monotonic_ns()}.yaml"
        path.write_text(configs.dump(config), encoding="utf-8")
        self._log = (folder / f"{path.stem}.log").open("w+", encoding="utf-8")
        self.child = forked.crossdock(verb, "--config", str(path), stderr=self._log.fileno())

    def log(self) -> str:
        """What it wrote to stderr."""
        self._log.seek(0)
        return self._log.read()

    def addresses(self) -> Addresses:
        """Where it listens; waits for the line that says so."""
        found = next((addresses for line in self.child.stdout if (addresses := parse(line))), None)
        assert found is not None, self.log()
        return found

    def end(self, *, expected: int) -> str:
        """Wait for the end; the lines it logged."""
        assert self.child.wait(FORM_S) == expected, self.log()
        return self.log()

    def kill(self) -> None:
        """kill -9, if it has not ended."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(FORM_S)
        self._log.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def control(tmp_path: Path, processes: list[Process]) -> str:
    """The address of a control plane for one worker."""
    config = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=1, lease_s=60.0)
    processes.append(Process(tmp_path, "control", config))
    return processes[-1].addresses().address


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_model(tmp_path / "model")
    return str(tmp_path / "model")


def one_line(log: str, words: str) -> None:
    """The log has exactly one error line, with the words, and no traceback."""
    errors = [line for line in log.splitlines() if " error " in line]
    assert len(errors) == 1, log
    assert words in errors[0], log
    assert "Traceback" not in log, log


def exit_2(config: WorkerConfig, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`run_worker`, called in this process (a start costs seconds), gives up with 2 and one clear line."""
    assert run_worker(config) == 2
    one_line(capfd.readouterr().err, words)


def test_a_missing_model_is_exit_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exit_2(WorkerConfig(model=str(tmp_path / "nowhere")), "no such directory", capfd)


def test_a_truncated_shard_is_exit_2(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    shard = Path(model) / "model.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    exit_2(WorkerConfig(model=model), "model.safetensors", capfd)


def test_an_unknown_activation_is_exit_2_before_the_group_forms(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = Path(model) / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"abacus"'))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # were the model taken, this would be the complaint
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        exit_2(WorkerConfig(model=model, listen=address), "abacus", capfd)


def test_an_unknown_transport_is_exit_2(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    exit_2(WorkerConfig(model=model, transport="pigeon"), "pigeon", capfd)


@pytest.mark.parametrize("works", [0, 1, 2], ids=["at the start", "before loading", "before an epoch"])
def test_a_lost_device_is_exit_4(
    model: str, control: str, works: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A GPU that fails stays lost to its process, so the process ends and whoever started it makes a new one."""
    asked = itertools.count()

    def enter(device: object) -> None:
        if next(asked) >= works:
            raise DeviceLost("cuda:0: an illegal memory access was encountered")

    monkeypatch.setattr(device, "enter", enter)
    assert run_worker(WorkerConfig(model=model, control=control)) == 4
    one_line(capfd.readouterr().err, "illegal memory access")


@pytest.mark.parametrize("what", ["listen", "http_listen"])
def test_a_port_in_use_is_exit_2(model: str, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        exit_2(WorkerConfig(model=model, **{what: address}), address, capfd)  # type: ignore[arg-type]


def test_sigterm_while_there_is_no_control_plane_is_exit_0(
    tmp_path: Path, processes: list[Process], model: str
) -> None:
    with unused_address() as nobody:
        worker = Process(tmp_path, "worker", WorkerConfig(model=model, control=nobody))
        processes.append(worker)
        with rpc.channel(worker.addresses().address) as channel:
            stub = expert_pb2_grpc.ExpertServiceStub(channel)
            assert not stub.Describe(expert_pb2.DescribeRequest(), timeout=ANSWER_S).serving
            (answer,) = stub.Forward(iter([Batch.random(2).message(1)]), timeout=ANSWER_S)
        assert answer.error.code == UNAVAILABLE
        assert "joining" in answer.error.message
        worker.child.send_signal(signal.SIGTERM)
        worker.end(expected=0)


def wait_member(control: str, uid: str) -> None:
    """Wait until a worker is registered."""
    deadline = time.monotonic() + FORM_S
    with rpc.channel(control) as channel:
        while uid not in {member.worker.uid for member in current_view(channel, ANSWER_S).members}:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_who_is_not_taken_ends_with_3(tmp_path: Path, processes: list[Process], model: str, control: str) -> None:
    """A worker with another model is refused; of two processes with one uid the newer one wins."""
    config = WorkerConfig(model=model, control=control, uid="twin")
    older = Process(tmp_path, "worker", config)
    processes.append(older)
    wait_member(control, "twin")
    write_model(tmp_path / "other")
    stranger = Process(tmp_path, "worker", WorkerConfig(model=str(tmp_path / "other"), control=control, uid="stranger"))
    processes.append(stranger)
    one_line(stranger.end(expected=3), "model: expected")
    newer = Process(tmp_path, "worker", config)
    processes.append(newer)
    one_line(older.end(expected=3), "newer")
    newer.child.send_signal(signal.SIGTERM)
    newer.end(expected=0)


def test_a_second_signal_ends_the_process_at_once(
    tmp_path: Path, processes: list[Process], model: str, control: str
) -> None:
    """The worker stands still until it has been sent both: it is told of the second in the middle of its drain."""
    worker = Process(tmp_path, "worker", WorkerConfig(model=model, control=control))
    processes.append(worker)
    with Caller(worker.addresses().address) as caller:
        deadline = time.monotonic() + ANSWER_S
        while caller.forward(Batch.random(1)).HasField("error"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            worker.child.send_signal(number)
        assert worker.child.wait(ANSWER_S) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
