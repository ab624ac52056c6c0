"""What workers remember of a group that this process does not: who claims which rank, and is it still whole? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossdock.control.ranks import Slot, assign_rank, assign_ranks
from crossdock.control.records import Group, Heartbeat, Member, Members, Phase, Prior


def arrange(members: Sequence[Member], world_size: int) -> Members:
    """Give ranks to members while ranks are not final.

    Remembered ranks are honoured, the highest epoch first, then by uid; without any memory, ranks.py orders all.
    At most `world_size` members. Returns them by rank.
    """
    if not any(member.claim for member in members):
        ranks = assign_ranks(member.worker.place for member in members)
        return _by_rank([replace(member, rank=ranks[member.uid]) for member in members])
    slots = [Slot()] * world_size
    seated: list[Member] = []
    for member in sorted(members, key=_seniority):
        rank = seat(member, slots)
        slots[rank] = Slot(member.worker.place, live=True)
        seated.append(replace(member, rank=rank))
    return _by_rank(seated)


def seat(member: Member, slots: Sequence[Slot]) -> int:
    """A rank for one newcomer: the one it remembers if that is free and nobody else's, else as ranks.py prefers."""
    claimed = member.claim.rank if member.claim else len(slots)
    if claimed < len(slots) and slots[claimed] == Slot():
        return claimed
    rank = assign_rank(member.worker.place, slots)
    assert rank is not None, "a group that is not full has a free slot"
    return rank


def hear(group: Group, event: Heartbeat, broken: bool) -> Group:
    """A member beats while the group recovers: since it told what it remembers, it may have got further, or broken."""
    member = group.member(event.uid)
    if member is None or member.claim is None:
        return group
    past = member.claim.epoch
    if event.epoch < past or (event.epoch == past and not broken):
        return group
    doubtful = replace(member, claim=replace(member.claim, ready=False))
    return replace(
        group, members=group.members.put(doubtful), highest_reported=max(group.highest_reported, event.epoch)
    )


def decide(group: Group, now: float) -> Group:
    """End the recovery: serve on at the remembered epoch when all agree, else form above every reported one."""
    group = replace(group, members=arrange(group.members, group.settings.world_size))
    done = replace(group, recover_until=None, since=now)
    claims = [member.claim for member in group.members]
    if group.full and _whole(claims):
        members = Members(replace(m, region=m.claim.region, ready=True) for m in group.members if m.claim)
        epoch = members[0].claim.epoch if members[0].claim else 0
        done = replace(done, members=members, owners=tuple(member.worker.place for member in members), placed=True)
        reason = f"control plane restarted: all {len(members)} ranks serve on"
        return replace(done, phase=Phase.SERVING, epoch=epoch, reason=reason)
    placed = any(claims)
    owners = tuple(slot.owner for slot in group.slots) if placed else group.owners
    reason = _why(group) if group.highest_reported else group.reason
    return replace(done, epoch=group.highest_reported + 1, owners=owners, placed=placed, reason=reason)


def _whole(claims: Sequence[Prior | None]) -> bool:
    known = [claim for claim in claims if claim is not None and claim.ready and claim.region]
    ranks = {claim.rank for claim in known}
    return len(known) == len(claims) and len({claim.epoch for claim in known}) == 1 and ranks == set(range(len(claims)))


def _why(group: Group) -> str:
    missing = [str(rank) for rank in group.lost_ranks]
    if missing:
        return f"control plane restarted: no report from ranks {', '.join(missing)}"
    fresh = [str(m) for m in group.members if m.claim is None or not (m.claim.ready and m.claim.region)]
    if fresh:
        return f"control plane restarted: not serving before: {', '.join(fresh)}"
    told = ", ".join(f"{m.uid} epoch {m.claim.epoch} rank {m.claim.rank}" for m in group.members if m.claim)
    return f"control plane restarted: reports contradict each other: {told}"


def _seniority(member: Member) -> tuple[bool, int, str]:
    return member.claim is None, -(member.claim.epoch if member.claim else 0), member.uid


def _by_rank(members: Sequence[Member]) -> Members:
    return Members(sorted(members, key=lambda member: member.rank))
