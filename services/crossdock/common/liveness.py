"""What /livez says: whether a restart would help. The event loop must turn, and threads and tasks must live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT_S, STALLED_S = 1.0, 10.0
"""The event loop says that it turns every BEAT_S; after STALLED_S of silence the process counts as dead."""


class Liveness:
    """Make it inside the running loop; `trouble` may be asked by any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._beat_at = clock, clock()
        self._parts: dict[str, Callable[[], bool]] = {}
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def expect(self, name: str, is_alive: Callable[[], bool]) -> None:
        """The process counts as dead once `is_alive` says no."""
        self._parts[name] = is_alive

    def trouble(self) -> str:
        """Why the process counts as dead; "": it lives."""
        silent_s = self._clock() - self._beat_at
        if silent_s > STALLED_S:
            return f"the event loop has not turned for {silent_s:.0f} s"
        dead = [name for name, is_alive in list(self._parts.items()) if not is_alive()]
        return f"{', '.join(dead)}: ended" if dead else ""

    def let_end(self) -> None:
        """What was expected ends on purpose from now on; the loop must turn until `close`."""
        self._parts = {}

    def close(self) -> None:
        """Stop beating."""
        self._timer.cancel()

    def _beat(self) -> None:
        self._beat_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
