"""Limit of retries after refusals by overloaded workers, so that retries do not amplify an overload."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RetryBudget:
    """A token for each request that is sent again after RESOURCE_EXHAUSTED. Any thread.

    Args:
        ratio: tokens per answer: in the long run one request in 1 / ratio is retried.
        most: initial and maximum number of tokens.
        per_s: tokens per second, so that a client without any answers keeps trying.
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
        self._left, self._at, self._lock = most, clock(), threading.Lock()

    def answered(self) -> None:
        with self._lock:
            self._left = min(self._most, self._left + self._ratio)

    def take(self) -> bool:
        """Take a token; False: none is left."""
        with self._lock:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left < 1:
                return False
            self._left -= 1
            return True
