"""The release `moe` on a cluster with a real node: its pods, what they run, who leads, and clients that ask it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.bed import lent
from tests.deploy.bed.api import Answer
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.images import Images
from tests.deploy.bed.inventory import inventory
from tests.deploy.bed.node import NAME, Node
from tests.deploy.bed.say import say
from tests.house.tree import ROOT

NAMESPACE, RANKS = "serving", 2
CHART = ROOT / "helm" / "crossdock"
ASK = Path(__file__).with_name("ask.py")
FLAGS = ("--namespace", NAMESPACE, "--wait", "--timeout=300s")
MINE = {"labelSelector": "app.kubernetes.io/instance=moe"}
PATIENCE_S = 300.0
"""Longest wait for anything: far more than it takes, also on a machine that does much else."""
TOLERANCE = 1e-4
"""Largest error that a client of ask.py may see."""


class Release:
    """See the module's head.

    Args:
        cluster, node: where it is.
        given: its values.
        tool: the helm that handles it.

    Attributes:
        before: the inventory before it is installed.
    """

    def __init__(self, cluster: Cluster, node: Node, given: dict[str, Any], tool: str) -> None:
        self.cluster, self.node, self.given, self.tool = cluster, node, given, tool
        cluster.namespace(NAMESPACE)
        default = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        cluster.eventually("the namespace is furnished", lambda: cluster.api.ask("GET", default).fine)
        self.before = inventory(cluster.api, NAMESPACE)

    def install(self) -> None:
        """`helm install --wait`, which returns when every rank serves."""
        self.helm("install", "moe", str(CHART), values=self.given)

    def helm(self, *words: str, values: object = None) -> str:
        """stdout of helm, waiting for pods; raises AssertionError that tells how they are."""
        try:
            return self.cluster.helm(*words, *FLAGS, values=values, tool=self.tool)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from error

    def upgrade(self, **changed: Mapping[str, Any]) -> None:
        """`helm upgrade` with these values over those it was installed with."""
        values = {**self.given, **{part: {**self.given[part], **given} for part, given in changed.items()}}
        self.helm("upgrade", "moe", str(CHART), values=values)

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

    def evict(self, pod: str) -> Answer:
        """Ask for a pod's eviction, as `kubectl drain` does."""
        wish = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        return self.cluster.api.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction", wish)

    def cordon(self, *, on: bool) -> None:
        """Whether the node takes new pods no more."""
        patch = {"spec": {"unschedulable": on}}
        self.cluster.api.ask("PATCH", f"/api/v1/nodes/{NAME}", patch, kind="application/merge-patch+json").done()

    def budget(self, component: str) -> int | None:
        """How many pods of a component its PodDisruptionBudget lets go now; None: there is none, or none judged yet."""
        path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/moe-{component}"
        found = self.cluster.api.ask("GET", path)
        if not found.fine or "observedGeneration" not in found.body.get("status", {}):
            return None
        return int(found.body["status"]["disruptionsAllowed"])

    def leader(self) -> str:
        """Name of the pod that holds the Lease; "" = nobody."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/moe"
        holder = self.cluster.api.ask("GET", path).done().get("spec", {}).get("holderIdentity") or ""
        names = [pod["metadata"]["name"] for pod in self.pods("control")]
        return next((name for name in names if holder.startswith(name)), "")

    def process(self, pod: Any) -> int:
        """Process 1 of the pod's container, as this machine numbers it."""
        found = pod["status"]["containerStatuses"][0]["containerID"]
        return self.node.process(found.removeprefix("containerd://"))

    def config(self, pod: Any) -> Any:
        """The config file that the pod's container sees."""
        (path,) = Path(f"/proc/{self.process(pod)}/root/etc/crossdock").glob("*.yaml")
        return yaml.safe_load(path.read_text())

    def wait_ready(self) -> None:
        """Until every pod of the release is Ready."""

        def all_ready() -> bool:
            found = self.pods("control") + self.pods("worker")
            worker_pods = self.given["worker"].get("hosts", 1)
            return len(found) == self.given["control"]["replicas"] + worker_pods and all(map(is_ready, found))

        self.cluster.eventually("every pod is Ready", all_ready, PATIENCE_S)

    def start_client(self, name: str, seconds: float) -> None:
        """A pod of the worker's image that asks the group for so long, or until SIGTERM, and checks the answers."""
        worker = self.given["worker"]
        mounts = [{"name": "ask", "mountPath": "/usr/local/ask"}, {"name": "model", "mountPath": "/models"}]
        volumes = [{"name": "ask", "configMap": {"name": "ask"}}, {"name": "model", **worker["model"]["volume"]}]
        command = ["python", "/usr/local/ask/ask.py", "moe-control:7400", "/models", str(seconds)]
        if self.given.get("tls", {}).get("enabled"):
            command.append("/etc/crossdock/security.yaml")
            mounts += [
                {"name": "config", "mountPath": "/etc/crossdock"},
                {"name": "tls", "mountPath": "/etc/crossdock-tls"},
            ]
            volumes += [{"name": "config", "configMap": {"name": "moe-control"}}]
            volumes += [{"name": "tls", "secret": {"secretName": "moe-client-tls"}}]
        container = {
            "name": "ask", "image": "localhost/crossdock-worker:bed", "env": worker["extraEnv"],
            "volumeMounts": [*mounts, *worker["extraVolumeMounts"]],
            "command": command,
        }  # fmt: skip
        spec = {"restartPolicy": "Never", "nodeName": NAME, "containers": [container]}  # also where it is cordoned
        spec["volumes"] = [*volumes, *worker["extraVolumes"]]
        script = {"metadata": {"name": "ask"}, "data": {"ask.py": ASK.read_text()}}
        self.cluster.api.apply({"apiVersion": "v1", "kind": "ConfigMap", **script}, NAMESPACE).done()
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        self.cluster.api.apply(pod, NAMESPACE).done()

    def stop_client(self, name: str) -> None:
        """Let a client end after the answer that it waits for."""
        os.kill(self.process(self.get(f"pods/{name}")), signal.SIGTERM)

    def answers(self, name: str) -> dict[str, Any]:
        """What the client saw, when it is through."""
        phase = lambda: self.get(f"pods/{name}")["status"].get("phase")  # noqa: E731
        self.cluster.eventually(f"pod {name} is through", lambda: phase() in ("Succeeded", "Failed"), PATIENCE_S)
        said = self.log(name)
        assert phase() == "Succeeded", said
        found = json.loads(said.splitlines()[-1])
        assert isinstance(found, dict)
        say(f"  client {name}: {found}")
        return found

    def uninstall(self) -> None:
        """`helm uninstall`; raises AssertionError naming what is left of it, of whatever kind and wherever it is."""
        clients = {pod["metadata"]["name"] for pod in self.get("pods")["items"]}
        clients -= {pod["metadata"]["name"] for component in ("control", "worker") for pod in self.pods(component)}
        self.helm("uninstall", "moe")
        for path in ("configmaps/ask", *(f"pods/{name}" for name in clients)):
            self.cluster.api.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/{path}").done()

        def left() -> set[str]:
            return inventory(self.cluster.api, NAMESPACE) - self.before

        self.cluster.eventually("nothing of the release is left", lambda: not left(), PATIENCE_S, left)

    def asked(self, name: str) -> None:
        """A client asks a few times: every request is answered, and as computed from the weights."""
        self.start_client(name, 1)
        right(self.answers(name))

    def explain(self) -> str:
        """What the pods' states and logs say."""
        lines = []
        for pod in self.get("pods")["items"]:
            name = pod["metadata"]["name"]
            lines += [f"== {name}", json.dumps(pod["status"])[-2500:], self.log(name, tailLines="25")]
        events = sorted(self.get("events")["items"], key=_last_seen)
        said = [f"{one['reason']}: {one['message']}" for one in events]
        return "\n".join([*lines, *said[-20:]])


def _last_seen(event: Any) -> str:
    """When it was told last; the server lists events by name."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


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
    """Two control planes of which one leads, and two ranks. Raises Missing where torch cannot be lent."""
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
