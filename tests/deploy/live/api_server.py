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

from tests.deploy.bed import certificates, fakes, kinds, prometheus, tools
from tests.deploy.bed.api import objects
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.inventory import inventory
from tests.deploy.bed.release import CHART
from tests.deploy.bed.say import Missing
from tests.house.tree import ROOT

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
EVERYTHING: dict[str, dict[str, Any]] = {
    "control": {
        "replicas": 2,
        "config": {"kubernetes": {}},
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"a": "b"},
    },
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


def dry_run(cluster: Cluster, values: object, *flags: str) -> list[str]:
    """Every object of the chart, helm's test too, as the server would take it; the warnings."""
    namespace = cluster.namespace("accepted", RESTRICTED)
    text = cluster.helm("template", "moe", str(CHART), "--namespace", namespace, *flags, values=values)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}  # no controller makes it
    cluster.api.apply(account, namespace).done()
    found = [one for one in yaml.safe_load_all(text) if one]
    made = {one["kind"] for one in found}
    assert {"Deployment", "Service", "ConfigMap", "ServiceAccount", "Pod"} <= made
    assert len(made & {"StatefulSet", "LeaderWorkerSet"}) == 1
    answers = [cluster.api.apply(one, namespace, dryRun="All") for one in found]
    for answer in answers:
        answer.done()
    return [warning for answer in answers for warning in answer.warnings]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_server_takes_every_object_without_a_warning(cluster: Cluster, values: dict[str, Any]) -> None:
    """Unknown fields are errors; the namespace warns of whatever Pod Security `restricted` would refuse."""
    assert dry_run(cluster, values) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_server_takes_every_example(cluster: Cluster, example: Path) -> None:
    """The only warnings are of models on a path of the host, and of the one capability that locks memory."""
    try:
        kinds.teach(cluster, [f"{tools.LEADER_WORKER_SET}.crd.yaml"], fakes.compute_domain_type())
    except Missing as error:
        pytest.skip(str(error))
    worker = yaml.safe_load(example.read_text())["worker"]
    values = yaml.safe_load(example.read_text()) | {"worker": {**worker, "workload": "StatefulSet"}}
    on_host = "hostPath" in worker.get("model", {}).get("volume", {})
    locks = "resource" in worker.get("rdma", {})
    warnings = dry_run(cluster, values)
    assert len(warnings) == on_host + locks
    if on_host:
        assert 'volume \\"model\\" uses restricted volume type \\"hostPath\\"' in warnings[0]
    if locks:
        assert 'must not include \\"IPC_LOCK\\" in securityContext.capabilities.add' in warnings[0]
        assert "privileged" not in warnings[0]
    dry_run(cluster, values | {"worker": {**worker, "workload": "LeaderWorkerSet"}})


def test_the_server_takes_the_objects_for_cert_manager(cluster: Cluster) -> None:
    try:
        kinds.teach(cluster, certificates.KINDS)
    except Missing as error:
        pytest.skip(str(error))
    for one in yaml.safe_load_all(certificates.ISSUERS.read_text()):
        cluster.api.apply(one, "default", dryRun="All").done()
    assert dry_run(cluster, EVERYTHING | certificates.values()) == []


def test_an_unknown_field_would_be_refused(cluster: Cluster) -> None:
    wrong = {"worker": {"extraVolumes": [{"name": "a", "emptyDirr": {}}]}}
    with pytest.raises(AssertionError, match="emptyDirr"):
        dry_run(cluster, wrong)


def test_the_server_takes_the_objects_for_the_prometheus_operator(cluster: Cluster) -> None:
    """It knows the operator's own types, and helm finds out by itself that it does."""
    try:
        kinds.teach(cluster, prometheus.KINDS)
    except Missing as error:
        pytest.skip(str(error))
    values = EVERYTHING | {"monitoring": {**EVERYTHING["monitoring"], "labels": {"release": "prometheus"}}}
    text = cluster.helm("template", "moe", str(CHART), "--validate", values=values)
    assert {"PodMonitor", "PrometheusRule"} <= {one["kind"] for one in objects(text)}
    assert dry_run(cluster, values, "--validate") == []


def test_helm_installs_upgrades_rolls_back_and_leaves_nothing(cluster: Cluster, helm: str) -> None:
    namespace = cluster.namespace(f"life-{helm}")
    flags = ["--namespace", namespace]
    before = inventory(cluster.api, namespace)

    def ranks() -> int:
        control = cluster.api.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/moe-control").done()
        return int(yaml.safe_load(control["data"]["control.yaml"])["world_size"])

    def checksum() -> str:
        found = cluster.api.ask("GET", f"/apis/apps/v1/namespaces/{namespace}/statefulsets/moe-worker").done()
        return str(found["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    said = cluster.helm("install", "moe", str(CHART), *flags, tool=helm, values=EVERYTHING | {"monitoring": {}})
    assert f"helm test moe --namespace {namespace}" in said
    first = checksum()
    cluster.helm("upgrade", "moe", str(CHART), *flags, tool=helm, values={"worker": {"numWorkers": 3}})
    assert (ranks(), checksum() == first) == (3, False)
    cluster.helm("rollback", "moe", *flags, tool=helm)
    assert (ranks(), checksum()) == (4, first)
    cluster.helm("uninstall", "moe", *flags, tool=helm)
    assert inventory(cluster.api, namespace) == before


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


def test_the_accounts_are_allowed_what_they_do_and_nothing_else(cluster: Cluster) -> None:
    """Beside what every account is allowed, like asking what it is allowed."""
    namespace = cluster.namespace("rules")
    values = {"control": {"replicas": 2, "config": {"kubernetes": {}}}}
    cluster.helm("install", "moe", str(CHART), "--namespace", namespace, values=values)
    everybody, *theirs = (
        cluster.api.rules(f"system:serviceaccount:{namespace}:{name}", namespace)
        for name in ("anybody", "moe-control", "moe-worker")
    )
    nodes = {("", "nodes", "", verb) for verb in ("get", "list", "watch")}
    lease = {("coordination.k8s.io", "leases", "moe", verb) for verb in ("get", "update")}
    assert [mine - everybody for mine in theirs] == [nodes | lease, set()]


def test_calls_in_the_name_of_the_accounts_are_answered_or_refused(cluster: Cluster) -> None:
    namespace = cluster.namespace("calls")
    values = {"control": {"replicas": 2, "config": {"kubernetes": {}}}}
    cluster.helm("install", "moe", str(CHART), "--namespace", namespace, values=values)
    here = f"/api/v1/namespaces/{namespace}"
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "mine"}}
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/api/v1/nodes", None),
        ("GET", f"{leases}/moe", None),
        ("PUT", f"{leases}/moe", cluster.api.ask("GET", f"{leases}/moe").done()),
        ("GET", leases, None),
        ("POST", leases, lease),
        ("PUT", f"{leases}/mine", lease),
        ("DELETE", f"{leases}/moe", None),
        ("GET", f"{here}/secrets", None),
        ("GET", f"{here}/configmaps", None),
        ("GET", f"{here}/pods", None),
        ("DELETE", "/api/v1/nodes/any", None),
    ]

    def statuses(account: str) -> list[int]:
        user = f"system:serviceaccount:{namespace}:{account}"
        return [cluster.api.ask(method, path, body, user=user).status for method, path, body in calls]

    assert statuses("moe-control") == [200] * 3 + [403] * (len(calls) - 3)
    assert statuses("moe-worker") == [403] * len(calls)


READER = """
import json, sys, time
from crossdock.common.settings import KubernetesConfig
from crossdock.control.topology.nodes import Nodes
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
    command = [sys.executable, "-c", READER, str(cluster.account(namespace, "moe-control", tmp_path))]
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
