"""Who of this host's peers has died: a thread that sleeps until a process ends."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping


class PeerWatch:
    """Reports each peer's death, once, until closed.

    Attributes:
        ranks: those that are watched.

    Args:
        pids: process id of each peer as this process numbers processes; 0, in another PID namespace: not watched.
        tell: called with the rank, in the thread of the watch.
    """

    def __init__(self, pids: Mapping[int, int], tell: Callable[[int], None]) -> None:
        self._watched: dict[int, int] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError):
                self._watched[os.pidfd_open(pid)] = rank
        self.ranks, self._tell = frozenset(self._watched.values()), tell
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="crossdock-peer-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (*self._watched, self._end):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._end:
                    return
                self._tell(self._watched[fd])
                poll.unregister(fd)

    def close(self) -> None:
        """End the thread. Idempotent. A byte ends it: processes that were forked meanwhile may hold the pipe open."""
        if self._ending >= 0:
            os.write(self._ending, b"\0")
            self._thread.join()
            self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's descriptors: after the thread's end, or in a forked child, which has none."""
        for fd in (*self._watched, self._end, self._ending):
            if fd >= 0:
                os.close(fd)
        self._watched, self._end, self._ending = {}, -1, -1
