"""A control plane that is one of several: it decides while it holds a Kubernetes Lease, and sends callers on otherwise.

    elector = Elector(state, KubernetesLeases(config), changed)      a thread: reads and renews the Lease
    replica = Replica(make, elector)                                 the service: a fresh ControlPlane for each reign

A reign begins with empty soft state, exactly as a control plane that was restarted: workers tell it what they know, and
a group that serves goes on. Every call and every view is preceded by a look at the clock (CLOCK_BOOTTIME, which goes on
while a machine is suspended), and every view carries the term.
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
from crossdock.common import rpc
from crossdock.control import election
from crossdock.control.election import RENEWALS_PER_LEASE, Lease, State
from crossdock.control.records import Group
from crossdock.v1 import control_pb2 as pb
from crossdock.v1 import control_pb2_grpc

log = logs.get(__name__)

TERM_KEY = "crossdock-term"
"""Metadata of workers' calls: the greatest term that they have seen in a view."""
_MAX_TERM_CHARS = 10
_LEASES_PER_TURN = 10
"""A member's word ends a reign once in so many leases at most."""


def boot_clock() -> float:
    """Seconds since the machine was started, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leases(Protocol):
    """The shared place. Each call has a deadline and raises OSError, or the errors of its client, when it fails."""

    def read(self, timeout_s: float) -> Lease | None:
        """What is there now."""

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        """Put `lease` in the place of exactly `seen`; as written, or None: somebody else was faster."""

    def close(self) -> None:
        """Hang up; nothing is asked after this."""


class Elector:
    """Reads and renews the lease in a thread of its own, so that a busy event loop does not lose it.

    Args:
        state: a candidate that has seen nothing yet.
        leases: the shared place.
        changed: called in that thread when a reign begins or ends, or another one leads.
        failed: called for each reading or writing that failed.

    Attributes:
        trouble: why the shared place cannot be reached just now, "" = it can.
    """

    def __init__(
        self,
        state: State,
        leases: Leases,
        changed: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._leases, self.changed, self._failed = state, leases, changed, failed
        self._lock = threading.Lock()
        self._stop, self._hurry = threading.Event(), threading.Event()
        self.trouble = ""
        self._told, self._deaf_until = 0, float("-inf")
        self._thread = threading.Thread(target=self._run, name="crossdock-elector", daemon=True)

    @property
    def term(self) -> int:
        """Of the reign of this process, 0 = it does not lead, now."""
        state = self._state
        return state.term if boot_clock() < state.until else 0

    @property
    def leader(self) -> str:
        """host:port of who leads as far as is known here; "" = nobody."""
        seen = self._state.seen
        return seen.address if seen is not None and seen.holder not in {"", self._state.identity} else ""

    def start(self) -> None:
        """Begin to stand for election."""
        self._thread.start()

    def hear(self, term: int) -> None:
        """A member has seen that term. If it may be true the lease is read again; where it still names this process, it
        was deleted meanwhile, and members take views of a later reign only: one begins."""
        state = self._state
        if state.term and election.near(state, term) and boot_clock() >= self._deaf_until:
            self._told = term
            self._deaf_until = boot_clock() + _LEASES_PER_TURN * state.lease_s
            self._hurry.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop leading, then give the lease back, so that the next one need not wait. Best effort: a round that is
        under way is waited for as long as the lease lasts, after which there is nothing to give back."""
        self._stop.set()
        self._hurry.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(max(timeout_s, self._state.lease_s))
        with self._lock:
            back, seen = election.given_back(self._state), self._state.seen
            self._state = replace(self._state, term=0)
        if self._thread.is_alive():
            return
        if back is not None:
            try:
                self._leases.write(back, seen, timeout_s)
            except Exception as error:
                log.warning("lease not given back", error=error)
        self._leases.close()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        pause_s = self._state.lease_s / RENEWALS_PER_LEASE
        while not self._stop.is_set():
            try:
                self._once(pause_s)
            except Exception:  # who is told of it has a bug: without this thread nobody here would ever lead again
                log.exception("the elector goes on; this is a bug")
            self._hurry.wait(pause_s)
            self._hurry.clear()

    def _once(self, pause_s: float) -> None:
        before = (self.term, self.leader)
        try:
            self._round(pause_s)
            self.trouble = ""
        except Exception as error:  # the client raises its own errors and the socket's
            self._complain(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if before != (self.term, self.leader):
            self.changed()

    def _round(self, timeout_s: float) -> None:
        seen = self._leases.read(timeout_s)
        with self._lock:
            self._state = election.observe(self._state, seen, boot_clock())
            told, self._told = self._told, 0
            if self._state.term and election.near(self._state, told):
                self._state = election.hear(self._state, told)
            lease = election.wanted(self._state, boot_clock(), secrets.randbelow(election.LEAPS))
        if lease is None:
            return
        began = boot_clock()
        made = self._leases.write(lease, seen, timeout_s)
        if made is None:  # whoever was faster is seen in the next round
            self._hurry.set()
            return
        with self._lock:
            self._state = election.written(self._state, made, began, boot_clock())

    def _complain(self, trouble: str) -> None:
        self._failed()
        if trouble != self.trouble:
            log.warning("lease not reached", why=trouble, leading=bool(self.term))
        self.trouble = trouble


class Service(Protocol):
    """What a reign is made of: a ControlPlane."""

    @property
    def group(self) -> Group: ...

    def tick(self) -> None: ...

    def stop(self) -> None: ...


class Replica(control_pb2_grpc.ControlPlaneServicer):
    """The service of one of several. Its methods are those of control.proto; each goes to the ControlPlane of the
    present reign, or is answered UNAVAILABLE with the leader's address.

    Args:
        make: a fresh ControlPlane.
        elector: tells who leads.
        reigns: told the term when a reign begins, 0 when it ends.
    """

    def __init__(self, make: Callable[[], Service], elector: Elector, reigns: Callable[[int], None]) -> None:
        self._make, self._elector, self._reigns = make, elector, reigns
        self._service: Service | None = None
        self._term = 0
        self._stopped = False

    @property
    def group(self) -> Group | None:
        """Of the present reign."""
        return self._service.group if self._service is not None else None

    def tick(self) -> None:
        """Begin and end reigns, and let time pass in the present one."""
        if self._stopped:  # the elector is stopped later, and may win a lease until then
            return
        term = self._elector.term
        if term != self._term:
            self._turn(term)
        if self._service is not None:
            self._service.tick()

    def stop(self) -> None:
        """End every stream; nothing is decided after this."""
        self._stopped = True
        self._turn(0)

    def _turn(self, term: int) -> None:
        former, self._service = self._service, None
        if former is not None:
            former.stop()
        if term:
            self._service = self._make()
        self._term = term
        log.info("leading" if term else "standing by", term=term, leader=self._elector.leader or "unknown")
        self._reigns(term)

    def _reign(self) -> Service:
        """The ControlPlane to ask now. Raises Unavailable: another one decides, or nobody."""
        if self._service is None or not self._holds():
            raise self._elsewhere()
        return self._service

    def _holds(self) -> bool:
        return bool(self._term) and self._elector.term == self._term

    def _elsewhere(self) -> rpc.Unavailable:
        leader = self._elector.leader
        return rpc.Unavailable(f"this control plane stands by; {leader or 'nobody yet'} leads", leader)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.GroupView | bytes]:
        """The views of this reign, with its term."""
        service: Any = self._reign()
        term = self._term
        try:
            views = service.Watch(request, context)
            del request
            async for view in views:
                if not (self._holds() and self._term == term):
                    raise self._elsewhere()
                if isinstance(view, bytes):  # two messages one after the other are one with the fields of both
                    yield view + pb.GroupView(term=term).SerializeToString()
                else:
                    view.term = term
                    yield view
        except rpc.Unavailable:
            raise self._elsewhere() from None


_MEMBERS_CALLS = frozenset({"Register", "PublishRegion", "Ready", "Heartbeat"})


def _delegate(name: str) -> Callable[[Replica, Any, Any], Any]:
    async def method(self: Replica, request: Any, context: Any) -> Any:
        answer = await getattr(self._reign(), name)(request, context)
        if name in _MEMBERS_CALLS:  # that were taken: it is a member, and has its key
            self._elector.hear(_term_of(context))
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
