"""Supervised workers and control planes that are forked from a process which has imported all they need: torch alone is
two seconds of a processor, for each worker of each group, and each time that one is killed.

    with forked_children():
        with Supervisor(...) as group: ...

    child = crossdock("worker", "--config", path, stderr=file.fileno())

A forked process is a child of this one, as the supervisor expects. Groups whose start itself is tested begin as people
start them. Run as a program, this file is the process that forks; it has no thread when it does.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_SUBREAPER = 36
_IMPORTED = ("crossdock.worker.process", "crossdock.control.process", "crossdock.cli.app", "ep_kernels.transports.cpu")
_START_S = 120.0


class Forked:
    """As much of a `subprocess.Popen` as a supervisor uses."""

    def __init__(self, pid: int, stdout: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self._lock, self._ended = threading.Lock(), select.poll()
        self._fd = os.pidfd_open(pid)
        self._ended.register(self._fd, select.POLLIN)

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        with self._lock:
            if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(found[1])
                os.close(self._fd)
            return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status, once it has ended. Raises TimeoutError where that takes longer."""
        while (code := self.poll()) is None:
            if not self._ended.poll(None if timeout_s is None else 1e3 * timeout_s):
                raise TimeoutError(f"process {self.pid}: expected its end within {timeout_s:g} s")
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Parent:
    """The process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        env = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
        theirs.close()
        self._socket.settimeout(_START_S)
        atexit.register(self.close)

    def close(self) -> None:
        """End it; what it has forked lives on."""
        self._socket.close()
        self._process.wait()

    def fork(self, words: Sequence[str], stderr: int) -> Forked:
        """A new process that does what `crossdock WORDS` would."""
        asked = {"words": words, "env": dict(os.environ), "cwd": os.getcwd(), "parent": os.getpid()}
        read, write = os.pipe()
        libc = ctypes.CDLL(None)
        with self._lock:  # who loses its parent meanwhile becomes a child of this process
            libc.prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(asked).encode()], [write, stderr])
                pid = int(self._socket.recv(16))
            finally:
                libc.prctl(_SUBREAPER, 0)
                os.close(write)
        return Forked(pid, read)


@functools.cache
def parent() -> Parent:
    """One for all groups of this process."""
    return Parent()


def crossdock(*words: str, stderr: int) -> Forked:
    """A process that does what `crossdock WORDS` would."""
    return parent().fork(words, stderr)


def _popen(command: list[str], **options: Any) -> Any:
    if command[:4] != [sys.executable, "-P", "-m", "crossdock"] or options["stderr"] is None:
        return subprocess.Popen(command, **options)
    return crossdock(*command[4:], stderr=options["stderr"].fileno())


@contextmanager
def forked_children() -> Iterator[None]:
    """What supervisors of this process start is forked, until the end."""
    from crossdock.host import child

    before = child.subprocess
    child.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        child.subprocess = before


def _serve(asking: socket.socket) -> dict[str, Any]:
    """Fork for whoever asks; returns in each forked process, with what it is to be."""
    while True:
        said, fds, _, _ = socket.recv_fds(asking, 1 << 20, 2)
        if not said:
            sys.exit()
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)  # its child has the parent that it shall have from now on
            for fd in fds:
                os.close(fd)
            asking.send(_told.recv(16))
            continue
        if child := os.fork():
            _tell.send(str(child).encode())
            os._exit(0)
        asked: dict[str, Any] = json.loads(said)
        while os.getppid() != asked["parent"]:
            time.sleep(0.0005)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        for fd in (*fds, asking.fileno(), _tell.fileno(), _told.fileno()):
            os.close(fd)
        return asked


if __name__ == "__main__":
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is asked to stop ends this by closing its end
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collector of a child looks through them, nor copies their pages
    _tell, _told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(_asked["cwd"])
    os.environ.clear()
    os.environ.update(_asked["env"])
    sys.argv = ["crossdock", *_asked["words"]]
    _code = 0
    try:
        sys.modules["crossdock.cli.app"].main()
    except SystemExit as ended:
        _code = ended.code or 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # to take torch apart, which a control plane does not have, takes a second
