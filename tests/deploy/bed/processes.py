"""Processes of the bed: started with a log file each, ended in the opposite order, never outliving the test run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
_TAIL_BYTES = 3000


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


class Processes:
    """Named processes.

    Args:
        logs: folder of NAME.log.
        prefix: put before every command line, to run it in a network namespace.
    """

    def __init__(self, logs: Path, prefix: Sequence[str] = ()) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs, self.prefix = logs, list(prefix)
        self._running: dict[str, tuple[subprocess.Popen[bytes], list[str], Mapping[str, str]]] = {}

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start one, in an environment of its own where one is given."""
        given = dict(environment if environment is not None else os.environ)
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.prefix, *_DIE_WITH_PARENT, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=given
            )
        self._running[name] = process, list(words), given

    def restart(self, name: str) -> None:
        """Start again, with the same command line, what was killed."""
        _, words, environment = self._running[name]
        self.start(name, words, environment)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal, and wait for nothing."""
        self._running[name][0].send_signal(number)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, timeout_s: float = 10) -> None:
        """Send a signal and wait; SIGKILL where that does not help in time."""
        process = self._running[name][0]
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)

    def end_all(self) -> None:
        """End what still runs, the youngest first."""
        for name in reversed(list(self._running)):
            if self._running[name][0].poll() is None:
                self.end(name, timeout_s=5)
        self._running.clear()

    def tail(self, name: str) -> str:
        """The end of its log."""
        path = self.logs / f"{name}.log"
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""

    def wait(self, name: str, ready: Callable[[], bool], timeout_s: float = 180) -> None:
        """Wait until `ready()`; raises RuntimeError with the log's end where it exits or takes too long."""
        ends = time.monotonic() + timeout_s
        while not ready():
            code = self._running[name][0].poll()
            if code is not None or time.monotonic() > ends:
                what = f"exit status {code}" if code is not None else f"not ready after {timeout_s:.0f} s"
                raise RuntimeError(f"{name}: {what}\n{self.tail(name)}")
            time.sleep(0.2)
