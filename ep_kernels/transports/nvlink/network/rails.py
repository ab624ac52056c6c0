"""Who gets rows of a dispatch on another host, for all ranks that read them there. Pure: all ranks compute the same.

Ranks that read one another's inboxes have one landing, named by the lowest of them: those of a host whose boxes are in
host memory. A rank whose boxes are in its GPU's memory has one for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rails:
    """Of the ranks of a group.

    Attributes:
        hosts: [R] lowest rank of each rank's host.
        landings: [R] lowest rank of its landing.
        mask: [R] who takes part.
    """

    hosts: Sequence[int]
    landings: Sequence[int]
    mask: Sequence[bool]

    def rail(self, source: int, rank: int) -> int | None:
        """The rank that gets rows of `source` which are for `rank`, of another host: the i-th active rank of a host
        sends to the (i mod n)-th of the n there. None: one of the two hosts takes no part, or `source` does not."""
        there = [one for one, landing in enumerate(self.landings) if self.mask[one] and landing == self.landings[rank]]
        if not there or not self.mask[source]:
            return None
        before = sum(self.mask[one] and self.hosts[one] == self.hosts[source] for one in range(source))
        return there[before % len(there)]
