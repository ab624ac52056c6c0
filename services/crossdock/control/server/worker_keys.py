"""Keys of workers: only the process that registered a uid may act for it.

Each worker process makes a random key and sends it as metadata with every call. The key of Register is stored as a hash
with the incarnation; calls for that incarnation with another key are refused. So a certificate or token shared by many
workers lets none of them send heartbeats, leave or publish for another. A newer incarnation brings its own key: which
certificate may take over a uid is configured by `{uid}` in `access.worker_names`. Workers without a key are bound by
their certificate alone.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from crossdock.common.access import CALLER, Caller, Role
from crossdock.common.rpc import PermissionDenied
from crossdock.protocol.v1 import control_pb2 as pb

METADATA_KEY = "crossdock-lease-key"
_NO_CALLER = Caller((), frozenset(Role), "", guarded=False)


class WorkerKeys:
    """The keys of the members."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[int, bytes]] = {}

    def check(self, worker: pb.WorkerId, context: Any) -> None:
        """Check the caller of a worker's call. Raises PermissionDenied."""
        caller = CALLER.get(_NO_CALLER)
        if not caller.speaks_for(worker.uid):
            raise PermissionDenied(f"worker {worker.uid}: expected its own certificate, got {caller}")
        incarnation, key = self._bound.get(worker.uid, (0, b""))
        if incarnation == worker.incarnation and key and not hmac.compare_digest(key, _key_of(context)):
            raise PermissionDenied(f"worker {worker.uid}: expected the key of its lease, got another one or none")

    def bind(self, worker: pb.WorkerId, context: Any) -> None:
        """Store the key of an accepted registration."""
        key = _key_of(context)
        if key:
            self._bound[worker.uid] = (worker.incarnation, key)
        else:
            self._bound.pop(worker.uid, None)

    def forget(self, uid: str) -> None:
        """Remove the key of a former member."""
        self._bound.pop(uid, None)


def _key_of(context: Any) -> bytes:
    """Hash of the call's key, b"" = none."""
    for key, value in (context.invocation_metadata() if context is not None else None) or ():
        if key == METADATA_KEY:
            return hashlib.sha256(str(value).encode()).digest()
    return b""
