"""Bars by uid, set by an operator (cordoned) or by the group itself (quarantined). Pure.

A bar ends no membership by itself: a cordoned member serves until it leaves, and cannot register again. Bars are soft
state; a barred worker reports its bar to the next control plane.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from crossdock.control.group.group_state import Bar, Group, Register, Spare, Worker

MAX_BARS = 4096
MAX_SPARES = 1024
MAX_RANK_NUMBER = 1 << 30


def named(group: Group, name: str) -> list[tuple[str, str]]:
    """(uid, hostname) of the workers with this uid, or in the slot of this rank, or on this host; [] = none."""
    known = {place.uid: place.hostname for place in group.owners if place is not None}
    known |= {member.uid: member.worker.place.hostname for member in group.members}
    known |= {spare.uid: spare.hostname for spare in group.spares}
    known |= {bar.uid: bar.hostname for bar in group.bars}
    if name in known:
        return [(name, known[name])]
    if name.isascii() and name.isdecimal() and (uid := _in_slot(group, name)):
        return [(uid, known[uid])]
    return sorted((uid, hostname) for uid, hostname in known.items() if hostname == name)


def is_kept_out(group: Group, event: Register) -> Bar | None:
    """The bar that excludes a registering worker. An existing member stays, also under a new control plane."""
    worker, known = event.worker, group.member(event.worker.uid)
    stays = known is not None and known.worker.incarnation == worker.incarnation
    returns = group.recovering and event.prior is not None and event.prior.ready
    return None if stays or returns else group.bar_of(worker)


def put(group: Group, bars: Iterable[Bar]) -> Group:
    fresh = {bar.uid: bar for bar in bars}
    kept = tuple(bar for bar in group.bars if bar.uid not in fresh)
    spares = tuple(spare for spare in group.spares if spare.uid not in fresh)
    return replace(group, bars=(*kept, *fresh.values()), spares=spares)


def lift(group: Group, uids: frozenset[str]) -> Group:
    return replace(group, bars=tuple(bar for bar in group.bars if bar.uid not in uids))


def add_spare(group: Group, worker: Worker, now: float) -> Group:
    if group.member(worker.uid) is not None:
        return group
    spare = Spare(worker.uid, worker.place.hostname, now)
    return replace(group, spares=(*_without(group, worker.uid), spare)[-MAX_SPARES:])


def remove_spare(group: Group, uid: str) -> Group:
    return replace(group, spares=_without(group, uid))


def expire(group: Group, now: float) -> Group:
    """Remove expired bars, and spares that no longer retry."""
    if any(bar.until is not None and bar.until <= now for bar in group.bars):
        group = replace(group, bars=tuple(bar for bar in group.bars if bar.until is None or bar.until > now))
    if group.spares and group.spares[0].asked_at <= now - group.settings.lease_s:
        late = now - group.settings.lease_s
        group = replace(group, spares=tuple(spare for spare in group.spares if spare.asked_at > late))
    return group


def _without(group: Group, uid: str) -> tuple[Spare, ...]:
    return tuple(spare for spare in group.spares if spare.uid != uid)


def _in_slot(group: Group, name: str) -> str:
    rank = int(name) if len(name) < len(str(MAX_RANK_NUMBER)) else MAX_RANK_NUMBER
    member = next((member for member in group.members if member.rank == rank), None)
    owner = group.owners[rank] if rank < len(group.owners) else None
    return member.uid if member is not None else owner.uid if owner is not None else ""
