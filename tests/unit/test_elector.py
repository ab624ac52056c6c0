"""The thread that reads and renews the lease, beside a lease that takes no number which Kubernetes would not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from crossdock.control.leader import leader
from crossdock.control.leader.election import MAX_TERM, MAX_TERM_STEP, Lease, State
from crossdock.control.leader.leader import Elector

TIMEOUT_S = 60.0


class LeaseStore:
    """In memory."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.reads, self.refused = 0, list[int]()
        self._lock, self._version = threading.Lock(), 0

    def read(self, timeout_s: float) -> Lease | None:
        self.reads += 1
        return self.lease

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        with self._lock:
            if not 0 <= lease.term <= MAX_TERM:
                self.refused.append(lease.term)
                raise ValueError("leaseTransitions: cannot decode a number beyond int32")
            if (self.lease.version if self.lease else None) != (seen.version if seen else None):
                return None
            self._version += 1
            self.lease = replace(lease, version=str(self._version))
            return self.lease

    def close(self) -> None:
        """Nothing to hang up."""


@pytest.fixture
def leases() -> LeaseStore:
    return LeaseStore()


@pytest.fixture
def elector(leases: LeaseStore) -> Iterator[Elector]:
    """Leads."""
    made = Elector(State("a", "a:1", 30.0), leases)
    leases.lease = Lease("a", "a:1", 5000, 30.0, "0")  # left from its former life: it takes it at once
    made.start()
    wait(lambda: made.term)
    yield made
    made.close()


def wait(look: object) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not look():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def read_again(elector: Elector, leases: LeaseStore) -> None:
    """Two rounds of the thread: one may have been under way."""
    for _ in range(2):
        before = leases.reads
        elector._run_now.set()
        wait(lambda before=before: leases.reads > before and not elector._run_now.is_set())


@pytest.mark.parametrize("claimed", [MAX_TERM_STEP + 4097, MAX_TERM - 5000, MAX_TERM, 10**18])
def test_a_term_that_cannot_be_true_changes_nothing(elector: Elector, leases: LeaseStore, claimed: int) -> None:
    before, lease = elector.term, leases.lease
    elector.note_term(before + claimed)
    read_again(elector, leases)
    assert elector.term == before
    assert (leases.refused, leases.lease.term if leases.lease else 0) == ([], before)
    assert lease is not None


def test_members_that_have_seen_a_later_reign_are_led_again_and_not_too_often(
    elector: Elector, leases: LeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was deleted, and names this process with an earlier term than that of the reign that is forgotten."""
    seen = elector.term + MAX_TERM_STEP
    elector.note_term(seen)
    wait(lambda: elector.term > seen)
    later = elector.term
    elector.note_term(later + 1)
    read_again(elector, leases)
    assert elector.term == later
    monkeypatch.setattr(elector, "_ignore_until", leader.boot_clock())
    elector.note_term(later + 1)
    wait(lambda: elector.term > later)


def test_a_leader_that_was_replaced_reads_so_when_a_member_tells_of_the_later_term(
    elector: Elector, leases: LeaseStore
) -> None:
    told = elector.term + 7
    leases.lease = Lease("b", "b:1", told, 30.0, "99")
    elector.note_term(told)
    wait(lambda: elector.leader == "b:1")
    assert elector.term == 0
    assert leases.lease.holder == "b"


def test_whoever_is_told_of_a_change_cannot_end_the_thread(
    elector: Elector, leases: LeaseStore, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks() -> None:
        raise ValueError("a bug")

    elector.changed = breaks
    leases.lease = Lease("b", "b:1", elector.term + 7, 30.0, "99")
    elector._run_now.set()
    wait(lambda: elector.leader == "b:1")
    read_again(elector, leases)
    assert elector._thread.is_alive()
    assert [record.message for record in caplog.records] == ["the elector continues after an error; this is a bug"]


def test_whoever_counts_failures_cannot_end_the_thread(
    elector: Elector, leases: LeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        leases.reads += 1
        raise OSError("away")

    monkeypatch.setattr(leases, "read", breaks)
    monkeypatch.setattr(elector, "_failed", breaks)
    read_again(elector, leases)
    assert elector._thread.is_alive()


def test_one_that_never_stood_for_election_is_closed(leases: LeaseStore) -> None:
    Elector(State("a", "a:1", 30.0), leases).close()
