"""`crossdock up --runtime docker` against a daemon of the test's own, over a real socket; the group is a fake too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crossdock.common.config import ConfigFileError, ControlConfig, HostConfig, WorkerConfig, dump, load
from crossdock.common.settings import DockerConfig
from crossdock.host import run as hosts
from crossdock.host.supervisor import SupervisorError
from crossdock.protocol.v1.control_pb2 import FORMING, SERVING, GroupView
from tests.services.docker_daemon import DEADLINE_S, Daemon
from tests.services.fakes import FakeControl

docker = pytest.importorskip("docker", reason="the docker SDK comes with the extra [docker]")
containers = pytest.importorskip("crossdock.host.docker")

NAME = "group"
CONTROL, WORKER = f"{NAME}-control", f"{NAME}-worker"
VIEW = GroupView(version=1, epoch=1, state=SERVING, world_size=2)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, "ours/control", "ours/worker") as made:
        yield made


@pytest.fixture
def group() -> Iterator[FakeControl]:
    made = FakeControl(VIEW)
    yield made
    made.kill()


@pytest.fixture
def config(daemon: Daemon, group: FakeControl, tmp_path: Path) -> HostConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    chosen = DockerConfig(
        host=daemon.url,
        name=NAME,
        control_image="ours/control",
        worker_image="ours/worker",
        shm_bytes=1 << 20,
        environment={"NCCL_DEBUG": "INFO"},
        mounts={str(tmp_path): "/more"},
        ulimits={"memlock": -1},
        user="7:8",
    )
    control = ControlConfig(listen=group.address, http_listen="127.0.0.1:0", form_timeout_s=DEADLINE_S)
    worker = WorkerConfig(model=str(model), transport="nvlink")
    return HostConfig(worker=worker, num_workers=2, control=control, docker=chosen)


@pytest.fixture
def run(config: HostConfig, tmp_path: Path) -> Iterator[Any]:
    made = containers.Containers(config, tmp_path / "logs")
    made.start()
    yield made
    made.stop(0)


def replaced(config: HostConfig, **fields: Any) -> HostConfig:
    assert config.docker is not None
    chosen = {name: getattr(config.docker, name) for name in config.docker.__struct_fields__}
    return HostConfig(
        worker=config.worker, num_workers=2, control=config.control, docker=DockerConfig(**{**chosen, **fields})
    )


def wait_until(true: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def test_it_makes_a_network_and_two_locked_containers(daemon: Daemon, run: Any, config: HostConfig) -> None:
    assert list(daemon.networks) == [NAME]
    control, worker = daemon.containers[CONTROL].body, daemon.containers[WORKER].body
    for name, body in (("control", control), ("worker", worker)):
        limits = body["HostConfig"]
        assert limits["ReadonlyRootfs"]
        assert limits["CapDrop"] == ["ALL"]
        assert limits["SecurityOpt"] == ["no-new-privileges"]
        assert limits["ShmSize"] == 1 << 20
        assert limits["Ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
        assert body["NetworkingConfig"]["EndpointsConfig"][NAME]["Aliases"] == [name]
        assert body["User"] == "7:8"
        assert body["Env"] == ["NCCL_DEBUG=INFO"]
        assert all(mount["ReadOnly"] for mount in limits["Mounts"])
        assert "/more" in [mount["Target"] for mount in limits["Mounts"]]
        assert not limits.get("Privileged")
    assert not control["HostConfig"]["DeviceRequests"]
    assert worker["HostConfig"]["DeviceRequests"][0]["Count"] == 2
    assert worker["HostConfig"]["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert (control["Image"], worker["Image"]) == ("ours/control", "ours/worker")


def test_a_container_is_told_its_config_by_a_file_that_any_user_may_read(daemon: Daemon, run: Any) -> None:
    for name, kind in ((CONTROL, ControlConfig), (WORKER, HostConfig)):
        body = daemon.containers[name].body
        verb, _, inside = body["Cmd"]
        (source,) = [mount["Source"] for mount in body["HostConfig"]["Mounts"] if mount["Target"] == inside]
        assert verb == ("control" if kind is ControlConfig else "up")
        assert load(kind, source)
        assert Path(source).stat().st_mode & 0o004


def test_the_group_is_watched_through_the_published_port(run: Any, group: FakeControl) -> None:
    assert run.control_address == group.address
    assert run.wait_serving(DEADLINE_S).epoch == 1


def test_a_group_that_does_not_form_is_told_with_the_last_words_of_both(
    daemon: Daemon, run: Any, group: FakeControl
) -> None:
    group.say(GroupView(version=2, state=FORMING, world_size=2))
    daemon.say(WORKER, "out of memory\n")
    for timeout_s in (0.01, 5.0, 50.0):  # a longer one where the machine was too busy to hear of the group before it
        with pytest.raises(SupervisorError) as caught:
            run.wait_serving(timeout_s)
        if "no answer from the control plane" not in str(caught.value):
            break
    assert re.search(rf"expected SERVING within {timeout_s:g} s, got FORMING(.|\n)*out of memory", str(caught.value))


def test_all_is_gone_afterwards_and_the_workers_were_stopped_first(daemon: Daemon, run: Any) -> None:
    run.stop(30)
    assert not daemon.containers
    assert not daemon.networks
    assert daemon.calls.index(f"stop {WORKER}") < daemon.calls.index(f"stop {CONTROL}")
    run.stop(30)


def test_a_container_that_ends_is_started_again_and_its_log_goes_on(daemon: Daemon, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker.log"
    daemon.say(WORKER, "one\n")
    wait_until(lambda: path.exists() and path.read_text() == "one\n", "the log is followed")
    daemon.turn(WORKER, "exited", 1)

    def again() -> bool:
        run.check()
        return daemon.containers[WORKER].starts == 2

    wait_until(again, "it is started again")
    daemon.say(WORKER, "two\n")
    wait_until(lambda: path.read_text() == "one\ntwo\n", "the log is followed on")
    assert daemon.containers[CONTROL].starts == 1


def test_a_config_that_can_never_work_is_not_tried_again(daemon: Daemon, run: Any) -> None:
    daemon.say(WORKER, "no such model\n")
    daemon.turn(WORKER, "exited", 2)
    with pytest.raises(
        SupervisorError, match=r"group-worker ended with exit status 2 and is not restarted:\nno such model"
    ):
        run.check()


def test_one_that_keeps_ending_young_is_given_up(daemon: Daemon, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_HEALTHY_S", float("inf"))
    stopped = threading.Event()

    def kill() -> None:
        while not stopped.wait(0.01):
            if daemon.containers[CONTROL].status == "running":
                daemon.turn(CONTROL, "exited", 1)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(SupervisorError, match="group-control ended with exit status 1 and is not restarted"):
            wait_until(lambda: run.check() is not None, "it is given up")
    finally:
        stopped.set()
        killer.join()
    assert daemon.containers[CONTROL].starts == containers._EARLY_ENDS


def test_a_container_that_somebody_removed_is_named(daemon: Daemon, run: Any) -> None:
    daemon.turn(CONTROL, "removing")
    del daemon.containers[CONTROL]
    with pytest.raises(SupervisorError, match="group-control: the container was removed"):
        run.check()


def test_a_daemon_that_is_away_for_a_while_is_no_reason_to_stop(daemon: Daemon, run: Any) -> None:
    daemon.refused = f"/containers/{WORKER}/json"
    run.check()
    daemon.refused = ""
    run.check()


def test_a_missing_image_is_named_before_anything_is_made(daemon: Daemon, config: HostConfig, tmp_path: Path) -> None:
    daemon.images.discard("ours/worker")
    with pytest.raises(ConfigFileError, match=r"docker.worker_image: expected an image .* got 'ours/worker'"):
        containers.Containers(config, tmp_path)
    assert not daemon.calls


def test_a_daemon_that_does_not_answer_is_named(config: HostConfig, tmp_path: Path) -> None:
    nobody = f"unix://{tmp_path}/nobody.sock"
    with pytest.raises(ConnectionError, match=f"expected a daemon that answers at {nobody}"):
        containers.Containers(replaced(config, host=nobody), tmp_path)


def test_without_the_sdk_it_says_what_to_install(
    config: HostConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "crossdock.host.docker")
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ConfigFileError, match=r'pip install "crossdock\[docker\]"'):
        hosts._containers(config, tmp_path)


def test_the_daemons_own_words_are_passed_on_and_what_was_made_is_removed(
    daemon: Daemon, config: HostConfig, tmp_path: Path
) -> None:
    daemon.refused = f"/containers/{WORKER}/start"
    run = containers.Containers(config, tmp_path / "logs")
    with pytest.raises(SupervisorError, match="container group-worker: the daemon is out of order"):
        run.start()
    run.stop(0)
    assert not daemon.containers
    assert not daemon.networks


def test_a_run_of_a_living_process_is_left_alone(daemon: Daemon, run: Any, config: HostConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=f"kept by process {os.getpid()}: expected another name"):
        containers.Containers(config, tmp_path / "second").start()
    assert set(daemon.containers) == {CONTROL, WORKER}


@pytest.mark.parametrize(("status", "cleared"), [("running", False), ("exited", True)])
def test_what_another_host_runs_is_named_and_what_it_left_is_removed(
    daemon: Daemon, config: HostConfig, tmp_path: Path, status: str, cleared: bool
) -> None:
    labels = {"crossdock.up": NAME, "crossdock.up.owner": "another-host 1 1"}
    daemon.make(WORKER, {"Labels": labels, "Image": "ours/worker"})
    daemon.turn(WORKER, status)
    run = containers.Containers(config, tmp_path / "logs")
    if cleared:
        run.start()
        run.stop(0)
        assert not daemon.containers
    else:
        with pytest.raises(ConfigFileError, match="kept from another host, another-host"):
            run.start()
        assert list(daemon.containers) == [WORKER]


def test_a_runtime_is_chosen_by_the_flag_or_by_the_config(config: HostConfig) -> None:
    plain = HostConfig(worker=config.worker)
    assert hosts.on_runtime(plain, "").docker is None
    assert hosts.on_runtime(plain, "docker").docker == DockerConfig()
    assert hosts.on_runtime(config, "").docker == config.docker
    assert hosts.on_runtime(config, "docker").docker == config.docker
    assert hosts.on_runtime(config, "process").docker is None
    with pytest.raises(ConfigFileError, match="--runtime: expected process or docker, got 'podman'"):
        hosts.on_runtime(plain, "podman")


class Up:
    """A `crossdock up` of its own process."""

    def __init__(self, config: HostConfig, folder: Path) -> None:
        folder.mkdir()
        (folder / "host.yaml").write_text(dump(config))
        self._out = folder / "out.txt"
        with self._out.open("wb") as out:
            words = ["up", "--config", str(folder / "host.yaml"), "--log-dir", str(folder / "logs")]
            self.process = subprocess.Popen([sys.executable, "-m", "crossdock", *words], stdout=out, stderr=out)

    @property
    def printed(self) -> str:
        return self._out.read_text()

    def wait_serving(self) -> None:
        wait_until(lambda: "Ctrl-C drains" in self.printed or self.process.poll() is not None, "it serves")
        assert self.process.poll() is None, self.printed


def test_up_removes_what_a_killed_run_left_and_its_own_when_told_to_stop(
    daemon: Daemon, config: HostConfig, tmp_path: Path
) -> None:
    killed = Up(config, tmp_path / "killed")
    killed.wait_serving()
    killed.process.kill()
    killed.process.wait(DEADLINE_S)
    assert set(daemon.containers) == {CONTROL, WORKER}
    up = Up(config, tmp_path / "up")
    try:
        up.wait_serving()
        assert "removed what a killed run left" in up.printed
        assert daemon.calls.count(f"create {WORKER}") == 2
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(DEADLINE_S) == 0, up.printed
    finally:
        up.process.kill()
    assert "SERVING" in up.printed
    assert up.printed.rstrip().endswith("stopped")
    assert not daemon.containers
    assert not daemon.networks
