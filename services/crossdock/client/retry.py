"""How much a client asks again where a worker refuses more work: little, or overload would feed itself."""

from __future__ import annotations

import time
from collections.abc import Callable


class RetryBudget:
    """A token for each request that is sent again after RESOURCE_EXHAUSTED.

    Args:
        ratio: tokens that each answer brings: in the long run one request in 1 / ratio is sent twice.
        most: tokens at the start, and at most.
        per_s: tokens that time brings, so that a client that gets no answers at all goes on trying.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ratio: float = 0.1,
        most: float = 10.0,
        per_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ratio, self._most, self._per_s, self._clock = ratio, most, per_s, clock
        self._left, self._at = most, clock()

    def answered(self) -> None:
        """A request was answered."""
        self._left = min(self._most, self._left + self._ratio)

    def take(self) -> bool:
        """Take a token; False: there is none just now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
