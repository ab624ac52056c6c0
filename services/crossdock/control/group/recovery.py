"""Recovery after a restart of the control plane: is the group that the workers remember complete and serving? Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossdock.control.group import elastic, resize
from crossdock.control.group.group_state import Group, Heartbeat, Member, Phase, Prior, Register, with_first_ranks

MAX_LEAP = 999
"""Upper bound of `Group.leap`. Control planes start less often than once a second, so epochs rise by less than the
clock's milliseconds, which bound the numbers that are accepted from workers (`views.greatest`)."""


def epoch_above(group: Group, learned: int) -> int:
    """Number of the next epoch, above one that a worker remembers from another control plane.

    That one may have counted further for workers that have not reported, and so may any other that learned the same
    number. The leap avoids those numbers. A worker that names the group's own number causes no second leap: repeated,
    it would bring the epoch above `views.greatest`.
    """
    learns = learned > group.epoch or not group.highest_reported
    return learned + 1 + (group.leap if learns else 0)


def note_heartbeat(group: Group, event: Heartbeat, broken: bool) -> Group:
    """Process a heartbeat during recovery: the member may have advanced or failed since it registered."""
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


def learn_size(group: Group, event: Register) -> Group:
    """How many workers are wanted, as a worker was told last, and the size of the latest epoch that one remembers.
    Where that is smaller, members without a memory give way. After the recovery only an operator wants another."""
    prior = event.prior
    if not group.recovering:
        return group
    group = resize.want(group, event.wanted)
    if prior is None or prior.epoch < group.highest_reported:
        return group
    size = prior.world_size or group.world_size
    if size == group.world_size:
        return group
    group = replace(group, world_size=size)
    latest = sorted(group.members, key=_epoch_of, reverse=True)[: group.num_slots]
    members = with_first_ranks(latest, group.num_slots)
    return replace(group, members=members, owners=(None,) * group.num_slots)


def _epoch_of(member: Member) -> int:
    return member.claim.epoch if member.claim is not None else 0


def _stood_by(claim: Prior) -> bool:
    """Whether it had a slot above the ranks of its epoch."""
    return 0 < claim.world_size <= claim.rank


def is_complete(group: Group) -> bool:
    """Whether recovery can be decided early: all slots are taken, and none by a newcomer that was only faster than a
    member with a memory. A spare registers sooner than a member whose stream broke."""
    claims = [member.claim is not None and not _stood_by(member.claim) for member in group.members]
    if not group.full or all(claims) or not any(claims):
        return group.full
    agreed = _agreed_memory(group)
    return agreed is not None and agreed.here == agreed.ranks


def newcomer(group: Group, prior: Prior | None) -> Member | None:
    """The member that is replaced by a worker with a newer memory, during recovery: without one, or the oldest."""
    if not group.recovering or prior is None:
        return None
    oldest = min(reversed(group.members), key=_epoch_of)
    return oldest if _epoch_of(oldest) < prior.epoch else None


def decide(group: Group, now: float) -> Group:
    """End the recovery: continue at the remembered epoch if all agree, else begin one above every reported epoch."""
    group = replace(group, members=with_first_ranks(group.members, group.num_slots))
    done = replace(group, recover_until=None, since=now)
    agreed = _agreed_memory(group)
    if agreed is not None and agreed.here == agreed.ranks:
        return _continue_serving(done, agreed)
    if agreed is not None and group.settings.elastic:
        lost = sorted(agreed.ranks - agreed.here)
        reason = f"control plane restarted: no report from ranks {', '.join(map(str, lost))}"
        left = elastic.continue_with(_continue_serving(done, agreed), agreed.here, (), reason, lost, now)
        return replace(left, epoch=epoch_above(group, agreed.epoch))
    placed = any(member.claim for member in group.members)
    owners = tuple(slot.owner for slot in group.slots) if placed else group.owners
    reported = group.highest_reported
    reason, epoch = (_why(group), epoch_above(group, reported)) if reported else (group.reason, 1)
    return replace(done, epoch=epoch, owners=owners, placed=placed, reason=reason)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """A group that served at `epoch` with `ranks`; `here`: those that have registered."""

    epoch: int
    ranks: frozenset[int]
    here: frozenset[int]


def _agreed_memory(group: Group) -> _Agreed | None:
    """The common memory of all members with the highest epoch; None: they disagree, or some do not serve."""
    epoch, size = group.highest_reported, group.world_size
    everybody = frozenset(range(size))
    latest = [(m.rank, m.claim) for m in group.members if m.claim is not None and m.claim.epoch == epoch]
    actives = {everybody if claim.active is None else claim.active for _, claim in latest}
    if len(actives) != 1 or any(claim.world_size not in (0, size) for _, claim in latest):
        return None
    ranks = next(iter(actives))
    inside = [(rank, claim) for rank, claim in latest if claim.rank in ranks]
    here = frozenset(claim.rank for _, claim in inside)
    whole = bool(inside) and all(claim.ready and claim.region and rank == claim.rank for rank, claim in inside)
    return _Agreed(epoch, ranks, here) if whole and (group.settings.elastic or ranks == everybody) else None


def _continue_serving(group: Group, agreed: _Agreed) -> Group:
    """The ranks continue to serve at the epoch that they remember; other members are standbys."""

    def restored(member: Member) -> Member:
        claim = member.claim
        if claim is None or claim.epoch != agreed.epoch or claim.rank not in agreed.ranks:
            return member
        return replace(member, region=claim.region, ready=True)

    # The group as its members remember it.
    whole = len(agreed.ranks) == group.world_size
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
    outcome = (
        f"all {len(agreed.ranks)} ranks continue"
        if whole
        else f"ranks {ranks} continue without {elastic.missing(done)}"
    )
    return replace(done, reason=f"control plane restarted: {outcome}")


def _why(group: Group) -> str:
    missing = [str(rank) for rank in group.lost_ranks]
    if missing:
        return f"control plane restarted: no report from ranks {', '.join(missing)}"
    fresh = [str(m) for m in group.members if m.claim is None or not (m.claim.ready and m.claim.region)]
    if fresh:
        return f"control plane restarted: not serving before: {', '.join(fresh)}"
    reports = ", ".join(f"{m.uid} epoch {m.claim.epoch} rank {m.claim.rank}" for m in group.members if m.claim)
    return f"control plane restarted: reports contradict each other: {reports}"
