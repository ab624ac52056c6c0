"""One of several control-plane replicas: it leads while it holds a Kubernetes Lease, and redirects callers otherwise.

    elector = Elector(state, KubernetesLeaseStore(config), changed)  a thread: reads and renews the Lease
    replica = Replica(make, elector)                                 the service: a new ControlPlane for each leadership

A leadership begins with empty soft state, like a restarted control plane: workers report their state, and a serving
group continues. Every call and every view is preceded by a check of the clock (CLOCK_BOOTTIME, which continues during
suspend), and every view carries the term.
"""
# ruff: noqa: N802  (the methods of a servicer are named in control.proto)

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Protocol

from crossdock.common import log as logs
from crossdock.common.call_errors import Unavailable
from crossdock.common.control_channel import TERM_KEY
from crossdock.common.helper_thread import HelperThread
from crossdock.control.group.group_state import Group
from crossdock.control.leader import election
from crossdock.control.leader.election import RENEWALS_PER_LEASE, Lease, State
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc

log = logs.get(__name__)

_MAX_TERM_CHARS = 10
_LEASES_PER_NEW_TERM = 10
"""Leases between two leaderships that end because of a member's term."""


def boot_clock() -> float:
    """Seconds since the machine was started, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseStore(Protocol):
    """Shared storage of the lease. Each call has a deadline and raises OSError, or errors of its client, on failure."""

    def read(self, timeout_s: float) -> Lease | None:
        """The current lease; None: there is none."""

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        """Compare and swap `seen` for `lease`; returns it as stored, or None: another candidate was faster."""

    def close(self) -> None:
        """Close the connection; no calls after this."""


class Elector:
    """Reads and renews the lease in its own thread, so that a busy event loop does not lose it.

    Args:
        changed: called in that thread when the leader changes.
        failed: called for each failed read or write.

    Attributes:
        trouble: why the storage cannot be reached; "" = it can.
    """

    def __init__(
        self,
        state: State,
        leases: LeaseStore,
        changed: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._store, self.changed, self._failed = state, leases, changed, failed
        self._lock = threading.Lock()
        self._stop, self._run_now = threading.Event(), threading.Event()
        self.trouble = ""
        self._noted_term, self._ignore_until = 0, float("-inf")
        self._thread = HelperThread("elector", self._run)

    @property
    def term(self) -> int:
        """Term of the current leadership of this process; 0 = it does not lead."""
        state = self._state
        return state.term if boot_clock() < state.until else 0

    @property
    def leader(self) -> str:
        """host:port of the known leader; "" = none, or this process."""
        seen = self._state.seen
        return seen.address if seen is not None and seen.holder not in {"", self._state.identity} else ""

    def start(self) -> None:
        self._thread.start()

    def note_term(self, term: int) -> None:
        """Note a term that a member has seen. If it is plausible, the lease is read again. If the lease still names
        this process, it was deleted in between; members accept views of a later term only, so a new leadership
        begins."""
        state = self._state
        if state.term and election.is_plausible(state, term) and boot_clock() >= self._ignore_until:
            self._noted_term = term
            self._ignore_until = boot_clock() + _LEASES_PER_NEW_TERM * state.lease_s
            self._run_now.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop leading, then release the lease, so that the next leader need not wait. Best effort: waits for the
        current round at most as long as the lease lasts, after which there is nothing to release."""
        self._stop.set()
        self._run_now.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(max(timeout_s, self._state.lease_s))
        with self._lock:
            back, seen = election.released(self._state), self._state.seen
            self._state = replace(self._state, term=0)
        if self._thread.is_alive():
            return
        if back is not None:
            try:
                self._store.write(back, seen, timeout_s)
            except Exception as error:
                log.warning("lease not released", error=error)
        self._store.close()

    def _run(self) -> None:
        pause_s = self._state.lease_s / RENEWALS_PER_LEASE
        while not self._stop.is_set():
            try:
                self._once(pause_s)
            except Exception:  # a bug in `changed`; without this thread the replica could never lead again
                log.exception("the elector continues after an error; this is a bug")
            self._run_now.wait(pause_s)
            self._run_now.clear()

    def _once(self, pause_s: float) -> None:
        before = (self.term, self.leader)
        try:
            self._round(pause_s)
            self.trouble = ""
        except Exception as error:  # errors of the client and of the socket
            self._record_failure(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if before != (self.term, self.leader):
            self.changed()

    def _round(self, timeout_s: float) -> None:
        seen = self._store.read(timeout_s)
        with self._lock:
            self._state = election.observe(self._state, seen, boot_clock())
            noted, self._noted_term = self._noted_term, 0
            if self._state.term and election.is_plausible(self._state, noted):
                self._state = election.observe_term(self._state, noted)
            lease = election.next_lease(self._state, boot_clock(), secrets.randbelow(election.MAX_LEAP))
        if lease is None:
            return
        began = boot_clock()
        made = self._store.write(lease, seen, timeout_s)
        if made is None:  # the next round sees the faster candidate
            self._run_now.set()
            return
        with self._lock:
            self._state = election.record_write(self._state, made, began, boot_clock())

    def _record_failure(self, trouble: str) -> None:
        self._failed()
        if trouble != self.trouble:
            log.warning("lease unreachable", why=trouble, leading=bool(self.term))
        self.trouble = trouble


class LeaderService(Protocol):
    """The service of one leadership: a ControlPlane."""

    @property
    def group(self) -> Group: ...

    def tick(self) -> None: ...

    def stop(self) -> None: ...


class Replica(control_pb2_grpc.ControlPlaneServicer):
    """The service of one of several replicas. Its methods are those of control.proto; each is delegated to the
    ControlPlane of the current leadership, or answered UNAVAILABLE with the leader's address.

    Args:
        make: returns a new ControlPlane.
        term_changed: called with the term when a leadership begins, with 0 when it ends.
    """

    def __init__(
        self, make: Callable[[], LeaderService], elector: Elector, term_changed: Callable[[int], None]
    ) -> None:
        self._make, self._elector, self._term_changed = make, elector, term_changed
        self._service: LeaderService | None = None
        self._term = 0
        self._stopped = False

    @property
    def group(self) -> Group | None:
        return self._service.group if self._service is not None else None

    def tick(self) -> None:
        """Begin and end leaderships, and advance time in the current one."""
        if self._stopped:  # the elector is stopped later and may still win the lease
            return
        term = self._elector.term
        if term != self._term:
            self._switch_role(term)
        if self._service is not None:
            self._service.tick()

    def stop(self) -> None:
        """End every stream and the leadership for good."""
        self._stopped = True
        self._switch_role(0)

    def _switch_role(self, term: int) -> None:
        former, self._service = self._service, None
        if former is not None:
            former.stop()
        if term:
            self._service = self._make()
        self._term = term
        log.info("leading" if term else "standby", term=term, leader=self._elector.leader or "unknown")
        self._term_changed(term)

    def _active_service(self) -> LeaderService:
        """The ControlPlane of the current leadership. Raises Unavailable: another replica leads, or none."""
        if self._service is None or not self._holds():
            raise self._not_leading()
        return self._service

    def _holds(self) -> bool:
        return bool(self._term) and self._elector.term == self._term

    def _not_leading(self) -> Unavailable:
        leader = self._elector.leader
        return Unavailable(f"this control plane is a standby; {leader or 'no replica'} leads", leader)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.GroupView | bytes]:
        """Views of the current leadership, with its term."""
        service: Any = self._active_service()
        term = self._term
        try:
            views = service.Watch(request, context)
            del request
            async for view in views:
                if not (self._holds() and self._term == term):
                    raise self._not_leading()
                if isinstance(view, bytes):  # concatenated messages parse as one message with the fields of both
                    yield view + pb.GroupView(term=term).SerializeToString()
                else:
                    view.term = term
                    yield view
        except Unavailable:
            raise self._not_leading() from None


_MEMBER_CALLS = frozenset({"Register", "PublishRegion", "Ready", "Heartbeat"})


def _delegate(name: str) -> Callable[[Replica, Any, Any], Any]:
    async def method(self: Replica, request: Any, context: Any) -> Any:
        answer = await getattr(self._active_service(), name)(request, context)
        if name in _MEMBER_CALLS:  # accepted, so the caller is a member with its key
            self._elector.note_term(_term_of(context))
        return answer

    return method


for _method in pb.DESCRIPTOR.services_by_name["ControlPlane"].methods:
    if not _method.server_streaming:
        setattr(Replica, _method.name, _delegate(_method.name))


def _term_of(context: Any) -> int:
    for key, value in context.invocation_metadata() or ():
        if key == TERM_KEY and str(value).isdecimal() and len(value) <= _MAX_TERM_CHARS:
            return int(value)
    return 0
