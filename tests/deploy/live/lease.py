"""The Lease of an election belongs to the release: helm makes it and takes it away, control planes fill it in.

Our own reading and writing of leases, with the token of the chart's account, against a real API server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdock.common.config import ElectionConfig
from crossdock.control.leader.election import Lease
from crossdock.control.leader.kube import KubernetesLeaseStore
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.release import CHART

TWO = {"control": {"replicas": 2}}
MINE = Lease("moe-control-a", "10.0.0.1:7400", 41, 6.0)
UNTOUCHED = Lease("", "", 0, 0.0)
TIMEOUT_S = 60.0


class Place:
    """The release `moe` in a namespace of its own, and what an account of it reaches."""

    def __init__(self, cluster: Cluster, helm: str, folder: Path) -> None:
        self.cluster, self.tool = cluster, helm
        self.namespace = cluster.namespace(f"lease-{helm}")
        self.path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/moe"
        self.helm("install", "moe", str(CHART), values=TWO)
        kubeconfig = cluster.account(self.namespace, "moe-control", folder)
        config = ElectionConfig(lease_name="moe", namespace=self.namespace, kubeconfig=str(kubeconfig))
        self.leases = KubernetesLeaseStore(config)

    def helm(self, *words: str, values: object = None) -> None:
        self.cluster.helm(*words, "--namespace", self.namespace, values=values, tool=self.tool)

    def upgrade(self, **control: object) -> None:
        self.helm("upgrade", "moe", str(CHART), values={"control": {"replicas": 2, **control}})

    def read(self) -> Lease | None:
        """Without its version."""
        found = self.leases.read(TIMEOUT_S)
        return replace(found, version="") if found else None

    def labels(self) -> dict[str, str]:
        metadata: dict[str, Any] = self.cluster.api.ask("GET", self.path).done()["metadata"]
        return dict(metadata["labels"])


@pytest.fixture
def place(cluster: Cluster, helm: str, tmp_path: Path) -> Iterator[Place]:
    made = Place(cluster, helm, tmp_path)
    yield made
    made.helm("uninstall", "moe", "--ignore-not-found")


def test_the_lease_lives_as_long_as_the_release_and_no_longer(place: Place) -> None:
    labels = place.labels()
    assert (labels["app.kubernetes.io/instance"], labels["app.kubernetes.io/managed-by"]) == ("moe", "Helm")
    assert place.read() == UNTOUCHED
    led = place.leases.write(MINE, place.leases.read(TIMEOUT_S), TIMEOUT_S)
    assert led is not None
    place.upgrade(podLabels={"a": "b"})
    assert (place.read(), place.labels()) == (MINE, labels), "an upgrade leaves the reign alone"
    back = replace(MINE, holder="", address="", lease_s=1.0)
    assert place.leases.write(back, place.leases.read(TIMEOUT_S), TIMEOUT_S) is not None
    place.upgrade(podLabels={"a": "c"})
    assert (place.read(), place.labels()) == (back, labels)
    place.helm("uninstall", "moe")
    assert place.cluster.api.ask("GET", place.path).status == 404


def test_a_deleted_lease_is_made_again_by_an_upgrade_and_by_nobody_else(place: Place) -> None:
    led = place.leases.write(MINE, place.leases.read(TIMEOUT_S), TIMEOUT_S)
    place.cluster.api.ask("DELETE", place.path).done()
    assert place.read() is None
    with pytest.raises(PermissionError, match=r"no Lease moe in the namespace .*helm upgrade"):
        place.leases.write(MINE, None, TIMEOUT_S)
    with pytest.raises(
        Exception, match="forbidden"
    ):  # the API makes a Lease of an update, where the account may create
        place.leases.write(MINE, led, TIMEOUT_S)
    assert place.read() is None
    place.upgrade()
    assert place.read() == UNTOUCHED


def test_the_account_may_get_and_update_this_lease_and_no_other(place: Place) -> None:
    user = f"system:serviceaccount:{place.namespace}:moe-control"

    def verbs(name: str) -> list[str]:
        every = ("get", "list", "watch", "create", "update", "patch", "delete")
        return [verb for verb in every if place.cluster.api.may(user, verb, "leases", place.namespace, name)]

    assert verbs("moe") == ["get", "update"]
    assert verbs("another") == verbs("") == []
