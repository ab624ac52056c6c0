"""The group as a pure state machine: `step(group, event, now) -> (group, effects)`. No I/O, no clock, no thread.

    FORMING ──every slot taken──▶ EXCHANGING ──all regions published, all ready──▶ SERVING
       ▲                              │  │                                            │
       │  slot empty    epoch broken: │  └── too often in a row ──▶ FAILED            │
       └──────────────── epoch + 1 ◀──┴───────────────────────────────────────────────┘

An epoch is one table of regions. It is *sealed* when the last region is in: from then on members map each other's
memory, and whatever happens to one of them (lost, left, replaced, called silent) ends the epoch, once. Before that,
nobody has built on it, so a member may go or be replaced without a new number. That is why killing one worker costs
exactly one epoch, in whatever order its lease, its neighbours' reports and its successor arrive.

A new process has no memory. For `recover_s` it listens to workers that remember a group (`Prior`). When all of them
agree, the group serves on at the same epoch and nobody noticed; else the group forms anew above every reported epoch.

An elastic group does not wait for a lost rank: the epoch rises, and the ranks that are left go on with the regions that
they have mapped (`active`), through EXCHANGING to SERVING again. Whoever comes meanwhile takes a slot, loads its
experts beside them and says so; when all slots are taken and loaded, the epoch rises once more and all exchange regions
anew.

docs/group-protocol.md has the tables. Ranks are chosen in ranks.py, the memory of workers is judged in recovery.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from crossdock.control import recovery
from crossdock.control.records import (
    Blamed,
    Effect,
    Event,
    Group,
    Heartbeat,
    Leave,
    Lost,
    Member,
    Members,
    Phase,
    Publish,
    PublishRegion,
    Ready,
    Refusal,
    Refuse,
    Register,
    Settings,
    Tick,
    Worker,
)

Result = tuple[Group, tuple[Effect, ...]]

ARRANGED_AT_ONCE = 64
"""While the first group gathers, each arrival is given its place among so many. In larger groups the others have ranks
in the order of arrival until all are there: to sort at each arrival would cost R^2 log R."""


class _Refused(Exception):
    """Leaves a rule early; `step` turns it into a Refuse effect on the unchanged group."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


def new_group(settings: Settings, now: float) -> Group:
    """The state of a process that was just started: empty, listening for a group that may have served before it."""
    return Group(
        settings=settings,
        phase=Phase.FORMING,
        epoch=0,
        members=Members(),
        owners=(None,) * settings.world_size,
        placed=False,
        recover_until=now + settings.recover_s,
        highest_reported=0,
        since=now,
        ticked_at=now,
        num_failed_epochs=0,
        reason="control plane started: waiting for workers",
        broken_ranks=(),
    )


def step(group: Group, event: Event, now: float) -> Result:
    """Take one event.

    Args:
        group: the state before.
        event: what happened.
        now: seconds on a monotonic clock, never smaller than in the step before.

    Returns:
        The state after and what the shell must do. A refused event gives the same state and one Refuse.
    """
    try:
        after, effects = _RULES[type(event)](group, event, now)
    except _Refused as refused:
        return group, (Refuse(refused.refusal, str(refused)),)
    after = _settle(after, now)
    if _visible(after) != _visible(group):
        effects += (Publish(),)
    return after, effects


def _register(group: Group, event: Register, now: float) -> Result:
    worker = event.worker
    known = group.member(worker.uid)
    if known is not None and worker.incarnation == known.worker.incarnation:
        return _update(group, replace(known, lease_until=now + group.settings.lease_s)), ()
    if known is not None and worker.incarnation < known.worker.incarnation:
        raise _Refused(Refusal.REPLACED, f"worker {worker.uid}: a newer process holds {known}")
    _check_same_kind(worker, next((member for member in group.members if member is not known), None))
    if known is None and group.full:
        size = group.settings.world_size
        raise _Refused(Refusal.GROUP_FULL, f"worker {worker.uid}: all {size} slots have live members")
    if known is None:
        return _add(group, event, now), ()
    reason = f"{known} replaced: a newer process of it registered"
    group = _add(_remove(group, (known,), reason, now), event, now)
    return replace(group, reason=reason), (Lost(known.rank, known.uid, "replaced"),)


def _publish_region(group: Group, event: PublishRegion, now: float) -> Result:
    member = _require(group, event, event.epoch)
    if not event.region:
        raise _Refused(Refusal.BAD_VALUE, "region: expected some bytes, got none")
    if not group.placed or group.phase is Phase.FAILED:
        raise _Refused(Refusal.WRONG_PHASE, f"region: ranks are not final, or the group has failed: {group.reason}")
    if group.sealed and event.region != member.region:
        raise _Refused(Refusal.WRONG_PHASE, f"region: {member} has published another one in epoch {group.epoch}")
    return _update(group, replace(member, region=event.region, lease_until=now + group.settings.lease_s)), ()


def _ready(group: Group, event: Ready, now: float) -> Result:
    member = _require(group, event, event.epoch)
    if not group.sealed or group.phase is Phase.FAILED:
        raise _Refused(Refusal.WRONG_PHASE, f"ready: {member} cannot be ready before all regions are published")
    if group.active is not None and member.rank not in group.active:
        raise _Refused(Refusal.WRONG_PHASE, f"ready: {member} is not among those that go on in epoch {group.epoch}")
    _check_same_placement(group, member, event.placement)
    lease_until = now + group.settings.lease_s
    return _update(group, replace(member, ready=True, placement=event.placement, lease_until=lease_until)), ()


def _heartbeat(group: Group, event: Heartbeat, now: float) -> Result:
    member = _require(group, event, None)
    wrong = [rank for rank in event.silent_ranks if rank >= group.settings.world_size]
    if wrong:
        raise _Refused(Refusal.BAD_VALUE, f"silent_ranks: expected < {group.settings.world_size}, got {wrong}")
    group = _update(group, replace(member, lease_until=now + group.settings.lease_s))
    broken = bool(event.silent_ranks or event.fault)
    if group.recovering:
        return recovery.hear(group, event, broken), ()
    if event.epoch > group.epoch:
        reason = f"{member} is at epoch {event.epoch} already: the control plane restarted without knowing of it"
        return replace(_raise_epoch(group, event.epoch + 1, now), reason=reason), ()
    if group.active is not None and member.rank not in group.active:
        return _update(group, replace(member, lease_until=now + group.settings.lease_s, loaded=event.loaded)), ()
    if not broken or event.epoch != group.epoch or group.phase not in {Phase.EXCHANGING, Phase.SERVING}:
        return group, ()
    blamed = {rank for rank in event.silent_ranks if rank != member.rank}
    members = group.members.each(lambda m: replace(m, num_blamed=m.num_blamed + 1) if m.rank in blamed else m)
    effects = tuple(Blamed(m.rank, member.rank, m.num_blamed) for m in members if m.rank in blamed)
    names = ", ".join(str(m) for m in members if m.rank in blamed)
    told = f" silent: {names}" if names else " a fault"
    reason = f"{member} reported{told}" + (f": {event.fault}" if event.fault else "")
    return _break_epoch(replace(group, members=members), reason, tuple(sorted(blamed)), now), effects


def _leave(group: Group, event: Leave, now: float) -> Result:
    member = group.member(event.uid)
    if member is None or member.worker.incarnation != event.incarnation:
        return group, ()
    reason = f"{member} left" + (f": {event.reason}" if event.reason else "")
    return _remove(group, (member,), reason, now), (Lost(member.rank, member.uid, "left"),)


def _tick(group: Group, event: Tick, now: float) -> Result:
    group = replace(_forgive_pause(group, now - group.ticked_at), ticked_at=now)
    silent = tuple(member for member in group.members if member.lease_until <= now)
    if silent:
        reason = ", ".join(str(member) for member in silent) + " lost: lease expired"
        effects = tuple(Lost(member.rank, member.uid, "lease") for member in silent)
        return _remove(group, silent, reason, now), effects
    if group.phase is Phase.EXCHANGING and now - group.since >= group.settings.form_timeout_s:
        late = [m for m in _those_that_count(group) if not (m.ready if group.sealed else m.region)]
        what = "ready" if group.sealed else "published"
        names = ", ".join(str(member) for member in late)
        reason = f"epoch {group.epoch} timed out after {group.settings.form_timeout_s:g} s: not {what}: {names}"
        return _break_epoch(group, reason, tuple(member.rank for member in late), now), ()
    return group, ()


_RULES: dict[type[Any], Callable[[Group, Any, float], Result]] = {
    Register: _register,
    PublishRegion: _publish_region,
    Ready: _ready,
    Heartbeat: _heartbeat,
    Leave: _leave,
    Tick: _tick,
}


def _settle(group: Group, now: float) -> Group:
    """Move on as far as the members allow, after any event."""
    if group.recover_until is not None:
        if not group.full and now < group.recover_until:
            return group
        group = recovery.decide(group, now)
    if group.phase is Phase.FORMING and group.full:
        if not group.placed:
            group = replace(group, members=recovery.arrange(group.members, group.settings.world_size))
        owners = tuple(member.worker.place for member in group.members)
        group = replace(group, phase=Phase.EXCHANGING, since=now, placed=True, owners=owners)
    size = group.settings.world_size
    expected = size if group.active is None else len(group.active)
    if group.phase is Phase.EXCHANGING and group.members.num_ready == expected:
        without = f": going on without {_missing(group)}" if group.active is not None else ""
        reason = f"all {expected} ranks ready{without}"
        group = replace(group, phase=Phase.SERVING, since=now, num_failed_epochs=0, reason=reason)
    return _take_in(group, now)


def _take_in(group: Group, now: float) -> Group:
    """A group that went on without some ranks takes them in when all slots have members that hold their experts."""
    if group.active is None or group.phase is not Phase.SERVING or not group.full:
        return group
    outside = [member for member in group.members if member.rank not in group.active]
    if not all(member.loaded for member in outside):
        return group
    names = ", ".join(map(str, outside))
    group = replace(_raise_epoch(group, group.epoch + 1, now), reason=f"{names} taken in", broken_ranks=())
    owners = tuple(member.worker.place for member in group.members)
    return replace(group, phase=Phase.EXCHANGING, owners=owners)


def _add(group: Group, event: Register, now: float) -> Group:
    worker, prior = event.worker, event.prior
    member = Member(worker, rank=0, lease_until=now + group.settings.lease_s, claim=prior)
    if group.placed:
        rank = recovery.seat(member, group.slots)
        members = sorted((*group.members, replace(member, rank=rank)), key=_rank)
        owners = (*group.owners[:rank], worker.place, *group.owners[rank + 1 :])
        group = replace(group, owners=owners, members=Members(members))
    elif len(group.members) < ARRANGED_AT_ONCE:
        group = replace(group, members=recovery.arrange((*group.members, member), group.settings.world_size))
    else:
        members = [*group.members, replace(member, rank=len(group.members))]
        group = replace(group, members=Members(members))
    joined = group.member(worker.uid)
    missing = group.settings.world_size - len(group.members)
    reason = f"{joined} joined" + (f": waiting for {missing} of {group.settings.world_size}" if missing else "")
    group = replace(group, reason=reason, num_failed_epochs=0)
    if prior is None:
        return group
    if group.recovering:
        return replace(group, highest_reported=max(group.highest_reported, prior.epoch))
    # A memory of this epoch or a later one is of another process: its table and ours must not share a number.
    return _raise_epoch(group, prior.epoch + 1, now) if prior.epoch >= group.epoch else group


def _remove(group: Group, gone: Sequence[Member], reason: str, now: float) -> Group:
    ranks = tuple(member.rank for member in gone)
    if (left := _left_to_go_on(group, ranks)) is not None:
        return _go_on(group, left, gone, reason, ranks, now)
    broke = group.sealed or group.phase is Phase.FAILED
    lost = frozenset(ranks)
    members = Members(member for member in group.members if member.rank not in lost)
    if not members:  # whoever comes next may be a wholly other set of workers
        group = replace(group, placed=False, owners=(None,) * group.settings.world_size)
    if not group.placed:
        members = recovery.arrange(members, group.settings.world_size)
    group = replace(group, members=members, reason=reason, num_failed_epochs=0)
    if broke:
        return replace(_raise_epoch(group, group.epoch + 1, now), broken_ranks=ranks)
    phase_changed = group.phase is not Phase.FORMING
    broken = tuple(sorted({*group.broken_ranks, *ranks}))
    return replace(group, phase=Phase.FORMING, since=now if phase_changed else group.since, broken_ranks=broken)


def _break_epoch(group: Group, reason: str, ranks: tuple[int, ...], now: float) -> Group:
    """End the epoch while every member is alive: a member's report, or a deadline."""
    left = _left_to_go_on(group, ranks) if ranks else None
    if left is not None and left != group.active:
        return _go_on(group, left, (), reason, ranks, now)
    failed = group.num_failed_epochs + 1 if group.phase is Phase.EXCHANGING else 0
    group = _raise_epoch(group, group.epoch + 1, now)
    group = replace(group, reason=reason, broken_ranks=ranks, num_failed_epochs=failed)
    if failed < group.settings.max_failed_epochs:
        return group
    return replace(group, phase=Phase.FAILED, reason=f"{failed} epochs broke in a row; the last: {reason}")


def _left_to_go_on(group: Group, ranks: Sequence[int]) -> frozenset[int] | None:
    """The ranks that can go on without these, or None: the group must form anew. All of them have mapped each other."""
    serves = group.phase is Phase.SERVING or (group.phase is Phase.EXCHANGING and group.active is not None)
    if not group.settings.elastic or not serves:
        return None
    members = range(group.settings.world_size) if group.active is None else group.active
    return frozenset(members).difference(ranks) or None


def _go_on(
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


def _those_that_count(group: Group) -> Sequence[Member]:
    return [member for member in group.members if group.active is None or member.rank in group.active]


def _missing(group: Group) -> str:
    assert group.active is not None
    return ", ".join(f"rank {rank}" for rank in range(group.settings.world_size) if rank not in group.active)


def _raise_epoch(group: Group, epoch: int, now: float) -> Group:
    """A new epoch: every region and every ready is void."""
    members = group.members.each(lambda member: replace(member, region=b"", ready=False, loaded=False))
    return replace(group, epoch=epoch, phase=Phase.FORMING, since=now, members=members, active=None)


def _forgive_pause(group: Group, pause: float) -> Group:
    """When this process itself stood still (suspended, starved), nobody could reach it: no lease runs meanwhile."""
    if pause <= group.settings.lease_s / 4:
        return group
    members = group.members.each(lambda member: replace(member, lease_until=member.lease_until + pause))
    until = None if group.recover_until is None else group.recover_until + pause
    return replace(group, members=members, recover_until=until)


def _check_same_kind(worker: Worker, member: Member | None) -> None:
    """`member`: any other one, None = there is none. Members are all of one kind."""
    if member is None:
        return
    for field in ("abi", "model", "transport"):
        here, there = getattr(member.worker, field), getattr(worker, field)
        if here != there:
            message = f"worker {worker.uid}: {field}: expected {here!r} as {member} has, got {there!r}"
            raise _Refused(Refusal.MIXED_GROUP, message)


def _check_same_placement(group: Group, member: Member, placement: int | None) -> None:
    """Ranks with different tables send tokens to slots that hold other experts, and no rank notices."""
    for other in group.members:
        if other.ready and other is not member and None not in (placement, other.placement):
            if other.placement != placement:
                message = f"ready: placement: expected {other.placement} as {other} has in epoch {group.epoch}"
                raise _Refused(Refusal.MIXED_PLACEMENT, f"{message}, got {placement} from {member}")
            return


def _require(group: Group, event: PublishRegion | Ready | Heartbeat, epoch: int | None) -> Member:
    """The live member that sent the event, at the epoch it must speak of (None: any)."""
    member = group.member(event.uid)
    if member is None or event.incarnation > member.worker.incarnation:
        raise _Refused(Refusal.UNKNOWN_WORKER, f"worker {event.uid}: not registered here (any more)")
    if event.incarnation < member.worker.incarnation:
        raise _Refused(Refusal.REPLACED, f"worker {event.uid}: a newer process holds {member}")
    if epoch is not None and (group.recovering or epoch != group.epoch):
        expected = "none before the group has recovered" if group.recovering else str(group.epoch)
        raise _Refused(Refusal.WRONG_EPOCH, f"epoch: expected {expected}, got {epoch}")
    return member


def _update(group: Group, member: Member) -> Group:
    return replace(group, members=group.members.put(member))


def _rank(member: Member) -> int:
    return member.rank


def _visible(group: Group) -> tuple[Any, ...]:
    """What watchers are told of when it changes; leases, reports and single regions are not. Members are the same as
    long as their `places` are the same object."""
    return group.phase, group.epoch, group.sealed, group.recovering, group.reason, id(group.members.places)
