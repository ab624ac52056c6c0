"""Who is woken when the view of the group changes, and when: the fan-out of Watch streams.

Changes that can wait are told together, and thousands of watchers are woken in parts, so that one change never holds
the event loop for long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from crossdock.common import rpc
from crossdock.common.access import VISIT
from crossdock.common.metrics import ControlMetrics

WATCHES_PER_RANK = 2
"""A stream that broke may not have ended here yet when the next one comes."""
QUIET_S_PER_RANK, SHORT_QUIET_S_PER_RANK = 2e-3, 0.5e-3
"""Changes that can wait (somebody comes or goes before the table of an epoch is complete) are told together, so long
after the last time: each costs a message to every watcher, and a group that loses many members at once would drown in
them. That the last one has come is told after a shorter while. Groups of up to QUIET_FROM ranks hear each at once."""
QUIET_FROM = 32
WOKEN_AT_ONCE = 32
"""Watchers that are sent something in one turn of the event loop: a call that comes meanwhile waits for one turn or a
few, and heartbeats that waited for thousands of tables to be written would be late."""


class Watchers:
    """The open Watch streams of one control plane.

    Args:
        world_size: ranks of the group.
        metrics: where they are counted.

    Attributes:
        stopped: the control plane serves no more; its gauges may be those of a successor in this process.
    """

    def __init__(self, world_size: int, metrics: ControlMetrics) -> None:
        self._world_size, self._metrics = world_size, metrics
        self._open: set[asyncio.Event] = set()
        self._num_members = 0
        self._told_at = 0.0
        self._telling: asyncio.TimerHandle | None = None
        self.stopped = False

    def enter(self, is_member: bool) -> asyncio.Event:
        """Count a new stream; the event is set at each change. Raises ResourceExhausted."""
        if is_member:
            self._admit_member()
        changed = asyncio.Event()
        self._num_members += is_member
        self._open.add(changed)
        self._measure()
        return changed

    def leave(self, changed: asyncio.Event, is_member: bool) -> None:
        """Its stream has ended."""
        self._num_members -= is_member
        self._open.discard(changed)
        self._measure()

    def tell(self, *, full: bool, wait: bool) -> None:
        """Wake all: at once, or where the change can `wait` together with others. `full`: every slot has a member."""
        now = time.monotonic()
        per_rank = SHORT_QUIET_S_PER_RANK if full else QUIET_S_PER_RANK
        quiet_s = self._told_at + self._world_size * per_rank - now if self._world_size > QUIET_FROM else 0.0
        if wait and quiet_s > 0:
            loop = asyncio.get_running_loop()
            if self._telling is None or self._telling.when() > loop.time() + quiet_s:
                self._cancel_telling()
                self._telling = loop.call_later(quiet_s, self.wake)
            return
        self.wake()

    def wake(self) -> None:
        """Wake all now."""
        self._cancel_telling()
        self._told_at = time.monotonic()
        _wake(list(self._open))

    def _admit_member(self) -> None:
        """A member's stream keeps its place, whoever else calls."""
        most = WATCHES_PER_RANK * self._world_size
        if self._num_members >= most:
            raise rpc.ResourceExhausted(f"watch: expected at most {most} members, got one more")
        visit = VISIT.get(None)
        if visit is not None:
            visit.keep()

    def _measure(self) -> None:
        if not self.stopped:
            self._metrics.watchers.set(len(self._open))

    def _cancel_telling(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None


def _wake(watchers: Sequence[asyncio.Event]) -> None:
    for changed in watchers[:WOKEN_AT_ONCE]:
        changed.set()
    if len(watchers) > WOKEN_AT_ONCE:
        asyncio.get_running_loop().call_soon(_wake, watchers[WOKEN_AT_ONCE:])
