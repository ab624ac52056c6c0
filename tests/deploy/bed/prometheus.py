"""Prometheus in the cluster: as a pod with a config file of the user's, or made by the Prometheus Operator.

    node.load(build(images))
    with_config(cluster, config, rules)  ->  Prometheus
    with_operator(cluster)               ->  Prometheus

Both run under the account of deploy/prometheus/kubernetes-rights.yaml.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import yaml

from tests.deploy.bed import tools
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.images import Images
from tests.deploy.bed.node import NAME
from tests.house.tree import ROOT

NAMESPACE, ACCOUNT, PORT = "monitoring", "prometheus", 9090
VERSION = "v3.15.0"
FILES = ROOT / "deploy" / "prometheus"
FOUND_BY = {"release": "prometheus"}
"""Labels of the PodMonitors and PrometheusRules that the operator's Prometheus takes."""
KINDS = tuple(f"{name}.crd.yaml" for name in tools.MONITORING)
PROGRAMS = ("prometheus", "operator", "prometheus-config-reloader", *KINDS)
_BINARIES = ("prometheus", "prometheus-config-reloader")
_SECURITY = {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001}


class Prometheus:
    """What one of them says by its API. It is the pod `name`."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self.name = cluster, name
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str, **query: str) -> Any:
        """`data` of /api/v1/PATH; None while nobody answers."""
        pod = self._cluster.api.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{self.name}")
        address = pod.body.get("status", {}).get("podIP") if pod.fine else None
        if not address:
            return None
        try:
            with self._opener.open(f"http://{address}:{PORT}/api/v1/{path}?{urlencode(query)}", timeout=30) as response:
                return json.load(response)["data"]
        except (URLError, OSError):
            return None

    def query(self, expression: str) -> list[dict[str, Any]] | None:
        """Labels and value of each series; None where it is not answered."""
        found = self.get("query", query=expression)
        return None if found is None else list(found["result"])

    def targets(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Every target, by the labels pod and endpoint."""
        found = (self.get("targets") or {}).get("activeTargets", ())
        return {(one["labels"].get("pod", ""), one["labels"].get("endpoint", "")): one for one in found}

    def alerts(self) -> dict[str, str] | None:
        """State (inactive, pending, firing) of each alert of its rules; None where it does not answer."""
        found = self.get("rules", type="alert")
        groups = () if found is None else found["groups"]
        return None if found is None else {rule["name"]: rule["state"] for one in groups for rule in one["rules"]}

    def explain(self) -> str:
        """The end of its log."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{self.name}"
        log = self._cluster.api.ask("GET", f"{path}/log", container="prometheus", tailLines="20").body
        return f"{json.dumps(self._cluster.api.ask('GET', path).body)[-2500:]}\n{log}"


def build(images: Images) -> str:
    """The name of an image of its own, in the store."""
    programs = tools.need(*_BINARIES)
    tag = "-".join(program.parent.name.rpartition("-")[2] for program in programs.values())
    name = f"localhost/crossdock-prometheus:{tag}"
    if not images.has(name):
        folder = images.folder / "prometheus"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for binary in _BINARIES:
            shutil.copy(programs[binary], folder / binary)
        (folder / "Dockerfile").write_text(
            f'FROM scratch\nCOPY {" ".join(_BINARIES)} /bin/\nENTRYPOINT ["/bin/prometheus"]\n'
        )
        command = ["buildah", *images.stores(), "build", "--quiet", "--tag", name, str(folder)]
        subprocess.run(command, env=images.environment(), check=True, capture_output=True, timeout=300)
        shutil.rmtree(folder)
    return name


def give_rights(cluster: Cluster, namespace: str) -> None:
    """Apply kubernetes-rights.yaml for releases in `namespace`."""
    cluster.namespace(NAMESPACE)
    for thing in yaml.safe_load_all(
        (FILES / "kubernetes-rights.yaml").read_text().replace(": default", f": {namespace}")
    ):
        cluster.api.apply(thing).done()


def with_config(cluster: Cluster, image: str, files: dict[str, str]) -> Prometheus:
    """A pod that runs it, with these files in /etc/prometheus; prometheus.yml is its config."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}, "data": files}
    container = {
        "name": "prometheus", "image": image,
        "args": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/data"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/prometheus"}, {"name": "data", "mountPath": "/data"}],
    }  # fmt: skip
    volumes = [{"name": "config", "configMap": {"name": "plain"}}, {"name": "data", "emptyDir": {}}]
    spec = {"serviceAccountName": ACCOUNT, "nodeName": NAME, "securityContext": _SECURITY}
    spec |= {"containers": [container], "volumes": volumes}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"}, "spec": spec}
    for thing in (config, pod):
        cluster.api.apply(thing, NAMESPACE).done()
    return Prometheus(cluster, "plain")


def with_operator(cluster: Cluster, image: str) -> Prometheus:
    """Start the operator, and let it make a Prometheus of what has the labels FOUND_BY, in any namespace."""
    path = cluster.authority.path
    pair = [f"--cert-file={path('admin.crt')}", f"--key-file={path('admin.key')}", f"--ca-file={path('ca.crt')}"]
    command = [str(tools.need("operator")["operator"]), f"--apiserver={cluster.server}", *pair]
    quiet = {**os.environ, "NO_PROXY": cluster.address}
    cluster.processes.start("operator", [*command, f"--prometheus-config-reloader={image}"], quiet)
    chosen: dict[str, Any] = {"matchLabels": FOUND_BY}
    spec = {
        "image": image, "version": VERSION, "replicas": 1, "serviceAccountName": ACCOUNT, "securityContext": _SECURITY,
        "scrapeInterval": "5s", "evaluationInterval": "5s",
        "podMonitorSelector": chosen, "podMonitorNamespaceSelector": {},
        "ruleSelector": chosen, "ruleNamespaceSelector": {},
    }  # fmt: skip
    thing = {"apiVersion": "monitoring.coreos.com/v1", "kind": "Prometheus", "metadata": {"name": "bed"}, "spec": spec}
    cluster.api.apply(thing, NAMESPACE).done()
    return Prometheus(cluster, "prometheus-bed-0")
