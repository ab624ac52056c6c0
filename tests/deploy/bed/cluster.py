"""A real Kubernetes API server for one test run: etcd, kube-apiserver, and helm to talk to it.

    with Cluster.up() as cluster:
        cluster.api.ask("GET", "/version")

On loopback, without root; gone with the test run. With an address that nodes reach, or with simulated nodes, it has
controllers and a scheduler.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.deploy.bed import leftovers, tools
from tests.deploy.bed.api import Api
from tests.deploy.bed.pki import Authority
from tests.deploy.bed.processes import Processes, free_ports

SERVICES, CLUSTER_IP = "10.96.0.0/16", "10.96.0.1"
ADDRESS = "127.0.0.1"
CONTROLLERS = {"kcm": "kube-controller-manager", "scheduler": "kube-scheduler"}
COMMAND_TIMEOUT_S = 400.0


class Cluster:
    """See the module's head.

    Args:
        folder: of its state; removed when it ends.
        programs: what it runs.
        address: where the API server listens.
        simulated: its nodes are only objects, of which no heartbeat is expected.

    Attributes:
        api: as its administrator.
        processes: every process of it.
    """

    def __init__(self, folder: Path, programs: dict[str, Path], address: str, *, simulated: bool = False) -> None:
        self.folder, self.programs, self.address, self.simulated = folder, programs, address, simulated
        self.ports = dict(zip(("etcd", "peer", "apiserver"), free_ports(3), strict=True))
        self.server = f"https://{address}:{self.ports['apiserver']}"
        self.processes = Processes(folder / "logs")
        self.authority = Authority.new(folder / "pki")
        self._sign()
        path = self.authority.path
        self.api = Api(self.server, path("ca.crt"), path("admin.crt"), path("admin.key"))

    @staticmethod
    def up(address: str = ADDRESS, *, simulated: bool = False) -> Cluster:
        """Start it. Raises Missing where a program cannot be built."""
        more = CONTROLLERS.values() if simulated or address != ADDRESS else ()
        programs = tools.need("etcd", "kube-apiserver", "helm3", *more)
        folder = leftovers.new_folder()
        cluster = Cluster(folder, programs, address, simulated=simulated)
        try:
            cluster._start()
        except BaseException:
            cluster.close()
            raise
        return cluster

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process, remove the files."""
        self.processes.end_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator."""
        return self.folder / "pki" / "admin.kubeconfig"

    def helm(self, *words: str, values: object = None, check: bool = True, tool: str = "helm3") -> str:
        """stdout of `helm WORDS` on this cluster, with values on stdin where given; both outputs where it may fail.

        `tool`: which helm, built where it has to be; raises Missing where it cannot be."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HELM_CACHE_HOME": str(self.folder / "helm")}
        environment["NO_PROXY"] = self.address
        given = ["--values", "-"] if values is not None else []
        done = subprocess.run(
            [str(tools.need(tool)[tool]), *words, *given], input=json.dumps(values or {}), env=environment,
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{tool} {' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def account(self, namespace: str, name: str, folder: Path) -> Path:
        """A kubeconfig of a service account, with a token of its own, in `folder`."""
        wish = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        config = json.loads(self.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": self.api.ask("POST", path, wish).done()["status"]["token"]}
        (folder / "kubeconfig").write_text(json.dumps(config))
        return folder / "kubeconfig"

    def namespace(self, name: str, labels: dict[str, str] | None = None) -> str:
        """Make a namespace; its name."""
        self.api.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}
        ).done()
        return name

    def eventually(
        self, what: str, holds: Callable[[], object], timeout_s: float = 300, instead: Callable[[], object] = str
    ) -> None:
        """Wait until `holds()` is true; raises AssertionError naming `what`, and what there is `instead`."""
        ends = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > ends:
                raise AssertionError(f"{what}: not so after {timeout_s:.0f} s {instead()}")
            time.sleep(0.2)

    def ready(self) -> bool:
        """Whether the API server says that it is ready."""
        return self.api.ask("GET", "/readyz").fine

    def kill_apiserver(self) -> None:
        """SIGKILL: on SIGTERM it waits a minute for open watches."""
        self.processes.end("apiserver", signal.SIGKILL)

    def start_apiserver(self) -> None:
        """Start it again and wait until it is ready."""
        self.processes.restart("apiserver")
        self.processes.wait("apiserver", self.ready)

    def _sign(self) -> None:
        names = ["DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"]
        self.authority.sign("apiserver", "kube-apiserver", "bed", [*names, f"IP:{self.address}", f"IP:{CLUSTER_IP}"])
        self.authority.sign("admin", "admin", "system:masters")
        self.authority.kubeconfig("admin", self.server)

    def _start(self) -> None:
        etcd, peer = (f"http://127.0.0.1:{self.ports[name]}" for name in ("etcd", "peer"))
        self.processes.start(
            "etcd",
            [
                str(self.programs["etcd"]), f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={etcd}",
                f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}", "--unsafe-no-fsync",
                f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
            ],
        )  # fmt: skip
        self.processes.start("apiserver", self._apiserver(etcd))
        self.processes.wait("apiserver", self.ready)
        for name, program in CONTROLLERS.items():
            if program in self.programs:
                self.processes.start(name, self._controller(name))

    def _apiserver(self, etcd: str) -> list[str]:
        path = self.authority.path
        headers = (
            "username-headers=X-Remote-User",
            "group-headers=X-Remote-Group",
            "extra-headers-prefix=X-Remote-Extra-",
        )
        return [
            str(self.programs["kube-apiserver"]), f"--etcd-servers={etcd}", f"--bind-address={self.address}",
            f"--advertise-address={self.address}", f"--secure-port={self.ports['apiserver']}",
            f"--endpoint-reconciler-type={'none' if self.address == ADDRESS else 'lease'}",
            "--kubelet-preferred-address-types=InternalIP", f"--kubelet-client-certificate={path('admin.crt')}",
            f"--kubelet-client-key={path('admin.key')}",
            f"--tls-cert-file={path('apiserver.crt')}", f"--tls-private-key-file={path('apiserver.key')}",
            f"--client-ca-file={path('ca.crt')}", f"--requestheader-client-ca-file={path('ca.crt')}",
            "--requestheader-allowed-names=front-proxy", *(f"--requestheader-{header}" for header in headers),
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={path('sa.pub')}",
            f"--service-account-signing-key-file={path('sa.key')}", f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            "--profiling=false",
        ]  # fmt: skip

    def _controller(self, name: str) -> list[str]:
        self.authority.sign(name, f"system:{CONTROLLERS[name]}", "bed")
        mine, path = self.authority.kubeconfig(name, self.server), self.authority.path
        common = [f"--{kind}kubeconfig={mine}" for kind in ("", "authentication-", "authorization-")]
        common += ["--secure-port=0", "--leader-elect=false", "--profiling=false"]
        keys = [
            "--use-service-account-credentials=true", f"--service-account-private-key-file={path('sa.key')}",
            f"--root-ca-file={path('ca.crt')}", f"--cluster-signing-cert-file={path('ca.crt')}",
            f"--cluster-signing-key-file={path('ca.key')}",
        ]  # fmt: skip
        keys += ["--node-monitor-grace-period=24h"] if self.simulated else []
        return [str(self.programs[CONTROLLERS[name]]), *common, *(keys if name == "kcm" else ())]
