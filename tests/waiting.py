"""Waiting, in a test, for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 120.0
"""For a machine that is busy with other things; nothing is expected to take so long."""


def until(condition: Callable[[], object]) -> None:
    """Return when it holds. Raises AssertionError."""
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, f"not so after {LONGEST_S:.0f} s"
        time.sleep(0.002)
