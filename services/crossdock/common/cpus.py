"""How many processors this process may use: its affinity mask, and the quotas of its cgroup (v2) and the parents."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def usable_cpus(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole processors, at least 1.

    Args:
        proc, cgroups: where those file systems are mounted.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(proc, cgroups)]))


def _quotas(proc: Path, cgroups: Path) -> list[int]:
    """Processors that each `cpu.max` from the process's own cgroup up to the root allows, rounded down."""
    path = ""
    with contextlib.suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
        path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    quotas = []
    for folder in (cgroups / path, *(cgroups / path).parents):
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = map(int, (folder / "cpu.max").read_text().split())  # "max" is no limit
            quotas.append(quota_us // period_us)
        if folder == cgroups:
            break
    return quotas
