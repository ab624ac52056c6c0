"""Detects operations that have failed silently: the replay of a CUDA graph runs no Python code, so a lost rank would
give NaN in every step. One daemon thread per process; it only reads host memory.

A later call raises the error, and the program handles it. If no call comes within GRACE_S, the process ends with the
error in its log: the engine then reports a dead worker instead of returning wrong tokens.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from crossdock.common.log import get
from ep_kernels import MoECommunicator

log = get(__name__)

LOOK_S = 0.25
GRACE_S = 1.0
"""How long a failed operation may stay unreported: an engine that runs eagerly makes its next call within a step."""
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


class Guard:
    """Watches this process's communicators.

    Args:
        end: called once, with a message, where a failure stayed unreported.
    """

    def __init__(self, end: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = end, clock
        self._watched: weakref.WeakKeyDictionary[MoECommunicator, int] = weakref.WeakKeyDictionary()
        self._since: weakref.WeakKeyDictionary[MoECommunicator, float] = weakref.WeakKeyDictionary()
        self._puzzling: weakref.WeakSet[MoECommunicator] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, comm: MoECommunicator) -> None:
        """Watch a communicator until it is closed."""
        with self._lock:
            self._watched[comm] = comm.rank
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="crossdock-guard", daemon=True)
                self._thread.start()

    def look(self) -> None:
        with self._lock:
            watched = list(self._watched.items())
        for comm, rank in watched:
            try:
                self._look_at(comm, rank)
            except Exception:  # this thread must survive: it alone ends the process
                if comm not in self._puzzling:
                    self._puzzling.add(comm)
                    log.exception(f"crossdock: rank {rank}: cannot check whether an operation has failed")

    def _look_at(self, comm: MoECommunicator, rank: int) -> None:
        error, now = comm.unheard(), self._clock()
        if error is None:
            self._since.pop(comm, None)
        elif comm not in self._since:
            self._since[comm] = now
            log.error(f"crossdock: rank {rank}: {error}")  # engines' logs show the text alone
        elif now - self._since[comm] >= GRACE_S:
            with self._lock:
                self._watched.pop(comm, None)
            self._end(f"crossdock: rank {rank}: {error}")

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            self.look()


def leave(message: str) -> None:
    """End this process: results of its GPU since the failure are invalid."""
    try:
        print(f"{message}; no call has raised it, so this process ends", file=sys.stderr, flush=True)
    finally:
        os._exit(EXIT_CODE)


@functools.cache
def guard() -> Guard:
    """This process's; made at the first call."""
    return Guard(leave)
