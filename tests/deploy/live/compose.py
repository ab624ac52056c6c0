"""deploy/compose.yaml brought up by podman-compose: both parts find each other, answers are right.

Without Prometheus and Grafana, whose images only a registry has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from crossdock.common.addresses import split_address
from crossdock.common.config import HostConfig, load
from tests.deploy.bed import lent
from tests.deploy.bed.engine import require_networks
from tests.deploy.bed.images import TAG, Images
from tests.deploy.bed.release import ASK, TOLERANCE
from tests.deploy.bed.say import Missing
from tests.deploy.live.containers import get
from tests.house.tree import ROOT

PROJECT, CONTROL, DEADLINE_S = "crossdock-bed-compose", 7400, 180.0
FILE = ROOT / "deploy" / "compose.yaml"


def override(images: Images, folder: Path) -> Path:
    """What is other here: the bed's images, torch lent, no timers of systemd for health checks."""
    given = lent.values(images.python())
    places = {one["name"]: one["mountPath"] for one in given["extraVolumeMounts"]}
    volumes = [f"{one['hostPath']['path']}:{places[one['name']]}:ro" for one in given["extraVolumes"]]
    environment = {one["name"]: one["value"] for one in given["extraEnv"]}
    services = {
        "control": {"image": f"localhost/crossdock-control:{TAG}", "healthcheck": {"disable": True}},
        "worker-cpu": {
            "image": f"localhost/crossdock-worker:{TAG}",
            "healthcheck": {"disable": True},
            "environment": environment,
            "volumes": volumes,
        },
    }
    path = folder / "override.yaml"
    path.write_text(yaml.safe_dump({"services": services}))
    return path


class Compose:
    """The file, as podman-compose takes it, with our two services."""

    def __init__(self, images: Images, model: Path, folder: Path) -> None:
        stores = f"--podman-args={' '.join(images.stores())}"
        files = [f"--file={FILE}", f"--file={override(images, folder)}"]
        self._words = [sys.executable, "-m", "podman_compose", f"--project-name={PROJECT}", stores, *files]
        self._environment = {**images.environment(), "MODEL": str(model)}

    def run(self, *words: str, check: bool = True) -> str:
        """Everything that `podman-compose WORDS` says; an AssertionError with it where it fails."""
        done = subprocess.run(
            [*self._words, "--profile=cpu", *words],
            env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stdout
        return done.stdout


@pytest.fixture
def host() -> HostConfig:
    """The workers' config in the file; skips where its ports are in use."""
    found = load(HostConfig, ROOT / "deploy" / "host.yaml")
    ports = [CONTROL, CONTROL + 1, split_address(found.http_listen)[1]]
    ports += [split_address(worker.listen)[1] for worker in found.worker_configs()]
    with contextlib.ExitStack() as held:
        for port in ports:
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError as error:
                pytest.skip(f"the compose file publishes port {port}: {error.strerror}")
    return found


def test_the_compose_file_serves_and_goes_away(images: Images, model: Path, tmp_path: Path, host: HostConfig) -> None:
    if importlib.util.find_spec("podman_compose") is None:
        pytest.skip("podman-compose is not installed (it comes with the extra [dev])")
    try:
        require_networks()
        compose = Compose(images, model, tmp_path)
    except Missing as error:
        pytest.skip(str(error))
    health, ends = split_address(host.http_listen)[1], time.monotonic() + DEADLINE_S
    try:
        compose.run("up", "--no-build", "--detach", "control", "worker-cpu")
        while not get(health, "/readyz").startswith("ready"):
            assert time.monotonic() < ends, compose.run("logs", check=False)
            time.sleep(0.5)
        command = [sys.executable, str(ASK), f"127.0.0.1:{CONTROL}", str(model), "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout.splitlines()[-1])
        assert answers["answers"] > 0
        assert (answers["failures"], answers["worst"] < TOLERANCE) == ({}, True)
    finally:
        compose.run("down", "--timeout=60", check=False)
    left = images.podman("ps", "--all", "--filter", f"label=io.podman.compose.project={PROJECT}", "--quiet")
    assert left.strip() == ""
    assert PROJECT not in images.podman("network", "ls", "--format={{.Name}}")
