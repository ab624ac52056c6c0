"""Local search of balancer.py: a table of experts, improved one or two slots at a time. Pure.

The most loaded rank either swaps an expert with another rank, or one of its heaviest experts gets one more copy in
place of a spare copy of another expert. The search applies the change that lowers the load of the most loaded affected
rank the most per copy that it loads; ties: the one that removes the coldest copy. Candidates that cannot beat the best
one so far are skipped as early as possible, which makes the search fast.

Letters: E experts, R ranks, P slots of all ranks together.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from crossdock.control.placement.tables import Change, Load, Shape, Table

TINY = 1e-9
"""Relative difference below which loads are equal."""
_MAX_CHANGES_PER_SLOT = 4
_TINIEST_GAIN = 1e-6
_HEAVIEST = 4
"""Number of experts of the most loaded rank for which one more copy is tried."""


class PlacementSearch:
    """Search state: a table with incrementally updated shares of the experts, loads of the ranks, and experts of each
    rank by share."""

    def __init__(self, load: Load, shape: Shape, held: list[set[int]], least: int) -> None:
        self._load, self._shape, self._held, self._least = load, shape, held, least
        self._where: list[set[int]] = [set() for _ in load]
        self._num_domains = len(set(shape.domains))
        for rank, experts in enumerate(held):
            for expert in experts:
                self._where[expert].add(rank)
        self._fill()
        self._share = [one / len(ranks) for one, ranks in zip(load, self._where, strict=True)]
        self._spare = {expert for expert, ranks in enumerate(self._where) if len(ranks) > least}
        self._loads = [0.0] * len(held)
        self._by_share: list[list[tuple[float, int]]] = [[] for _ in held]
        self._weigh(range(len(held)))

    def table(self) -> Table:
        """The current table, slots in the order of experts."""
        return tuple(tuple(sorted(experts)) for experts in self._held)

    def search(self, worth: float) -> None:
        """Apply changes until none gains enough."""
        mean = sum(self._loads) / len(self._loads)
        for _ in range(_MAX_CHANGES_PER_SLOT * self._shape.num_slots):
            hottest = max(range(len(self._loads)), key=self._loads.__getitem__)
            load, least = self._loads[hottest], max(worth, _TINIEST_GAIN / 2) * mean
            change = self._swap(hottest, load - 2 * least)
            least = max(least, (load - change.most) / 2) if change else least
            for taken in [expert for _, expert in self._by_share[hottest][: -_HEAVIEST - 1 : -1]]:
                copy = self._copy(taken, load - least)
                change, least = (copy, load - copy.most) if copy else (change, least)
            if change is None or load - change.most <= max(worth * change.cost, _TINIEST_GAIN) * mean:
                return
            self._apply(change, hottest)

    def restore_copies(self) -> None:
        """Add missing minimum copies, in place of spare copies of other experts."""
        for expert, ranks in enumerate(self._where):
            while len(ranks) < self._least:
                change = self._copy(expert, math.inf)
                if change is None:
                    return
                self._apply(change, min(ranks))

    def _swap(self, rank: int, below: float) -> Change | None:
        """The swap of an expert of `rank` with another rank that leaves the least on the more loaded of the two, of
        those that leave less than `below`."""
        load, found = self._loads[rank], None
        for other in sorted(range(len(self._loads)), key=self._loads.__getitem__):
            half = (load - self._loads[other]) / 2
            if half <= 0 or load - half >= below:  # nor can any of the ranks that follow
                break
            theirs = [pair for pair in self._by_share[other] if pair[1] not in self._held[rank]]
            for own, taken in self._by_share[rank] if theirs else ():
                if taken in self._held[other]:
                    continue
                share, given = _nearest(theirs, own - half)
                most = max(load - own + share, self._loads[other] + own - share)
                if most < below and share < own and self._stay_spread(taken, rank, given, other):
                    below, found = most, Change(most, 2, taken, other, given, swap=True)
        return found

    def _copy(self, taken: int, below: float) -> Change | None:
        """One more copy of `taken`, in the place of one that another expert can spare: what leaves the least on the
        most loaded rank that is touched, of those that leave less than `below`."""
        where, loads = self._where[taken], self._loads
        after = self._load[taken] / (len(where) + 1)
        change = after - self._share[taken]
        if max(loads[place] for place in where) + change >= below:
            return None
        near, found, least = self._domains_of(taken), None, math.inf
        for given in self._spare - {taken}:
            share, heavier = self._share[given], self._load[given] / (len(self._where[given]) - 1)
            for other in self._where[given] - where:
                left = loads[other] - share + after
                if left >= below or (self._shape.domains[other] in near and len(near) < self._num_domains):
                    continue
                rest = self._where[given] - {other}
                relieved = (loads[place] + change + (heavier - share if place in rest else 0.0) for place in where)
                most = max(left, *relieved, *(loads[place] + heavier - share for place in rest - where))
                if most < below * (1 - TINY) or (most <= below * (1 + TINY) and heavier - share < least):
                    below, least = min(most, below), heavier - share
                    found = Change(most, 1, taken, other, given, swap=False)
        return found

    def _domains_of(self, expert: int) -> set[int]:
        return {self._shape.domains[rank] for rank in self._where[expert]}

    def _stay_spread(self, taken: int, rank: int, given: int, other: int) -> bool:
        """Whether the copies of both lie in as many domains when they have changed places."""
        return self._stays_spread(taken, rank, other) and self._stays_spread(given, other, rank)

    def _stays_spread(self, expert: int, rank: int, other: int) -> bool:
        if self._shape.domains[rank] == self._shape.domains[other] or len(self._where[expert]) == 1:
            return True
        after = {self._shape.domains[place] for place in self._where[expert] if place != rank}
        return len(after | {self._shape.domains[other]}) >= len(self._domains_of(expert))

    def _apply(self, change: Change, rank: int) -> None:
        taken, other, given = change.taken, change.other, change.given
        touched = self._where[taken] | self._where[given] | {rank, other}
        self._move(given, other, rank if change.swap else None)
        self._move(taken, rank if change.swap else None, other)
        for expert in (taken, given):
            self._share[expert] = self._load[expert] / len(self._where[expert])
            spare = len(self._where[expert]) > self._least
            (self._spare.add if spare else self._spare.discard)(expert)
        self._weigh(touched)

    def _move(self, expert: int, source: int | None, target: int | None) -> None:
        if source is not None:
            self._held[source].remove(expert)
            self._where[expert].remove(source)
        if target is not None:
            self._held[target].add(expert)
            self._where[expert].add(target)

    def _weigh(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._by_share[rank] = sorted((self._share[expert], expert) for expert in self._held[rank])
            self._loads[rank] = sum(share for share, _ in self._by_share[rank])

    def _fill(self) -> None:
        """Replace duplicates on one rank, which a former table may have, by the most loaded experts absent there."""
        for rank, experts in enumerate(self._held):
            while len(experts) < self._shape.capacity(rank):
                absent = [expert for expert in range(len(self._load)) if expert not in experts]
                expert = max(absent, key=lambda expert: self._load[expert] / max(1, len(self._where[expert])))
                experts.add(expert)
                self._where[expert].add(rank)


def _nearest(pairs: Sequence[tuple[float, int]], share: float) -> tuple[float, int]:
    """The pair whose first number is nearest to `share`; pairs: at least one, in ascending order."""
    place = bisect.bisect_left(pairs, (share, -1))
    if place == len(pairs) or (place and share - pairs[place - 1][0] <= pairs[place][0] - share):
        return pairs[place - 1]
    return pairs[place]
