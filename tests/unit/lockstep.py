"""A model of ranks in lockstep: what each waits for whom, if each takes these times. No process, no clock.

A step is exchange, dispatch, experts, combine; a rank enters each when it has what it needs from all others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossdock.control.latency.verdict import OPS, RankTimes


@dataclass
class Lockstep:
    """A group and what is wrong with it.

    Attributes:
        hosts: by rank.
        own_s: mean seconds of a rank's own work in exchange, dispatch, experts and combine.
        noise: scale of the exponential noise on each, over the mean.
        slow: by rank, factor of all it does.
        stop: rank, share of its steps in which it stands still, seconds.
        wire_s: extra seconds from rank j to rank i.
        rows: by rank, of a step; experts take that much longer than for 100.
        hot: (expert, rows) by rank.
    """

    hosts: Sequence[str]
    own_s: tuple[float, float, float, float] = (2e-4, 4e-4, 2e-3, 4e-4)
    noise: float = 0.3
    slow: dict[int, float] = field(default_factory=dict)
    stop: tuple[int, float, float] | None = None
    wire_s: Callable[[int, int], float] = lambda i, j: 0.0
    rows: dict[int, int] = field(default_factory=dict)
    hot: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, steps: int, seed: int) -> dict[int, RankTimes]:
        """Figures of that many steps."""
        made = random.Random(seed)
        size = len(self.hosts)
        at = [0.0] * size
        late = {op: [[0.0] * size for _ in range(size)] for op in OPS}
        experts_s, waits_s, begun = [0.0] * size, [0.0] * size, list(at)
        for _ in range(steps):
            for op, own_s in zip(OPS, (self.own_s[0], self.own_s[1], self.own_s[3]), strict=True):
                sent = [at[i] + self._takes(i, own_s, made) for i in range(size)]
                at = [self._wait(i, sent, late[op][i]) for i in range(size)]
                waits_s = [waited + after - before for waited, after, before in zip(waits_s, at, sent, strict=True)]
                if op == "dispatch":
                    for i in range(size):
                        spent = self._takes(i, self.own_s[2], made) * self.rows.get(i, 100) / 100
                        experts_s[i] += spent
                        at[i] += spent
        made_by = [self.hot.get(i, (2 * i, 50)) for i in range(size)]
        return {
            i: RankTimes(
                steps, at[i] - begun[i], waits_s[i], experts_s[i], steps * self.rows.get(i, 100), made_by[i][0],
                steps * made_by[i][1], {op: tuple(late[op][i]) for op in OPS}, self.hosts[i],
            )
            for i in range(size)
        }  # fmt: skip

    def _takes(self, rank: int, mean_s: float, made: random.Random) -> float:
        takes = mean_s * self.slow.get(rank, 1.0) * (1 + made.expovariate(1 / max(self.noise, 1e-9)))
        if self.stop is not None and self.stop[0] == rank and made.random() < self.stop[1] / 4:
            takes += self.stop[2]
        return takes

    def _wait(self, i: int, sent: Sequence[float], late: list[float]) -> float:
        """When rank i has everything; what it waited for each peer beyond the typical one is added to `late`."""
        arrived = [moment + (self.wire_s(i, j) if j != i else 0.0) for j, moment in enumerate(sent)]
        waited = [max(0.0, moment - arrived[i]) for moment in arrived]
        typical = sorted(waited)[(len(waited) - 1) // 2]
        for j, seconds in enumerate(waited):
            late[j] += max(0.0, seconds - typical)
        return arrived[i] + max(waited)
