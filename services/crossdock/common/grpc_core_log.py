"""Relays lines that gRPC's core writes directly to fd 2 into our log: rate-limited, and counted.

    with grpc_core_log(metrics.grpc_core_log_lines_total):
        ...                                       serve

gRPC has no hook for them in Python, and each failed TLS handshake is one, so any client could fill a log. Inside the
block fd 2 is a pipe. Its reader is a small process (stderr_filter.py), not a thread: what is in a pipe when this
process aborts (a fatal line of gRPC, "double free" of libc, a traceback of faulthandler) still comes out, and a thread
that writes while it holds the interpreter's lock never blocks on a full pipe whose reader needs that lock. Lines that
are not from gRPC's core are passed on at once and unchanged. Our own log goes to the old fd 2 directly. If the filter
ends, fd 2 is restored.

A container ends with its first process: if that is a server that aborts, the kernel may end the filter before its last
raw line is out. Under `crossdock up` nothing is lost. A terminal keeps its fd 2, for progress bars.
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
from crossdock.common.helper_thread import HelperThread
from crossdock.common.metrics import Counter

log = logs.get(__name__)

_LOG_EVERY_S = 1.0
_END_S = 2.0
_LINE = re.compile(r"([IWE])\d{4} \S+ +\d+ (\S+)\] (.*)", re.DOTALL)


@contextmanager
def grpc_core_log(counter: Counter) -> Iterator[None]:
    """Relay the lines inside the block. If that fails, a warning is logged and they go to stderr unchanged."""
    if not _can_relay():
        yield
        return
    try:
        relay = _Relay(counter)
    except OSError as error:
        log.warning("gRPC core log is not relayed", error=error)
        yield
        return
    try:
        yield
    finally:
        relay.close()


def _can_relay() -> bool:
    """False if stderr is a terminal, is closed, or is not fd 2 but was redirected by the embedding program."""
    with suppress(OSError, ValueError, AttributeError):
        return sys.stderr.fileno() == 2 and not os.isatty(2)
    return False


class CoreLogRelay:
    """Counts lines of gRPC's core, and logs at most one per second.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter, self._clock = counter, clock
        self._logged_at, self.suppressed = float("-inf"), 0

    def record(self, line: str) -> None:
        found = _LINE.match(line)
        if found is None:  # "All log messages before absl::InitializeLog() ...": once in a process
            return
        level, source, text = found.groups()
        self._counter.labels(topic="handshake" if "andshak" in text else "other").inc()
        if self._clock() - self._logged_at < _LOG_EVERY_S:
            self.suppressed += 1
            return
        say = log.info if level == "I" else log.warning
        say("gRPC core", what=text, source=source, **self._left())

    def rest(self) -> None:
        """Log the number of suppressed lines, if it is time."""
        if self.suppressed and self._clock() - self._logged_at >= _LOG_EVERY_S:
            log.info("gRPC core", **self._left())

    def _left(self) -> dict[str, int]:
        self._logged_at, left = self._clock(), self.suppressed
        self.suppressed = 0
        return {"suppressed": left} if left else {}


class _Relay:
    """fd 2 as a pipe to the filter process. Raises OSError if the filter cannot be started."""

    def __init__(self, counter: Counter) -> None:
        self._relay, self._lock, self._closing = CoreLogRelay(counter), threading.Lock(), False
        read, write = os.pipe()
        lines, lines_in = os.pipe()
        os.set_blocking(lines_in, False)
        self._real, self._lines = os.dup(2), lines
        try:
            self._filter = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(stderr_filter.__file__))],
                stdin=read, stdout=lines_in, stderr=self._real, start_new_session=True,
            )  # fmt: skip
        except OSError:
            for fd in (write, self._real, lines):
                os.close(fd)
            raise
        finally:
            os.close(read)
            os.close(lines_in)
        self._direct = os.fdopen(os.dup(self._real), "w", encoding="utf-8", errors="backslashreplace")
        logs.write_to(self._direct)
        os.dup2(write, 2)
        os.close(write)
        self._thread = HelperThread("gRPC log lines", self._run)
        self._thread.start()

    def close(self) -> None:
        """Restore fd 2, after the pipe is empty, unless another process still holds it."""
        self._closing = True
        self._restore()
        self._thread.join(_END_S)
        logs.write_to(sys.stderr)
        self._direct.close()

    def _restore(self) -> None:
        with self._lock:
            if self._real >= 0:
                os.dup2(self._real, 2)
                os.close(self._real)
                self._real = -1

    def _run(self) -> None:
        """The thread; ends with the filter."""
        try:
            self._read()
        finally:
            self._restore()
        self._filter.wait()
        if not self._closing:
            log.warning("gRPC core log is no longer relayed", ended=self._filter.returncode)

    def _read(self) -> None:
        with os.fdopen(self._lines, "rb", buffering=0) as pipe:
            waiting = b""
            while True:
                if not select.select([pipe], [], [], _LOG_EVERY_S if self._relay.suppressed else None)[0]:
                    self._relay.rest()
                    continue
                data = pipe.read(65536)
                if not data:
                    break
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    self._relay.record(line.decode(errors="replace"))
