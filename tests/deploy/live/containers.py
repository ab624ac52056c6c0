"""Our images as containers: read-only and without rights, a checkpoint served, answers checked, ended by SIGTERM.

Podman runs them; torch is lent by this machine (tests/deploy/bed/lent.py), the rest is what the Dockerfile makes.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from crossdock.common.metrics import ControlMetrics, HostMetrics
from tests.deploy.bed import lent
from tests.deploy.bed.images import Images
from tests.deploy.bed.processes import free_ports
from tests.deploy.bed.release import ASK, TOLERANCE
from tests.deploy.bed.say import Missing

LOCKED = (
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--network=host",
    "--detach",
)
START_S, STOP_S = 120.0, 45
CONTROL_MB = 250
"""What the control plane's image must stay below, unpacked, with its base."""


def loan(images: Images) -> list[str]:
    """Flags that mount torch."""
    try:
        given = lent.values(images.python())
    except Missing as error:
        pytest.skip(str(error))
    folders = {one["name"]: one["hostPath"]["path"] for one in given["extraVolumes"]}
    mounts = [f"--volume={folders[one['name']]}:{one['mountPath']}:ro" for one in given["extraVolumeMounts"]]
    return [*mounts, *(f"--env={one['name']}={one['value']}" for one in given["extraEnv"])]


def get(port: int, path: str) -> str:
    """Body of a page of this host; "" while there is none."""
    try:
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}{path}", timeout=15) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def wait_for(images: Images, name: str, port: int) -> None:
    """Until /readyz says yes; raises AssertionError with the container's log."""
    ends = time.monotonic() + START_S
    while not get(port, "/readyz"):
        assert time.monotonic() < ends, images.podman("logs", name, check=False)
        time.sleep(0.3)


@contextlib.contextmanager
def container(images: Images, name: str, *words: str) -> Iterator[str]:
    """One that runs, removed at the end."""
    images.podman("rm", "--force", "--ignore", name)
    images.podman("run", f"--name={name}", "--no-healthcheck", *LOCKED, *words)
    try:
        yield name
    finally:
        images.podman("rm", "--force", "--ignore", name)


def healthcheck(images: Images, name: str) -> str:
    """What the image's HEALTHCHECK says in a container; raises RuntimeError where it fails."""
    image = json.loads(images.podman("inspect", name))[0]["Image"]
    _, *command = json.loads(images.podman("image", "inspect", image))[0]["Healthcheck"]["Test"]
    return images.podman("exec", name, *command).strip()


def stop(images: Images, name: str) -> tuple[int, str]:
    """SIGTERM; exit status and log."""
    images.podman("stop", f"--time={STOP_S}", name)
    state = json.loads(images.podman("inspect", name))[0]["State"]
    return int(state["ExitCode"]), images.podman("logs", name)


def test_the_control_plane_starts_without_rights_and_stops_when_told(images: Images) -> None:
    listen, http = free_ports(2)
    flags = [f"--set=listen=127.0.0.1:{listen}", f"--set=http_listen=127.0.0.1:{http}"]
    with container(images, "crossdock-bed-control", "localhost/crossdock-control:bed", "control", *flags) as name:
        wait_for(images, name, http)
        assert images.podman("exec", name, "python", "-c", "import os; print(os.getuid())").strip() == "10001"
        assert 'crossdock_world_size{group="default"} 4.0' in get(http, "/metrics")
        assert images.podman("exec", name, "cat", "/proc/1/comm").strip() == "tini"
        assert healthcheck(images, name).startswith("FORMING")
        code, _ = stop(images, name)
    assert code == 0


@pytest.mark.parametrize("target", ["control", "worker"])
def test_an_image_tells_what_it_is_and_what_is_in_it(images: Images, target: str) -> None:
    name = f"localhost/crossdock-{target}:bed"
    config = json.loads(images.podman("image", "inspect", name))[0]
    assert config["Config"]["User"] == "10001:10001"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    text = images.podman("run", "--rm", "--network=none", "--entrypoint=cat", name, "/app/sbom.cdx.json")
    inside = {part["name"].lower() for part in json.loads(text)["components"]}
    assert {"crossdock", "grpcio", "msgspec"} <= inside
    assert ("torch" in inside) == (target == "worker")


def test_the_control_plane_is_small(images: Images) -> None:
    found = json.loads(images.podman("image", "inspect", "localhost/crossdock-control:bed"))[0]
    assert found["Size"] / 1e6 < CONTROL_MB


def test_the_control_plane_has_no_installer_and_no_torch(images: Images) -> None:
    script = "import importlib.util as u; print([n for n in ('pip', 'setuptools', 'torch', 'numpy') if u.find_spec(n)])"
    name = "localhost/crossdock-control:bed"
    assert images.podman("run", "--rm", "--network=none", "--entrypoint=python", name, "-c", script).strip() == "[]"


def test_a_checkpoint_is_served_and_every_answer_is_right(images: Images, model: Path) -> None:
    torch = loan(images)
    control, control_http, host = free_ports(3)
    settings = [
        f"--set=control.listen=127.0.0.1:{control}", f"--set=control.http_listen=127.0.0.1:{control_http}",
        f"--set=http_listen=127.0.0.1:{host}", "--set=log_to_stderr=true", "--log-dir=/tmp/crossdock", "--workers=2",
    ]  # fmt: skip
    place = f"--volume={model}:/models:ro"
    with container(
        images,
        "crossdock-bed-worker",
        *torch,
        place,
        "localhost/crossdock-worker:bed",
        "up",
        "--model=/models",
        *settings,
    ) as name:
        wait_for(images, name, host)
        assert healthcheck(images, name) == "ready"
        script = f"--volume={ASK}:/ask.py:ro"
        command = [
            "--entrypoint=python",
            "localhost/crossdock-worker:bed",
            "/ask.py",
            f"127.0.0.1:{control}",
            "/models",
            "2",
        ]
        said = images.podman("run", "--rm", "--network=host", *torch, place, script, *command, timeout_s=120)
        answers = json.loads(said.splitlines()[-1])
        served = set(
            re.findall(r"^# TYPE (crossdock_\w+)", get(control_http, "/metrics") + get(host, "/metrics"), re.M)
        )
        began = time.monotonic()
        code, log = stop(images, name)
    assert answers["answers"] > 0
    assert answers["failures"] == {}
    assert answers["worst"] < TOLERANCE
    assert {metric.name for kind in (ControlMetrics(), HostMetrics()) for metric in kind.declarations()} <= served
    assert (code, log.rstrip().splitlines()[-1]) == (0, "stopped")
    assert time.monotonic() - began < STOP_S
