"""Operations of one kind that have begun, and those of them whose `wait` is still to come."""

from __future__ import annotations

from ep_kernels.errors import HandleError


class InFlight:
    """Dispatches, or combines, of one communicator.

    Attributes:
        num_begun: so far; the number of the next one.
        pending: numbers of requests that have not been waited for.

    Args:
        kind: in errors.
        most: requests that may be pending.
    """

    def __init__(self, kind: str, most: int) -> None:
        self.kind, self._most = kind, most
        self.num_begun = 0
        self.pending: set[int] = set()

    def has_room(self) -> bool:
        """Whether one more may begin."""
        return not self.pending or min(self.pending) > self.num_begun - self._most

    def check(self) -> None:
        """The operation that is to begin may take the buffers of the `max_in_flight`-th before it, or let peers do so
        before this rank begins another: a request for that one that is still pending would get other rows. Raises
        HandleError."""
        if not self.has_room():
            oldest = min(self.pending)
            raise HandleError(
                f"{self.kind}: expected every request waited for before max_in_flight = {self._most} later ones begin, "
                f"got one that was begun {self.num_begun - oldest} before this and is pending; wait() for it first"
            )

    def begin(self) -> int:
        """An operation has begun, and did not fail for want of memory; its number."""
        number = self.num_begun
        self.num_begun = number + 1
        return number
