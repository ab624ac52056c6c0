"""The group as a pure state machine: `advance(group, event, now) -> (group, effects)`. No I/O, no clock, no thread.

    FORMING ──every slot taken──▶ EXCHANGING ──all regions published, all ready──▶ SERVING
       ▲                              │  ▲                                            │
       │                              │  └─ epoch + 1 ◀─ the planned epoch prepared ──┤
       └──────────────── epoch + 1 ◀──┴── slot empty, or epoch broken ────────────────┘

An epoch is one table of regions. It is *sealed* when the last region is published: from then on members map each
other's memory, and any change of a member (lost, left, replaced, reported silent) ends the epoch, once. Before that no
member has used the table, so members may leave or be replaced within the epoch. So the loss of one worker costs exactly
one epoch, in whatever order its lease, its peers' reports and its successor arrive. Epochs that break before they
served are followed by others for ever, after a pause (`pause_s`) while the members stay the same.

A new process has no memory. For `recover_s` it collects the memory of workers (`Prior`). If all of them agree, the
group continues at the same epoch; else one begins above every reported epoch, by a leap (`recovery.epoch_above`).

docs/group-protocol.md has the tables. ranks.py assigns ranks, recovery.py decides on the memory of workers, elastic.py
continues without lost ranks, resize.py has planned epochs of more or fewer ranks, blame.py finds sick ranks, cordon.py
has the bars. `difference` refuses a mixed group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from crossdock.control.group import blame, cordon, elastic, recovery, resize
from crossdock.control.group.blame import Verdict
from crossdock.control.group.elastic import raise_epoch
from crossdock.control.group.group_state import (
    Cordon,
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
    RefusedWorker,
    Register,
    Scale,
    Settings,
    Slow,
    Tick,
    Uncordon,
    Waits,
    Wanted,
    Worker,
    with_first_ranks,
)
from crossdock.control.group.ranks import claimed_or_free_rank

Result = tuple[Group, tuple[Effect, ...]]

MAX_SORTED_ON_ARRIVAL = 64
"""While the first group gathers, members are sorted into ranks at each arrival up to this number; beyond it they get
preliminary ranks in the order of arrival, since sorting at each arrival would cost R^2 log R."""

_LONGEST = 400
"""Characters of a refusal that are shown."""
MAX_PAUSE_S = 10.0
"""Longest pause between two epochs; see `pause_s`."""


def difference(worker: Worker, members: Sequence[Member]) -> str | None:
    """The first field in which `worker` differs from `members`, which are equal to each other: field, expected, got.
    None: it fits."""
    return _first_difference(members[0], _kind(members[0].worker), _kind(worker)) if members else None


def is_other_host(worker: Worker, other: Worker) -> bool:
    """Whether two workers run under different kernels; those of an unknown boot id may be one."""
    return "" not in (worker.boot_id, other.boot_id) and worker.boot_id != other.boot_id


def name_taken(member: Member) -> str:
    """Why a process of another host is no successor of a live member of its uid, and what to do."""
    return (
        f"{member} is alive on another host of this name, at {member.worker.address}; "
        "set worker.uid on one of the two hosts, or wait for the lease to end if it is dead"
    )


def _first_difference(member: Member, expected: dict[str, str], got: dict[str, str]) -> str | None:
    for field in expected | got:  # in the order of `expected`
        if expected.get(field) != got.get(field):
            return f"{field}: expected {_shown(expected, field)} as {member} has, got {_shown(got, field)}"
    return None


def _shown(fields: dict[str, str], field: str) -> str:
    return repr(fields[field]) if field in fields else "nothing"


def _kind(worker: Worker) -> dict[str, str]:
    provider = worker.network.provider if worker.network else "none"
    settings = {f"communicator.{name}": value for name, value in worker.communicator}
    return {"abi": worker.abi, "model": worker.model, "transport": worker.transport, "network": provider, **settings}


class _Refused(Exception):
    """Aborts a rule; `step` turns it into a Refuse effect on the unchanged group."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


def new_group(settings: Settings, now: float, leap: int = 0) -> Group:
    """Initial state of a process: empty, in recovery of a group that may still serve. `leap`: random in 1..MAX_LEAP; 0
    only where there is no other control plane, before or after."""
    size = settings.bounded(settings.world_size)
    return Group(
        settings=settings,
        world_size=size,
        wanted=Wanted(size),
        phase=Phase.FORMING,
        epoch=0,
        members=Members(),
        owners=(None,) * size,
        placed=False,
        recover_until=now + settings.recover_s,
        highest_reported=0,
        since=now,
        ticked_at=now,
        num_failed_epochs=0,
        reason="control plane started: waiting for workers",
        broken_ranks=(),
        leap=leap,
    )


def advance(group: Group, event: Event, now: float) -> Result:
    """Apply one event.

    Args:
        group: the state before.
        event: what happened.
        now: seconds on a monotonic clock, never smaller than in the step before.

    Returns:
        The new state and its effects. A refused event gives the same state and one Refuse.
    """
    try:
        after, effects = _RULES[type(event)](group, event, now)
    except _Refused as refused:
        return group, (Refuse(refused.refusal, str(refused)),)
    after = _advance(after, now)
    if after.members.positions is not group.members.positions:  # whoever is gone without another cause
        told = {effect.uid for effect in effects if isinstance(effect, Lost)}
        gone = (member for member in group.members if member.uid not in told and after.member(member.uid) is None)
        effects += tuple(Lost(member.rank, member.uid, "scaled") for member in gone)
    if _visible(after) != _visible(group):
        effects += (Publish(),)
    return after, effects


def _register(group: Group, event: Register, now: float) -> Result:
    worker = event.worker
    group = recovery.learn_size(group, event)
    known = group.member(worker.uid)
    # The same process again.
    if known is not None and worker.incarnation == known.worker.incarnation:
        return _update(group, replace(known, lease_until=now + group.settings.lease_s)), ()
    # Another process of that uid: refused, or its successor.
    if known is not None and is_other_host(worker, known.worker):
        if not (group.recovering and event.prior is not None and known.claim is None):
            raise _Refused(Refusal.NAME_TAKEN, f"worker {worker.uid}: {name_taken(known)}")
    elif known is not None and worker.incarnation < known.worker.incarnation:
        raise _Refused(Refusal.REPLACED, f"worker {worker.uid}: a newer process holds {known}")
    # Does it fit the group, and may it enter?
    if wrong := difference(worker, [member for member in group.members if member is not known]):
        raise _Refused(Refusal.MIXED_GROUP, f"worker {worker.uid}: {wrong}")
    if (bar := cordon.is_kept_out(group, event)) is not None:
        raise _Refused(Refusal.BARRED, f"worker {worker.uid}: {bar.cause}: {bar.reason}")
    # A full group: a member that remembers replaces one that does not.
    if (
        known is None
        and len(group.members) >= group.num_slots
        and (newcomer := recovery.newcomer(group, event.prior)) is not None
    ):
        reason = f"{newcomer} is replaced by {worker.uid}, which remembers the group"
        group = _add(_remove(group, (newcomer,), reason, now), event, now)
        return group, (Lost(newcomer.rank, newcomer.uid, "replaced"),)
    if known is None and len(group.members) >= group.num_slots:
        message = f"worker {worker.uid}: all {group.num_slots} slots have live members"
        raise _Refused(Refusal.GROUP_FULL, message)
    # A new member, or the successor of one.
    if known is None:
        return _add(group, event, now), ()
    moved = worker.address.rpartition(":")[0] != known.worker.address.rpartition(":")[0]
    elsewhere = f" at {worker.address}; if two hosts have one name, set worker.uid on one of them" if moved else ""
    reason = f"{known} replaced: a newer process of it registered{elsewhere}"
    group = _add(_remove(group, (known,), reason, now), event, now)
    return replace(group, reason=reason), (Lost(known.rank, known.uid, "replaced"),)


def _scale(group: Group, event: Scale, now: float) -> Result:
    least, most = group.settings.min_workers, group.settings.most_workers
    if not least <= event.workers <= most:
        raise _Refused(Refusal.BAD_VALUE, f"workers: expected {least}..{most}, got {event.workers}")
    if group.settings.follow_workers:
        raise _Refused(Refusal.WRONG_PHASE, "scale: expected follow_workers: false; start or stop workers instead")
    if group.recovering or not group.placed:
        raise _Refused(Refusal.WRONG_PHASE, f"scale: expected a group that has formed, got none yet: {group.why}")
    if event.workers == group.wanted.workers:
        return group, ()
    return resize.want(group, Wanted(event.workers, group.wanted.version + 1)), ()


def _publish_region(group: Group, event: PublishRegion, now: float) -> Result:
    member = _require(group, event, event.epoch)
    if not event.region:
        raise _Refused(Refusal.BAD_VALUE, "region: expected some bytes, got none")
    if not group.placed:
        raise _Refused(Refusal.WRONG_PHASE, f"region: ranks are not final: {group.reason}")
    if member.rank >= group.world_size:
        raise _Refused(Refusal.WRONG_PHASE, f"region: {member} does not take part in epoch {group.epoch}")
    if group.sealed and event.region != member.region:
        raise _Refused(Refusal.WRONG_PHASE, f"region: {member} has published another one in epoch {group.epoch}")
    return _update(group, replace(member, region=event.region, lease_until=now + group.settings.lease_s)), ()


def _ready(group: Group, event: Ready, now: float) -> Result:
    member = _require(group, event, event.epoch)
    if not group.sealed:
        raise _Refused(Refusal.WRONG_PHASE, f"ready: {member} cannot be ready before all regions are published")
    if member.rank not in group.taking_part:
        raise _Refused(Refusal.WRONG_PHASE, f"ready: {member} is not active in epoch {group.epoch}")
    _check_same_placement(group, member, event.placement)
    lease_until = now + group.settings.lease_s
    return _update(group, replace(member, ready=True, placement=event.placement, lease_until=lease_until)), ()


def _heartbeat(group: Group, event: Heartbeat, now: float) -> Result:
    member = _require(group, event, None)
    wrong = [rank for rank in event.silent_ranks if rank >= group.world_size]
    if wrong and event.epoch >= group.epoch:  # the epoch before may have had more
        raise _Refused(Refusal.BAD_VALUE, f"silent_ranks: expected < {group.world_size}, got {wrong}")
    lease_until = now + group.settings.lease_s
    group = _update(group, replace(member, lease_until=lease_until, prepared=event.prepared, leaving=event.leaving))
    broken = bool(event.silent_ranks or event.fault)
    if group.recovering:
        return recovery.note_heartbeat(group, event, broken), ()
    if event.epoch > group.epoch:
        reason = f"{member} is at epoch {event.epoch} already: the control plane restarted without knowing of it"
        return replace(raise_epoch(group, recovery.epoch_above(group, event.epoch), now), reason=reason), ()
    if member.rank not in group.taking_part:
        return group, ()
    late = event.epoch == group.epoch - 1 and bool(event.silent_ranks)
    current = event.epoch == group.epoch and group.phase in {Phase.EXCHANGING, Phase.SERVING}
    if not broken or not (current or late):
        return group, ()
    return _blame(group, event, member, now)


def _blame(group: Group, event: Heartbeat, member: Member, now: float) -> Result:
    """Process a report that a member's data plane failed in this epoch, or in the previous one, ended by others."""
    blamed = [m for m in group.members if m.rank in event.silent_ranks and m.uid != member.uid]
    subject = f" silent: {', '.join(map(str, blamed))}" if blamed else " a fault"
    reason = f"{member} reported{subject}" + (f": {event.fault}" if event.fault else "")
    current = event.epoch == group.epoch
    group, effects = blame.record(group, event, reason, now)
    if current and blamed and elastic.can_continue(group):
        group = _decide(group, now)
    elif current:
        group = _break_epoch(group, reason, tuple(m.rank for m in blamed), now, silent=True)
    group, lost = _quarantine(group, blame.to_quarantine(group) if effects else (), now)
    return group, (*effects, *lost)


def _decide(group: Group, now: float) -> Group:
    """An elastic group continues without the reported ranks, once it has enough reports."""
    if not blame.is_due(group, now):
        return group
    return _break_epoch(group, blame.summary(group), blame.ranks_to_exclude(group), now, silent=True)


def _quarantine(group: Group, verdicts: Sequence[Verdict], now: float) -> Result:
    """Remove sick members and bar them for a while."""
    if not verdicts:
        return group, ()
    reason = "; ".join(f"{verdict.member} quarantined: {verdict.reason}" for verdict in verdicts[: blame.MAX_NAMED])
    bars = [blame.bar(group, verdict, now) for verdict in verdicts]
    group = _remove(group, [verdict.member for verdict in verdicts], reason, now)
    lost = tuple(Lost(verdict.member.rank, verdict.member.uid, "quarantined") for verdict in verdicts)
    return replace(cordon.put(group, bars), reason=reason), lost


def _leave(group: Group, event: Leave, now: float) -> Result:
    member = group.member(event.uid)
    if member is None or member.worker.incarnation != event.incarnation:
        return group, ()
    reason = f"{member} left" + (f": {event.reason}" if event.reason else "")
    return _remove(group, (member,), reason, now), (Lost(member.rank, member.uid, "left"),)


def _uncordon(group: Group, event: Uncordon, now: float) -> Result:
    return blame.forget(cordon.lift(group, event.uids), event.uids), ()


def _slow(group: Group, event: Slow, now: float) -> Result:
    return _quarantine(group, blame.replaceable(group, event), now)


def _refused(group: Group, event: RefusedWorker, now: float) -> Result:
    wanted = not group.full or group.member(event.uid) is not None
    return (replace(group, refused=replace(event, message=event.message[:_LONGEST])) if wanted else group), ()


def _tick(group: Group, event: Tick, now: float) -> Result:
    group = replace(_forgive_pause(group, now - group.ticked_at), ticked_at=now)
    group = resize.follow(blame.expire(cordon.expire(group, now), now))
    silent = tuple(member for member in group.members if member.lease_until <= now)
    if silent:
        reason = ", ".join(str(member) for member in silent) + " lost: lease expired"
        effects = tuple(Lost(member.rank, member.uid, "lease") for member in silent)
        return _remove(group, silent, reason, now), effects
    if group.phase is Phase.EXCHANGING and now - group.since >= group.settings.form_timeout_s:
        return _time_out(group, now)
    due = blame.is_due(group, now)
    group = _decide(group, now)
    sick = blame.to_quarantine(group) if blame.may_act(group, new_reports=due) else ()
    return _quarantine(group, sick, now)


def _time_out(group: Group, now: float) -> Result:
    """End an epoch that timed out. Spares replace the late members."""
    late = [m for m in group.members if m.rank in group.taking_part and not (m.ready if group.sealed else m.region)]
    laggards = blame.laggards(group, late)
    what = "ready" if group.sealed else "published"
    names = ", ".join(str(member) for member in late)
    reason = f"epoch {group.epoch} timed out after {group.settings.form_timeout_s:g} s: not {what}: {names}"
    return _quarantine(_break_epoch(group, reason, tuple(member.rank for member in late), now), laggards, now)


_RULES: dict[type[Any], Callable[[Group, Any, float], Result]] = {
    Register: _register,
    Scale: _scale,
    RefusedWorker: _refused,
    Waits: lambda group, event, now: (cordon.add_spare(group, event.worker, now), ()),
    PublishRegion: _publish_region,
    Ready: _ready,
    Heartbeat: _heartbeat,
    Leave: _leave,
    Cordon: lambda group, event, now: (cordon.put(group, event.bars), ()),
    Uncordon: _uncordon,
    Slow: _slow,
    Tick: _tick,
}


def _advance(group: Group, now: float) -> Group:
    """Advance the phase as far as the members allow, after any event."""
    if group.recover_until is not None:
        if not recovery.is_complete(group) and now < group.recover_until:
            return group
        group = recovery.decide(group, now)
    group = resize.settle(group)
    if group.phase is Phase.FORMING and group.full and now - group.since >= pause_s(group.num_failed_epochs):
        if not group.placed:
            group = replace(group, members=with_first_ranks(group.members, group.world_size))
        group = resize.with_owners(replace(group, phase=Phase.EXCHANGING, since=now, placed=True))
    expected = len(group.taking_part)
    if group.phase is Phase.EXCHANGING and group.members.num_ready == expected:
        without = f": continuing without {elastic.missing(group)}" if group.active is not None else ""
        reason = f"all {expected} ranks ready{without}"
        group = replace(group, phase=Phase.SERVING, since=now, num_failed_epochs=0, reason=reason)
    return resize.switch(group, now)


def _add(group: Group, event: Register, now: float) -> Group:
    worker, prior = event.worker, event.prior
    member = Member(worker, rank=0, lease_until=now + group.settings.lease_s, claim=prior)
    # Its rank: kept, by place, or in order of arrival until all are here.
    if group.placed:
        rank = claimed_or_free_rank(worker.place, member.claimed_rank, group.slots)
        members = sorted((*group.members, replace(member, rank=rank)), key=_rank)
        owners = (*group.owners[:rank], worker.place, *group.owners[rank + 1 :])
        group = replace(group, owners=owners, members=Members(members))
    elif len(group.members) < MAX_SORTED_ON_ARRIVAL:
        group = replace(group, members=with_first_ranks((*group.members, member), group.num_slots))
    else:
        members = [*group.members, replace(member, rank=len(group.members))]
        group = replace(group, members=Members(members))
    # It is no spare any more; say who is missing.
    group = cordon.remove_spare(group, worker.uid)
    joined = group.member(worker.uid)
    missing = group.num_slots - len(group.members)
    reason = f"{joined} joined" + (f": waiting for {missing} of {group.num_slots}" if missing else "")
    group = replace(group, reason=reason, refused=None, num_failed_epochs=0)
    # What it remembers may be newer than this control plane.
    if prior is None:
        return group
    if not group.recovering and prior.epoch >= group.epoch:
        # A memory of this epoch or a later one is from another process: two tables must not share an epoch.
        group = raise_epoch(group, recovery.epoch_above(group, prior.epoch), now)
    return replace(group, highest_reported=max(group.highest_reported, prior.epoch))


def _remove(group: Group, gone: Sequence[Member], reason: str, now: float) -> Group:
    ranks = tuple(member.rank for member in gone)
    group = blame.forget(group, (member.uid for member in gone))
    if min(ranks) >= group.world_size:  # standbys, of which no epoch depends
        return replace(group, members=Members(m for m in group.members if m.rank not in ranks), reason=reason)
    if (left := elastic.survivors(group, ranks)) is not None:
        return elastic.continue_with(group, left, gone, reason, ranks, now)
    broke, lost = group.sealed, frozenset(ranks)
    members = Members(member for member in group.members if member.rank not in lost)
    if not members:  # the next workers may be an entirely different set
        group = replace(group, placed=False, owners=(None,) * group.world_size)
    if not group.placed:
        members = with_first_ranks(members, group.world_size)
    group = replace(group, members=members, reason=reason, num_failed_epochs=0)
    if broke:
        return replace(raise_epoch(group, group.epoch + 1, now), broken_ranks=ranks)
    phase_changed = group.phase is not Phase.FORMING
    broken = tuple(sorted({*group.broken_ranks, *ranks}))
    return replace(group, phase=Phase.FORMING, since=now if phase_changed else group.since, broken_ranks=broken)


def _break_epoch(group: Group, reason: str, ranks: tuple[int, ...], now: float, *, silent: bool = False) -> Group:
    """End the epoch while every member is alive: a member's report, or a deadline."""
    left = elastic.survivors(group, ranks) if ranks else None
    if left is not None and left != group.active:
        return elastic.continue_with(group, left, (), reason, ranks, now)
    failed = 0
    if group.phase is Phase.EXCHANGING:  # what waited for a silent rank at length took its time, and may heal
        waited = silent and bool(ranks) and now - group.since >= group.settings.lease_s
        failed = group.num_failed_epochs + (0 if waited else 1)
    if pause := pause_s(failed):
        reason = f"{failed} epochs broke in a row, the next begins in {pause:g} s; the last: {reason}"
    group = raise_epoch(group, group.epoch + 1, now)
    return replace(group, reason=reason, broken_ranks=ranks, num_failed_epochs=failed)


def pause_s(num_failed_epochs: int) -> float:
    """Seconds between the end of an epoch and the next one of the same members. `num_failed_epochs`: epochs in a row
    that broke before they served. The pause gives a shortage on a worker time to pass."""
    return min(MAX_PAUSE_S, 0.1 * 2.0 ** min(num_failed_epochs - 2, 10)) if num_failed_epochs > 1 else 0.0


def _forgive_pause(group: Group, pause: float) -> Group:
    """Extend all leases by a pause of this process (suspended, starved), during which no worker could reach it."""
    if pause <= group.settings.lease_s / 4:
        return group
    members = group.members.each(lambda member: replace(member, lease_until=member.lease_until + pause))
    until = None if group.recover_until is None else group.recover_until + pause
    return replace(group, members=members, recover_until=until)


def _check_same_placement(group: Group, member: Member, placement: int) -> None:
    """All ranks must hold the same tables: otherwise tokens silently reach slots with other experts."""
    other = next((other for other in group.members if other.ready and other is not member), None)
    if other is not None and other.placement != placement:
        message = f"ready: placement: expected {other.placement} as {other} has in epoch {group.epoch}"
        raise _Refused(Refusal.MIXED_PLACEMENT, f"{message}, got {placement} from {member}")


def _require(group: Group, event: PublishRegion | Ready | Heartbeat, epoch: int | None) -> Member:
    """The live member that sent the event, if it is for `epoch` (None: any)."""
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
    """The parts of the state whose change is published; leases, reports and single regions are not. The membership is
    unchanged as long as `positions` is the same object."""
    members = id(group.members.positions)
    return group.phase, group.epoch, group.sealed, group.recovering, group.why, group.bars, group.wanted, members
