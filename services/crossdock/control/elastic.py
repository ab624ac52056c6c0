"""How an epoch ends: all form anew, or in an elastic group those that are left go on with the regions they have. Pure.

An elastic group does not wait for a lost rank: the epoch rises, and the ranks that are left go on with the regions that
they have mapped (`active`), through EXCHANGING to SERVING again. Whoever comes meanwhile takes a slot, loads its
experts beside them and says so; when all slots are taken and loaded, the epoch rises once more and all exchange regions
anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossdock.control.group_state import Group, Member, Members, Phase


def raise_epoch(group: Group, epoch: int, now: float) -> Group:
    """A new epoch: every region and every ready is void."""
    members = group.members.each(lambda member: replace(member, region=b"", ready=False, loaded=False))
    return replace(group, epoch=epoch, phase=Phase.FORMING, since=now, members=members, active=None)


def can_go_on(group: Group) -> bool:
    """Whether members have mapped each other, so that some of them can go on without the others."""
    serves = group.phase is Phase.SERVING or (group.phase is Phase.EXCHANGING and group.active is not None)
    return group.settings.elastic and serves


def left_to_go_on(group: Group, ranks: Sequence[int]) -> frozenset[int] | None:
    """The ranks that can go on without these, or None: the group must form anew."""
    return group.taking_part.difference(ranks) or None if can_go_on(group) else None


def go_on(
    group: Group, left: frozenset[int], gone: Sequence[Member], reason: str, ranks: Sequence[int], now: float
) -> Group:
    """The ranks `left` go on in a new epoch, with their regions; a loss among the others costs them nothing."""
    lost = {member.rank for member in gone}
    members = Members(member for member in group.members if member.rank not in lost)
    if left == group.active:
        return replace(group, members=members)
    members = members.each(
        lambda member: replace(member, ready=False, region=member.region if member.rank in left else b"")
    )
    return replace(
        group,
        epoch=group.epoch + 1,
        phase=Phase.EXCHANGING,
        since=now,
        members=members,
        active=left,
        reason=reason,
        broken_ranks=tuple(sorted(ranks)),
    )


def take_in(group: Group, now: float) -> Group:
    """A group that went on without some ranks takes them in when all slots have members that hold their experts."""
    if group.active is None or group.phase is not Phase.SERVING or not group.full:
        return group
    outside = [member for member in group.members if member.rank not in group.active]
    if not all(member.loaded for member in outside):
        return group
    names = ", ".join(map(str, outside))
    group = replace(raise_epoch(group, group.epoch + 1, now), reason=f"{names} taken in", broken_ranks=())
    owners = tuple(member.worker.place for member in group.members)
    return replace(group, phase=Phase.EXCHANGING, owners=owners)


def missing(group: Group) -> str:
    """The ranks that take no part, in words."""
    return ", ".join(f"rank {rank}" for rank in range(group.settings.world_size) if rank not in group.taking_part)
