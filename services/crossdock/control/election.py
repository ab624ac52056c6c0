"""Which of several control planes decides: what to write into a shared lease, from what was read there. Pure.

    observe(state, seen, now), then wanted(state, now, leap) ─▶ the lease to write now, or None: wait

Nobody compares wall clocks. Who waits counts, by its own clock, for how long the lease has not changed, and takes it
only after `lease_s` of that; who leads stops `FENCE` of `lease_s` after it *began* its last renewal that worked. So the
former leader has stopped before the next one begins, however slow the network and however wrong the clocks of the day
are; what it said late is told by its lower term. A term is greater than every one that was in the lease. What a member
has seen counts only where it is `near` that, for anybody may claim a number, and a great one would use all terms up.

A lease that is missing may have been deleted from under a leader. So it is made without a holder first, and taken after
`lease_s` like any other; so is one that somebody else has made and nobody has written to. It has forgotten its term: so
each reign leaps ahead by a random number, and does not repeat a term that somebody else took after a number which both
had seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FENCE = 2 / 3
"""Part of `lease_s` for which a leader that cannot renew goes on."""
RENEWALS_PER_LEASE = 5
RELEASED_LEASE_S = 1.0
"""So long a lease that was given back is left alone; the API takes no shorter time."""
MAX_LEAP = 1 << 12
"""A leap is less than this; the API keeps terms below 2^31, which is a million reigns."""
NEAR = 4 * MAX_LEAP
"""A reign that this process has not seen in the lease, because it was deleted meanwhile, is not further ahead."""
MAX_TERM = (1 << 31) - 1
LAST_LEAPING_TERM = MAX_TERM - (1 << 20)
"""From here on reigns leap no more, and nobody's word counts."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What is in the shared place.

    Attributes:
        holder: who leads; "" = nobody: it was given back, or has just been made.
        address: host:port of the holder.
        term: of the holder.
        lease_s: how long the holder counts on it; 0: nobody has written to it yet.
        version: changes with every write; only the place itself makes them.
    """

    holder: str
    address: str
    term: int
    lease_s: float
    version: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Of one candidate.

    Attributes:
        identity: unique for each process.
        address: host:port under which others reach it.
        lease_s: what it writes.
        seen: what was read last; None = nothing there.
        since: when that was read first.
        looked: whether anything was read yet.
        term: of its reign; 0 = it does not lead.
        until: when its reign ends unless it renews.
        heard: greatest term that was in the lease, or that a member told of and that was `near`.
    """

    identity: str
    address: str
    lease_s: float
    seen: Lease | None = None
    since: float = 0.0
    looked: bool = False
    term: int = 0
    until: float = 0.0
    heard: int = 0


def observe(state: State, seen: Lease | None, now: float) -> State:
    """Take in what was read. A leader that reads another holder, or nothing, leads no more."""
    if not state.looked or seen != state.seen:
        state = replace(state, seen=seen, since=now, looked=True)
    if seen is not None:
        state = hear(state, seen.term)
    lost = seen is None or seen.holder != state.identity
    return replace(state, term=0) if state.term and (lost or now >= state.until) else state


def hear(state: State, term: int) -> State:
    """There was a reign of that term; a leader of a lower one leads no more."""
    if term <= state.heard:
        return state
    return replace(state, heard=term, term=state.term if state.term >= term else 0)


def near(state: State, term: int) -> bool:
    """Whether a term that a member has seen may be true, and is later than all that were in the lease."""
    return state.heard < term <= min(state.heard + NEAR, LAST_LEAPING_TERM)


def wanted(state: State, now: float, leap: int) -> Lease | None:
    """The lease to write in the place of `seen`; None: wait. `leap`: random, 0..MAX_LEAP - 1."""
    seen = state.seen
    mine = seen is not None and seen.holder == state.identity
    if mine and state.term:
        return Lease(state.identity, state.address, state.term, state.lease_s)
    if seen is None:
        return Lease("", "", _later(state.heard, leap), state.lease_s)
    held_s = max(seen.lease_s, state.lease_s) if seen.holder else seen.lease_s or state.lease_s
    if not (mine or now - state.since >= held_s):
        return None
    return Lease(state.identity, state.address, _later(state.heard, 1 + leap), state.lease_s)


def written(state: State, lease: Lease, began: float, now: float) -> State:
    """It was written, by a request that was begun at `began`; it leads, unless that took too long: past the end of the
    reign that it should prolong, or of its own."""
    until = began + FENCE * state.lease_s
    ended = state.term == lease.term and now >= state.until
    leads = bool(lease.holder) and now < until and not ended and lease.term >= state.heard
    term = lease.term if leads else 0
    return replace(state, seen=lease, since=now, term=term, until=until, heard=max(state.heard, lease.term))


def _later(term: int, leap: int) -> int:
    return min(MAX_TERM, term + (leap if term < LAST_LEAPING_TERM else min(leap, 1)))


def given_back(state: State) -> Lease | None:
    """The lease to write when it stops on purpose; None: it does not hold it."""
    if state.seen is None or state.seen.holder != state.identity:
        return None
    return replace(state.seen, holder="", address="", lease_s=RELEASED_LEASE_S, version="")
