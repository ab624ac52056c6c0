"""Who may call what, and how often: a caller becomes roles, a method names the roles that may call it.

    role       by certificate (names)           by token (files)          may
    worker     access.worker_names              access.worker_tokens      register, beat, see regions: for its own uid
    client     access.client_names              access.client_tokens      Forward, Describe, watch without regions
    operator   access.operator_names            access.operator_tokens    drain workers

Where both are configured a caller has the roles that both give it. Without TLS everybody may do everything. A method
that the table below does not name is an operator's.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import grpc

from crossdock.common import log as logs
from crossdock.common.call_errors import CallError, InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated
from crossdock.common.metrics import GuardedMetrics
from crossdock.common.call_limits import CallLimits, NoPlace, Places, Visit
from crossdock.common.security import Security

log = logs.get(__name__)


class Role(Enum):
    """What a caller is allowed to be."""

    WORKER = "worker"
    CLIENT = "client"
    OPERATOR = "operator"


ANYBODY = frozenset(Role)
WORKERS = frozenset({Role.WORKER})
OPERATORS = frozenset({Role.OPERATOR})

METHODS: Mapping[str, frozenset[Role]] = {
    "/crossdock.v1.ControlPlane/Register": WORKERS,
    "/crossdock.v1.ControlPlane/PublishRegion": WORKERS,
    "/crossdock.v1.ControlPlane/Ready": WORKERS,
    "/crossdock.v1.ControlPlane/Heartbeat": WORKERS,
    "/crossdock.v1.ControlPlane/Leave": WORKERS,
    "/crossdock.v1.ControlPlane/Watch": ANYBODY,  # as a member: a worker's, checked where the member is known
    "/crossdock.v1.ControlPlane/Topology": ANYBODY,
    "/crossdock.v1.ControlPlane/Placement": WORKERS,
    "/crossdock.v1.ControlPlane/Experts": ANYBODY,
    "/crossdock.v1.ControlPlane/Rebalance": OPERATORS,
    "/crossdock.v1.ControlPlane/Cordon": OPERATORS,
    "/crossdock.v1.ControlPlane/Uncordon": OPERATORS,
    "/crossdock.v1.ExpertService/Describe": ANYBODY,
    "/crossdock.v1.ExpertService/Forward": ANYBODY,
    "/crossdock.v1.ExpertService/Drain": OPERATORS,
}

OUR_METHODS = "/crossdock."
"""What begins otherwise (health, reflection) needs no role."""
MAX_UID_CHARS = 256
CALLERS_PER_HOST = 4
"""Calls per second of all uids at one host, in units of those of one."""
_SCHEME = "Bearer "
_KEPT_CALLERS = 8192
_KEPT_PATTERNS = 256
_OTHERS = 256
_SAY_S = 1.0


def door_of(
    security: Security | None, max_calls_per_s: float, metrics: GuardedMetrics, limits: CallLimits | None = None
) -> Door:
    """A door that counts, and certificates that are measured."""
    if security is not None:
        guarded = security
        metrics.certificate_not_after_seconds.set_function(lambda: guarded.not_after)
        reloads = metrics.certificate_reloads_total
        guarded.on_reload = lambda ok: reloads.labels(result="ok" if ok else "failed").inc()
    refused = metrics.calls_refused_total
    return Door(security, max_calls_per_s, lambda why: refused.labels(reason=why).inc(), limits)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        names: of its certificate; empty without one.
        roles: what it may be.
        host: where it calls from.
        guarded: whether anything was checked at all.
        patterns: of names that workers may have.
    """

    names: tuple[str, ...]
    roles: frozenset[Role]
    host: str
    guarded: bool = True
    patterns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(self.names) or 'no certificate'} at {self.host}"

    def speaks_for(self, uid: str) -> bool:
        """Whether it may act as the worker of that uid."""
        if not self.guarded:
            return True
        if Role.WORKER not in self.roles:
            return False
        return not self.names or any(matches(pattern, name, uid) for pattern in self.patterns for name in self.names)


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Of the call that is being answered."""


class Limiter:
    """So many per second and caller, with a burst of twice as many; a rate of 0 limits nothing.

    Args:
        rate: per second.
        clock: monotonic seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._left: dict[object, tuple[float, float]] = {}

    def allow(self, caller: object) -> bool:
        """Take one; False: there is none left just now."""
        if self.rate <= 0:
            return True
        now, most = self._clock(), max(1.0, 2 * self.rate)
        left, at = self._left.pop(caller, (most, now))
        left = min(most, left + (now - at) * self.rate)
        allowed = left >= 1
        self._left[caller] = (left - allowed, now)
        if len(self._left) > _KEPT_CALLERS:
            del self._left[next(iter(self._left))]  # who has been quiet for longest
        return allowed


VISIT: ContextVar[Visit] = ContextVar("visit")
"""Of the call that is being answered."""


class Door:
    """Looks at each call before its request is read, and at the request before its handler does.

    Args:
        security: what is checked; None: nothing is, calls are only counted.
        max_calls_per_s: of one caller; each uid at a host counts by itself, and all of them together have
            CALLERS_PER_HOST times as many; 0 = no limit.
        refused: told why a call was turned away: "unauthenticated", "permission", "rate", "full" or "value".
        limits: of calls that are open at once; None: as for messages of 1 MiB.

    Attributes:
        calls: places of our own methods.
        others: places of health and reflection.
        reading: places for requests that are under way.
    """

    def __init__(
        self,
        security: Security | None,
        max_calls_per_s: float = 0.0,
        refused: Callable[[str], None] | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        self._security = security
        self._limiter, self._hosts = Limiter(max_calls_per_s), Limiter(max_calls_per_s * CALLERS_PER_HOST)
        self._others = Limiter(max_calls_per_s)
        limits = limits or CallLimits.of(1 << 20, 1024)
        self.calls, self.others = Places(limits.calls, limits.calls_of_peer), Places(_OTHERS, _OTHERS // 4)
        self.reading = Places(limits.reading, limits.reading_of_peer)
        self._refused = refused or (lambda why: None)
        self._said_at = float("-inf")

    def enter(self, method: str, context: Any) -> Visit:
        """Before anything of the request is read: set CALLER and VISIT for the handler.

        Raises:
            CallError: Unauthenticated, PermissionDenied or ResourceExhausted.
        """
        ours = method.startswith(OUR_METHODS)
        try:
            caller = self.caller_of(context) if ours else self._anybody(context)
            if ours:
                self._check_role(method, caller)
            self._count(self._hosts if ours else self._others, (caller.host, caller.names))
            places = self.calls if ours else self.others
            visit = Visit(places, self.reading, (caller.host, caller.names), str(context.peer()))
        except CallError as error:
            self._turn_away(method, error, context)
            raise
        CALLER.set(caller)
        VISIT.set(visit)
        return visit

    async def read(self, visit: Visit, method: str, context: Any) -> None:
        """Wait for a place to read the request. Raises ResourceExhausted."""
        try:
            await visit.read()
        except CallError as error:
            self._turn_away(method, error, context)
            raise

    def look(self, method: str, request: object, context: Any) -> None:
        """At who a request says that it is for, before that is used anywhere. `request`: None for a stream of them.

        Raises:
            CallError: InvalidArgument, or ResourceExhausted for a uid that calls too often.
        """
        if not method.startswith(OUR_METHODS):
            return
        caller = CALLER.get()
        uid = getattr(getattr(request, "worker", None), "uid", "")
        try:
            check_uid(uid)
            self._count(self._limiter, (caller.host, caller.names, uid if Role.WORKER in caller.roles else ""))
        except CallError as error:
            self._turn_away(method, error, context)
            raise

    def _turn_away(self, method: str, error: CallError, context: Any) -> None:
        known = {Unauthenticated: "unauthenticated", PermissionDenied: "permission", NoPlace: "full"}
        self.note({**known, InvalidArgument: "value"}.get(type(error), "rate"), method, str(error), context)

    @staticmethod
    def _count(limiter: Limiter, key: object) -> None:
        if not limiter.allow(key):
            raise ResourceExhausted(f"calls: expected at most {limiter.rate:g} a second of one caller, got more")

    def note(self, why: str, method: str, message: str, context: Any) -> None:
        """Count a refusal, and say so; a caller that tries again and again cannot fill the log."""
        self._refused(why)
        now = time.monotonic()
        if now - self._said_at >= _SAY_S:
            self._said_at = now
            log.warning("call refused", method=method, why=message, peer=host_of(context))

    def caller_of(self, context: Any) -> Caller:
        """Who calls. Raises Unauthenticated: a token is needed and there is none, or an unknown one."""
        caller = self._anybody(context)
        if self._security is None or not caller.guarded:
            return caller
        access, names, roles = self._security.config.access, caller.names, ANYBODY
        if self._security.config.requires_certs:
            allowed = {
                Role.WORKER: access.worker_names,
                Role.CLIENT: access.client_names,
                Role.OPERATOR: access.operator_names,
            }
            roles = frozenset(r for r, wanted in allowed.items() if any(matches(p, n) for p in wanted for n in names))
        if self._security.accepted:
            roles &= self._by_token(context)
        return Caller(names, roles, caller.host, patterns=access.worker_names)

    def _anybody(self, context: Any) -> Caller:
        """Where a call comes from and by which certificate, whatever that may do."""
        guarded = self._security is not None and bool(self._security.config.cert_file)
        shown = guarded and self._security is not None and self._security.config.requires_certs
        return Caller(names_of(context.auth_context()) if shown else (), ANYBODY, host_of(context), guarded=guarded)

    def _by_token(self, context: Any) -> frozenset[Role]:
        assert self._security is not None
        headers = dict(context.invocation_metadata() or ())
        told = str(headers.get("authorization", ""))
        if not told.startswith(_SCHEME):
            raise Unauthenticated("authorization: expected `Bearer` and a token, got none")
        token = told.removeprefix(_SCHEME).encode()
        roles = set()
        for role, file in self._security.accepted.items():  # all are compared, whichever fits
            roles |= {Role(role) for known in file.tokens if hmac.compare_digest(known.encode(), token)}
        if not roles:
            raise Unauthenticated("authorization: expected a token that is known here, got another one")
        return frozenset(roles)

    @staticmethod
    def _check_role(method: str, caller: Caller) -> None:
        wanted = METHODS.get(method, OPERATORS)
        if not caller.roles & wanted:
            roles = " or ".join(sorted(role.value for role in wanted))
            held = ", ".join(sorted(role.value for role in caller.roles)) or "nobody known here"
            raise PermissionDenied(f"{method.rpartition('/')[2]}: expected a caller that is {roles}, got {held}")


def check_uid(uid: str) -> None:
    """Raises InvalidArgument: too long, or not printable."""
    if len(uid) > MAX_UID_CHARS:
        raise InvalidArgument(f"worker.uid: expected at most {MAX_UID_CHARS} characters, got {len(uid)}")
    if not uid.isprintable():
        raise InvalidArgument(f"worker.uid: expected printable characters, got {uid!r}")


def matches(pattern: str, name: str, uid: str | None = None) -> bool:
    """Whether a name fits a pattern: `*` stands for anything, `{uid}` for this uid (None: for any but "")."""
    if uid is None:
        return _for_any_uid(pattern).fullmatch(name) is not None
    first, *middle = [part.replace("{uid}", uid) for part in pattern.split("*")]
    if not middle:
        return name == first
    last = middle.pop()
    at, end = len(first), len(name) - len(last)
    if at > end or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@lru_cache(_KEPT_PATTERNS)
def _for_any_uid(pattern: str) -> re.Pattern[str]:
    words = {"*": ".*", "{uid}": ".+"}
    parts = re.split(r"(\*|\{uid\})", pattern)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts), re.DOTALL)


def names_of(auth: Mapping[str, Any]) -> tuple[str, ...]:
    """The URI and DNS names of a caller's certificate, or else its common name."""
    found = [*auth.get("peer_uri", ()), *auth.get("peer_dns", ())] or list(auth.get("x509_common_name", ()))
    return tuple(name.decode("utf-8", "replace") for name in found)


def host_of(context: grpc.ServicerContext | Any) -> str:
    """Where a caller is, without its port: a new connection is not a new caller."""
    return str(context.peer()).rpartition(":")[0]
