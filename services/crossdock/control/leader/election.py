"""Leader election among control planes over a shared lease: which lease to write, given the one read. Pure.

    observe(state, seen, now), then next_lease(state, now, leap) ─▶ the lease to write now, or None: wait

Wall clocks are never compared. A candidate measures by its own clock how long the lease has not changed, and takes it
only after `lease_s` of that; a leader stops `FENCE` of `lease_s` after it *began* its last successful renewal. So the
former leader has stopped before the next one begins, however slow the network and however wrong the wall clocks;
outdated messages are recognized by their lower term. A new term is higher than every term seen in the lease. A term
reported by a member counts only if it is plausible (`is_plausible`), since any caller may claim a number and a huge one
would exhaust the terms.

A missing lease may have been deleted under a leader. So it is created without a holder, and taken after `lease_s` like
any other lease; so is a lease that another program created and never wrote. A deleted lease has lost its term: so each
leadership leaps ahead by a random number, to not repeat the term of another candidate that saw the same number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FENCE = 2 / 3
"""Fraction of `lease_s` for which a leader that cannot renew keeps leading."""
RENEWALS_PER_LEASE = 5
RELEASED_LEASE_S = 1.0
"""Duration of a released lease; the API accepts no shorter one."""
MAX_LEAP = 1 << 12
"""Upper bound of a leap; the API keeps terms below 2^31, enough for a million leaderships."""
MAX_TERM_STEP = 4 * MAX_LEAP
"""Largest distance of a true term from the ones seen in the lease, which may have been deleted in between."""
MAX_TERM = (1 << 31) - 1
LAST_LEAPING_TERM = MAX_TERM - (1 << 20)
"""From this term on leaderships do not leap, and reported terms do not count."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Content of the lease.

    Attributes:
        holder: identity of the leader; "" = none: released, or just created.
        address: host:port of the holder.
        term: of the holder.
        lease_s: duration; 0: never written.
        version: changes with every write; set by the storage.
    """

    holder: str
    address: str
    term: int
    lease_s: float
    version: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """State of one candidate.

    Attributes:
        lease_s: duration that it writes.
        seen: the lease read last; None = there is none.
        since: when it was read first.
        has_read: whether the lease was read at all.
        term: of its leadership; 0 = it does not lead.
        until: end of its leadership unless renewed.
        highest_term: highest term seen in the lease, or reported by a member and plausible.
    """

    identity: str
    address: str
    lease_s: float
    seen: Lease | None = None
    since: float = 0.0
    has_read: bool = False
    term: int = 0
    until: float = 0.0
    highest_term: int = 0


def observe(state: State, seen: Lease | None, now: float) -> State:
    """Process a read. A leader that reads another holder, or no lease, stops leading."""
    if not state.has_read or seen != state.seen:
        state = replace(state, seen=seen, since=now, has_read=True)
    if seen is not None:
        state = observe_term(state, seen.term)
    lost = seen is None or seen.holder != state.identity
    return replace(state, term=0) if state.term and (lost or now >= state.until) else state


def observe_term(state: State, term: int) -> State:
    """Note that a term existed; a leader with a lower one stops leading."""
    if term <= state.highest_term:
        return state
    return replace(state, highest_term=term, term=state.term if state.term >= term else 0)


def is_plausible(state: State, term: int) -> bool:
    """Whether a reported term may be true and is higher than all terms seen in the lease."""
    return state.highest_term < term <= min(state.highest_term + MAX_TERM_STEP, LAST_LEAPING_TERM)


def next_lease(state: State, now: float, leap: int) -> Lease | None:
    """The lease to write in place of `seen`; None: wait. `leap`: random, 0..MAX_LEAP - 1."""
    seen = state.seen
    mine = seen is not None and seen.holder == state.identity
    if mine and state.term:
        return Lease(state.identity, state.address, state.term, state.lease_s)
    if seen is None:
        return Lease("", "", _later(state.highest_term, leap), state.lease_s)
    held_s = max(seen.lease_s, state.lease_s) if seen.holder else seen.lease_s or state.lease_s
    if not (mine or now - state.since >= held_s):
        return None
    return Lease(state.identity, state.address, _later(state.highest_term, 1 + leap), state.lease_s)


def record_write(state: State, lease: Lease, began: float, now: float) -> State:
    """Process a successful write whose request began at `began`. The candidate leads unless the write took too long:
    past the end of the renewed leadership, or of the new one."""
    until = began + FENCE * state.lease_s
    ended = state.term == lease.term and now >= state.until
    leads = bool(lease.holder) and now < until and not ended and lease.term >= state.highest_term
    term = lease.term if leads else 0
    return replace(
        state, seen=lease, since=now, term=term, until=until, highest_term=max(state.highest_term, lease.term)
    )


def _later(term: int, leap: int) -> int:
    return min(MAX_TERM, term + (leap if term < LAST_LEAPING_TERM else min(leap, 1)))


def released(state: State) -> Lease | None:
    """The lease to write at shutdown; None: it is held by another candidate."""
    if state.seen is None or state.seen.holder != state.identity:
        return None
    return replace(state.seen, holder="", address="", lease_s=RELEASED_LEASE_S, version="")
