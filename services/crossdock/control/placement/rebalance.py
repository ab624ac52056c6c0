"""Rebalances: moves of experts and their gain, for all MoE layers of a model. Pure, and slow enough for a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossdock.control.placement.balancer import balance, imbalance, num_moved, rank_loads
from crossdock.control.placement.tables import Shape, Table


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A better placement.

    Attributes:
        before, after: tables by layer.
        imbalance, imbalance_after: of all layers, now and then; see `total_imbalance`.
    """

    base: int
    before: tuple[Table, ...]
    after: tuple[Table, ...]
    imbalance: float
    imbalance_after: float
    moves: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Input of a rebalance: immutable, for another thread."""

    version: int
    shape: Shape
    tables: tuple[Table, ...]
    loads: tuple[tuple[float, ...], ...]
    min_copies: int

    def rebalance(self) -> Rebalance:
        """Balance each layer. Some ten milliseconds a layer in groups of 64 ranks with 256 experts."""
        after = tuple(
            balance(load, self.shape, table, min_copies=self.min_copies) if any(load) else table
            for load, table in zip(self.loads, self.tables, strict=True)
        )
        moves = sum(num_moved(old, new) for old, new in zip(self.tables, after, strict=True))
        now, then = (total_imbalance(self.loads, tables) for tables in (self.tables, after))
        return Rebalance(self.version, self.tables, after, now, then, moves)


def total_imbalance(loads: Sequence[Sequence[float]], tables: Sequence[Table]) -> float:
    """Imbalance of layers that run one after the other: the sum of the most loaded ranks over the sum of the means."""
    most = mean = 0.0
    for load, table in zip(loads, tables, strict=True):
        ranks = rank_loads(load, table)
        most += max(ranks)
        mean += sum(ranks) / len(ranks)
    return most / mean if mean > 0 else 1.0


def rank_shares(snapshot: Snapshot) -> list[float]:
    """Share of all rows that each rank computes."""
    sums = [0.0] * snapshot.shape.num_ranks
    for load, table in zip(snapshot.loads, snapshot.tables, strict=True):
        sums = [total + one for total, one in zip(sums, rank_loads(load, table), strict=True)]
    total = sum(sums)
    return [one / total for one in sums] if total else sums


def domain_imbalance(snapshot: Snapshot) -> float:
    """Rows of the most loaded NVLink domain, per rank of it, over the mean rank's; all layers together."""
    shares = rank_shares(snapshot)
    alone = tuple((rank,) for rank in range(len(shares)))
    return imbalance(shares, alone, snapshot.shape.domains)
