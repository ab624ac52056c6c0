"""The lines that gRPC's core writes straight to fd 2 become events of our log: limited, and counted.

    with grpc_lines(metrics.grpc_core_lines_total):
        ...                                       serve

gRPC offers Python no hook for them, and each failed TLS handshake is one, so whoever connects can fill a log. fd 2 is a
pipe meanwhile. Its reader is a small process (stderr_filter.py), not a thread: what is in a pipe when this process
aborts (a fatal line of gRPC's, "double free" of libc, a traceback of faulthandler) still comes out, and a thread that
writes while it holds the interpreter's lock is never stopped by a full pipe that waits for that lock. All that is not
of gRPC's core is written on at once and unchanged. Our own events go to the old fd 2 directly. If the filter ends, fd 2
is put back.

A container ends with its first process: where that is a server that aborts, the kernel may end the filter before its
last raw line is out. Under `crossdock up` nothing is lost. A terminal keeps its fd 2, on which progress is drawn.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crossdock.common import log as logs
from crossdock.common import stderr_filter
from crossdock.common.metrics import Counter

log = logs.get(__name__)

_SAY_S = 1.0
_END_S = 2.0
_LINE = re.compile(r"([IWE])\d{4} \S+ +\d+ (\S+)\] (.*)", re.DOTALL)


@contextmanager
def grpc_lines(counter: Counter) -> Iterator[None]:
    """Take them in the block. Where that cannot be, it is said, and they go to stderr as they are."""
    if not _is_to_be_taken():
        yield
        return
    try:
        taken = _Taken(counter)
    except OSError as error:
        log.warning("lines of gRPC's core are not taken", error=error)
        yield
        return
    try:
        yield
    finally:
        taken.close()


def _is_to_be_taken() -> bool:
    """No: stderr is a terminal, is closed, or is not fd 2 but what a program around this one made of it."""
    with suppress(OSError, ValueError, AttributeError):
        return sys.stderr.fileno() == 2 and not os.isatty(2)
    return False


class Teller:
    """Counts lines of gRPC's core, and says one a second.

    Args:
        counter: with the label `about`.
        clock: monotonic seconds.
    """

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter, self._clock = counter, clock
        self._said_at, self.left_out = float("-inf"), 0

    def hear(self, line: str) -> None:
        """One line."""
        found = _LINE.match(line)
        if found is None:  # "All log messages before absl::InitializeLog() ...": once in a process
            return
        level, source, text = found.groups()
        self._counter.labels(about="handshake" if "andshak" in text else "other").inc()
        if self._clock() - self._said_at < _SAY_S:
            self.left_out += 1
            return
        say = log.info if level == "I" else log.warning
        say("gRPC core", what=text, source=source, **self._left())

    def rest(self) -> None:
        """Say how many were left out, if it is time."""
        if self.left_out and self._clock() - self._said_at >= _SAY_S:
            log.info("gRPC core", **self._left())

    def _left(self) -> dict[str, int]:
        self._said_at, left = self._clock(), self.left_out
        self.left_out = 0
        return {"left_out": left} if left else {}


class _Taken:
    """fd 2, while it is a pipe. Raises OSError where the filter cannot be started."""

    def __init__(self, counter: Counter) -> None:
        self._teller, self._lock, self._closing = Teller(counter), threading.Lock(), False
        read, write = os.pipe()
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        self._real, self._told = os.dup(2), told
        try:
            self._filter = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(stderr_filter.__file__))],
                stdin=read, stdout=tell, stderr=self._real, start_new_session=True,
            )  # fmt: skip
        except OSError:
            for fd in (write, self._real, told):
                os.close(fd)
            raise
        finally:
            os.close(read)
            os.close(tell)
        self._direct = os.fdopen(os.dup(self._real), "w", encoding="utf-8", errors="backslashreplace")
        logs.write_to(self._direct)
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._run, name="crossdock-grpc-lines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put fd 2 back; what was written to it comes out first, unless another process still holds the pipe."""
        self._closing = True
        self._put_back()
        self._thread.join(_END_S)
        logs.write_to(sys.stderr)
        self._direct.close()

    def _put_back(self) -> None:
        with self._lock:
            if self._real >= 0:
                os.dup2(self._real, 2)
                os.close(self._real)
                self._real = -1

    def _run(self) -> None:
        """The thread: until the filter ends."""
        try:
            self._hear()
        finally:
            self._put_back()
        self._filter.wait()
        if not self._closing:
            log.warning("lines of gRPC's core are no longer taken", ended=self._filter.returncode)

    def _hear(self) -> None:
        with os.fdopen(self._told, "rb", buffering=0) as told:
            waiting = b""
            while True:
                if not select.select([told], [], [], _SAY_S if self._teller.left_out else None)[0]:
                    self._teller.rest()
                    continue
                data = told.read(65536)
                if not data:
                    break
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    self._teller.hear(line.decode(errors="replace"))
