"""Fixtures of `make test-deploy`: an API server, our images, a checkpoint, a release on a real node.

The files here are not named test_*, so that only `make test-deploy` runs them. A machine that lacks something skips
what needs it, and the reason is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.bed import network, tools
from tests.deploy.bed import node as real
from tests.deploy.bed import release as releases
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.images import Images
from tests.deploy.bed.node import Node
from tests.deploy.bed.release import Release
from tests.deploy.bed.say import Missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """etcd and kube-apiserver."""
    try:
        made = Cluster.up()
    except Missing as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    """Name of a helm that is there."""
    try:
        tools.need(request.param)
    except Missing as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="session")
def images() -> Images:
    """Our two images, which `make test-deploy` has built before."""
    try:
        store = Images.here()
    except Missing as error:
        pytest.skip(str(error))
    if not all(store.has(f"localhost/crossdock-{target}:bed") for target in ("control", "worker")):
        pytest.skip("the images are not built: python -m tests.deploy.bed.images says why")
    return store


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 MoE checkpoint that user 10001 can read."""
    from crossdock.demo.models import write_checkpoint

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint("qwen3_moe", folder, num_layers=2, hidden_size=64, intermediate_size=32, num_experts=8, topk=2)
    for path in (folder, *folder.parents):
        if path.owner() == folder.owner() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def programs() -> tuple[str, ...]:
    """What a file runs beside the node. Built before the node's network is entered, which leads nowhere."""
    return ()


@pytest.fixture(scope="module")
def node(images: Images, programs: tuple[str, ...]) -> Iterator[Node]:
    """A real node that has our images, in a cluster and a network of its own."""
    try:
        real.demand()
        tools.need("helm3", *real.PROGRAMS, *programs)
    except Missing as error:
        pytest.skip(str(error))
    with network.private(), Cluster.up(network.NODE) as cluster, Node.up(cluster, images) as made:
        for target in ("control", "worker"):
            made.load(f"localhost/crossdock-{target}:bed")
        yield made


@pytest.fixture(scope="module")
def given(images: Images, model: Path) -> dict[str, Any]:
    """Values of a release of two control planes and two ranks."""
    try:
        return releases.values(model, images)
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def release(given: dict[str, Any], node: Node) -> Release:
    """On a real node, installed by helm."""
    made = Release(node.cluster, node, given, "helm3")
    made.install()
    return made
