"""Groups for tests that need no peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LonelyGroup:
    """A rank that never meets anybody: enough for configs, reference and single-rank communicators."""

    rank: int = 0
    size: int = 1
    epoch: int = 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        assert self.size == 1, "nobody else is here"
        return [payload]
