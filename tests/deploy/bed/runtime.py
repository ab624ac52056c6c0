"""What containerd of the bed is told, and what is to be cleared away after it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from tests.deploy.bed.images import Images

PAUSE = "localhost/crossdock-pause:1"
CGROUPS = Path("/sys/fs/cgroup")
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


def pod_cgroups() -> list[Path]:
    """The cgroups under which a kubelet keeps all pods."""
    return [path for root in (CGROUPS, *CGROUPS.glob("*")) for path in root.glob("kubepods*") if path.is_dir()]


def _inside(top: Path) -> list[Path]:
    return [top, *(path for path in top.rglob("*") if path.is_dir())]


def pod_pids() -> list[int]:
    """Every process of every pod."""
    found = set()
    for path in (path for top in pod_cgroups() for path in _inside(top)):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (path / "cgroup.procs").read_text().split()}
    return sorted(found)


def pod_networks(folder: Path) -> list[str]:
    """Names of the pods' network namespaces, as the descriptions of their containers have them."""
    found = set()
    for path in (folder / "state").rglob("config.json"):
        with contextlib.suppress(OSError, ValueError):
            spaces = json.loads(path.read_text()).get("linux", {}).get("namespaces", [])
            found |= {Path(one["path"]).name for one in spaces if one.get("type") == "network" and one.get("path")}
    return sorted(name for name in found if name.startswith("cni-"))


def end_shims(socket: Path) -> None:
    """End containerd's helpers: their command lines name its socket."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"shim" in words[0] and any(str(socket).encode() in word for word in words):
                os.kill(int(folder.name), signal.SIGKILL)


def forget(folder: Path, networks: list[str]) -> None:
    """Unmount what is mounted under `folder`; remove the pods' network namespaces and cgroups."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((place for place in places if place.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", path], check=False, capture_output=True, timeout=30)
    for name in networks:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)
    for path in (path for top in pod_cgroups() for path in sorted(_inside(top), reverse=True)):
        with contextlib.suppress(OSError):
            path.rmdir()
