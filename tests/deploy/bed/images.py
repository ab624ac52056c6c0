"""Our images, built without a container engine's service: buildah in a chroot, into a store of the bed's own.

    python -m tests.deploy.bed.images       builds both, prints their sizes
    Images.here().podman("run", ...)        podman on the same store; Missing where it is not installed

The base image is pulled where a registry answers; where none does, mmdebstrap makes it from Debian's packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.bed import lent
from tests.deploy.bed.say import Missing, say
from tests.deploy.bed.tools import cache
from tests.house.tree import ROOT

PULLED = "docker.io/library/debian:bookworm-slim"
MADE = "localhost/debian:bookworm-slim"
TAG = "bed"
LEFT_OUT = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
"""Folders of /usr/share that Debian's slim images do without, but for licences."""
DEBIAN = "http://deb.debian.org/debian"
TRUSTED = "/run/host-certificates.crt"
BUILD_TIMEOUT_S, COMMAND_TIMEOUT_S = 3600, 600
CONF = """\
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:8192"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""runc, because crun refuses hybrid cgroups; low limits, because raising them needs a capability."""


@dataclass(frozen=True)
class Images:
    """A store of images under `folder`."""

    folder: Path

    @staticmethod
    def here() -> Images:
        """The store of this machine's bed."""
        lacking = [name for name in ("buildah", "podman", "runc") if shutil.which(name) is None]
        if lacking:
            raise Missing(f"images are built by buildah and run by podman and runc: not found: {', '.join(lacking)}")
        if os.geteuid() != 0:
            raise Missing("images are built in a chroot: needs root")
        folder = cache() / "images"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(CONF)
        return Images(folder)

    def environment(self) -> dict[str, str]:
        """What podman and buildah need to find in theirs."""
        return {**os.environ, "CONTAINERS_CONF": str(self.folder / "containers.conf"), "BUILDAH_ISOLATION": "chroot"}

    def stores(self) -> list[str]:
        """Flags that choose the store."""
        return ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]

    def podman(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True) -> str:
        """stdout of `podman WORDS`; raises RuntimeError with its stderr where it fails and `check` is set."""
        return self._run(["podman", *self.stores(), *words], timeout_s, check=check)

    def has(self, name: str) -> bool:
        """Whether the store holds that image."""
        done = subprocess.run(
            ["podman", *self.stores(), "image", "exists", name], env=self.environment(), timeout=60, check=False
        )
        return done.returncode == 0

    def base(self) -> str:
        """The name of a base image that is in the store."""
        for name in (PULLED, MADE):
            if self.has(name):
                return name
        pull = ["podman", *self.stores(), "pull", "--quiet", PULLED]
        if subprocess.run(pull, env=self.environment(), capture_output=True, timeout=300, check=False).returncode == 0:
            return PULLED
        if shutil.which("mmdebstrap") is None:
            raise Missing(
                f"no registry gives {PULLED}, and mmdebstrap, which would make a base image, is not installed"
            )
        say("no registry answers: making the base image from Debian's packages")
        archive = self.folder / "base.tar"
        self._run(["mmdebstrap", *_slim(), "bookworm", str(archive), DEBIAN], 900)
        self.podman("import", "--quiet", str(archive), MADE)
        archive.unlink()
        return MADE

    def build(self, target: str, *arguments: str, volumes: Sequence[str] = ()) -> str:
        """Build one target of the Dockerfile; its image's name. `arguments`: NAME=VALUE of the Dockerfile's ARGs."""
        name = f"localhost/crossdock-{target}:{TAG}"
        given = [f"--build-arg={argument}" for argument in (f"BASE={self.base()}", *arguments)]
        command = ["buildah", *self.stores(), "build", "--layers", "--format", "docker", "--network", "host"]
        words = [
            *command,
            *given,
            *self._trust(),
            *(f"--volume={v}" for v in volumes),
            "--target",
            target,
            "--tag",
            name,
            str(ROOT),
        ]
        self._run(words, BUILD_TIMEOUT_S)
        return name

    def build_both(self) -> None:
        """The control plane's image, and the worker's for the transport cpu, with torch lent by this machine."""
        lent.placeholder(self.folder / "lent")
        began = time.monotonic()
        self.build("control")
        self.build(
            "worker", f"PIP_ARGS=--find-links={lent.MOUNT}", "KERNELS=none",
            volumes=[f"{self.folder / 'lent'}:{lent.MOUNT}:ro"],
        )  # fmt: skip
        say(f"  images built in {time.monotonic() - began:.0f} s; torch is lent to the worker, not part of its image")

    def python(self) -> str:
        """Version of the images' Python, like 3.11."""
        script = "import sys; print('{}.{}'.format(*sys.version_info))"
        name = f"localhost/crossdock-control:{TAG}"
        return self.podman("run", "--rm", "--network=none", "--entrypoint=python", name, "-c", script).strip()

    def _trust(self) -> list[str]:
        """The host's certificates and pip's settings, for hosts behind a registry mirror; no part of the image."""
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        conf = self.folder / "pip.conf"
        conf.write_text(f"[global]\ntimeout = 180\ncert = {TRUSTED}\n" if certificates.exists() else "")
        mounts = {TRUSTED: certificates, "/etc/pip.conf": conf}
        return [f"--volume={path}:{place}:ro" for place, path in mounts.items() if path.exists()]

    def _run(self, words: Sequence[str], timeout_s: float, *, check: bool = True) -> str:
        done = subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words[:6])} ...: exit status {done.returncode}\n{done.stderr[-3000:]}")
        return done.stdout


def _slim() -> list[str]:
    """How mmdebstrap makes what Debian's slim images are: no full perl, no manuals, no lists of packages."""
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in LEFT_OUT]
    merged = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
    no_lists = "--customize-hook=rm -rf $1/var/lib/apt/lists/*"
    licences = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
    return ["--variant=minbase", merged, "--include=usr-is-merged", *left_out, licences, no_lists]


def main() -> None:
    """Build both images from this checkout."""
    try:
        store = Images.here()
        store.build_both()
    except Missing as error:
        sys.exit(f"test bed: {error}")
    print(store.podman("images", "--filter", f"reference=localhost/crossdock-*:{TAG}"))


if __name__ == "__main__":
    main()
