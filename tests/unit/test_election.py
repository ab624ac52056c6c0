"""Who leads, decided by a lease: never two at once, terms that only grow, somebody in the end.

Simulated with clocks that start anywhere and run a little fast or slow, answers that come late or never, processes that
stand still, a lease that is deleted, and an API server that is away.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from crossdock.control.leader.election import (
    FENCE,
    LAST_LEAPING_TERM,
    MAX_LEAP,
    MAX_TERM,
    MAX_TERM_STEP,
    Lease,
    State,
    is_plausible,
    next_lease,
    observe,
    observe_term,
    record_write,
    released,
)

LEASE_S, END_S, QUIET_S = 6.0, 240.0, 60.0
DRIFT = 0.01


class World:
    """One shared lease, an order of happenings, and what went wrong."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.lease: Lease | None = None
        self.away_until = 0.0
        self.terms: list[int] = []
        self.told = 0  # the greatest term that workers have seen
        self._versions, self._order = itertools.count(1), itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._order), do))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()
        self.now = until

    def write(self, lease: Lease, seen: Lease | None) -> Lease | None:
        """Compare and swap."""
        if (self.lease.version if self.lease else None) != (seen.version if seen else None):
            return None
        self.lease = replace(lease, version=str(next(self._versions)))
        return self.lease

    def trouble(self) -> None:
        """Something happens to the lease or to its server."""
        if self.now > END_S - QUIET_S:
            return
        kind = self.random.random()
        if kind < 0.2:
            self.lease = None
        elif kind < 0.3:  # deleted, and made anew by somebody who stands for nothing
            self.lease = Lease("", "", 0, 0.0, str(next(self._versions)))
        else:
            self.away_until = self.now + self.random.uniform(0, 3 * LEASE_S)
        self.at(self.now + self.random.uniform(5, 60), self.trouble)


@dataclass
class Candidate:
    """One process; `now` is its own clock."""

    world: World
    name: str
    offset: float
    rate: float
    state: State
    paused_until: float = 0.0

    @property
    def now(self) -> float:
        return self.offset + self.rate * self.world.now

    @property
    def leads(self) -> bool:
        """As it would decide, if it ran."""
        return bool(self.state.term) and self.now < self.state.until

    def later(self, most_s: float, do: Callable[[], None]) -> None:
        """Go on after a delay, and not while this process stands still."""
        quiet = self.world.now > END_S - QUIET_S
        if not quiet and self.world.random.random() < 0.01:
            self.paused_until = self.world.now + self.world.random.uniform(0, 4 * LEASE_S)
        delay = self.world.random.uniform(0, most_s if not quiet else 0.05)
        self.world.at(max(self.world.now + delay, self.paused_until), do)

    def round(self) -> None:
        """Read; the answer comes later. One round ends before the next begins."""
        if self.world.now < self.world.away_until:
            return self.rest()
        seen = self.world.lease
        return self.later(1.5, lambda: self.look(seen))

    def rest(self) -> None:
        self.world.at(max(self.world.now + LEASE_S / 5, self.paused_until), self.round)

    def look(self, seen: Lease | None) -> None:
        told = self.world.told if self.leads else 0
        self.state = observe(self.state, seen, self.now)
        if self.state.term and is_plausible(self.state, told):
            self.state = observe_term(self.state, told)
        lease = next_lease(self.state, self.now, self.world.random.randrange(MAX_LEAP))
        if lease is None:
            return self.rest()
        began = self.now
        return self.later(1.5, lambda: self.put(lease, seen, began))

    def put(self, lease: Lease, seen: Lease | None, began: float) -> None:
        made = self.world.write(lease, seen)
        lost = self.world.random.random() < 0.05 and self.world.now < END_S - QUIET_S
        if made is None or lost:  # it counted, but the answer is lost
            return self.rest()

        def answered() -> None:
            led = self.state.term
            self.state = record_write(self.state, made, began, self.now)
            if self.state.term and self.state.term != led:
                self.world.terms.append(self.state.term)
                self.world.told = max(self.world.told, self.world.random.choice([0, self.state.term]))
            self.rest()

        return self.later(1.5, answered)


def candidates(world: World) -> list[Candidate]:
    made = []
    for number in range(3):
        rate = 1 + world.random.uniform(-DRIFT, DRIFT)
        state = State(f"c{number}", f"c{number}:1", LEASE_S)
        made.append(Candidate(world, f"c{number}", world.random.uniform(0, 1e6), rate, state))
        world.at(world.random.uniform(0, 2), made[-1].round)
    return made


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_never_two_lead_and_no_term_comes_twice(first: int) -> None:
    for seed in range(first, first + 50):
        world = World(seed)
        running = candidates(world)
        world.at(10.0, world.trouble)
        served = 0
        for step in range(int(END_S * 10)):
            world.run(step / 10)
            leaders = [candidate.name for candidate in running if candidate.leads]
            assert len(leaders) <= 1, (seed, world.now, leaders)
            served += len(leaders)
        assert len(world.terms) == len(set(world.terms)), seed
        assert [candidate.state.term >= world.told for candidate in running if candidate.leads] == [True], seed
        assert served > 100, seed


def test_a_leader_that_cannot_renew_stops_before_another_may_begin() -> None:
    lease = Lease("a", "a:1", 1, LEASE_S, "1")
    leader = record_write(State("a", "a:1", LEASE_S), lease, began=10.0, now=10.5)
    waiting = observe(State("b", "b:1", LEASE_S), lease, 10.2)
    assert (leader.term, leader.until) == (1, 10.0 + FENCE * LEASE_S)
    assert next_lease(waiting, leader.until, 5) is None
    assert next_lease(waiting, 10.2 + LEASE_S, 5) == Lease("b", "b:1", 7, LEASE_S)
    assert observe(leader, lease, leader.until).term == 0


def test_a_write_that_took_too_long_begins_no_reign() -> None:
    lease = Lease("a", "a:1", 1, LEASE_S, "1")
    assert record_write(State("a", "a:1", LEASE_S), lease, began=0.0, now=FENCE * LEASE_S).term == 0


def test_a_missing_lease_is_made_without_a_holder_and_taken_like_any_other() -> None:
    """A leader whose lease was deleted may go on until its fence: only then another one may begin."""
    state = observe(State("b", "b:1", LEASE_S), Lease("a", "a:1", 41, LEASE_S, "7"), 0.0)
    state = observe(state, None, 1.0)
    made = next_lease(state, 1.0, leap=500)
    assert made == Lease("", "", 541, LEASE_S)
    state = record_write(state, replace(made, version="8"), 1.0, 1.1)
    assert state.term == 0
    assert next_lease(state, 1.0 + LEASE_S, 0) is None
    assert next_lease(state, 1.1 + LEASE_S, 0) == Lease("b", "b:1", 542, LEASE_S)


def test_a_lease_that_nobody_has_written_to_is_taken_as_late_as_a_missing_one() -> None:
    """The chart makes one, also in the place of one that was deleted from under a leader."""
    made = Lease("", "", 0, 0.0, "7")
    state = observe_term(observe(State("b", "b:1", LEASE_S), made, 1.0), 41)
    assert next_lease(state, 0.9 + LEASE_S, 5) is None
    assert next_lease(state, 1.0 + LEASE_S, 5) == Lease("b", "b:1", 47, LEASE_S)


def test_whoever_hears_of_a_later_term_leads_no_more_and_then_above_it() -> None:
    lease = Lease("a", "a:1", 3, LEASE_S, "1")
    leader = record_write(State("a", "a:1", LEASE_S), lease, began=0.0, now=0.1)
    assert observe_term(leader, 3).term == 3
    leader = observe_term(leader, 9)
    assert leader.term == 0
    again = next_lease(leader, 0.2, 5)
    assert again is not None
    assert again.term == 15


def test_a_term_far_above_the_lease_is_nobodys() -> None:
    """Whoever claims one cannot use up the terms that the API can keep."""
    leader = record_write(State("a", "a:1", LEASE_S), Lease("a", "a:1", 3, LEASE_S, "1"), began=0.0, now=0.1)
    assert [is_plausible(leader, term) for term in (3, 4, 3 + MAX_TERM_STEP, 4 + MAX_TERM_STEP, 10**18)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    late = replace(leader, highest_term=LAST_LEAPING_TERM - 1)
    assert (is_plausible(late, LAST_LEAPING_TERM), is_plausible(late, LAST_LEAPING_TERM + 1)) == (True, False)


@pytest.mark.parametrize("kept", [LAST_LEAPING_TERM, MAX_TERM - 3000, MAX_TERM - 1, MAX_TERM])
def test_terms_never_leave_what_the_api_can_keep(kept: int) -> None:
    """Whatever is in the lease: somebody leads, and its term grows for as long as there are any."""
    state = observe(State("b", "b:1", LEASE_S), Lease("a", "a:1", kept, LEASE_S, "7"), 0.0)
    lease = next_lease(state, LEASE_S, MAX_LEAP - 1)
    assert lease is not None
    assert min(kept + 1, MAX_TERM) <= lease.term <= MAX_TERM
    missing = next_lease(observe(state, None, 1.0), 1.0, MAX_LEAP - 1)
    assert missing is not None
    assert kept <= missing.term <= MAX_TERM


def test_a_lease_that_was_given_back_is_taken_after_a_second() -> None:
    leader = record_write(State("a", "a:1", LEASE_S), Lease("a", "a:1", 3, LEASE_S, "1"), began=0.0, now=0.1)
    back = released(leader)
    assert back == Lease("", "", 3, 1.0)
    other = observe(State("b", "b:1", LEASE_S), back, 0.2)
    assert next_lease(other, 1.1, 5) is None
    assert next_lease(other, 1.2, 5) == Lease("b", "b:1", 9, LEASE_S)
    assert released(State("b", "b:1", LEASE_S)) is None
