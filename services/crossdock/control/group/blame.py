"""Detection of sick ranks from members' reports of silent peers. Pure; group.py carries it out.

A single report may be wrong: the reporter itself may be cut off or sick. So a rank is quarantined only on reports of
two members. Reports count unless their author is reported silent by two others, or has reported more than half of the
other ranks. In a group of two there is no second witness, and no rank is quarantined.

    once        two members in the same epoch       replaced by a spare, if one waits
    repeatedly  in `blame_epochs` epochs, by two    the same; an elastic group excludes it in any case

If no spare waits and the group would have to stop, a sick rank keeps its slot and is named (`sick`), as is a rank that
one member alone reports in `blame_epochs` epochs. Fewer than half of the ranks are ever in quarantine. Reports about a
process are dropped when it ends: a crash is no sickness.

An elastic group collects reports for HOLD_S, or until every rank has reported or is named, then excludes the fewest
ranks such that no two remaining ranks report each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crossdock.control.group import elastic
from crossdock.control.group.group_state import Bar, Blame, Blamed, Group, Heartbeat, Member, Phase, Slow

HOLD_S = 0.1
"""Members that wait for the same peer report it within milliseconds of each other."""
MAX_NAMED = 8
"""Limit of members named in one text."""
_MAX_BLAMES = 1 << 16
_TWO = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a member is sick. repeated: the bar covers its next process, too."""

    member: Member
    reason: str
    repeated: bool


def record(group: Group, event: Heartbeat, report: str, now: float) -> tuple[Group, tuple[Blamed, ...]]:
    """Record a member's report, once per accused rank and epoch. A report of the previous epoch counts only if another
    member's report ended it, and only for ranks named in that report, too."""
    accuser = group.member(event.uid)
    assert accuser is not None
    named = {blame.accused for blame in group.blames if blame.epoch == event.epoch}
    known = {blame.accused for blame in group.blames if (blame.epoch, blame.accuser) == (event.epoch, event.uid)}
    late = event.epoch != group.epoch
    accused = [
        member
        for member in group.members
        if member.rank in event.silent_ranks
        and member.uid not in known | {event.uid}
        and (not late or member.uid in named)
    ]
    uids = {member.uid for member in accused}
    members = group.members.each(lambda m: replace(m, num_blamed=m.num_blamed + 1) if m.uid in uids else m)
    more = tuple(Blame(event.epoch, event.uid, member.uid, now, report) for member in accused)
    effects = tuple(Blamed(m.rank, accuser.rank, m.num_blamed) for m in members if m.uid in uids)
    return replace(group, members=members, blames=(*group.blames, *more)[-_MAX_BLAMES:]), effects


def forget(group: Group, uids: Iterable[str]) -> Group:
    """Drop the reports about these."""
    gone = frozenset(uids)
    return replace(group, blames=tuple(blame for blame in group.blames if blame.accused not in gone))


def expire(group: Group, now: float) -> Group:
    """Drop reports older than the window."""
    if group.blames and group.blames[0].at <= now - group.settings.blame_window_s:
        kept = tuple(blame for blame in group.blames if blame.at > now - group.settings.blame_window_s)
        group = replace(group, blames=kept)
    return group


def held(group: Group) -> Sequence[Blame]:
    """Reports of this epoch that an elastic group has not acted on yet."""
    return [blame for blame in group.blames if blame.epoch == group.epoch] if elastic.can_continue(group) else []


def is_due(group: Group, now: float) -> bool:
    """Whether an elastic group has enough reports to decide."""
    reports = held(group)
    if not reports or now - reports[0].at >= HOLD_S:
        return bool(reports)
    involved = {blame.accuser for blame in reports} | {blame.accused for blame in reports}
    others = [member for member in group.members if member.rank in group.taking_part and member.uid not in involved]
    return len(group.taking_part) <= _TWO or not others


def ranks_to_exclude(group: Group) -> tuple[int, ...]:
    """Ranks to exclude, chosen greedily: the one in the most reports of this epoch, as subject or author; ties by the
    number of reports in the window, then by reports as subject."""
    ranks = {member.uid: member.rank for member in group.members if member.rank in group.taking_part}
    pairs = {(b.accuser, b.accused) for b in held(group) if b.accuser in ranks and b.accused in ranks}
    near, before = _partners(pairs), _partners((b.accuser, b.accused) for b in group.blames)
    subjects = Counter(accused for _, accused in pairs)
    out: list[int] = []
    while near:
        worst = max(near, key=lambda uid: (len(near[uid]), len(before[uid]), subjects[uid], ranks[uid]))
        for other in near.pop(worst):
            near[other].discard(worst)
            if not near[other]:
                del near[other]
        out.append(ranks[worst])
    return tuple(sorted(out))


def summary(group: Group) -> str:
    """The held reports as one text."""
    reports = list(dict.fromkeys(blame.report for blame in held(group)))
    more = f"; and {len(reports) - MAX_NAMED} more reports" if len(reports) > MAX_NAMED else ""
    return "; ".join(reports[:MAX_NAMED]) + more


def verdicts(group: Group) -> list[Verdict]:
    """Members reported silent by two credible members, the most often blamed first."""
    if not group.blames:
        return []
    doubted = _doubted(group)
    said: dict[str, list[Blame]] = {}
    for blame in group.blames:
        if blame.accuser not in doubted:
            said.setdefault(blame.accused, []).append(blame)
    found = []
    for uid, blames in sorted(said.items(), key=lambda pair: -len(pair[1])):
        member, witnesses = group.member(uid), {blame.accuser for blame in blames}
        if member is None or len(witnesses) < _TWO:
            continue
        epochs = {blame.epoch for blame in blames}
        last = {blame.accuser for blame in blames if blame.epoch == max(epochs)}
        if len(epochs) >= group.settings.blame_epochs:
            window = f"{group.settings.blame_window_s:g} s"
            reason = f"reported silent in {len(epochs)} epochs by {_names(witnesses)} within {window}"
            found.append(Verdict(member, reason, repeated=True))
        elif len(last) >= _TWO and max(epochs) >= group.epoch - 1:
            found.append(Verdict(member, f"reported silent by {_names(last)}", repeated=False))
    return found


def sick(group: Group) -> Mapping[str, str]:
    """Why a member that keeps its slot counts as sick, by uid, or as one of two of which one is."""
    return _disputed(group) | {verdict.member.uid: verdict.reason for verdict in verdicts(group) if verdict.repeated}


def _disputed(group: Group) -> dict[str, str]:
    """Members reported by a single other member in `blame_epochs` epochs: shown, but not quarantined, since the accuser
    may be the sick one."""
    epochs: dict[tuple[str, str], set[int]] = {}
    for blame in group.blames:
        epochs.setdefault((blame.accused, blame.accuser), set()).add(blame.epoch)
    return {
        accused: f"reported silent in {len(seen)} epochs by {accuser} alone: either of the two may be sick"
        for (accused, accuser), seen in epochs.items()
        if len(seen) >= group.settings.blame_epochs and group.member(accused) is not None
    }


def to_quarantine(group: Group) -> list[Verdict]:
    """The sick ranks that the group can spare now."""
    waiting, chosen = _free_spares(group), []
    for verdict in verdicts(group)[: _quarantine_left(group)]:
        outside = group.active is not None and verdict.member.rank not in group.active
        if waiting > 0 or (verdict.repeated and outside):
            chosen.append(verdict)
            waiting -= 1
    return chosen


def replaceable(group: Group, event: Slow) -> list[Verdict]:
    """The rank that the latency verdict has called slow for `quarantine_slow_s`, if a spare can replace it now."""
    member = group.member(event.uid)
    if member is None or group.phase is not Phase.SERVING or not _quarantine_left(group) or _free_spares(group) < 1:
        return []
    return [Verdict(member, event.reason, repeated=False)]


def _quarantine_left(group: Group) -> int:
    """How many more ranks may be in quarantine."""
    if not group.settings.quarantine_s or group.recovering:
        return 0
    return max(0, (group.world_size - 1) // 2 - sum(bar.cause == "quarantined" for bar in group.bars))


def laggards(group: Group, late: Sequence[Member]) -> list[Verdict]:
    """The late members that spares can replace. With a complete table members wait for each other: only if most are in
    time is it clear which are late."""
    if not group.settings.quarantine_s or (group.sealed and len(late) * 2 >= len(group.taking_part)):
        return []
    what = "was not ready" if group.sealed else "had not loaded its experts"
    reason = f"{what} {group.settings.form_timeout_s:g} s after the group was complete"
    return [Verdict(member, reason, repeated=False) for member in late[: max(0, _free_spares(group))]]


def bar(group: Group, verdict: Verdict, now: float) -> Bar:
    """The bar of a sick member: for its process, or for every process of its uid."""
    worker = verdict.member.worker
    until, incarnation = now + group.settings.quarantine_s, 0 if verdict.repeated else worker.incarnation
    return Bar(worker.uid, worker.place.hostname, "quarantined", verdict.reason, until, incarnation)


def may_act(group: Group, *, new_reports: bool) -> bool:
    """Old reports do not disturb a serving group; `new_reports`: a member has just blamed another."""
    return bool(group.blames) and (new_reports or group.phase is not Phase.SERVING)


def _free_spares(group: Group) -> int:
    return len(group.spares) - len(group.lost_ranks)


def _doubted(group: Group) -> set[str]:
    """Members without credibility: two others blame them, or they blame more than half of the others."""
    by, of = {}, {}  # type: dict[str, set[str]], dict[str, set[str]]
    for blame in group.blames:
        by.setdefault(blame.accused, set()).add(blame.accuser)
        of.setdefault(blame.accuser, set()).add(blame.accused)
    loud = {uid for uid, named in of.items() if 2 * len(named) > group.world_size - 1}
    return loud | {uid for uid, accusers in by.items() if len(accusers - loud) >= _TWO}


def _partners(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    near: dict[str, set[str]] = {}
    for one, other in pairs:
        near.setdefault(one, set()).add(other)
        near.setdefault(other, set()).add(one)
    return near


def _names(uids: Iterable[str]) -> str:
    names = sorted(uids)
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
