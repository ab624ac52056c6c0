"""Conversion between messages and bars: requests of operators, bars remembered by workers, bars in answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from crossdock.common.rpc import InvalidArgument, NotFound, ResourceExhausted
from crossdock.control.group import cordon
from crossdock.control.group.group_state import Bar, Group, Worker
from crossdock.control.placement.views import MAX_NAME_CHARS, printable
from crossdock.protocol.v1 import control_pb2 as pb

MAX_NAMED = 16
"""Limit of workers named in an error."""


def bars_of(group: Group, request: pb.CordonRequest) -> tuple[Bar, ...]:
    """The bars of a cordon request. Raises InvalidArgument, NotFound, ResourceExhausted."""
    found = cordon.named(group, _checked(request.name))
    if not found:
        known = sorted({member.uid for member in group.members} | {spare.uid for spare in group.spares})
        more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
        named = ", ".join(known[:MAX_NAMED]) or "none"
        raise NotFound(f"name: expected a rank, a worker or a host of this group ({named}{more}), got {request.name!r}")
    if len(group.bars) + len(found) > cordon.MAX_BARS:
        raise ResourceExhausted(f"cordon: expected at most {cordon.MAX_BARS} workers, got more")
    reason = printable(request.reason, MAX_NAME_CHARS) or "by an operator"
    return tuple(Bar(uid, hostname, "cordoned", reason, drain=request.drain) for uid, hostname in found)


def to_lift(group: Group, request: pb.UncordonRequest) -> tuple[Bar, ...]:
    """The bars of an uncordon request. Raises InvalidArgument, NotFound."""
    uids = {uid for uid, _ in cordon.named(group, _checked(request.name))}
    found = tuple(bar for bar in group.bars if bar.uid in uids)
    if not found:
        known = ", ".join(bar.uid for bar in group.bars[:MAX_NAMED]) or "none"
        raise NotFound(f"name: expected a cordoned or quarantined worker ({known}), got {request.name!r}")
    return found


def remembered(group: Group, worker: Worker, message: pb.Barred, now: float, own_id: int) -> Bar | None:
    """The bar that a worker remembers from another control plane; None: none, or this one knows better."""
    cordoned = message.cause == "cordoned"
    if message.told_by == own_id or not (cordoned or message.cause == "quarantined"):
        return None
    if group.bar_of(worker) is not None or len(group.bars) >= cordon.MAX_BARS:
        return None
    reason = printable(message.reason, MAX_NAME_CHARS)
    if cordoned:
        return Bar(worker.uid, worker.place.hostname, message.cause, reason, drain=message.drain)
    if not (math.isfinite(message.left_s) and 0 < message.left_s <= group.settings.quarantine_s):
        return None
    until = now + message.left_s
    return Bar(worker.uid, worker.place.hostname, message.cause, reason, until, worker.incarnation)


def to_message(bar: Bar, now: float, own_id: int) -> pb.Barred:
    """A bar as a message for workers and watchers."""
    left_s = 0.0 if bar.until is None else max(0.001, bar.until - now)
    return pb.Barred(
        uid=bar.uid,
        hostname=bar.hostname,
        cause=bar.cause,
        reason=bar.reason,
        left_s=left_s,
        drain=bar.drain,
        told_by=own_id,
    )


def to_messages(bars: Sequence[Bar], now: float, own_id: int) -> list[pb.Barred]:
    """Bars as messages."""
    return [to_message(bar, now, own_id) for bar in bars]


def _checked(name: str) -> str:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidArgument(f"name: expected a rank, a worker or a host, got {name[:MAX_NAME_CHARS]!r}")
    return name
