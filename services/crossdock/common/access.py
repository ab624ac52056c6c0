"""Authorization and rate limits of calls: a caller has roles, a method names the roles that may call it.

    role       by certificate (names)    by token (files)          may
    worker     access.worker_names       access.worker_tokens      register, send heartbeats, see regions: for its own
                                                                   uid; read weights of experts
    client     access.client_names       access.client_tokens      Forward, Describe, watch without regions
    operator   access.operator_names     access.operator_tokens    drain workers

With certificates and tokens configured, a caller has the roles granted by both. Without TLS every caller has all
roles. A method that the table below does not name requires the operator role.
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import grpc

from crossdock.common import log as logs
from crossdock.common.call_errors import (
    CallError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from crossdock.common.call_limits import CallLimits, CallPermits, LimitReached, PermitPool
from crossdock.common.metrics import GuardedMetrics
from crossdock.common.security import Security

log = logs.get(__name__)


class Role(Enum):
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
    "/crossdock.v1.ControlPlane/Watch": ANYBODY,  # as a member: workers only, checked by the control plane
    "/crossdock.v1.ControlPlane/Topology": ANYBODY,
    "/crossdock.v1.ControlPlane/Placement": WORKERS,
    "/crossdock.v1.ControlPlane/Experts": ANYBODY,
    "/crossdock.v1.ControlPlane/Rebalance": OPERATORS,
    "/crossdock.v1.ControlPlane/Load": OPERATORS,
    "/crossdock.v1.ControlPlane/Scale": OPERATORS,
    "/crossdock.v1.ControlPlane/Cordon": OPERATORS,
    "/crossdock.v1.ControlPlane/Uncordon": OPERATORS,
    "/crossdock.v1.ControlPlane/Postmortems": ANYBODY,
    "/crossdock.v1.ExpertService/Describe": ANYBODY,
    "/crossdock.v1.ExpertService/Forward": ANYBODY,
    "/crossdock.v1.ExpertService/Drain": OPERATORS,
    "/crossdock.v1.ExpertService/ReadWeights": WORKERS,  # no call: a connection that begins with READER
    "/crossdock.v1.ExpertService/Trace": OPERATORS,
}

OUR_METHODS = "/crossdock."
"""Prefix of methods that require a role; others (health, reflection) require none."""
MAX_UID_CHARS = 256
CALLERS_PER_HOST = 4
"""Rate limit of all uids at one host together, as a multiple of the limit of one uid."""
_SCHEME = "Bearer "
_KEPT_CALLERS = 8192
_KEPT_PATTERNS = 256
_OTHERS = 256


def authorizer_of(
    security: Security | None, max_calls_per_s: float, metrics: GuardedMetrics, limits: CallLimits | None = None
) -> CallAuthorizer:
    """An authorizer whose refusals and certificates are exported as metrics."""
    if security is not None:
        guarded = security
        metrics.certificate_expiry_timestamp_seconds.set_function(lambda: guarded.not_after)
        reloads = metrics.certificate_reloads_total
        guarded.on_reload = lambda ok: reloads.labels(result="ok" if ok else "failed").inc()
    refused = metrics.rpc_refusals_total
    return CallAuthorizer(security, max_calls_per_s, lambda why: refused.labels(reason=why).inc(), limits)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call.

    Attributes:
        names: names in its certificate; empty without one.
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
        """Whether the caller may act as the worker of that uid."""
        if not self.guarded:
            return True
        if Role.WORKER not in self.roles:
            return False
        return not self.names or any(matches(pattern, name, uid) for pattern in self.patterns for name in self.names)


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The caller of the current call."""


class RateLimiter:
    """Token bucket per caller, for any thread: `rate` per second, bursts of twice the rate; a rate of 0 limits nothing.

    Args:
        rate: per second.
        clock: monotonic seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock, self._lock = rate, clock, threading.Lock()
        self._left: dict[object, tuple[float, float]] = {}

    def allow(self, caller: object) -> bool:
        """Take one token; False: none is left."""
        if self.rate <= 0:
            return True
        with self._lock:
            now, most = self._clock(), max(1.0, 2 * self.rate)
            left, at = self._left.pop(caller, (most, now))
            left = min(most, left + (now - at) * self.rate)
            allowed = left >= 1
            self._left[caller] = (left - allowed, now)
            if len(self._left) > _KEPT_CALLERS:
                del self._left[next(iter(self._left))]  # the least recently used one
            return allowed


CALL_PERMITS: ContextVar[CallPermits] = ContextVar("call_permits")
"""The permits of the current call."""


class CallAuthorizer:
    """Authorizes each call before its request is read, and checks the request before the handler runs.

    Args:
        security: TLS and tokens to check; None: only the limits apply.
        max_calls_per_s: rate limit of one caller. Each uid at a host has its own; all uids of a host together have
            CALLERS_PER_HOST times the rate. 0 = no limit.
        refused: called with the reason of each refusal: "unauthenticated", "permission", "rate", "full" or "value".
        limits: of concurrent calls; None: as for messages of 1 MiB.

    Attributes:
        calls: permits of Crossdock's own methods.
        others: permits of health and reflection.
        reading: permits for requests that are not yet complete.
        streaming: permits for calls with a stream of requests, one of which may always be incomplete. They have their
            own, since they last.
    """

    def __init__(
        self,
        security: Security | None,
        max_calls_per_s: float = 0.0,
        refused: Callable[[str], None] | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        self._security = security
        self._rate_limiter, self._hosts = RateLimiter(max_calls_per_s), RateLimiter(max_calls_per_s * CALLERS_PER_HOST)
        self._others = RateLimiter(max_calls_per_s)
        limits = limits or CallLimits.of(1 << 20, 1024)
        self.calls, self.others = PermitPool(limits.calls, limits.calls_per_peer), PermitPool(_OTHERS, _OTHERS // 4)
        self.reading, self.streaming = (PermitPool(limits.reading, limits.reading_per_peer) for _ in range(2))
        self._waiting = PermitPool(limits.waiting, limits.waiting_per_peer)
        self._refused = refused or (lambda why: None)

    def authorize(self, method: str, context: Any, *, streams: bool = False) -> CallPermits:
        """Authorize a call before its request is read; sets CALLER and CALL_PERMITS for the handler.

        Args:
            method: full name.
            streams: the client sends a stream of requests.

        Raises:
            CallError: Unauthenticated, PermissionDenied or ResourceExhausted.
        """
        ours = method.startswith(OUR_METHODS)
        caller = self.admit(method, context)
        try:
            pool = self.calls if ours else self.others
            reading, peer = self.streaming if streams else self.reading, (caller.host, caller.names)
            permits = CallPermits(pool, reading, self._waiting, peer, str(context.peer()))
        except CallError as error:
            self._refuse(method, error, context)
            raise
        CALLER.set(caller)
        CALL_PERMITS.set(permits)
        return permits

    def admit(self, method: str, context: Any) -> Caller:
        """The caller, which may call the method, and not too often. context: of a call, or of a connection with its
        `peer`, `auth_context` and `invocation_metadata`. Any thread. Raises as `authorize`."""
        ours = method.startswith(OUR_METHODS)
        try:
            caller = self.caller_of(context) if ours else self._unrestricted_caller(context)
            if ours:
                self._check_role(method, caller)
            self._count(self._hosts if ours else self._others, (caller.host, caller.names))
        except CallError as error:
            self._refuse(method, error, context)
            raise
        return caller

    async def acquire_reading(self, permits: CallPermits, method: str, context: Any) -> None:
        """Wait for a permit to read the request. Raises ResourceExhausted."""
        try:
            await permits.acquire_reading()
        except CallError as error:
            self._refuse(method, error, context)
            raise

    def check_request(self, method: str, request: object, context: Any) -> None:
        """Check the uid in a request before it is used anywhere. `request`: None for a stream of requests.

        Raises:
            CallError: InvalidArgument, or ResourceExhausted for a uid over its rate limit.
        """
        if not method.startswith(OUR_METHODS):
            return
        caller = CALLER.get()
        uid = getattr(getattr(request, "worker", None), "uid", "")
        try:
            check_uid(uid)
            self._count(self._rate_limiter, (caller.host, caller.names, uid if Role.WORKER in caller.roles else ""))
        except CallError as error:
            self._refuse(method, error, context)
            raise

    def _refuse(self, method: str, error: CallError, context: Any) -> None:
        known = {Unauthenticated: "unauthenticated", PermissionDenied: "permission", LimitReached: "full"}
        self.record_refusal({**known, InvalidArgument: "value"}.get(type(error), "rate"), method, str(error), context)

    @staticmethod
    def _count(limiter: RateLimiter, key: object) -> None:
        if not limiter.allow(key):
            raise ResourceExhausted(f"calls: expected at most {limiter.rate:g} a second of one caller, got more")

    def record_refusal(self, why: str, method: str, message: str, context: Any) -> None:
        self._refused(why)
        log.seldom("call refused", method=method, why=message, peer=host_of(context))

    def caller_of(self, context: Any) -> Caller:
        """The caller and its roles. Raises Unauthenticated: a required token is missing or unknown."""
        caller = self._unrestricted_caller(context)
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

    def _unrestricted_caller(self, context: Any) -> Caller:
        """The host and certificate names of a call, with all roles."""
        guarded = self._security is not None and bool(self._security.config.cert_file)
        shown = guarded and self._security is not None and self._security.config.requires_certs
        return Caller(names_of(context.auth_context()) if shown else (), ANYBODY, host_of(context), guarded=guarded)

    def _by_token(self, context: Any) -> frozenset[Role]:
        assert self._security is not None
        headers = dict(context.invocation_metadata() or ())
        header = str(headers.get("authorization", ""))
        if not header.startswith(_SCHEME):
            raise Unauthenticated("authorization: expected `Bearer` and a token, got none")
        token = header.removeprefix(_SCHEME).encode()
        roles = set()
        for role, file in self._security.accepted.items():  # compare all, so the time does not depend on the match
            roles |= {Role(role) for known in file.tokens if hmac.compare_digest(known.encode(), token)}
        if not roles:
            raise Unauthenticated("authorization: expected a known token, got an unknown one")
        return frozenset(roles)

    @staticmethod
    def _check_role(method: str, caller: Caller) -> None:
        wanted = METHODS.get(method, OPERATORS)
        if not caller.roles & wanted:
            roles = " or ".join(sorted(role.value for role in wanted))
            held = ", ".join(sorted(role.value for role in caller.roles)) or "none of the known roles"
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
    """Host of a caller without its port: a new connection is the same caller."""
    return str(context.peer()).rpartition(":")[0]
