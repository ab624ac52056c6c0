"""One real node: containerd, runc, kubelet, kube-proxy and names of Services. Pods are real containers.

    with network.private(), Cluster.up(network.NODE) as cluster, Node.up(cluster, images) as node:
        node.load("localhost/crossdock-control:bed")

All its state is in the cluster's folder, that of containerd too, and its pods are in cgroups of the folder's name, so
that it runs beside any other kubelet. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from types import TracebackType
from typing import Any

from tests.deploy.bed import leftovers, network, runtime, tools
from tests.deploy.bed.cluster import ADDRESS, Cluster
from tests.deploy.bed.images import Images
from tests.deploy.bed.names import Names
from tests.deploy.bed.say import Missing, say

NAME = "real-0"
DNS_IP = "10.96.0.10"
PROGRAMS = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr")
READY_S = 300.0


def demand() -> None:
    """Raise Missing unless this machine can run a kubelet of ours."""
    if os.geteuid() != 0:
        raise Missing("a kubelet needs root")
    wanted = ("runc", "iptables", "ip", "nsenter", "conntrack", "cc", "podman", "buildah")
    lacking = [name for name in wanted if shutil.which(name) is None]
    lacking += [str(path) for path in map(runtime.PLUGINS.joinpath, runtime.PLUGINS_USED) if not path.exists()]
    if lacking:
        raise Missing(
            f"a real node needs {', '.join(lacking)} "
            "(Debian: runc, iptables, conntrack, containernetworking-plugins, gcc, podman, buildah)"
        )


class Node:
    """See the module's head.

    Args:
        cluster: whose node it is.
        images: the store that `load` takes from.
    """

    def __init__(self, cluster: Cluster, images: Images) -> None:
        self.cluster, self.images, self.folder = cluster, images, cluster.folder / "node"
        self.programs = tools.need(*PROGRAMS)
        self.socket = self.folder / "containerd.sock"
        self._names: Names | None = None

    @staticmethod
    def up(cluster: Cluster, images: Images) -> Node:
        """Start everything and wait until the node is Ready."""
        leftovers.clear()
        node = Node(cluster, images)
        node.folder.mkdir()
        try:
            node._start()
        except BaseException:
            node.close()
            raise
        return node

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ctr(self, *words: str, given: subprocess.Popen[bytes] | None = None, timeout_s: float = 600) -> str:
        """stdout of `ctr WORDS` in the kubelet's part of containerd."""
        command = [str(self.programs["ctr"]), "--address", str(self.socket), "--namespace", "k8s.io", *words]
        stdin = given.stdout if given else subprocess.DEVNULL
        done = subprocess.run(command, stdin=stdin, capture_output=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise RuntimeError(f"ctr {' '.join(words)}: {done.stderr.decode(errors='replace')[-2000:]}")
        return done.stdout.decode()

    def load(self, image: str) -> None:
        """Give the node an image of the store, without a file in between."""
        began = time.monotonic()
        words = ["podman", *self.images.stores(), "save", "--quiet", "--format", "oci-archive", image]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=self.images.environment()) as saving:
            self.ctr("images", "import", "--all-platforms", "-", given=saving)
        say(f"  {image}: loaded in {time.monotonic() - began:.0f} s")

    def process(self, container: str) -> int:
        """Process 1 of a container, by its id, as this machine numbers it."""
        rows = [line.split() for line in self.ctr("task", "ls").splitlines()]
        return next(int(row[1]) for row in rows if row[0] == container)

    def close(self) -> None:
        """End kubelet and pods, unmount, and remove cgroups and network namespaces of pods."""
        for name in ("kubelet", "proxy"):
            self._end(name)
        for task in self._quietly("task", "ls", "-q").split():
            self._quietly("task", "rm", "--force", task)
        self._end("containerd")
        if self._names:
            self._names.close()
        runtime.clear(self.cluster.folder)

    def _end(self, name: str) -> None:
        with contextlib.suppress(KeyError):
            self.cluster.processes.end(name)

    def _quietly(self, *words: str) -> str:
        try:
            return self.ctr(*words, timeout_s=20)
        except (RuntimeError, subprocess.TimeoutExpired):
            return ""

    def _start(self) -> None:
        runtime.configure(self.folder, self.socket, network.PODS)
        path = f"{self.programs['containerd'].parent}:{os.environ['PATH']}"
        command = [str(self.programs["containerd"]), "--config", str(self.folder / "containerd.toml")]
        self.cluster.processes.start("containerd", command, {**os.environ, "PATH": path})
        self.cluster.processes.wait("containerd", lambda: bool(self._quietly("version")))
        runtime.build_pause(self.images)
        self.load(runtime.PAUSE)
        self._start_kubelet()
        self._start_proxy()
        self._names = Names(self.cluster.api, network.NODE)
        self._announce_names()
        self.cluster.processes.wait("kubelet", self._is_ready, READY_S)

    def _start_kubelet(self) -> None:
        runtime.make_cgroups(self.cluster.folder.name)
        authority = self.cluster.authority
        names = [f"DNS:{NAME}", f"IP:{network.NODE}", f"IP:{ADDRESS}"]
        authority.sign("kubelet", f"system:node:{NAME}", "system:nodes", names)
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_config()))
        self.cluster.processes.start(
            "kubelet",
            [
                str(self.programs["kubelet"]), f"--config={config}", f"--root-dir={self.folder / 'kubelet'}",
                f"--kubeconfig={authority.kubeconfig('kubelet', self.cluster.server)}",
                f"--hostname-override={NAME}", f"--node-ip={network.NODE}",
                f"--cert-dir={self.folder / 'kubelet-pki'}",
            ],
        )  # fmt: skip

    def _kubelet_config(self) -> dict[str, Any]:
        """For a machine with cgroups of version 1 too, which may not be allowed to lower OOM scores."""
        path = self.cluster.authority.path
        anyone = {"anonymous": {"enabled": False}, "webhook": {"enabled": True}}
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": network.NODE,
            "authentication": {**anyone, "x509": {"clientCAFile": path("ca.crt")}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": path("kubelet.crt"),
            "tlsPrivateKeyFile": path("kubelet.key"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cluster.folder.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "clusterDomain": "cluster.local",
            "clusterDNS": [DNS_IP],
            "resolvConf": "",
            "readOnlyPort": 0,
            "podLogsDir": str(self.folder / "podlogs"),
            "oomScoreAdj": 0,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi"},
            "localStorageCapacityIsolation": False,
        }

    def _start_proxy(self) -> None:
        limits = ("max-per-core", "tcp-timeout-established", "tcp-timeout-close-wait")
        command = [
            str(self.programs["kube-proxy"]), f"--kubeconfig={self.cluster.kubeconfig}", "--proxy-mode=iptables",
            f"--cluster-cidr={network.PODS}", f"--hostname-override={NAME}",
            *(f"--conntrack-{limit}=0" for limit in limits),
        ]  # fmt: skip
        self.cluster.processes.start("proxy", command)

    def _announce_names(self) -> None:
        """The Service that pods ask for names."""
        ports = [{"name": "dns", "port": 53, "protocol": "UDP"}]
        meta = {"namespace": "kube-system"}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**meta, "name": "kube-dns"},
            "spec": {"clusterIP": DNS_IP, "ports": ports},
        }
        endpoints = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**meta, "name": "kube-dns-1", "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [network.NODE], "conditions": {"ready": True}}],
        }
        for thing in (service, endpoints):
            self.cluster.api.apply(thing).done()

    def _is_ready(self) -> bool:
        found = self.cluster.api.ask("GET", f"/api/v1/nodes/{NAME}")
        conditions = found.body["status"].get("conditions", ()) if found.fine else ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
