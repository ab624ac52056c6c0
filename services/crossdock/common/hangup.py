"""SIGHUP: the end of a terminal ends what was started in it; without one it is somebody's `kill -HUP`, and nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType


def at_hangup(end: Callable[[], object]) -> None:
    """Call `end` when the terminal of this process is closed, once: a shell and the kernel both send SIGHUP then.

    Every other SIGHUP does nothing: certificates, tokens and renamed log files are opened again without one. Neither
    does any where it is ignored already, as under nohup. Call it in the main thread; so is `end`.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    in_terminal = _has_terminal()

    def hung_up(number: int, frame: FrameType | None) -> None:
        nonlocal in_terminal
        if in_terminal and not _has_terminal():
            in_terminal = False
            end()

    signal.signal(signal.SIGHUP, hung_up)


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal, which the kernel takes away before it sends SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
