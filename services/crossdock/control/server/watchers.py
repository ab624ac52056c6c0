"""Fan-out of view changes to Watch streams: debounced, and in batches.

Changes that can wait are sent together, and thousands of watchers are notified in batches, so that one change never
blocks the event loop for long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from crossdock.common.access import CALL_PERMITS
from crossdock.common.call_errors import ResourceExhausted
from crossdock.common.metrics import ControlMetrics

WATCHES_PER_RANK = 2
"""A broken stream may not have ended here when its successor opens."""
NOTIFY_DEBOUNCE_S_PER_RANK, FULL_NOTIFY_DEBOUNCE_S_PER_RANK = 2e-3, 0.5e-3
"""Debounce interval for changes that can wait (a member joins or leaves before the table of an epoch is complete): each
costs a message to every watcher, so a burst of losses would flood them. The second, shorter interval applies once
every slot has a member. Groups of up to DEBOUNCE_FROM_RANKS ranks are notified immediately."""
DEBOUNCE_FROM_RANKS = 32
NOTIFY_BATCH = 32
"""Watchers notified per iteration of the event loop: heartbeats must not wait for thousands of tables to be written."""


class Watchers:
    """The open Watch streams of one control plane.

    Args:
        metrics: where they are counted.

    Attributes:
        stopped: the control plane has stopped; the gauges may already belong to a successor in this process.
    """

    def __init__(self, world_size: int, metrics: ControlMetrics) -> None:
        self._world_size, self._metrics = world_size, metrics
        self._open: set[asyncio.Event] = set()
        self._num_members = 0
        self._notified_at = 0.0
        self._notify_timer: asyncio.TimerHandle | None = None
        self.stopped = False

    def enter(self, is_member: bool) -> asyncio.Event:
        """Add a stream; the returned event is set at each change. Raises ResourceExhausted."""
        if is_member:
            self._admit_member()
        changed = asyncio.Event()
        self._num_members += is_member
        self._open.add(changed)
        self._measure()
        return changed

    def leave(self, changed: asyncio.Event, is_member: bool) -> None:
        self._num_members -= is_member
        self._open.discard(changed)
        self._measure()

    def notify(self, *, full: bool, wait: bool) -> None:
        """Notify all streams: at once, or debounced if the change can `wait`. `full`: every slot has a member."""
        now = time.monotonic()
        per_rank = FULL_NOTIFY_DEBOUNCE_S_PER_RANK if full else NOTIFY_DEBOUNCE_S_PER_RANK
        debounce_s = (
            self._notified_at + self._world_size * per_rank - now if self._world_size > DEBOUNCE_FROM_RANKS else 0.0
        )
        if wait and debounce_s > 0:
            loop = asyncio.get_running_loop()
            if self._notify_timer is None or self._notify_timer.when() > loop.time() + debounce_s:
                self._cancel_notify_timer()
                self._notify_timer = loop.call_later(debounce_s, self.notify_now)
            return
        self.notify_now()

    def notify_now(self) -> None:
        self._cancel_notify_timer()
        self._notified_at = time.monotonic()
        _wake(list(self._open))

    def _admit_member(self) -> None:
        """Check the limit of member streams; the permit of a member stream cannot be revoked."""
        most = WATCHES_PER_RANK * self._world_size
        if self._num_members >= most:
            raise ResourceExhausted(f"watch: expected at most {most} members, got one more")
        permits = CALL_PERMITS.get(None)
        if permits is not None:
            permits.pin()

    def _measure(self) -> None:
        if not self.stopped:
            self._metrics.watch_streams.set(len(self._open))

    def _cancel_notify_timer(self) -> None:
        if self._notify_timer is not None:
            self._notify_timer.cancel()
            self._notify_timer = None


def _wake(watchers: Sequence[asyncio.Event]) -> None:
    for changed in watchers[:NOTIFY_BATCH]:
        changed.set()
    if len(watchers) > NOTIFY_BATCH:
        asyncio.get_running_loop().call_soon(_wake, watchers[NOTIFY_BATCH:])
