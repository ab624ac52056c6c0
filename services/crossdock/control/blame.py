"""Who is sick: what members say of each other, and what follows from it. Pure; group.py carries it out.

One member's word may be wrong: the reporter itself may be cut off or ill. So a rank is quarantined only on the word of
two members, who are believed as long as they are not called silent by two others themselves and have not called more
than half of the other ranks silent. In a group of two there is no second witness, and nobody is quarantined.

    once        two members in the same epoch       its place goes to a spare, if one waits
    repeatedly  in `blame_epochs` epochs, by two    the same; an elastic group goes on without it in any case

Where no spare waits and the group would have to stop, a sick rank keeps its place and is named (`sick`), as is one
that a single member calls silent in `blame_epochs` epochs. Fewer than
half of the ranks are ever in quarantine. A process that ends takes what was said of it along: a crash is no sickness.

An elastic group hears the reports of HOLD_S before it goes on, or until every rank has been heard or named, and leaves
out the fewest ranks such that no two that go on call each other silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crossdock.control import elastic
from crossdock.control.group_state import Bar, Blame, Blamed, Group, Heartbeat, Member, Phase

HOLD_S = 0.1
"""Members that wait for the same peer notice its silence within milliseconds of each other."""
MAX_NAMED = 8
"""Members named in one sentence."""
_MAX_BLAMES = 1 << 16
_TWO = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a member is sick. repeated: its next process would be, too."""

    member: Member
    reason: str
    repeated: bool


def note(group: Group, event: Heartbeat, told: str, now: float) -> tuple[Group, tuple[Blamed, ...]]:
    """Keep what a member says of others, once for each of them and each epoch. A report of the epoch before counts
    only where another member's ended it, and of ranks that this one named, too."""
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
    more = tuple(Blame(event.epoch, event.uid, member.uid, now, told) for member in accused)
    effects = tuple(Blamed(m.rank, accuser.rank, m.num_blamed) for m in members if m.uid in uids)
    return replace(group, members=members, blames=(*group.blames, *more)[-_MAX_BLAMES:]), effects


def forget(group: Group, uids: Iterable[str]) -> Group:
    """What was said of these is void."""
    gone = frozenset(uids)
    return replace(group, blames=tuple(blame for blame in group.blames if blame.accused not in gone))


def expire(group: Group, now: float) -> Group:
    """Drop what is too old."""
    if group.blames and group.blames[0].at <= now - group.settings.blame_window_s:
        kept = tuple(blame for blame in group.blames if blame.at > now - group.settings.blame_window_s)
        group = replace(group, blames=kept)
    return group


def held(group: Group) -> Sequence[Blame]:
    """Reports of this epoch, on which an elastic group has not decided yet."""
    return [blame for blame in group.blames if blame.epoch == group.epoch] if elastic.can_go_on(group) else []


def is_due(group: Group, now: float) -> bool:
    """Whether an elastic group has heard enough to go on."""
    reports = held(group)
    if not reports or now - reports[0].at >= HOLD_S:
        return bool(reports)
    heard = {blame.accuser for blame in reports} | {blame.accused for blame in reports}
    others = [member for member in group.members if member.rank in group.taking_part and member.uid not in heard]
    return len(group.taking_part) <= _TWO or not others


def left_out(group: Group) -> tuple[int, ...]:
    """The ranks without which an elastic group goes on: again and again the one that stands in most reports of this
    epoch, as their subject or their author; of equal ones that which stands in most of the window, then the subject."""
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


def words(group: Group) -> str:
    """The held reports as one sentence."""
    told = list(dict.fromkeys(blame.told for blame in held(group)))
    more = f"; and {len(told) - MAX_NAMED} more reports" if len(told) > MAX_NAMED else ""
    return "; ".join(told[:MAX_NAMED]) + more


def verdicts(group: Group) -> list[Verdict]:
    """The members that two believed members call silent, the most often blamed first."""
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
            reason = f"called silent in {len(epochs)} epochs by {_names(witnesses)} within {window}"
            found.append(Verdict(member, reason, repeated=True))
        elif len(last) >= _TWO and max(epochs) >= group.epoch - 1:
            found.append(Verdict(member, f"called silent by {_names(last)}", repeated=False))
    return found


def sick(group: Group) -> Mapping[str, str]:
    """By uid, why a member that keeps its place counts as sick, or as one of two of which one is."""
    return _disputed(group) | {verdict.member.uid: verdict.reason for verdict in verdicts(group) if verdict.repeated}


def _disputed(group: Group) -> dict[str, str]:
    """Members that one other alone calls silent, in `blame_epochs` epochs: nobody is quarantined for that, since the
    accuser may be the sick one, but people must see it."""
    epochs: dict[tuple[str, str], set[int]] = {}
    for blame in group.blames:
        epochs.setdefault((blame.accused, blame.accuser), set()).add(blame.epoch)
    return {
        accused: f"called silent in {len(seen)} epochs by {accuser} alone: either of the two may be sick"
        for (accused, accuser), seen in epochs.items()
        if len(seen) >= group.settings.blame_epochs and group.member(accused) is not None
    }


def to_quarantine(group: Group) -> list[Verdict]:
    """The sick ranks that can be done without now."""
    if not group.settings.quarantine_s or group.recovering:
        return []
    room = (group.settings.world_size - 1) // 2 - sum(bar.cause == "quarantined" for bar in group.bars)
    waiting, chosen = _free_spares(group), []
    for verdict in verdicts(group)[: max(0, room)]:
        outside = group.active is not None and verdict.member.rank not in group.active
        if waiting > 0 or (verdict.repeated and outside):
            chosen.append(verdict)
            waiting -= 1
    return chosen


def laggards(group: Group, late: Sequence[Member]) -> list[Verdict]:
    """Those of the members that came too late whose places spares can take. Where the table is complete, members wait
    for each other: only if most are in time is it clear who is late."""
    if not group.settings.quarantine_s or (group.sealed and len(late) * 2 >= len(group.taking_part)):
        return []
    what = "was not ready" if group.sealed else "had not loaded its experts"
    reason = f"{what} {group.settings.form_timeout_s:g} s after the group was complete"
    return [Verdict(member, reason, repeated=False) for member in late[: max(0, _free_spares(group))]]


def bar(group: Group, verdict: Verdict, now: float) -> Bar:
    """What keeps a sick member out for a while: its process, or every process of its name."""
    worker = verdict.member.worker
    until, incarnation = now + group.settings.quarantine_s, 0 if verdict.repeated else worker.incarnation
    return Bar(worker.uid, worker.place.hostname, "quarantined", verdict.reason, until, incarnation)


def may_act(group: Group, *, news: bool) -> bool:
    """A group that serves is not disturbed for what was said before; `news`: a member has just blamed another."""
    return bool(group.blames) and (news or group.phase is not Phase.SERVING)


def _free_spares(group: Group) -> int:
    return len(group.spares) - len(group.lost_ranks)


def _doubted(group: Group) -> set[str]:
    """Members whose word does not count: two others blame them, or they blame more than half of the others."""
    by, of = {}, {}  # type: dict[str, set[str]], dict[str, set[str]]
    for blame in group.blames:
        by.setdefault(blame.accused, set()).add(blame.accuser)
        of.setdefault(blame.accuser, set()).add(blame.accused)
    loud = {uid for uid, named in of.items() if 2 * len(named) > group.settings.world_size - 1}
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
