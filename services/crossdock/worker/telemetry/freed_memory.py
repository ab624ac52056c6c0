"""What happens to memory that the process frees.

By itself glibc raises the size from which freed blocks go back to the system to 32 MiB as such blocks are freed, and
keeps gigabytes after a burst. Where they go back at once, each message of a megabyte costs hundreds of page faults,
several times over: for the blocks in which gRPC reads it, for its bytes, its rows, its answer. So blocks of the size of
messages are kept for the next ones, and a thread gives back all that is free once the process has grown by
`KEPT_BYTES`, holes between small objects too; and again 2, 4, 8, 16 and 32 s later, since what is in use when a burst
comes is free when it has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from crossdock.common.helper_thread import HelperThread, go_on

KEPT_BYTES = 16 << 20
"""Growth at which all free memory is given back."""
_POLL_S = 0.25
_AGAIN = (8, 16, 32, 64, 128)
"""Polls after a growth."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES, _TOP_BYTES, _ARENAS = 4 << 20, 64 << 20, 2
"""Blocks that are no message's go back at once; the end of the heap is kept until the thread comes; each arena has
holes of its own, so there are few."""


def bound_freed_memory() -> None:
    """Bound freed memory in this process. Does nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        give_back = libc.malloc_trim
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TOP_BYTES)
        HelperThread("freed memory", go_on, Watch(lambda: give_back(0), resident_bytes()).poll).start()


class Watch:
    """When free memory is given back.

    Args:
        give_back: gives back all that is free.
    """

    def __init__(self, give_back: Callable[[], object], resident: int) -> None:
        self._give_back = give_back
        self._least = resident  # since memory was given back last
        self._polls = _AGAIN[-1]  # since it has grown

    def poll(self) -> None:
        """Wait, and look. Raises OSError: no descriptor is free."""
        time.sleep(_POLL_S)
        self.check(resident_bytes)

    def check(self, resident: Callable[[], int]) -> None:
        """Give back what is due."""
        self._polls += 1
        now = resident()
        if now > self._least + KEPT_BYTES:
            self._give_back()
            now = self._least = resident()
            self._polls = 0
        elif self._polls in _AGAIN:
            self._give_back()
        self._least = min(self._least, now)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
