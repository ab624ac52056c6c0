"""The configuration of the bed's containerd, the cgroups of its pods, and how both are removed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.deploy.bed.images import Images

PAUSE = "localhost/crossdock-pause:1"
CGROUPS = Path("/sys/fs/cgroup")
CLEAR_S = 30.0
PLUGINS = Path("/usr/lib/cni")
PLUGINS_USED = ("bridge", "host-local", "loopback")
PAUSE_SOURCE = """\
#include <signal.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, NULL, WNOHANG) > 0) { } }
int main(void) {
  signal(SIGINT, end);
  signal(SIGTERM, end);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
"""
"""The container that holds a pod's network open."""
UNUSED = ("btrfs", "devmapper", "zfs", "blockfile", "erofs")
CONFIG = """\
version = 3
root = '{folder}/root'
state = '{folder}/state'
disabled_plugins = {disabled}
[grpc]
address = '{socket}'
[ttrpc]
address = '{socket}.ttrpc'
[plugins.'io.containerd.cri.v1.images']
snapshotter = 'overlayfs'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{pause}'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
disable_apparmor = true
enable_selinux = false
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['{plugins}']
conf_dir = '{folder}/cni'
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = 'runc'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
Root = '{folder}/runc'
"""


def configure(folder: Path, socket: Path, pods: str) -> None:
    """Write containerd.toml and the pods' network of addresses `pods` into `folder`."""
    (folder / "cni").mkdir()
    ranges = {"ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    addresses = {"type": "host-local", "dataDir": str(folder / "addresses"), **ranges}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    plugins = {"cniVersion": "1.0.0", "name": "bed", "plugins": [{**bridge, "ipam": addresses}]}
    (folder / "cni" / "10-bed.conflist").write_text(json.dumps(plugins))
    disabled = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.differ.v1.erofs"]
    disabled += [f"io.containerd.snapshotter.v1.{name}" for name in UNUSED]
    text = CONFIG.format(folder=folder, socket=socket, pause=PAUSE, plugins=PLUGINS, disabled=json.dumps(disabled))
    (folder / "containerd.toml").write_text(text)


def build_pause(images: Images) -> None:
    """Put the image PAUSE into the store, once."""
    if images.has(PAUSE):
        return
    folder = images.folder / "pause"
    folder.mkdir(exist_ok=True)
    (folder / "pause.c").write_text(PAUSE_SOURCE)
    subprocess.run(["cc", "-O2", "-static", "-o", "pause", "pause.c"], cwd=folder, check=True, timeout=60)
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
    command = ["buildah", *images.stores(), "build", "--quiet", "--tag", PAUSE, str(folder)]
    subprocess.run(command, env=images.environment(), check=True, capture_output=True, timeout=120)


def hierarchies() -> list[Path]:
    """The folders that hold cgroups: one per controller with cgroups of version 1, a single one with version 2."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return sorted(path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def make_cgroups(name: str) -> None:
    """Make a cgroup `name` of every controller: the root of a kubelet's own, beside those of any other kubelet."""
    for top in hierarchies():
        if (top / "cgroup.controllers").exists():  # version 2: handed on to its children where that is allowed
            for controller in (top / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):
                    (top / "cgroup.subtree_control").write_text(f"+{controller}")
        path = top / name
        path.mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts them empty, and then takes no process
            if (path / file).exists() and not (path / file).read_text().strip():
                (path / file).write_text((top / file).read_text())


def pod_cgroups(name: str) -> list[Path]:
    """Every cgroup `name` and those in it, the innermost first."""
    tops = [top / name for top in hierarchies() if (top / name).is_dir()]
    return [path for top in tops for path in (*sorted(filter(Path.is_dir, top.rglob("*")), reverse=True), top)]


def pod_pids(name: str) -> list[int]:
    """Every process of the pods in the cgroups `name`."""
    found = set()
    for path in pod_cgroups(name):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (path / "cgroup.procs").read_text().split()}
    return sorted(found)


def pod_networks(folder: Path) -> list[str]:
    """Names of the pods' network namespaces, as the descriptions of their containers have them."""
    spaces = [one for text in _state(folder, "config.json") for one in text.get("linux", {}).get("namespaces", [])]
    found = {Path(one["path"]).name for one in spaces if one.get("type") == "network" and one.get("path")}
    return sorted(name for name in found if name.startswith("cni-"))


def _state(folder: Path, file: str) -> list[dict[str, Any]]:
    """That file of every container, as containerd keeps it."""
    found = []
    for path in (folder / "node" / "state").rglob(file):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def shims(folder: Path) -> list[int]:
    """Containerd's helpers, one per pod: their command lines name its socket, which is under `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"shim" in words[0] and any(word.startswith(f"{folder}/".encode()) for word in words):
                found.append(int(path.name))
    return found


def mounts(folder: Path) -> list[str]:
    """What is mounted under `folder`, the innermost first."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((place for place in places if place.startswith(f"{folder}/")), reverse=True)


def clear(folder: Path) -> None:
    """End the pods of the bed in `folder`; remove their network namespaces, mounts and cgroups."""
    networks = pod_networks(folder)
    sockets = [one["address"].removeprefix("unix://") for one in _state(folder, "bootstrap.json") if one.get("address")]
    ends = time.monotonic() + CLEAR_S
    while (pids := [*shims(folder), *pod_pids(folder.name)]) and time.monotonic() < ends:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for socket in sockets:
        Path(socket).unlink(missing_ok=True)
    for path in mounts(folder):
        subprocess.run(["umount", "--lazy", path], check=False, capture_output=True, timeout=30)
    for name in networks:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)
    while (left := pod_cgroups(folder.name)) and time.monotonic() < ends:
        for cgroup in left:  # the kernel lets go of a killed process's cgroup a moment later
            with contextlib.suppress(OSError):
                cgroup.rmdir()
