"""The chart against a real API server: what is accepted, who may do what, what our control plane learns of nodes."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from tests.deploy.bed import fakes
from tests.deploy.bed.api import objects
from tests.deploy.bed.cluster import Cluster
from tests.deploy.live.conftest import CHART
from tests.house.tree import ROOT

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
LAPTOP, EIGHT_GPUS = (yaml.safe_load((CHART / "examples" / f"{n}.yaml").read_text()) for n in ("laptop", "eight-gpus"))
EVERYTHING = {
    "control": {"config": {"kubernetes": {}}, "priorityClassName": "system-cluster-critical", "podLabels": {"a": "b"}},
    "worker": {
        "blockEvictions": True,
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four"}],
        "runtimeClassName": "nvidia",
        "schedulerName": "mine",
        "extraEnv": [{"name": "A", "value": "1"}],
        "extraVolumes": [{"name": "cache", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "cache", "mountPath": "/tmp/cache"}],
        "model": {"volume": {"image": {"reference": "registry.test/model:1"}}, "path": "a"},
    },
    "networkPolicy": {
        "enabled": True,
        "clients": [{"podSelector": {"matchLabels": {"app": "client"}}}],
        "scrapers": [{"namespaceSelector": {}}],
    },
    "monitoring": {"dashboard": True, "scrapeAnnotations": True},
}


def dry_run(cluster: Cluster, values: dict[str, Any]) -> list[str]:
    """Every object of the chart as the server would take it; the warnings."""
    namespace = cluster.namespace("accepted", RESTRICTED)
    text = cluster.helm("template", "moe", str(CHART), "--namespace", namespace, values=values)
    found = objects(text)
    assert {"Deployment", "StatefulSet", "Service", "ConfigMap", "ServiceAccount"} <= {one["kind"] for one in found}
    answers = [cluster.api.apply(one, namespace, dryRun="All") for one in found]
    for answer in answers:
        answer.done()
    return [warning for answer in answers for warning in answer.warnings]


@pytest.mark.parametrize("values", [{}, EIGHT_GPUS, EVERYTHING], ids=["defaults", "eight-gpus", "everything"])
def test_the_server_takes_every_object_without_a_warning(cluster: Cluster, values: dict[str, Any]) -> None:
    """Unknown fields are errors; the namespace warns of whatever Pod Security `restricted` would refuse."""
    assert dry_run(cluster, values) == []


def test_an_unknown_field_would_be_refused(cluster: Cluster) -> None:
    wrong = {"worker": {"extraVolumes": [{"name": "a", "emptyDirr": {}}]}}
    with pytest.raises(AssertionError, match="emptyDirr"):
        dry_run(cluster, wrong)


def test_a_model_on_a_host_path_is_what_restricted_warns_of(cluster: Cluster) -> None:
    (warning,) = dry_run(cluster, LAPTOP)
    assert 'volume \\"model\\" uses restricted volume type \\"hostPath\\"' in warning


def test_helm_installs_upgrades_rolls_back_and_leaves_nothing(cluster: Cluster) -> None:
    namespace = cluster.namespace("life")
    flags = ["--namespace", namespace]

    def ranks() -> int:
        control = cluster.api.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/moe-control").done()
        return int(yaml.safe_load(control["data"]["control.yaml"])["world_size"])

    def checksum() -> str:
        found = cluster.api.ask("GET", f"/apis/apps/v1/namespaces/{namespace}/statefulsets/moe-worker").done()
        return str(found["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    said = cluster.helm("install", "moe", str(CHART), *flags, values=EVERYTHING | {"monitoring": {}})
    assert "helm test moe --namespace life" in said
    first = checksum()
    cluster.helm("upgrade", "moe", str(CHART), *flags, values={"worker": {"numWorkers": 3}})
    assert (ranks(), checksum() == first) == (3, False)
    cluster.helm("rollback", "moe", *flags)
    assert (ranks(), checksum()) == (4, first)
    cluster.helm("uninstall", "moe", *flags)
    mine = {"labelSelector": "app.kubernetes.io/instance=moe"}
    for path in (
        *(
            f"/api/v1/namespaces/{namespace}/{kind}"
            for kind in ("services", "configmaps", "serviceaccounts", "secrets")
        ),
        *(f"/apis/apps/v1/namespaces/{namespace}/{kind}" for kind in ("deployments", "statefulsets")),
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
        *(f"/apis/rbac.authorization.k8s.io/v1/{kind}" for kind in ("clusterroles", "clusterrolebindings")),
    ):
        assert cluster.api.ask("GET", path, **mine).done()["items"] == [], path


RIGHTS = [("get", "nodes"), ("list", "nodes"), ("watch", "nodes")]
NO_RIGHTS = [
    ("delete", "nodes"), ("patch", "nodes"), ("list", "pods"), ("get", "secrets"), ("list", "configmaps"),
    ("create", "pods"), ("create", "leases"), ("get", "nodes/proxy"), ("create", "serviceaccounts/token"),
    ("list", "namespaces"), ("bind", "clusterroles"), ("patch", "deployments"),
]  # fmt: skip


def test_the_control_plane_may_read_nodes_and_nobody_anything_else(cluster: Cluster) -> None:
    namespace = cluster.namespace("rights")
    values = {"control": {"config": {"kubernetes": {}}}}
    cluster.helm("install", "moe", str(CHART), "--namespace", namespace, values=values)

    def allowed(account: str) -> list[tuple[str, str]]:
        user = f"system:serviceaccount:{namespace}:{account}"
        return [what for what in [*RIGHTS, *NO_RIGHTS] if cluster.api.may(user, *what, namespace)]

    assert allowed("moe-control") == RIGHTS
    assert allowed("moe-worker") == []
    cluster.helm("upgrade", "moe", str(CHART), "--namespace", namespace, "--reset-values")
    assert allowed("moe-control") == [], "the default config reads no nodes"


READER = """
import json, sys, time
from crossdock.common.config import KubernetesConfig
from crossdock.control.nodes import Nodes
nodes, said = Nodes(KubernetesConfig(kubeconfig=sys.argv[1])), None
nodes.start()
while True:
    now = json.dumps({name: labels.rack for name, labels in nodes.labels.items()}, sort_keys=True)
    if now != said:
        print(now, flush=True)
    said = now
    time.sleep(0.05)
"""
"""The part of our control plane that reads nodes: prints each node's rack when something changes."""


@pytest.fixture
def reader(cluster: Cluster, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """It runs with the rights of the chart's account and no more."""
    namespace = cluster.namespace("reader")
    values = {"control": {"config": {"kubernetes": {}}}}
    cluster.helm("install", "moe", str(CHART), "--namespace", namespace, values=values)
    wish = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/moe-control/token"
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": cluster.api.ask("POST", path, wish).done()["status"]["token"]}
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    command = [sys.executable, "-c", READER, str(tmp_path / "kubeconfig")]
    environment = {"PYTHONPATH": f"{ROOT / 'services'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def hear(reader: subprocess.Popen[str], timeout_s: float = 60) -> Iterator[dict[str, str]]:
    """What it says, while it says something."""
    stream: IO[str] | None = reader.stdout
    assert stream is not None
    ends = time.monotonic() + timeout_s
    while (left_s := ends - time.monotonic()) > 0 and select.select([stream], [], [], left_s)[0]:
        yield json.loads(stream.readline())
    raise AssertionError(f"the reader of nodes said nothing more for {timeout_s:.0f} s")


def test_the_control_plane_learns_of_nodes_also_after_the_server_was_killed(
    cluster: Cluster, reader: subprocess.Popen[str]
) -> None:
    def move(rack: str) -> None:
        patch = {"metadata": {"labels": {"fabric.topograph.run/tier-1": rack}}}
        cluster.api.ask("PATCH", "/api/v1/nodes/h200-0", patch, kind="application/merge-patch+json").done()

    fakes.add(cluster, fakes.h200(0), fakes.gb200(0), fakes.plain())
    assert next(k for k in hear(reader) if len(k) == 3) == {"h200-0": "leaf0", "gb200-0-0": "", "plain-0": ""}
    move("leaf-a")
    assert next(known for known in hear(reader) if known["h200-0"] == "leaf-a")
    cluster.kill_apiserver()
    cluster.start_apiserver()
    move("leaf-b")
    assert next(known for known in hear(reader) if known["h200-0"] == "leaf-b")
    fakes.add(cluster, fakes.h200(7))
    assert next(known for known in hear(reader) if "h200-7" in known)
    cluster.api.ask("DELETE", "/api/v1/nodes/h200-7").done()
    assert next(known for known in hear(reader) if "h200-7" not in known)
