"""One supervised process: started, listened to, restarted with back-off, stopped. Knows nothing of groups or ranks.

A child prints its addresses on stdout (`common/announce.py`); its stderr goes to its log file. It asks the kernel for
SIGTERM when its supervisor dies, so nothing outlives a `kill -9` of the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from crossdock.common.announce import Addresses, parse
from crossdock.common.log import get

log = get(__name__)

EXIT_HOPELESS = 2
"""Exit status of a process whose configuration or model can never work."""
EXIT_UNFIT = 5
"""Exit status of a worker that its control plane says it can never take, as both are configured."""
EXITS_FOR_GOOD = frozenset({EXIT_HOPELESS, EXIT_UNFIT})

_PR_SET_PDEATHSIG = 1
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_HEALTHY_S = 5.0
_EARLY_DEATHS = 5
"""A process that ends so often without ever having listened is given up."""
_READ_S = 5.0
_TAIL_BYTES, _TAIL_LINES = 4096, 8


def die_with(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the process `parent_pid`, which started this one, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        signal.raise_signal(signal.SIGTERM)


def last_words(tail: str) -> str:
    """The last error line of a log (`common/log.py`), for what a process says after it is how it
    cleaned up; else the last line."""
    lines = tail.splitlines()
    errors = [line for line in lines if line.split(maxsplit=2)[1:2] == ["error"]]
    return (errors or lines or [""])[-1]


def bound_log(path: Path, max_bytes: int) -> None:
    """Copy a log file of `max_bytes` or more to PATH.1 and empty it; 0: never. The writer must append, and keeps
    its file; a line that is written between copy and emptying is lost."""
    try:
        if not max_bytes or path.stat().st_size < max_bytes:
            return
    except OSError:  # not there yet, or gone
        return
    copy = path.with_name(f"{path.name}.1")
    try:
        shutil.copyfile(path, copy)
    except OSError as error:
        log.warning("log file emptied without a copy", file=path, error=error.strerror)
        with contextlib.suppress(OSError):
            copy.unlink()
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def ending(code: int | None) -> str:
    """How a process ended, in words: "exit status 2", "signal SIGBUS"."""
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time one
        return f"signal {-code}"


class Child:
    """A process that is kept running.

    Args:
        name: what people call it: "control", "worker-0".
        log_path: file that gets its stderr, appended over restarts. None: this process's own stderr.
        on_change: called with this child, from the child's own thread, after every start, announcement and end.

    Attributes:
        addresses: where it listens, or None while it does not.
        restarts: times it was started again.
        exit_status: of the process that ended last, or None.
        hopeless: why it will not be started again, or "".
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path | None, on_change: Callable[[Child], None] | None = None
    ) -> None:
        self.name, self.log_path = name, log_path
        self.addresses: Addresses | None = None
        self.restarts = 0
        self.exit_status: int | None = None
        self.hopeless = ""
        self._command = list(command)
        self._on_change = on_change or (lambda _child: None)
        self._process: subprocess.Popen[str] | None = None
        self._has_listened = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._started = threading.Event()
        # The kernel's "parent" is the thread that started the child, so this one stays for the child's whole life.
        self._thread = threading.Thread(target=self._keep, name=f"keep-{name}", daemon=True)

    def start(self) -> None:
        """Start the process; returns once it exists."""
        self._thread.start()
        self._started.wait()

    @property
    def pid(self) -> int:
        """Process id of the latest process. Raises RuntimeError where none was started."""
        if self._process is None:
            raise RuntimeError(f"{self.name}: expected a started process, got none")
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM, and no more restarts."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and no more restarts."""
        self._signal(signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of a terminated child; False if it still runs."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def tail(self) -> str:
        """The last lines of the log, or "" if there is none."""
        if self.log_path is None:
            return ""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        except OSError:
            return ""

    def _signal(self, number: int) -> None:
        self._stopping.set()
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)

    def _keep(self) -> None:
        """The thread of this child. The kernel ends the process with it, so an error here is an end for good."""
        try:
            self._keep_running()
        except Exception as error:
            log.exception("process no longer supervised", process=self.name)
            self.hopeless = f"{self.name} is no longer supervised: {type(error).__name__}: {error}"
            self._signal(signal.SIGKILL)
            self.addresses = None
            with contextlib.suppress(Exception):  # perhaps that was it
                self._on_change(self)

    def _keep_running(self) -> None:
        delay_s = _FIRST_DELAY_S
        while not self._stopping.is_set():
            begun = time.monotonic()
            code = self.exit_status = self._run_once()
            if self._stopping.is_set():
                return
            never = not self._has_listened
            if code == EXIT_UNFIT or (never and (code == EXIT_HOPELESS or self.restarts + 1 >= _EARLY_DEATHS)):
                self.hopeless = f"{self.name} ended with {ending(code)} and is not restarted"
                self._on_change(self)
                return
            if time.monotonic() - begun > _HEALTHY_S:
                delay_s = _FIRST_DELAY_S
            said = last_words(self.tail())
            if code is not None and code < 0 and said.split(maxsplit=2)[1:2] in (["info"], ["warning"], ["debug"]):
                said = ""  # a process killed by a signal logs nothing: that line is unrelated
            words = {"exit_status": code, "ended_by": ending(code), "restart_in_s": delay_s, "last_words": said}
            log.warning("process ended", process=self.name, **words)
            self._stopping.wait(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            self.restarts += 1

    def _run_once(self) -> int | None:
        """The exit status; None if the process could not be started."""
        try:
            process = self._spawn()
        finally:
            self._started.set()
        if process is None or process.stdout is None:
            return None
        self._on_change(self)
        reader = threading.Thread(
            target=self._read, args=(process, process.stdout), name=f"read-{self.name}", daemon=True
        )
        reader.start()
        code = process.wait()
        reader.join(_READ_S)  # a process that this one started may hold its stdout open for ever
        self.addresses = None
        self._on_change(self)
        return code

    def _spawn(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                with self._open_log() or nullcontext() as stderr:
                    # A session of its own: Ctrl-C reaches the supervisor only, which stops its children in order.
                    self._process = subprocess.Popen(
                        self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        errors="replace",
                        start_new_session=True,
                    )
            except OSError as error:
                log.error("process not started", process=self.name, error=error)
                return None
            return self._process

    def _open_log(self) -> IO[bytes] | None:
        if self.log_path is None:
            return None
        try:
            return self.log_path.open("ab")
        except OSError as error:  # a full or vanished disk must not keep a process from starting
            log.warning("log file left out", process=self.name, file=self.log_path, error=error.strerror)
            return open(os.devnull, "ab")

    def _read(self, process: subprocess.Popen[str], stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                addresses = parse(line)
                if addresses is None or process is not self._process:
                    continue
                self._has_listened = True
                if process.returncode is None:
                    self.addresses = addresses
                    self._on_change(self)
