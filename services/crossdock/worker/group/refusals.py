"""Log messages of a worker whose heartbeats are refused, or that is barred from the group."""

from __future__ import annotations

import time

from crossdock.common import rpc
from crossdock.common.log import Logger
from crossdock.protocol.v1 import control_pb2

WARN_EVERY_S = 30.0
"""Interval of warnings about refused heartbeats."""


class Refusals:
    """Refused heartbeats since the last accepted one."""

    def __init__(self) -> None:
        self._last = ""
        self._warned_at = -WARN_EVERY_S

    def note(self, error: rpc.CallError, lease_s: float, log: Logger) -> None:
        """Note a failed heartbeat. An unreachable control plane is temporary; a refusal is permanent, so it is logged
        at intervals, and again when the lease is lost."""
        if isinstance(error, rpc.Unavailable | rpc.DeadlineExceeded | rpc.Cancelled):
            log.debug("heartbeat failed", error=error)
            return
        self._last = f"{error.code.name}: {error}"
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning("heartbeat refused", error=self._last, lease_s=lease_s)

    def lease_lost(self, error: rpc.CallError, log: Logger) -> None:
        """The lease was lost: log the refusals before it."""
        if self._last:
            log.warning("lease lost", error=error, heartbeats_refused=self._last)
        self.clear()

    def clear(self) -> None:
        """A heartbeat was accepted."""
        self._last = ""


def why_barred(barred: control_pb2.Barred) -> str:
    """Why a worker is barred from the group, and until when."""
    until = f"for {barred.left_s:.0f} s more" if barred.left_s else f"until `crossdock uncordon {barred.uid}`"
    return f"{barred.cause}: {barred.reason}, {until}"
