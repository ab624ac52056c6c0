"""Podman's own service of Docker's API, over the bed's store: what `docker` and its SDK talk to on a real host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.bed.images import Images
from tests.deploy.bed.processes import Processes
from tests.deploy.bed.say import Missing

HELPERS = ("netavark", "aardvark-dns")
"""Programs with which podman makes networks in which containers know each other's names."""
_FOLDERS = (Path("/usr/lib/podman"), Path("/usr/libexec/podman"))


def require_networks() -> None:
    """Raises Missing where podman cannot make networks."""
    lacking = [name for name in HELPERS if not any((folder / name).exists() for folder in _FOLDERS)]
    if lacking:
        raise Missing(f"podman makes networks by programs that are not installed: {', '.join(lacking)}")


@contextlib.contextmanager
def engine(images: Images) -> Iterator[str]:
    """URL of a running service; Missing where podman cannot make networks."""
    require_networks()
    with tempfile.TemporaryDirectory(prefix="crossdock-engine-") as folder:
        path, processes = Path(folder) / "engine.sock", Processes(Path(folder))
        url = f"unix://{path}"
        try:
            words = ["podman", *images.stores(), "system", "service", "--time=0", url]
            processes.start("engine", words, images.environment())
            processes.wait("engine", path.exists)
            yield url
        finally:
            processes.end_all()
