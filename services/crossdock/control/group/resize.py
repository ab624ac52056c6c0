"""Planned epochs: more ranks, fewer ranks, or ranks that are readmitted. Pure.

    SERVING 7, ranks 0-3 ─ Scale(6) ─ two workers take slots 4 and 5 as standbys, load ─▶ SERVING 7
      ─ all six are prepared ─▶ EXCHANGING 8, ranks 0-5 ─▶ SERVING 8
    SERVING 8, ranks 0-5 ─ Scale(3) ─ ranks 0-2 load what 3-5 hold, and all serve meanwhile
      ─ the three are prepared ─▶ EXCHANGING 9, ranks 0-2; 3-5 are members no more ─▶ SERVING 9

The group serves as it is until every member of the next epoch is prepared, so a loss meanwhile is the loss of a rank or
of a standby as ever, and another number may be wanted at any time. A group that serves with fewer ranks than it has
slots (elastic.py) is completed in the same way, without a change of its size.

A member that stays keeps its rank if there is such a rank; those that were above fill the gaps. So only ranks that hold
no experts, or hold them elsewhere in the next epoch anyway, are renumbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossdock.control.group.elastic import raise_epoch
from crossdock.control.group.group_state import Group, Member, Members, Phase, Wanted, with_first_ranks


def want(group: Group, wanted: Wanted | None) -> Group:
    """Another number of workers is wanted, unless a newer one is known."""
    if wanted is None or wanted.version <= group.wanted.version:
        return group
    bounded = replace(wanted, workers=group.settings.bounded(wanted.workers))
    group = replace(group, wanted=bounded, members=group.members.each(lambda m: replace(m, prepared=False)))
    return with_owners(group) if group.placed else group


def follow(group: Group) -> Group:
    """Where the group wants the workers that there are: want those. Lost ranks are waited for, as ever."""
    if not group.settings.follow_workers or group.phase is not Phase.SERVING or group.active is not None:
        return group
    leaving = sum(member.leaving for member in group.members)
    ranks = group.world_size - sum(member.leaving for member in group.members if member.rank < group.world_size)
    workers = group.settings.bounded(max(ranks, len(group.members) - leaving + len(group.spares)))
    return group if workers == group.wanted.workers else want(group, Wanted(workers, group.wanted.version + 1))


def next_members(group: Group) -> tuple[Member, ...]:
    """Members of the planned epoch, with their ranks in it, by rank; none: no epoch is planned, or too few are here."""
    if group.phase is not Phase.SERVING:
        return ()
    size = group.wanted.workers if len(group.members) >= group.wanted.workers else group.world_size
    if len(group.members) < size or (size == group.world_size and group.active is None):
        return ()
    return _seated(group, size)


def switch(group: Group, now: float) -> Group:
    """Begin the planned epoch once all of its members are prepared; those that keep what they have need not be."""
    planned, size = next_members(group), group.world_size
    if not planned or not all(m.prepared for m in planned if len(planned) != size or m.rank not in group.taking_part):
        return group
    if len(planned) == size:
        back = ", ".join(str(member) for member in planned if member.rank not in group.taking_part)
        reason = f"{back} readmitted"
    else:
        reason = f"scaled from {size} to {len(planned)} workers"
    # Reports of ranks count within an epoch and in the next one; here ranks may be others' by then.
    blames = tuple(blame for blame in group.blames if blame.epoch != group.epoch)
    group = replace(group, members=Members(planned), world_size=len(planned), blames=blames)
    group = raise_epoch(group, group.epoch + 1, now)
    group = replace(group, phase=Phase.EXCHANGING, reason=reason, broken_ranks=())
    return with_owners(group)


def settle(group: Group) -> Group:
    """What needs no preparation: the size of a group that does not serve, and standbys in place of lost ranks."""
    wanted = group.wanted.workers
    if not group.placed and group.world_size != wanted:
        first = with_first_ranks(group.members[:wanted], wanted)
        return replace(group, world_size=wanted, members=first, owners=(None,) * wanted)
    if not group.placed:
        return group
    size = group.world_size
    if group.phase is Phase.FORMING and (wanted < size or len(group.members) >= wanted):
        size = wanted
    highest = group.members[-1].rank if group.members else 0
    if highest < size == group.world_size and len(group.owners) == group.num_slots:
        return group
    # Members above take empty slots below; who is then in no slot is a member no more.
    members: Sequence[Member] = group.members
    if sum(member.rank < size for member in members) < min(size, len(members)):
        seated = [replace(member, prepared=False) for member in _seated(group, size)]
        held = {member.uid for member in seated}
        members = [*seated, *(member for member in members if member.uid not in held)]
    broken = tuple(rank for rank in group.broken_ranks if rank < size)
    group = replace(group, world_size=size, broken_ranks=broken)
    kept = Members(member for member in members if member.rank < group.num_slots)
    return with_owners(group if kept == group.members else replace(group, members=kept))


def _seated(group: Group, size: int) -> tuple[Member, ...]:
    """At most `size` members with ranks below `size`: those that are not being stopped first, then those that serve;
    each in its slot if there is one."""
    taking_part = group.taking_part
    order = sorted(group.members, key=lambda member: (member.leaving, member.rank not in taking_part, member.rank))
    staying = order[:size]
    held = {member.rank for member in staying}
    free = (rank for rank in range(size) if rank not in held)
    seated = [member if member.rank < size else replace(member, rank=next(free)) for member in staying]
    return tuple(sorted(seated, key=lambda member: member.rank))


def with_owners(group: Group) -> Group:
    """The same state with an owner for each slot: its live one, else the last."""
    live = {member.rank: member.worker.place for member in group.members}
    former = (*group.owners, *(None for _ in range(group.num_slots)))[: group.num_slots]
    return replace(group, owners=tuple(live.get(rank, owner) for rank, owner in enumerate(former)))
