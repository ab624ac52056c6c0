"""File descriptors of this process, and the parts of them that its clients may hold.

Parts are chosen so that all together leave seven sixteenths of the limit for everything else: regions and connections
of the next epoch, files of checkpoints, the log.
"""

from __future__ import annotations

import resource

CONNECTIONS, REQUESTS, HTTP, STRANGERS = 4, 4, 32, 64
"""Divisors of the soft limit: gRPC connections may hold limit / CONNECTIONS descriptors, request connections limit /
REQUESTS. STRANGERS is for those of one listener that have not said who they are; a worker has two listeners."""
_MOST = 1 << 20
"""Highest soft limit that `raise_limit` sets."""


def raise_limit() -> None:
    """Raise this process's soft limit of open files to the hard one. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def share(most: int, divisor: int) -> int:
    """The smaller of `most` and the soft limit / `divisor`; at least 1."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // divisor))
