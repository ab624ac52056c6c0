"""`crossdock up` and its supervisor with real processes: comes up, shows itself, survives a kill, drains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from crossdock.common.addresses import split_address
from crossdock.common.config import ControlConfig, PlacementConfig, WorkerConfig, load
from crossdock.common.http import ask_http
from crossdock.host.supervisor import HopelessError, Supervisor, SupervisorError
from crossdock.protocol.v1.expert_pb2 import DescribeResponse
from tests import tools
from tests.chaos.netns import Fabric, Host, NoNamespaces
from tests.services.cluster import TEST_S, write_model
from tests.services.fakes import FakeWorker, echo

pytestmark = [pytest.mark.timeout(TEST_S), pytest.mark.usefixtures("forked")]
"""What `Up` starts is not forked: it is the start that people make."""
DEADLINE_S = 240
NUM_WORKERS = 2


class Up:
    """A running `crossdock up`, and what it has printed."""

    def __init__(
        self,
        folder: Path,
        num_workers: int = NUM_WORKERS,
        flags: Sequence[str] = (),
        join: str = "",
        enter: Sequence[str] = (),
    ) -> None:
        if not (folder / "model").exists():
            write_model(folder / "model")
        own = ["--set", "control.http_listen=127.0.0.1:0", "--set", "control.lease_s=60", "--listen", "127.0.0.1:0"]
        self.log_dir = folder / ("logs-of-joined" if join else "logs")
        free = [*(["--join", join] if join else own), "--set", "worker.step_timeout_s=100"]
        free += ["--log-dir", str(self.log_dir), *flags]
        self.process = subprocess.Popen(
            [
                *("env", "--default-signal=HUP"),  # also where the tests run under nohup
                *enter,
                sys.executable,
                "-m",
                "crossdock",
                "up",
                "-m",
                str(folder / "model"),
                "-n",
                str(num_workers),
                *free,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed = ""
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.printed += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, pattern: str, start: int = 0) -> re.Match[str]:
        """Wait until what was printed from `start` on matches; fails at once if the process ended without."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.printed[start:])

        with self._changed:
            self._changed.wait_for(lambda: found() or self._ended, DEADLINE_S)
            match = found()
        assert match, self.printed
        return match

    @property
    def target(self) -> str:
        return self.wait(r"crossdock status --target (\S+)").group(1)

    def control_address(self) -> str:
        """Of the control plane that runs here, from the config it was given."""
        return str(load(ControlConfig, self.log_dir / "control.yaml").listen)

    def status(self) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "crossdock", "status", "--json", "--timeout", "60", "--target", self.target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        return done.returncode, json.loads(done.stdout)


def page_of(address: str) -> dict[str, dict[str, float]]:
    """The host's page: by name of a series without further labels, its value by process ("": the supervisor)."""
    found: dict[str, dict[str, float]] = {}
    status, text = ask_http(address, "/metrics", DEADLINE_S)
    assert status == 200
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not set(sample.labels) - {"process", "group"}:
                found.setdefault(sample.name, {})[sample.labels.get("process", "")] = sample.value
    return found


def wait_page(address: str, holds: Callable[[dict[str, dict[str, float]]], bool]) -> None:
    """Until the host's page is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds(page := page_of(address)):
        assert time.monotonic() < deadline, page
        time.sleep(0.1)


@pytest.fixture
def host_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def up(tmp_path: Path, host_address: str) -> Iterator[Up]:
    made = Up(tmp_path, flags=["--set", f"http_listen={host_address}"])
    yield made
    made.process.kill()
    made.process.wait()


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += map(int, (task / "children").read_text().split())
    return children


def workers_of(pid: int) -> list[int]:
    return [pid for pid in children_of(pid) if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def test_up_serves_comes_back_after_a_kill_and_drains(up: Up, host_address: str) -> None:
    up.wait("Ctrl-C drains")
    code, said = up.status()
    assert (code, said["state"], said["epoch"]) == (0, "SERVING", 1)
    ready = up.wait(r"(http:\S+)/metrics").group(1) + "/readyz"
    with build_opener(ProxyHandler({})).open(ready, timeout=DEADLINE_S) as response:
        assert response.status == 200

    children, workers = children_of(up.process.pid), workers_of(up.process.pid)
    assert (len(children), len(workers)) == (NUM_WORKERS + 1, NUM_WORKERS)
    for pid in (up.process.pid, *children):  # `pkill -HUP crossdock`
        os.kill(pid, signal.SIGHUP)
    before = len(up.printed)
    names = [f"worker-{number}" for number in range(NUM_WORKERS)]
    page = page_of(host_address)
    assert sorted(page["crossdock_rank"].values()) == list(range(NUM_WORKERS))
    assert page["process_start_time_seconds"].keys() == {"", "control", *names}
    assert page["crossdock_process_scraped"] == dict.fromkeys(("control", *names), 1)
    assert children_of(up.process.pid) == children
    os.kill(workers[0], signal.SIGSTOP)
    wait_page(host_address, lambda page: page["crossdock_rank"].keys() == set(names[1:]))
    os.kill(workers[0], signal.SIGCONT)
    wait_page(host_address, lambda page: page["crossdock_rank"].keys() == set(names))
    os.kill(workers[0], signal.SIGKILL)
    wait_page(host_address, lambda page: page["crossdock_rank"].keys() == set(names[1:]))
    up.wait("epoch 2: SERVING", before)
    assert up.status()[0] == 0
    wait_page(host_address, lambda page: page["crossdock_epoch"] == dict.fromkeys(("control", *names), 2))

    ends = [os.pidfd_open(pid) for pid in children_of(up.process.pid)]
    assert len(ends) == NUM_WORKERS + 1
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(DEADLINE_S) == 0
    up.wait("stopped", before)
    for end in ends:
        assert select.select([end], [], [], DEADLINE_S)[0], "a process outlived its supervisor"
        os.close(end)


def test_a_group_of_two_hosts_is_joined_by_the_second_one(tmp_path: Path) -> None:
    """Two domains on loopback stand for hosts: rows between them take the network."""

    def network(domain: str) -> list[str]:
        sets = [f"worker.network.domain={domain}", "worker.network.listen=127.0.0.1:0", f"worker.uid={domain}"]
        return ["--network", "tcp", *(word for one in sets for word in ("--set", one))]

    with contextlib.ExitStack() as stack:
        first = Up(tmp_path, 1, ["--world-size", "3", *network("a")])
        stack.callback(first.process.kill)
        address = first.wait(r"1/3 registered") and first.control_address()
        second = Up(tmp_path, 2, network("b"), join=address)
        stack.callback(second.process.kill)
        second.wait("Ctrl-C drains")
        code, said = first.status()
        assert (code, said["state"], said["world_size"]) == (0, "SERVING", 3)
        told = [(one["uid"], one["network"]["provider"], one["network"]["domain"]) for one in said["members"]]
        assert sorted(told) == [("a/0", "tcp", "a"), ("b/0", "tcp", "b"), ("b/1", "tcp", "b")]
        first.wait("Ctrl-C drains")
        before, (lost, *_) = len(first.printed), workers_of(second.process.pid)
        os.kill(lost, signal.SIGKILL)
        first.wait("epoch 2: SERVING", before)
        second.process.send_signal(signal.SIGTERM)
        second.wait("draining")
        assert second.process.wait(DEADLINE_S) == 0
        second.wait("stopped")
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(DEADLINE_S) == 0


def test_hosts_with_networks_of_their_own_are_one_group(tmp_path: Path) -> None:
    """Two network namespaces, by the commands of docs/deploy.md."""
    with contextlib.ExitStack() as stack:
        try:
            fabric = stack.enter_context(contextlib.closing(Fabric()))
        except NoNamespaces as error:
            tools.skip("network namespaces", error)
        one, two = fabric.host("one", 1), fabric.host("two", 2)
        control = f"{one.address}:7400"

        def started(host: Host, flags: Sequence[str], join: str = "") -> Up:
            sets = [
                f"worker.{port}={host.address}:{number}"
                for port, number in (("listen", 7500), ("network.listen", 7700))
            ]
            sets += [f"worker.network.domain={host.name}", f"worker.uid={host.name}"]
            flags = [*flags, "--network", "tcp", *(word for each in sets for word in ("--set", each))]
            up = Up(tmp_path, 1, flags, join, host.enter)
            stack.callback(up.process.wait)
            stack.callback(up.process.kill)
            return up

        first = started(one, ["--world-size", "2", "--listen", control])
        first.wait(r"1/2 registered")
        second = started(two, [], control)
        second.wait("Ctrl-C drains")
        assert f"crossdock status --target {control}" in second.printed
        first.wait("Ctrl-C drains")
        for up in (second, first):
            up.process.send_signal(signal.SIGTERM)
            assert up.process.wait(DEADLINE_S) == 0


def test_a_killed_supervisor_leaves_no_process(up: Up) -> None:
    up.wait("Ctrl-C drains")
    ends = [os.pidfd_open(pid) for pid in children_of(up.process.pid)]
    up.process.kill()
    for end in ends:
        assert select.select([end], [], [], DEADLINE_S)[0], "a process outlived its supervisor"
        os.close(end)


def test_a_model_that_cannot_be_served_ends_the_wait_with_the_workers_words(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=1)
    worker = WorkerConfig(model=str(tmp_path / "model"))
    with (
        Supervisor(control, [worker], tmp_path / "logs") as group,
        pytest.raises(SupervisorError, match=r"config\.json"),
    ):
        group.wait_serving(DEADLINE_S)


def test_a_group_that_is_not_complete_in_time_is_described(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=2)
    worker = WorkerConfig(model=str(tmp_path / "model"))
    with Supervisor(control, [worker], tmp_path / "logs") as group:
        with pytest.raises(SupervisorError, match=r"expected SERVING within 0\.1 s, got"):
            group.wait_serving(0.1)
        assert group.addresses().keys() <= {"control", "worker-0"}


def test_members_tell_an_address_for_metrics_that_others_can_use(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    everywhere = {"listen": "0.0.0.0:0", "http_listen": "0.0.0.0:0", "advertise": "10.1.2.3:7500"}
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=2)
    worker = WorkerConfig(model=str(tmp_path / "model"), **everywhere)
    with Supervisor(control, [worker], tmp_path / "logs") as group:
        (member,) = next(view for view in group.views() if view.members).members
        host, port = split_address(member.http_address)
        assert (member.address, host) == ("10.1.2.3:7500", "10.1.2.3")
        assert ask_http(f"127.0.0.1:{port}", "/livez", DEADLINE_S)[0] == 200


def test_a_supervisor_without_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers"):
        Supervisor(ControlConfig(), [], tmp_path)
    with pytest.raises(ValueError, match=r"workers: expected a local_rank of its own for each, got \[1, 1\]"):
        Supervisor(ControlConfig(), 2 * [WorkerConfig(model="m", local_rank=1)], tmp_path)


def test_a_chosen_port_is_nobody_elses_while_the_control_plane_is_away(tmp_path: Path) -> None:
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=1)
    group = Supervisor(control, [WorkerConfig(model="m")], tmp_path)
    address = split_address(group.control_address)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(address)
    held = list(group._ports)
    group.stop()
    assert [port.fileno() for port in held] == [-1, -1]


@pytest.mark.parametrize("field", ["listen", "http_listen"])
def test_nothing_is_started_where_something_listens_already(tmp_path: Path, field: str) -> None:
    """Workers of a second `up` would find the control plane of the first, and take the seats of its workers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:{1}".format(*taken.getsockname())
        control = ControlConfig(**{"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0", field: address})
        group = Supervisor(control, [WorkerConfig(model="m")], tmp_path)
        with pytest.raises(HopelessError, match=f"control.{field}: expected .* got {address}: Address already in use"):
            group.start()
        with pytest.raises(RuntimeError, match="expected a started process"):
            group.worker_pids()
        group.stop()


def test_copies_that_no_rank_can_hold_end_it_at_once_with_the_reason(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    control = ControlConfig(
        listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=1, placement=PlacementConfig(redundant_experts=5)
    )
    group = Supervisor(control, [WorkerConfig(model=str(tmp_path / "model"))], tmp_path)
    with group, pytest.raises(HopelessError, match=r"redundant_experts: expected at most 0, E \* \(R - 1\), got 5"):
        group.wait_serving(DEADLINE_S)


def test_a_server_that_is_no_control_plane_is_not_asked_in_a_tight_loop(tmp_path: Path) -> None:
    other = FakeWorker(DescribeResponse(), echo)
    group = Supervisor(None, [WorkerConfig(model="m", control=other.address)], tmp_path)
    views, until = group.views(), time.monotonic() + 0.5
    num_asked = 0
    while time.monotonic() < until:
        assert next(views).version == 0
        num_asked += 1
    assert num_asked < 10
    views.close()
    other.kill()
