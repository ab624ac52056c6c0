"""Memory that is free to this process."""

from __future__ import annotations

from pathlib import Path

_LIMITS = (("memory.max", "memory.stat", "anon"), ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"))
"""Of cgroup v2 and v1: the limit, and what is used that cannot be dropped."""


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that are free on this host, or that the limit of the container around this process leaves if those are
    fewer; None: unknown."""
    found = [_left_in_container(cgroup, *names) for names in _LIMITS]
    try:
        fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):
        pass
    return min((each for each in found if each is not None), default=None)


def _left_in_container(cgroup: Path, limit: str, stat: str, used: str) -> int | None:
    try:
        fields = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
        return int((cgroup / limit).read_text()) - int(fields[used])
    except (OSError, KeyError, ValueError):  # of the other version, or without a limit
        return None
