"""`crossdock up --runtime docker` on a real engine: podman's service of Docker's API, our images, answers checked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.bed import lent
from tests.deploy.bed.engine import engine
from tests.deploy.bed.images import TAG, Images
from tests.deploy.bed.processes import free_ports
from tests.deploy.bed.release import ASK, TOLERANCE
from tests.deploy.bed.say import Missing
from tests.deploy.live.containers import get

docker = pytest.importorskip("docker", reason="the docker SDK comes with the extra [docker]")

NAME, DEADLINE_S = "crossdock-bed-up", 180.0
LIMITS = {"nofile": 4096, "nproc": 8192}
"""Low ones: the service asks for more than a root without CAP_SYS_RESOURCE may give."""


@pytest.fixture(scope="module")
def url(images: Images) -> Iterator[str]:
    """A running service."""
    try:
        with engine(images) as made:
            yield made
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    """The SDK, which looks at what there is."""
    made = docker.DockerClient(base_url=url, timeout=60)
    yield made
    for container in made.containers.list(all=True, filters={"label": f"crossdock.up={NAME}"}):
        container.remove(force=True)
    for network in made.networks.list(filters={"label": f"crossdock.up={NAME}"}):
        network.remove()
    made.close()


class Up:
    """A `crossdock up --runtime docker` of its own process."""

    def __init__(self, folder: Path, url: str, images: Images, model: Path) -> None:
        try:
            given = lent.values(images.python())
        except Missing as error:
            pytest.skip(str(error))
        places = {one["name"]: one["mountPath"] for one in given["extraVolumeMounts"]}
        chosen = {
            "host": url,
            "name": NAME,
            "control_image": f"localhost/crossdock-control:{TAG}",
            "worker_image": f"localhost/crossdock-worker:{TAG}",
            "ulimits": LIMITS,
            "environment": {one["name"]: one["value"] for one in given["extraEnv"]},
            "mounts": {one["hostPath"]["path"]: places[one["name"]] for one in given["extraVolumes"]},
        }
        self.control, self.http = free_ports(2)
        folder.mkdir()
        self._out, config = folder / "out.txt", folder / "host.yaml"
        config.write_text(yaml.safe_dump({"worker": {"model": str(model)}, "docker": chosen}))
        words = ["up", "--runtime=docker", f"--config={config}", "--workers=2", f"--log-dir={folder / 'logs'}"]
        words += [f"--listen=127.0.0.1:{self.control}", f"--set=control.http_listen=127.0.0.1:{self.http}"]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "crossdock", *words], stdout=out, stderr=out)

    def wait_for(self, pattern: str) -> None:
        """Until that was printed."""
        ends = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.printed):
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < ends, self.printed
            time.sleep(0.2)

    @property
    def printed(self) -> str:
        """Until now."""
        return self._out.read_text()

    def stop(self) -> int:
        """SIGTERM, which does what Ctrl-C does; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def up(*given: Any) -> Iterator[Up]:
    """One that is ended in any case."""
    made = Up(*given)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop()


def ask(target: str, model: Path) -> dict[str, Any]:
    """What a client on this host sees."""
    command = [sys.executable, str(ASK), target, str(model), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def made(client: Any) -> list[str]:
    """Names of this run's containers and networks."""
    chosen = {"label": f"crossdock.up={NAME}"}
    found = [*client.containers.list(all=True, filters=chosen), *client.networks.list(filters=chosen)]
    return sorted(one.name for one in found)


def test_a_group_in_containers_answers_right_restarts_what_dies_and_leaves_nothing(
    url: str, client: Any, images: Images, model: Path, tmp_path: Path
) -> None:
    with up(tmp_path / "up", url, images, model) as running:
        running.wait_for("Ctrl-C drains")
        assert made(client) == [NAME, f"{NAME}-control", f"{NAME}-worker"]
        target = f"127.0.0.1:{running.control}"
        answers = ask(target, model)
        assert answers["answers"] > 0
        assert (answers["failures"], answers["worst"] < TOLERANCE) == ({}, True)
        assert "SERVING" in get(running.http, "/readyz")
        worker = client.containers.get(f"{NAME}-worker")
        pid = worker.attrs["State"]["Pid"]
        worker.kill()
        running.wait_for(r"container ended +container=\S+-worker exit_status=137")
        running.wait_for(r"epoch \d+: SERVING")
        assert ask(target, model)["answers"] > 0
        assert client.containers.get(worker.name).attrs["State"]["Pid"] != pid
        assert running.stop() == 0, running.printed
        log = (tmp_path / "up" / "logs" / "worker.log").read_text()
    assert made(client) == []
    assert log.count("Ctrl-C drains") == 2
    assert log.rstrip().endswith("stopped")


def test_what_a_killed_run_left_is_removed_by_the_next(
    url: str, client: Any, images: Images, model: Path, tmp_path: Path
) -> None:
    with up(tmp_path / "killed", url, images, model) as killed:
        killed.wait_for("FORMING")
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(DEADLINE_S)
    assert len(made(client)) == 3
    with up(tmp_path / "next", url, images, model) as running:
        running.wait_for("removed what a killed run left")
        running.wait_for("Ctrl-C drains")
        assert running.stop() == 0, running.printed
    assert made(client) == []
