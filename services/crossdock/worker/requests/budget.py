"""Accounting of the bytes of requests and answers, per client and in total. Pure: no clock, no lock, no socket.

All streams of a client share one account. Bytes count from a request's admission until its answer was written. Below
`max_bytes_per_client` its streams are read; past that, and up to twice that, a stream that has nothing here may still
bring one request, so that one stream of a client does not hold up the others. What is left of `max_bytes` stays for
other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


class BudgetExceeded(Exception):
    """A request exceeds the limit of all clients together."""


@dataclass(slots=True, eq=False)
class _Account:
    """One client: bytes of all its streams."""

    client: Hashable
    quotas: list[StreamQuota] = field(default_factory=list)
    num_bytes: int = 0


class Budget:
    """The accounts of all clients.

    Args:
        max_bytes_per_client: soft limit of one client; see above.
        max_bytes: of all clients together.

    Attributes:
        num_bytes: held now.
    """

    def __init__(self, max_bytes_per_client: int, max_bytes: int) -> None:
        self.max_bytes_per_client, self.max_bytes = max_bytes_per_client, max_bytes
        self._accounts: dict[Hashable, _Account] = {}
        self.num_bytes = 0

    def open(self, client: Hashable, on_room: Callable[[], None]) -> StreamQuota:
        """The quota of a new stream of `client`; close it. `on_room` is called when there may be room again."""
        account = self._accounts.setdefault(client, _Account(client))
        quota = StreamQuota(self, account, on_room)
        account.quotas.append(quota)
        return quota

    def forget(self, client: Hashable) -> None:
        """Remove the account of a client without streams."""
        self._accounts.pop(client, None)


class StreamQuota:
    """Bytes of one stream in its client's account. Made by `Budget.open`."""

    def __init__(self, budget: Budget, account: _Account, on_room: Callable[[], None]) -> None:
        self._budget, self._account, self._on_room = budget, account, on_room
        self.num_bytes = 0

    @property
    def client(self) -> Hashable:
        """The client."""
        return self._account.client

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether the stream may add a request of `num_bytes`. A client without other requests may add one of any
        size."""
        held, limit = self._account.num_bytes, self._budget.max_bytes_per_client
        return held < limit or (self.num_bytes == 0 and held + num_bytes <= 2 * limit)

    def charge(self, num_bytes: int) -> None:
        """Add `num_bytes`. Raises BudgetExceeded without charging anything."""
        most, size = self._budget.max_bytes, self._budget.num_bytes + num_bytes
        if size > most:
            raise BudgetExceeded(
                f"queue: expected at most {most} bytes waiting here, this request would make it {size}"
            )
        self._add(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Release charged bytes."""
        if num_bytes:
            self._add(-num_bytes)
            for quota in self._account.quotas:
                quota._on_room()

    def close(self) -> None:
        """Release everything: the stream has ended. Idempotent."""
        if self not in self._account.quotas:
            return
        self.release(self.num_bytes)
        self._account.quotas.remove(self)
        if not self._account.quotas:
            self._budget.forget(self.client)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._account.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
