"""Limits of open calls at a server: in total and per peer, fair among the connections of one peer.

A peer is a host together with the names of its certificate. In plain text all processes of a host are one peer, and
one of them must not lock out the others. When no permit is left, the pool revokes the permit of a call on the
connection that holds the most, or else of a call without traffic for `IDLE_S`. Where all others are busy, a call waits
for one to end, and is refused after its longest wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from crossdock.common.call_errors import ResourceExhausted

IDLE_S = 1.0
UNFINISHED_BYTES_PER_PEER = 48 << 20
MIN_READING_PER_PEER = 12
"""Enough for a host of eight engines and its monitoring."""
WAITING_PER_PEER = 64
"""Calls that wait for a permit to read: each holds up to 64 KiB of its request, the window of its stream."""
WAIT_S, _POLL_S = 2 * IDLE_S, 0.02
"""Longest wait of a call for a permit to read its request, and the polling interval."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one server.

    Attributes:
        calls: open at once.
        calls_per_peer: open at once for one peer.
        reading: open calls whose request may be incomplete; each can hold one message of the largest size. Calls with a
            stream of requests have as many permits of their own.
        reading_per_peer: the same for one peer.
        waiting: open calls that wait to become `reading`.
        waiting_per_peer: the same for one peer.
    """

    calls: int
    calls_per_peer: int
    reading: int
    reading_per_peer: int
    waiting: int = 4 * WAITING_PER_PEER
    waiting_per_peer: int = WAITING_PER_PEER

    @staticmethod
    def of(max_message_bytes: int, calls: int, waiting_per_peer: int = WAITING_PER_PEER) -> CallLimits:
        """One peer gets a quarter of the calls, and as many unfinished messages as fit UNFINISHED_BYTES_PER_PEER."""
        reading = max(MIN_READING_PER_PEER, min(calls // 4, UNFINISHED_BYTES_PER_PEER // max_message_bytes))
        return CallLimits(calls, max(1, calls // 4), 4 * reading, reading, 4 * waiting_per_peer, waiting_per_peer)


@dataclass(slots=True, eq=False)
class Permit:
    """The permit of one open call.

    Attributes:
        cancel: ends the call when its permit is revoked.
        since, at: time of its acquisition, and of the last traffic.
        revoked: another call has taken it.
    """

    peer: Hashable
    connection: str
    cancel: Callable[[], None]
    since: float
    at: float
    pinned: bool = False
    revoked: bool = False


class PermitPool:
    """Permits for open calls.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, max_total: int, max_per_peer: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_total, self.max_per_peer, self._clock = max_total, max_per_peer, clock
        self._peers: dict[Hashable, dict[Permit, None]] = {}
        self._waiters: dict[Hashable, list[asyncio.Event]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def acquire(self, peer: Hashable, connection: str, cancel: Callable[[], None]) -> Permit | None:
        """Get a permit, if need be by revoking that of another call. None: all are in use by busy calls."""
        own = self._peers.get(peer, {})
        if len(own) >= self.max_per_peer or self._num >= self.max_total:
            victim = self._victim(self._candidates(own), connection)
            if victim is None:
                return None
            self.release(victim)
            victim.revoked = True
            victim.cancel()
        now = self._clock()
        permit = Permit(peer, connection, cancel, now, now)
        self._peers.setdefault(peer, {})[permit] = None
        self._num += 1
        return permit

    def release(self, permit: Permit) -> None:
        """Return a permit. Idempotent."""
        own = self._peers.get(permit.peer, {})
        if permit in own:
            del own[permit]
            self._num -= 1
            if not own:
                del self._peers[permit.peer]
            self._wake()

    @contextlib.contextmanager
    def waiter(self, peer: Hashable) -> Iterator[asyncio.Event]:
        """Wait for a permit: the event is set when this is the first of its peer and one is released."""
        released, waiters = asyncio.Event(), self._waiters.setdefault(peer, [])
        waiters.append(released)
        try:
            yield released
        finally:
            waiters.remove(released)
            if not waiters:
                del self._waiters[peer]
            self._wake()

    def _wake(self) -> None:
        for waiters in self._waiters.values():
            waiters[0].set()

    def is_first(self, peer: Hashable, released: asyncio.Event) -> bool:
        """Whether that waiter has waited longest of its peer."""
        return self._waiters[peer][0] is released

    def is_waited_for(self, peer: Hashable) -> bool:
        return peer in self._waiters

    def progress(self, permit: Permit) -> None:
        permit.at = self._clock()

    def _candidates(self, own: dict[Permit, None]) -> dict[Permit, None]:
        """Permits that may be revoked: those of the peer itself at its limit, else those of the peer with the most."""
        if len(own) >= self.max_per_peer:
            return own
        most = max(self._peers.values(), key=len)
        return most if len(most) > len(own) else own

    def _victim(self, candidates: dict[Permit, None], connection: str) -> Permit | None:
        held = Counter(permit.connection for permit in candidates)
        movable = [permit for permit in candidates if not permit.pinned]
        if not movable:
            return None
        victim = max(movable, key=lambda permit: (held[permit.connection], -permit.at))
        if held[victim.connection] > held[connection] + 1:
            return victim
        now = self._clock()
        idle = [permit for permit in movable if now - permit.at >= IDLE_S]
        return min(idle, key=lambda permit: permit.at, default=None)


class LimitReached(ResourceExhausted):
    """All permits are in use by busy calls."""


class CallPermits:
    """The permits of one call. Made in the task of the call, which is cancelled when one of them is revoked.

    Args:
        open_pool: for the whole call.
        reading: for its request, until that is complete.
        waiting: until it has a permit of `reading`.

    Raises:
        LimitReached: too many calls are open.
    """

    def __init__(
        self,
        open_pool: PermitPool,
        reading: PermitPool,
        waiting: PermitPool,
        peer: Hashable,
        connection: str,
    ) -> None:
        self._task = asyncio.current_task()
        self._peer, self._connection = peer, connection
        self._permits: dict[PermitPool, Permit] = {}
        self._open, self._reading, self._waiting = open_pool, reading, waiting
        if not self._acquire(open_pool):
            limit = open_pool.max_per_peer
            raise LimitReached(f"calls: expected at most {limit} open at once of one caller, got one more")

    @property
    def revoked(self) -> bool:
        """Whether one of the permits was revoked: the call must end."""
        return any(permit.revoked for permit in self._permits.values())

    async def acquire_reading(self) -> None:
        """Wait until the request may be read. Raises LimitReached."""
        if not self._reading.is_waited_for(self._peer) and self._acquire(self._reading):
            return
        if not (self._acquire(self._waiting) and await self._wait()):
            limit = self._reading.max_per_peer
            raise LimitReached(
                f"calls: expected at most {limit} requests under way at once of one caller, got one more"
            )

    def release_reading(self) -> None:
        self._release(self._reading)

    def on_loss(self, end: Callable[[], None]) -> None:
        """Set how to end the call when a permit is revoked. By default its task is cancelled; cancelled in a write of
        grpc's, a call ends without a status."""
        for permit in self._permits.values():
            permit.cancel = end

    def progress(self) -> None:
        for pool, permit in self._permits.items():
            pool.progress(permit)

    def pin(self) -> None:
        """Protect the permit of the whole call against revocation."""
        self._permits[self._open].pinned = True

    def release(self) -> None:
        """Return all permits: the call has ended. Idempotent."""
        for pool in (self._waiting, self._reading, self._open):
            self._release(pool)

    async def _wait(self) -> bool:
        last_at = time.monotonic() + WAIT_S
        with self._reading.waiter(self._peer) as released:
            while time.monotonic() <= last_at:
                is_first = self._reading.is_first(self._peer, released)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S if is_first else WAIT_S):
                        await released.wait()
                released.clear()
                if self._reading.is_first(self._peer, released) and self._acquire(self._reading):
                    self._release(self._waiting)
                    return True
        return False

    def _acquire(self, pool: PermitPool) -> bool:
        permit = pool.acquire(self._peer, self._connection, self._cancel)
        if permit is not None:
            self._permits[pool] = permit
        return permit is not None

    def _release(self, pool: PermitPool) -> None:
        permit = self._permits.get(pool)
        if permit is not None:
            pool.release(permit)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
