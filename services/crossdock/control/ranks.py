"""Who gets which rank: pure functions from stated facts to slots.

Neighbours in rank are neighbours in hardware: the ranks of one NVLink domain are consecutive, inside it those of one
host, inside it by rail, then by local rank, so that with hosts of one kind rank mod (ranks per host) tells the rail.
Domains of one rack, block and zone follow each other. Slots are stable: a worker that comes back gets its own, nobody
is renumbered when another leaves, and the slot of one who left stays reserved until somebody new has no other place.

Not here: who is alive, epochs, experts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_DIGITS = re.compile(r"([0-9]+)")

NameKey = tuple[tuple[str | int, ...], str]
Area = tuple[str, str, str]
"""Zone, block, rack: what the platform says about where a host stands; "" = unknown."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands."""

    uid: str
    hostname: str
    local_rank: int = 0
    nvlink_domain: str = ""
    """Workers with equal, non-empty domains reach each other over NVLink. Empty: only the host is known."""
    rail: int = -1
    """Number of the NIC nearest to it among those of its host; -1 = unknown."""
    area: Area = ("", "", "")

    @property
    def neighbourhood(self) -> tuple[str, str]:
        """What the worker shares with those that should be next to it in rank."""
        return ("domain", self.nvlink_domain) if self.nvlink_domain else ("host", self.hostname)


@dataclass(frozen=True, slots=True)
class Slot:
    """One rank of the group: who holds it, or held it last."""

    owner: Place | None = None
    live: bool = False


def assign_ranks(places: Iterable[Place]) -> dict[str, int]:
    """Number workers that hold no rank yet: uid -> rank, consecutive from 0, whatever the order of `places`."""
    return {place.uid: rank for rank, place in enumerate(sorted(_level(places), key=_order))}


def assign_rank(place: Place, slots: Sequence[Slot]) -> int | None:
    """Find one newcomer a slot among those without a live owner; None when there is no such slot.

    In order of preference: the slot it held itself; the slot of the same host and local rank (a worker that returned
    under another name); a slot reserved for nobody; the slot with most kin (last owner and live neighbours of the same
    NVLink domain or host); the lowest.
    """
    free = [rank for rank, slot in enumerate(slots) if not slot.live]
    for rank in free:
        owner = slots[rank].owner
        if owner is not None and owner.uid == place.uid:
            return rank
    return max(free, key=lambda rank: _fitness(place, rank, slots), default=None)


def _fitness(place: Place, rank: int, slots: Sequence[Slot]) -> tuple[bool, bool, bool, int, int]:
    owner = slots[rank].owner
    around = [slots[near].owner for near in (rank - 1, rank + 1) if 0 <= near < len(slots) and slots[near].live]
    kin = sum(other is not None and other.neighbourhood == place.neighbourhood for other in (owner, *around))
    same_seat = owner is not None and (owner.hostname, owner.local_rank) == (place.hostname, place.local_rank)
    return owner is not None and owner.uid == place.uid, same_seat, owner is None, kin, -rank


def _level(places: Iterable[Place]) -> list[Place]:
    """The same places, such that sorting tears nothing apart: a neighbourhood stands in one area, its least, and rails
    count on a host only where all of its places tell theirs."""
    places = list(places)
    areas: dict[tuple[str, str], Area] = {}
    unsure: set[str] = set()
    for place in places:
        areas[place.neighbourhood] = min(place.area, areas.get(place.neighbourhood, place.area))
        if place.rail < 0:
            unsure.add(place.hostname)
    return [
        replace(
            place, area=areas[place.neighbourhood], rail=place.local_rank if place.hostname in unsure else place.rail
        )
        for place in places
    ]


@functools.lru_cache(maxsize=1 << 14)
def _order(place: Place) -> tuple[object, ...]:
    neighbourhood = place.nvlink_domain or place.hostname
    return (
        not place.nvlink_domain,
        *(natural(name) for name in place.area),
        natural(neighbourhood),
        natural(place.hostname),
        place.rail,
        place.local_rank,
        natural(place.uid),
    )


def natural(name: str) -> NameKey:
    """Sort key that puts host-2 before host-10: text at even, numbers at odd positions; then by the text itself."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(name))), name
