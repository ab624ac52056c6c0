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
from crossdock.common.calls import CallError, PermissionDenied, ResourceExhausted, Unauthenticated
from crossdock.common.metrics import GuardedMetrics
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

_SCHEME = "Bearer "
_KEPT_CALLERS = 8192
_SAY_S = 1.0


def door_of(security: Security | None, max_calls_per_s: float, metrics: GuardedMetrics) -> Door:
    """A door that counts, and certificates that are measured."""
    if security is not None:
        guarded = security
        metrics.certificate_not_after_seconds.set_function(lambda: guarded.not_after)
        reloads = metrics.certificate_reloads_total
        guarded.on_reload = lambda ok: reloads.labels(result="ok" if ok else "failed").inc()
    return Door(security, max_calls_per_s, lambda why: metrics.calls_refused_total.labels(reason=why).inc())


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


class Door:
    """Looks at each call before its handler does.

    Args:
        security: what is checked; None: nothing is, calls are only counted.
        max_calls_per_s: of one caller (a worker: one uid); 0 = no limit.
        refused: told why a call was turned away: "unauthenticated", "permission" or "rate".
    """

    def __init__(
        self, security: Security | None, max_calls_per_s: float = 0.0, refused: Callable[[str], None] | None = None
    ) -> None:
        self._security = security
        self._limiter = Limiter(max_calls_per_s)
        self._refused = refused or (lambda why: None)
        self._said_at = float("-inf")

    def admit(self, method: str, request: object, context: Any) -> None:
        """Set CALLER for the handler. Raises Unauthenticated, PermissionDenied, ResourceExhausted."""
        try:
            caller = self.caller_of(context)
            CALLER.set(caller)
            self._check(method, request, caller)
        except CallError as error:
            why = {Unauthenticated: "unauthenticated", PermissionDenied: "permission"}.get(type(error), "rate")
            self.note(why, method, str(error), context)
            raise

    def note(self, why: str, method: str, message: str, context: Any) -> None:
        """Count a refusal, and say so; a caller that tries again and again cannot fill the log."""
        self._refused(why)
        now = time.monotonic()
        if now - self._said_at >= _SAY_S:
            self._said_at = now
            log.warning("call refused", method=method, why=message, peer=host_of(context))

    def caller_of(self, context: Any) -> Caller:
        """Who calls. Raises Unauthenticated: a token is needed and there is none, or an unknown one."""
        host = host_of(context)
        if self._security is None or not self._security.config.cert_file:
            return Caller((), ANYBODY, host, guarded=False)
        access = self._security.config.access
        names = names_of(context.auth_context()) if self._security.config.requires_certs else ()
        roles = ANYBODY
        if self._security.config.requires_certs:
            allowed = {
                Role.WORKER: access.worker_names,
                Role.CLIENT: access.client_names,
                Role.OPERATOR: access.operator_names,
            }
            roles = frozenset(r for r, wanted in allowed.items() if any(matches(p, n) for p in wanted for n in names))
        if self._security.accepted:
            roles &= self._by_token(context)
        return Caller(names, roles, host, patterns=access.worker_names)

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

    def _check(self, method: str, request: object, caller: Caller) -> None:
        wanted = METHODS.get(method, OPERATORS)
        if not caller.roles & wanted:
            roles = " or ".join(sorted(role.value for role in wanted))
            held = ", ".join(sorted(role.value for role in caller.roles)) or "nobody known here"
            raise PermissionDenied(f"{method.rpartition('/')[2]}: expected a caller that is {roles}, got {held}")
        uid = getattr(getattr(request, "worker", None), "uid", "") if Role.WORKER in caller.roles else ""
        if not self._limiter.allow((caller.host, caller.names, uid)):
            raise ResourceExhausted(f"calls: expected at most {self._limiter.rate:g} a second of one caller, got more")


def matches(pattern: str, name: str, uid: str | None = None) -> bool:
    """Whether a name fits a pattern: `*` stands for anything, `{uid}` for this uid (None: for any but "")."""
    return _compiled(pattern, uid).fullmatch(name) is not None


@lru_cache(_KEPT_CALLERS)
def _compiled(pattern: str, uid: str | None) -> re.Pattern[str]:
    words = {"*": ".*", "{uid}": ".+" if uid is None else re.escape(uid)}
    parts = re.split(r"(\*|\{uid\})", pattern)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts), re.DOTALL)


def names_of(auth: Mapping[str, Any]) -> tuple[str, ...]:
    """The URI and DNS names of a caller's certificate, or else its common name."""
    found = [*auth.get("peer_uri", ()), *auth.get("peer_dns", ())] or list(auth.get("x509_common_name", ()))
    return tuple(name.decode("utf-8", "replace") for name in found)


def host_of(context: grpc.ServicerContext | Any) -> str:
    """Where a caller is, without its port: a new connection is not a new caller."""
    return str(context.peer()).rpartition(":")[0]
