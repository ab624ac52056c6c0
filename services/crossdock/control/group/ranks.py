"""Assignment of ranks to workers: pure functions from places to slots.

Neighbours in rank are neighbours in hardware: the ranks of one NVLink domain are consecutive, inside it those of one
host that share memory, inside it by rail, then by local rank, so that with uniform hosts rank mod (ranks per host) is
the rail. Domains of one rack, block and zone follow each other. Slots are stable: a returning worker gets its own slot,
no worker is renumbered when another leaves, and the slot of a lost worker is given to a new one only if no other is
free.

First ranks (`assign_first_ranks`): remembered ranks are honoured, the rest is assigned by place. Later ones:
`assign_rank`. Not here: leases, epochs, experts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_DIGITS = re.compile(r"([0-9]+)")

NameKey = tuple[tuple[str | int, ...], str]
Area = tuple[str, str, str]
"""Zone, block, rack of a host, from the platform's labels; "" = unknown."""


@dataclass(frozen=True, slots=True)
class NetworkPlace:
    """How ranks of other hosts reach a worker; the fields of `topology.proto`'s Network."""

    provider: str
    address: str = ""
    domain: str = ""
    device: str = ""
    device_why: str = ""
    boxes: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    uid: str
    hostname: str
    local_rank: int = 0
    nvlink_domain: str = ""
    """Workers with equal, non-empty domains reach each other over NVLink. Empty: only the host is known."""
    rail: int = -1
    """Number of its nearest NIC among those of its host; -1 = unknown."""
    area: Area = ("", "", "")
    memory_domain: str = ""
    """Workers of one host with equal domains share memory. Empty: all of the host do, as far as is known."""

    @property
    def neighbourhood(self) -> tuple[str, str]:
        """Key shared with the workers that should be adjacent in rank."""
        if self.nvlink_domain:
            return "domain", self.nvlink_domain
        return "host", f"{self.hostname} {self.memory_domain}" if self.memory_domain else self.hostname


@dataclass(frozen=True, slots=True)
class Slot:
    """One rank of the group, with its current or last owner."""

    owner: Place | None = None
    live: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Rank that a worker remembers from an epoch."""

    epoch: int
    rank: int


def assign_first_ranks(claims: Mapping[Place, Claim | None], world_size: int) -> dict[str, int]:
    """Ranks of workers while ranks are not final: uid -> rank.

    Remembered ranks are honoured, the highest epoch first, then by uid; without any claim, `assign_ranks` orders all.
    At most `world_size` places.
    """
    if not any(claims.values()):
        return assign_ranks(claims)
    slots = [Slot()] * world_size
    ranks: dict[str, int] = {}
    for place, claim in sorted(claims.items(), key=_seniority):
        ranks[place.uid] = rank = claimed_or_free_rank(place, claim, slots)
        slots[rank] = Slot(place, live=True)
    return ranks


def claimed_or_free_rank(place: Place, claim: Claim | None, slots: Sequence[Slot]) -> int:
    """Rank of a newcomer to a group with a free slot: the claimed one if it never had an owner, else `assign_rank`."""
    if claim is not None and claim.rank < len(slots) and slots[claim.rank] == Slot():
        return claim.rank
    rank = assign_rank(place, slots)
    assert rank is not None, "a group that is not full has a free slot"
    return rank


def assign_ranks(places: Iterable[Place]) -> dict[str, int]:
    """Ranks of workers without one: uid -> rank, consecutive from 0, independent of the order of `places`."""
    return {place.uid: rank for rank, place in enumerate(sorted(_level(places), key=_order))}


def assign_rank(place: Place, slots: Sequence[Slot]) -> int | None:
    """Slot of one newcomer among those without a live owner; None: there is none.

    In order of preference: its own former slot; the slot of the same host and local rank (a worker that returned under
    another name); a slot that never had an owner; the slot with the most neighbours (last owner and live adjacent ranks
    of the same NVLink domain or host); the lowest.
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
    """The places with normalized keys, so that sorting splits no neighbourhood: each gets one area (the least of its
    members), and rails count only on hosts where all are known."""
    places = list(places)
    areas: dict[tuple[str, str], Area] = {}
    without_rail: set[str] = set()
    for place in places:
        areas[place.neighbourhood] = min(place.area, areas.get(place.neighbourhood, place.area))
        if place.rail < 0:
            without_rail.add(place.hostname)
    return [
        replace(
            place,
            area=areas[place.neighbourhood],
            rail=place.local_rank if place.hostname in without_rail else place.rail,
        )
        for place in places
    ]


def _seniority(entry: tuple[Place, Claim | None]) -> tuple[bool, int, str]:
    place, claim = entry
    return claim is None, -(claim.epoch if claim else 0), place.uid


@functools.lru_cache(maxsize=1 << 14)
def _order(place: Place) -> tuple[object, ...]:
    neighbourhood = place.nvlink_domain or place.hostname
    return (
        not place.nvlink_domain,
        *(natural(name) for name in place.area),
        natural(neighbourhood),
        natural(place.hostname),
        natural(place.memory_domain),
        place.rail,
        place.local_rank,
        natural(place.uid),
    )


def natural(name: str) -> NameKey:
    """Sort key that puts host-2 before host-10: text at even, numbers at odd positions; then by the text itself."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(name))), name
