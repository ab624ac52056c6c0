"""Against a real kubelet and containerd: `helm install --wait`, our images as pods, a checkpoint served and checked.

One release lives through the file, so the tests stand in the order in which an operator would meet them.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.bed import lent, network, tools
from tests.deploy.bed import node as real
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.images import Images
from tests.deploy.bed.node import Node
from tests.deploy.bed.say import Missing, say
from tests.deploy.live.conftest import ASK, CHART, TOLERANCE

NAMESPACE, RANKS = "serving", 2
FLAGS = ("--namespace", NAMESPACE, "--wait", "--timeout=150s")
MINE = {"labelSelector": "app.kubernetes.io/instance=moe"}
KINDS = {
    "/api/v1": ("pods", "services", "configmaps", "serviceaccounts", "secrets", "persistentvolumeclaims"),
    "/apis/apps/v1": ("deployments", "statefulsets", "replicasets", "controllerrevisions"),
    "/apis/policy/v1": ("poddisruptionbudgets",),
    "/apis/rbac.authorization.k8s.io/v1": ("roles", "rolebindings", "clusterroles", "clusterrolebindings"),
    "/apis/discovery.k8s.io/v1": ("endpointslices",),
}


class Bed:
    """The cluster with its node, and the release `moe` on it."""

    def __init__(self, cluster: Cluster, node: Node, given: dict[str, Any]) -> None:
        self.cluster, self.node, self.given = cluster, node, given

    def get(self, path: str, **query: str) -> Any:
        """GET of a path of the namespace."""
        return self.cluster.api.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/{path}", **query).done()

    def pods(self, component: str) -> list[Any]:
        """The release's pods of that component."""
        chosen = f"{MINE['labelSelector']},app.kubernetes.io/component={component}"
        return list(self.get("pods", labelSelector=chosen)["items"])

    def log(self, pod: str, **query: str) -> str:
        """What a pod has printed."""
        said = self.cluster.api.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/log", **query).body
        return said if isinstance(said, str) else json.dumps(said)  # a line that is JSON has been read as such

    def delete(self, pod: str, grace_s: int) -> None:
        """Delete a pod."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}"
        self.cluster.api.ask("DELETE", path, gracePeriodSeconds=str(grace_s)).done()

    def wait_ready(self) -> None:
        """Until every pod of the release is Ready."""

        def all_ready() -> bool:
            found = self.pods("control") + self.pods("worker")
            return len(found) == self.given["control"]["replicas"] + 1 and all(map(is_ready, found))

        self.cluster.eventually("every pod is Ready", all_ready, 120)

    def start_client(self, name: str, seconds: float) -> None:
        """A pod of the worker's image that asks the group for so long and checks the answers."""
        worker = self.given["worker"]
        mounts = [{"name": "ask", "mountPath": "/usr/local/ask"}, {"name": "model", "mountPath": "/models"}]
        volumes = [{"name": "ask", "configMap": {"name": "ask"}}, {"name": "model", **worker["model"]["volume"]}]
        container = {
            "name": "ask", "image": "localhost/crossdock-worker:bed", "env": worker["extraEnv"],
            "volumeMounts": [*mounts, *worker["extraVolumeMounts"]],
            "command": ["python", "/usr/local/ask/ask.py", "moe-control:7400", "/models", str(seconds)],
        }  # fmt: skip
        spec = {"restartPolicy": "Never", "containers": [container], "volumes": [*volumes, *worker["extraVolumes"]]}
        script = {"metadata": {"name": "ask"}, "data": {"ask.py": ASK.read_text()}}
        self.cluster.api.apply({"apiVersion": "v1", "kind": "ConfigMap", **script}, NAMESPACE).done()
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        self.cluster.api.apply(pod, NAMESPACE).done()

    def answers(self, name: str) -> dict[str, Any]:
        """What the client saw, when it is through."""
        phase = lambda: self.get(f"pods/{name}")["status"].get("phase")  # noqa: E731
        self.cluster.eventually(f"pod {name} is through", lambda: phase() in ("Succeeded", "Failed"), 150)
        said = self.log(name)
        assert phase() == "Succeeded", said
        found = json.loads(said.splitlines()[-1])
        assert isinstance(found, dict)
        say(f"  client {name}: {found}")
        return found

    def explain(self) -> str:
        """What the pods' states and logs say."""
        lines = []
        for pod in self.get("pods")["items"]:
            name = pod["metadata"]["name"]
            lines += [f"== {name}", json.dumps(pod["status"])[-2500:], self.log(name, tailLines="25")]
        said = [f"{one['reason']}: {one['message']}" for one in self.get("events")["items"]]
        return "\n".join([*lines, *said[-20:]])


def is_ready(pod: Any) -> bool:
    """Whether the kubelet calls it Ready and nobody wants it gone."""
    conditions = pod["status"].get("conditions", ())
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def right(answers: dict[str, Any]) -> None:
    """Every request was answered, and as computed from the weights."""
    assert answers["answers"] > 0
    assert answers["failures"] == {}
    assert answers["worst"] < TOLERANCE


def values(model: Path, images: Images) -> dict[str, Any]:
    """Two control planes of which one leads, and two ranks."""
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    volume = {"hostPath": {"path": str(model)}}
    return {
        "image": {"control": "localhost/crossdock-control", "worker": "localhost/crossdock-worker", "tag": "bed"},
        "control": {"replicas": 2, "config": {"kubernetes": {}}, "resources": small},
        "worker": {
            "numWorkers": RANKS,
            "resources": small,
            "model": {"volume": volume},
            **lent.values(images.python()),
        },
    }


@pytest.fixture(scope="module")
def bed(images: Images, model: Path) -> Iterator[Bed]:
    """Installed by `helm install --wait`, which returns when every rank serves."""
    try:
        real.demand()
        given = values(model, images)
        tools.need(*real.PROGRAMS)
    except Missing as error:
        pytest.skip(str(error))
    with network.private(), Cluster.up(network.NODE) as cluster, Node.up(cluster, images) as node:
        for target in ("control", "worker"):
            node.load(f"localhost/crossdock-{target}:bed")
        cluster.namespace(NAMESPACE)
        made = Bed(cluster, node, given)
        try:
            cluster.helm("install", "moe", str(CHART), *FLAGS, values=given)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{made.explain()}") from error
        yield made


def test_helm_returns_when_every_pod_is_ready_at_the_first_try(bed: Bed) -> None:
    pods = bed.pods("control") + bed.pods("worker")
    assert [is_ready(pod) for pod in pods] == [True, True, True]
    assert {pod["spec"]["nodeName"] for pod in pods} == {real.NAME}
    assert {pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods} == {0}


def test_a_client_in_another_pod_gets_right_answers(bed: Bed) -> None:
    bed.start_client("first", 2)
    right(bed.answers("first"))


def test_helm_test_passes(bed: Bed) -> None:
    said = bed.cluster.helm("test", "moe", "--namespace", NAMESPACE, "--timeout=90s")
    assert "Phase:          Succeeded" in said


def test_a_worker_killed_is_started_again_by_the_kubelet_and_serves(bed: Bed) -> None:
    status = bed.pods("worker")[0]["status"]["containerStatuses"][0]
    os.kill(bed.node.process(status["containerID"].removeprefix("containerd://")), signal.SIGKILL)

    def restarted() -> bool:
        return bool(bed.pods("worker")[0]["status"]["containerStatuses"][0]["restartCount"] == 1)

    bed.cluster.eventually("the kubelet started the container again", restarted)
    bed.wait_ready()
    bed.start_client("second", 1)
    right(bed.answers("second"))


def test_a_worker_pod_deleted_drains_and_comes_back_as_another(bed: Bed) -> None:
    before = bed.pods("worker")[0]["metadata"]
    bed.delete(before["name"], 50)

    def another() -> bool:
        return any(pod["metadata"]["uid"] != before["uid"] for pod in bed.pods("worker"))

    bed.cluster.eventually("the StatefulSet has made another pod", another)
    bed.wait_ready()
    bed.start_client("third", 1)
    right(bed.answers("third"))


def test_uninstall_leaves_nothing(bed: Bed) -> None:
    bed.cluster.helm("uninstall", "moe", *FLAGS)
    names = (f"{group}/{kind}" for group, kinds in KINDS.items() for kind in kinds)
    paths = list(names)

    def left() -> list[str]:
        found = [(path, bed.cluster.api.ask("GET", path, **MINE).done()["items"]) for path in paths]
        return [f"{path}: {one['metadata']['name']}" for path, items in found for one in items]

    bed.cluster.eventually("nothing of the release is left", lambda: not left(), 60)
