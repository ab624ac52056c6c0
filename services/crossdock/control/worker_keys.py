"""A worker speaks only for itself: the lease of a uid belongs to the process that brought its key.

Each worker process makes a random key and sends it as metadata with every call. The one that came with Register is
kept as a hash with the incarnation; who speaks for that incarnation without it is refused. So a certificate or token
that many workers share lets none of them beat, leave or publish for another. A newer incarnation brings a key of its
own: who may take a uid over is the certificate's matter (`{uid}` in `access.worker_names`). Workers that send no key
are bound by their certificate alone.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from crossdock.common.access import CALLER, Caller, Role
from crossdock.common.rpc import PermissionDenied
from crossdock.protocol.v1 import control_pb2 as pb

METADATA_KEY = "crossdock-lease-key"
_NOBODY = Caller((), frozenset(Role), "", guarded=False)


class WorkerKeys:
    """The keys of the members."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[int, bytes]] = {}

    def check(self, worker: pb.WorkerId, context: Any) -> None:
        """Raises PermissionDenied: the caller is not that worker."""
        caller = CALLER.get(_NOBODY)
        if not caller.speaks_for(worker.uid):
            raise PermissionDenied(f"worker {worker.uid}: expected its own certificate, got {caller}")
        incarnation, key = self._bound.get(worker.uid, (0, b""))
        if incarnation == worker.incarnation and key and not hmac.compare_digest(key, _key_of(context)):
            raise PermissionDenied(f"worker {worker.uid}: expected the key of its lease, got another one or none")

    def bind(self, worker: pb.WorkerId, context: Any) -> None:
        """Its registration was accepted: from now on it is known by this key."""
        key = _key_of(context)
        if key:
            self._bound[worker.uid] = (worker.incarnation, key)
        else:
            self._bound.pop(worker.uid, None)

    def forget(self, uid: str) -> None:
        """The member is gone."""
        self._bound.pop(uid, None)


def _key_of(context: Any) -> bytes:
    """A hash of what the call brought, b"" = nothing."""
    for key, value in (context.invocation_metadata() if context is not None else None) or ():
        if key == METADATA_KEY:
            return hashlib.sha256(str(value).encode()).digest()
    return b""
