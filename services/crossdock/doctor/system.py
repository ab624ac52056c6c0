"""Limits of this process and of the kernel: read here, judged by pure functions."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crossdock.common import descriptors, rpc
from crossdock.common.addresses import split_address
from crossdock.common.config import ControlConfig
from crossdock.common.free_memory import free_memory
from crossdock.common.plural import counted
from crossdock.doctor.findings import Finding, Level, judge, ok, skipped, warn
from ep_kernels import tuning

_GIB = 1 << 30
_ENOUGH_FILES = descriptors.CONNECTIONS * rpc.MAX_CONNECTIONS
_LEAST_SHM = 64 << 20
_LEAST_CACHE = 256 << 20
_LEAST_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """What this process may do.

    Attributes:
        open_files: hard limit, to which servers raise their soft one; -1 = none.
        locked_bytes: soft limit of locked memory, -1 = none.
        shm_bytes: free in /dev/shm, -1 = there is none.
        memory_bytes: free to this process, its container's limit counted; -1 = unknown.
        cache_bytes: free where kernels are cached, -1 = cannot be written.
        busy_ports: of the control plane's default addresses, those that are taken.
    """

    open_files: int
    locked_bytes: int
    shm_bytes: int
    memory_bytes: int
    num_cpus: int
    cache_bytes: int
    busy_ports: tuple[int, ...]


def read(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), shm: Path = Path("/dev/shm")
) -> SystemFacts:
    """Read it all; nothing raises for what is not there."""
    defaults = ControlConfig()
    ports = [split_address(address)[1] for address in (defaults.listen, defaults.http_listen)]
    return SystemFacts(
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=_free(shm),
        memory_bytes=-1 if (free := free_memory(proc, cgroup)) is None else free,
        num_cpus=len(os.sched_getaffinity(0)),
        cache_bytes=_cache(tuning.cache_dir(None)),
        busy_ports=tuple(port for port in ports if not _is_free(port)),
    )


def judge_system(facts: SystemFacts, *, num_ranks: int, has_gpus: bool, has_nics: bool) -> Iterator[Finding]:
    """Findings for a number of ranks on this host."""
    files = "unlimited" if facts.open_files < 0 else f"{facts.open_files}"
    enough = facts.open_files < 0 or facts.open_files >= _ENOUGH_FILES
    cause = f"servers take fewer clients with less than {_ENOUGH_FILES}: each connection is one"
    cure = "ulimit -Hn 65536; LimitNOFILE= of a unit"
    yield _reserve("open-files", enough, files, cause, cure)
    yield _memory(facts)
    if has_nics:
        locked = "unlimited" if facts.locked_bytes < 0 else f"{facts.locked_bytes >> 10} KiB"
        cause = "memory that a NIC reads must be locked; without RDMA it does not matter"
        cure = "ulimit -l unlimited; LimitMEMLOCK=infinity of a unit"
        yield _reserve("memlock", facts.locked_bytes < 0, locked, cause, cure)
    yield _shm(facts)
    cause = "ranks poll for their peers at the same time"
    cure = "one core for each rank at least, by a larger CPU limit or fewer workers"
    words = f"{facts.num_cpus} for {counted(num_ranks, 'rank')}"
    yield _reserve("processors", facts.num_cpus >= num_ranks, words, cause, cure)
    if has_gpus:
        words = f"{facts.cache_bytes >> 20} MiB free" if facts.cache_bytes >= 0 else "cannot be written"
        cause = "kernels that are not in the wheel would be compiled at each start"
        cure = "set worker.kernel_cache_dir to a folder that can be written"
        yield _reserve("kernel-cache", facts.cache_bytes >= _LEAST_CACHE, words, cause, cure)
    yield _ports(facts)


def _reserve(check: str, holds: bool, what: str, cause: str, cure: str) -> Finding:
    return judge(check, holds, what, cause, cure, level=Level.WARN)


def _shm(facts: SystemFacts) -> Finding:
    if facts.shm_bytes < 0:
        return skipped("shm", "no /dev/shm: Crossdock itself does not use it, NCCL does")
    cause = "Crossdock does not use it (regions are memfds), but NCCL does"
    cure = "docker run --shm-size 1g; an emptyDir with medium: Memory at /dev/shm"
    return _reserve("shm", facts.shm_bytes >= _LEAST_SHM, f"{facts.shm_bytes >> 20} MiB free", cause, cure)


def _ports(facts: SystemFacts) -> Finding:
    if not facts.busy_ports:
        return ok("ports", "the defaults are free")
    what = f"taken on 127.0.0.1: {', '.join(map(str, facts.busy_ports))}"
    cure = "perhaps a control plane runs already; else choose others with control.listen and control.http_listen"
    return warn("ports", what, "`crossdock up` with its defaults could not listen", cure)


def _memory(facts: SystemFacts) -> Finding:
    if facts.memory_bytes < 0:
        return skipped("memory", "not reported by the kernel")
    cause = "a worker of even a small model would be killed for memory"
    cure = "a larger memory limit of the container, or a larger host"
    words = f"{facts.memory_bytes / _GIB:.1f} GiB free"
    return _reserve("memory", facts.memory_bytes >= _LEAST_MEMORY, words, cause, cure)


def _free(folder: Path) -> int:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return -1
    return stat.f_bavail * stat.f_frsize


def _cache(folder: Path | None) -> int:
    if folder is None:  # a user without a home
        return -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _free(folder)
    except OSError:
        return -1


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
