"""What workers remember of a group that this process does not: who claims which rank, and is it still whole? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossdock.control import elastic
from crossdock.control.ranks import Slot, assign_rank, assign_ranks
from crossdock.control.group_state import Group, Heartbeat, Member, Members, Phase, Prior


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


def is_complete(group: Group) -> bool:
    """Whether nobody else needs to be heard: all slots are taken, and nobody in them has taken the place of a member
    that remembers more and is only slower to come back. A spare asks sooner than a member whose stream broke."""
    claims = [member.claim is not None for member in group.members]
    if not group.full or all(claims) or not any(claims):
        return group.full
    agreed = _agreed(group)
    return agreed is not None and agreed.here == agreed.ranks


def newcomer(group: Group, prior: Prior | None) -> Member | None:
    """The member without a memory that gives way to a worker with one, while the group recovers."""
    if not group.recovering or prior is None:
        return None
    return next((member for member in reversed(group.members) if member.claim is None), None)


def decide(group: Group, now: float) -> Group:
    """End the recovery: serve on at the remembered epoch when all agree, else form above every reported one."""
    group = replace(group, members=arrange(group.members, group.settings.world_size))
    done = replace(group, recover_until=None, since=now)
    agreed = _agreed(group)
    if agreed is not None and agreed.here == agreed.ranks:
        return _serve_on(done, agreed)
    if agreed is not None and group.settings.elastic:
        lost = sorted(agreed.ranks - agreed.here)
        reason = f"control plane restarted: no report from ranks {', '.join(map(str, lost))}"
        return elastic.go_on(_serve_on(done, agreed), agreed.here, (), reason, lost, now)
    placed = any(member.claim for member in group.members)
    owners = tuple(slot.owner for slot in group.slots) if placed else group.owners
    reason = _why(group) if group.highest_reported else group.reason
    return replace(done, epoch=group.highest_reported + 1, owners=owners, placed=placed, reason=reason)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """A group that served at `epoch` with `ranks`, of which these are `here`."""

    epoch: int
    ranks: frozenset[int]
    here: frozenset[int]


def _agreed(group: Group) -> _Agreed | None:
    """What all members that remember the greatest epoch say alike of it; None: they do not, or some serve no more."""
    epoch, size = group.highest_reported, group.settings.world_size
    everybody = frozenset(range(size))
    latest = [(m.rank, m.claim) for m in group.members if m.claim is not None and m.claim.epoch == epoch]
    told = {everybody if claim.active is None else claim.active for _, claim in latest}
    if len(told) != 1:
        return None
    ranks = next(iter(told))
    inside = [(rank, claim) for rank, claim in latest if claim.rank in ranks]
    here = frozenset(claim.rank for _, claim in inside)
    whole = bool(inside) and all(claim.ready and claim.region and rank == claim.rank for rank, claim in inside)
    return _Agreed(epoch, ranks, here) if whole and (group.settings.elastic or ranks == everybody) else None


def _serve_on(group: Group, agreed: _Agreed) -> Group:
    """The ranks serve at the epoch that they remember; members beside them wait to be taken in."""

    def restored(member: Member) -> Member:
        claim = member.claim
        if claim is None or claim.epoch != agreed.epoch or claim.rank not in agreed.ranks:
            return member
        return replace(member, region=claim.region, ready=True)

    whole = len(agreed.ranks) == group.settings.world_size
    done = replace(
        group,
        members=group.members.each(restored),
        owners=tuple(slot.owner for slot in group.slots),
        placed=True,
        phase=Phase.SERVING,
        epoch=agreed.epoch,
        active=None if whole else agreed.ranks,
    )
    ranks = ", ".join(map(str, sorted(agreed.ranks)))
    who = (
        f"all {len(agreed.ranks)} ranks serve on"
        if whole
        else f"ranks {ranks} serve on without {elastic.missing(done)}"
    )
    return replace(done, reason=f"control plane restarted: {who}")


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
