"""Values of the placement of experts: tables, load, shape of a layer, one change.

Letters: E experts, R ranks, P slots of all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Table = tuple[tuple[int, ...], ...]
"""Experts by rank, by slot."""
Load = Sequence[float]
"""Rows per expert, in any unit; copies share an expert's rows evenly."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of experts and slots, and domains of the ranks, of a placement.

    Attributes:
        domains: number of the NVLink domain of each rank; [R].

    Raises ValueError unless R >= 1 and E <= P <= E * R.
    """

    num_experts: int
    num_slots: int
    domains: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.domains:
            raise ValueError("domains: expected one for each rank, got none")
        most = self.num_experts * self.num_ranks
        if not 1 <= self.num_experts <= self.num_slots <= most:
            raise ValueError(f"num_slots: expected {self.num_experts}..{most}, got {self.num_slots}")

    @property
    def num_ranks(self) -> int:
        return len(self.domains)

    def capacity(self, rank: int) -> int:
        share, more = divmod(self.num_slots, self.num_ranks)
        return share + (rank < more)


class Change(NamedTuple):
    """`taken` leaves `rank` for `other`, and `given` comes back; or (no `swap`) its copy on `other` becomes one more
    of `taken`. `most`: load of the most loaded rank that is touched, afterwards."""

    most: float
    cost: int
    taken: int
    other: int
    given: int
    swap: bool


def numbered(names: Sequence[str | None]) -> tuple[int, ...]:
    """Numbers of the names, in the order of their first appearance. Each None has its own."""
    keys = [place if name is None else name for place, name in enumerate(names)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)
