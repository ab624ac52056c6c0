"""Accounting of the bytes of requests and answers, per client and in total. No clock, no socket; any thread.

All streams of a client, of gRPC or of frames, share one account. Bytes count from a request's admission until its
answer was written. Below `max_bytes_per_client` its streams are read; past that, and up to twice that, a stream that
has nothing here may still bring one request, so that one stream of a client does not hold up the others. Where one of
the client's largest would be past twice that, a stream that has nothing here is not read either: what it brings would
be in nobody's account while it waits. What is left of `max_bytes` stays for other clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import grpc

from crossdock.worker.steps.work import Failure, Refused

STALLED_S = 2.0
"""Time blocked in a write after which a stream may be given up if its bytes are needed."""


@dataclass(slots=True, eq=False)
class _Account:
    """One client: bytes of all its streams, and of its largest request so far."""

    client: Hashable
    quotas: dict[StreamQuota, None] = field(default_factory=dict)
    waiting: dict[StreamQuota, int] = field(default_factory=dict)
    num_bytes: int = 0
    largest: int = 0


class Budget:
    """The accounts of all clients.

    Args:
        max_bytes_per_client: soft limit of one client; see above.

    Attributes:
        num_bytes: held now.
    """

    def __init__(self, max_bytes_per_client: int, max_bytes: int) -> None:
        self.max_bytes_per_client, self.max_bytes = max_bytes_per_client, max_bytes
        self._accounts: dict[Hashable, _Account] = {}
        self._lock = threading.RLock()
        self.num_bytes = 0

    def open(
        self,
        client: Hashable,
        on_room: Callable[[], None],
        stalled_s: Callable[[], float] = lambda: 0.0,
        give_up: Callable[[str], None] = lambda why: None,
    ) -> StreamQuota:
        """The quota of a new stream of `client`; close it.

        Args:
            on_room: called when there is room for what `wait` was told, by any thread.
            stalled_s: how long the stream's current write has been blocked.
            give_up: ends the stream, with the reason; any thread.
        """
        with self._lock:
            account = self._accounts.setdefault(client, _Account(client))
            quota = StreamQuota(self, account, on_room, stalled_s, give_up)
            account.quotas[quota] = None
        return quota

    def make_room(self, refused: StreamQuota, *, of_client: bool) -> None:
        """Give up another stream, the one blocked longest in a write, of the same client or of all."""
        with self._lock:
            accounts = [refused._account] if of_client else list(self._accounts.values())
            others = [quota for account in accounts for quota in account.quotas if quota is not refused]
        slowest = max(others, key=lambda quota: quota.stalled_s(), default=None)
        if slowest is not None and slowest.stalled_s() > STALLED_S:
            slowest.give_up("its bytes are needed")


class StreamQuota:
    """Bytes of one stream in its client's account. Made by `Budget.open`."""

    def __init__(
        self,
        budget: Budget,
        account: _Account,
        on_room: Callable[[], None],
        stalled_s: Callable[[], float],
        give_up: Callable[[str], None],
    ) -> None:
        self._budget, self._account, self._on_room = budget, account, on_room
        self.stalled_s, self.give_up = stalled_s, give_up
        self.num_bytes, self._closed = 0, False

    @property
    def client(self) -> Hashable:
        return self._account.client

    @property
    def unread_bytes(self) -> int:
        """What the stream's next request has to be taken for before it is read: 0, or where the stream has nothing
        here, the size of its client's largest so far."""
        return 0 if self.num_bytes else self._account.largest

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether the stream may add a request of `num_bytes`. A client without other requests may add one of any
        size."""
        held, limit = self._account.num_bytes, self._budget.max_bytes_per_client
        return held < limit or (self.num_bytes == 0 and held + num_bytes <= 2 * limit)

    def wait(self, num_bytes: int) -> None:
        """Call `on_room` when there is room for a request of that size: streams of a client in the order in which they
        began to wait."""
        with self._budget._lock:
            self._account.waiting.setdefault(self, num_bytes)

    def stop_waiting(self) -> None:
        with self._budget._lock:
            self._account.waiting.pop(self, None)

    def charge(self, num_bytes: int) -> None:
        """Add `num_bytes`. Raises Refused, and adds nothing, where all clients together would have too many."""
        with self._budget._lock:
            most, size = self._budget.max_bytes, self._budget.num_bytes + num_bytes
            if size <= most:
                self._add(num_bytes)
        self._wake_next()
        if size > most:
            self._budget.make_room(self, of_client=False)
            words = f"queue: expected at most {most} bytes waiting here, this request would make it {size}"
            raise Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, words))

    def release(self, num_bytes: int) -> None:
        """Release charged bytes; ignored after `close`, which has done it."""
        with self._budget._lock:
            if not num_bytes or self._closed:
                return
            self._add(-num_bytes)
        self._wake_next()

    def close(self) -> None:
        """Release everything: the stream has ended. Idempotent."""
        with self._budget._lock:
            if self._closed:
                return
            self._closed = True
            self._add(-self.num_bytes)
            self._account.waiting.pop(self, None)
            del self._account.quotas[self]
            if not self._account.quotas:
                self._budget._accounts.pop(self.client, None)
        self._wake_next()

    def _wake_next(self) -> None:
        if not self._account.waiting:  # as a rule
            return
        with self._budget._lock:
            waiting = self._account.waiting.items()
            found = next((quota for quota, num_bytes in waiting if quota.has_room(num_bytes)), None)
        if found is not None:
            found._on_room()

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._account.num_bytes += num_bytes
        self._account.largest = max(self._account.largest, num_bytes)
        self._budget.num_bytes += num_bytes
