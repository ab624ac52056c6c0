"""A bed whose test run is killed: its pod runs on; the next bed removes it, and touches no bed whose run goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.bed import leftovers, network, runtime, tools
from tests.deploy.bed import node as real
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.images import Images
from tests.deploy.bed.node import Node
from tests.deploy.bed.say import Missing
from tests.house.tree import ROOT

WORKS_S = 120.0


@pytest.fixture(scope="module")
def images() -> Images:
    """The store; that it holds ours does not matter here."""
    try:
        real.demand()
        tools.need("helm3", *real.PROGRAMS)
        return Images.here()
    except Missing as error:
        pytest.skip(str(error))


def main() -> None:
    """A bed with one pod that runs; prints its folder, and then waits to be killed."""
    images = Images.here()
    with network.private(), Cluster.up(network.NODE) as cluster, Node.up(cluster, images):
        default = "/api/v1/namespaces/default/serviceaccounts/default"
        cluster.eventually("the namespace is furnished", lambda: cluster.api.ask("GET", default).fine)
        container = {"name": "pause", "image": runtime.PAUSE, "imagePullPolicy": "Never"}
        pod = {"metadata": {"name": "pause"}, "spec": {"nodeName": real.NAME, "containers": [container]}}
        cluster.api.apply({"apiVersion": "v1", "kind": "Pod", **pod}, "default").done()
        path = "/api/v1/namespaces/default/pods/pause"
        cluster.eventually(
            "the pod runs", lambda: cluster.api.ask("GET", path).done()["status"]["phase"] == "Running", WORKS_S
        )
        print(cluster.folder, flush=True)
        sys.stdin.read()


@pytest.fixture
def bed(images: Images) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Such a bed in a process of its own, and its folder."""
    words = [sys.executable, "-c", f"from {__name__} import main; main()"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        assert said, f"the bed did not come up: exit status {process.wait(WORKS_S)}"
        yield process, Path(said)
        process.kill()


def traces(folder: Path) -> dict[str, bool]:
    """Which kinds of leftovers there are of the bed in `folder`."""
    return {
        "processes": bool(runtime.pod_pids(folder.name) or runtime.shims(folder)),
        "cgroups": bool(runtime.pod_cgroups(folder.name)),
        "mounts": bool(runtime.mounts(folder)),
        "files": folder.exists(),
    }


def test_a_killed_bed_is_removed_and_one_that_runs_is_not(bed: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = bed
    networks = runtime.pod_networks(folder)
    leftovers.clear()
    assert folder not in leftovers.found(), "its process runs"
    assert traces(folder) == dict.fromkeys(traces(folder), True)
    process.kill()
    process.wait(WORKS_S)
    assert leftovers.found() == [folder]
    assert traces(folder) == dict.fromkeys(traces(folder), True), "they outlive the process"
    leftovers.clear()
    assert leftovers.found() == []
    assert traces(folder) == dict.fromkeys(traces(folder), False)
    present = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert networks
    assert not [name for name in networks if name in present]
