"""State of /livez: the event loop must run, essential tasks must be alive, and no helper thread ended by an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from crossdock.common import helper_thread

BEAT_S, STALLED_S = 1.0, 10.0
"""Interval of the event loop's heartbeat, and the silence after which the process counts as dead."""


class Liveness:
    """Make it inside the running loop; any thread may call `trouble`.

    Args:
        clock: monotonic seconds.
        lagged: called at each heartbeat with the seconds by which it was late.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, lagged: Callable[[float], None] = lambda _: None
    ) -> None:
        self._clock, self._beat_at, self._lagged = clock, clock(), lagged
        self._parts: dict[str, Callable[[], bool]] = {}
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def expect(self, name: str, is_alive: Callable[[], bool]) -> None:
        """Add a check: the process counts as dead once `is_alive` is false."""
        self._parts[name] = is_alive

    def trouble(self) -> str:
        """Why the process counts as dead; "" = it is alive."""
        silent_s = self._clock() - self._beat_at
        if silent_s > STALLED_S:
            return f"the event loop has been blocked for {silent_s:.0f} s"
        dead = [name for name, is_alive in list(self._parts.items()) if not is_alive()] + helper_thread.ended()
        return f"{', '.join(dead)}: ended" if dead else ""

    def let_end(self) -> None:
        """Drop the checks at shutdown; the event loop is still checked until `close`."""
        self._parts = {}

    def close(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        now = self._clock()
        self._lagged(max(0.0, now - self._beat_at - BEAT_S))
        self._beat_at = now
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
