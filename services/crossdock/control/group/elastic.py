"""How an epoch ends: all ranks re-form, or in an elastic group the remaining ranks continue with their regions. Pure.

An elastic group does not wait for a lost rank: the epoch rises, and the remaining ranks (`active`) continue with the
regions that they have mapped, through EXCHANGING to SERVING again. A worker that joins in the meantime takes a slot as
a standby; resize.py has how it is readmitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossdock.control.group.group_state import Group, Member, Members, Phase


def raise_epoch(group: Group, epoch: int, now: float) -> Group:
    """Begin a new epoch: all regions and ready flags are cleared."""
    members = group.members.each(lambda member: replace(member, region=b"", ready=False, prepared=False))
    return replace(group, epoch=epoch, phase=Phase.FORMING, since=now, members=members, active=None)


def can_continue(group: Group) -> bool:
    """Whether the group is elastic and members have mapped each other, so that some can continue without the others."""
    serves = group.phase is Phase.SERVING or (group.phase is Phase.EXCHANGING and group.active is not None)
    return group.settings.elastic and serves


def survivors(group: Group, ranks: Sequence[int]) -> frozenset[int] | None:
    """The ranks that can continue without these, or None: the group must re-form."""
    return group.taking_part.difference(ranks) or None if can_continue(group) else None


def continue_with(
    group: Group, left: frozenset[int], gone: Sequence[Member], reason: str, ranks: Sequence[int], now: float
) -> Group:
    """The ranks `left` continue in a new epoch with their regions; a lost standby does not affect them."""
    lost = {member.rank for member in gone}
    members = Members(member for member in group.members if member.rank not in lost)
    if left == group.active:
        return replace(group, members=members)
    same_size = group.wanted.workers == group.world_size  # else another epoch is planned from here on

    def continued(member: Member) -> Member:
        region = member.region if member.rank in left else b""
        return replace(member, ready=False, region=region, prepared=member.prepared and same_size)

    members = members.each(continued)
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


def missing(group: Group) -> str:
    """The inactive ranks, as text."""
    return ", ".join(f"rank {rank}" for rank in range(group.world_size) if rank not in group.taking_part)
