"""SIGHUP: a closed terminal ends what was started in it, as SIGTERM does. Any other one, and any under nohup, none."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.bed.processes import free_ports
from tests.services.cluster import TEST_S, write_model

pytestmark = pytest.mark.timeout(TEST_S)
END_S = 120
UNMOVED_S = 1.0
"""How long a process is watched that must not end."""


@dataclass
class InTerminal:
    """A command in a terminal of its own."""

    process: subprocess.Popen[str]
    terminal: int

    def wait(self, word: str) -> None:
        """Until a line of its stdout has that word."""
        assert self.process.stdout is not None
        assert any(word in line for line in self.process.stdout)

    def close_terminal(self) -> None:
        os.close(self.terminal)
        self.terminal = -1

    def goes_on(self) -> bool:
        time.sleep(UNMOVED_S)
        return self.process.poll() is None


@contextlib.contextmanager
def in_terminal(*words: str, hangup: str = "default") -> Iterator[InTerminal]:
    """`crossdock WORDS` with a controlling terminal; stdout is a pipe. `hangup`: default or ignore, as by nohup."""
    outer, inner = pty.openpty()
    command = ["env", f"--{hangup}-signal=HUP", "setsid", "--ctty", sys.executable, "-m", "crossdock", *words]
    with subprocess.Popen(command, stdin=inner, stdout=subprocess.PIPE, text=True) as process:
        os.close(inner)
        made = InTerminal(process, outer)
        try:
            yield made
        finally:
            process.kill()
            if made.terminal >= 0:
                made.close_terminal()


def control() -> tuple[str, ...]:
    listen, page = free_ports(2)
    return ("control", "--set", f"listen=127.0.0.1:{listen}", "--set", f"http_listen=127.0.0.1:{page}")


def test_a_control_plane_ends_with_its_terminal_alone() -> None:
    with in_terminal(*control()) as one:
        one.wait("crossdock-ready")
        for _ in range(3):
            one.process.send_signal(signal.SIGHUP)
        assert one.goes_on()
        one.close_terminal()
        assert one.process.wait(END_S) == 0


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    with in_terminal(*control(), hangup="ignore") as one:
        one.wait("crossdock-ready")
        one.close_terminal()
        assert one.goes_on()
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(END_S) == 0


def test_up_drains_with_its_terminal_alone(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    logs = tmp_path / "logs"
    words = ("up", "--model", str(tmp_path / "model"), "-n", "1", "--listen", f"127.0.0.1:{free_ports(1)[0]}")
    with in_terminal(*words, "--log-dir", str(logs)) as one:
        one.wait("Ctrl-C drains")
        one.process.send_signal(signal.SIGHUP)
        assert one.goes_on()
        one.close_terminal()
        assert one.process.wait(END_S) == 0
    assert "stopped" in (logs / "worker-0.log").read_text().splitlines()[-1]
    assert "stopping" in (logs / "control.log").read_text()
