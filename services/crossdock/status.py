"""What `crossdock status` shows: a group view as a plain dict (for --json) and as a table. No I/O here."""

from __future__ import annotations

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from crossdock.common.announce import metrics_url
from crossdock.v1.control_pb2 import (
    EXCHANGING,
    FAILED,
    FORMING,
    SERVING,
    Barred,
    GroupState,
    GroupView,
    Member,
    WorkerStats,
)

_STYLE = {SERVING: "green", EXCHANGING: "yellow", FORMING: "yellow", FAILED: "red"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI = 1024


def as_dict(view: GroupView) -> dict[str, object]:
    """The view with plain JSON types; names as in the proto, the region tickets left out."""
    return {
        "state": GroupState.Name(view.state),
        "epoch": view.epoch,
        "world_size": view.world_size,
        "lost_ranks": list(view.lost_ranks),
        "reason": view.reason,
        "model": view.model,
        "members": [_member(member) for member in view.members],
        "barred": [_barred(one) for one in view.barred],
    }


def as_table(view: GroupView, target: str) -> Group:
    """One headline, one row per rank (lost ones too), and why the last change happened."""
    rows = {member.rank: _row(member) for member in view.members}
    reason = [Text(f"last change: {view.reason}", style="dim")] if view.reason else []
    sick = [
        Text(f"rank {member.rank} ({member.worker.uid}) is sick, and no spare waits: {member.sick}", style="red")
        for member in view.members
        if member.sick
    ]
    out = [Text(_out(one), style="yellow") for one in view.barred]
    return Group(_headline(view, target), Text(), _table(view, _COLUMNS, rows), *sick, *out, *reason)


def as_address_table(view: GroupView, target: str) -> Group:
    """The headline, and where each rank listens."""
    rows = {
        member.rank: [
            Text(str(member.rank)),
            Text(member.worker.uid),
            Text(member.address),
            Text(metrics_url(member.http_address, https=member.https)),
        ]
        for member in view.members
    }
    return Group(_headline(view, target), Text(), _table(view, _ADDRESS_COLUMNS, rows))


_COLUMNS: dict[str, JustifyMethod] = {
    "rank": "right",
    "state": "left",
    "worker": "left",
    "address": "left",
    "experts": "right",
    "memory": "right",
    "tokens/s": "right",
    "tokens": "right",
    "queued": "right",
    "heartbeat": "right",
}
_ADDRESS_COLUMNS: dict[str, JustifyMethod] = {"rank": "right", "worker": "left", "address": "left", "metrics": "left"}


def _headline(view: GroupView, target: str) -> Text:
    return Text.assemble(
        (GroupState.Name(view.state), f"bold {_STYLE.get(view.state, '')}"),
        f"  epoch {view.epoch}  {len(view.members)}/{view.world_size} ranks",
        (f"  control plane {target}", "dim"),
    )


def _table(view: GroupView, columns: dict[str, JustifyMethod], rows: dict[int, list[Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, justify in columns.items():
        table.add_column(title, justify=justify, no_wrap=True)
    for rank in view.lost_ranks:
        rows.setdefault(rank, [Text(str(rank)), Text("lost", style="red")])
    for rank in sorted(rows):
        table.add_row(*rows[rank])
    return table


def _barred(one: Barred) -> dict[str, object]:
    return {
        "uid": one.uid,
        "hostname": one.hostname,
        "cause": one.cause,
        "reason": one.reason,
        "left_s": round(one.left_s, 3),
        "drain": one.drain,
    }


def _out(one: Barred) -> str:
    until = f"for {one.left_s:.0f} s more" if one.left_s else "until it is uncordoned"
    return f"{one.uid} on {one.hostname}: {one.cause} {until}: {one.reason}"


def _member(member: Member) -> dict[str, object]:
    stats = member.stats
    return {
        "rank": member.rank,
        "uid": member.worker.uid,
        "incarnation": member.worker.incarnation,
        "hostname": member.hostname,
        "address": member.address,
        "http_address": member.http_address,
        "https": member.https,
        "ready": member.ready,
        "sick": member.sick,
        "heartbeat_age_s": round(member.heartbeat_age_s, 3),
        "first_expert": stats.first_expert,
        "num_experts": stats.num_experts,
        "scattered": stats.scattered,
        "expert_bytes": stats.expert_bytes,
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "tokens_total": stats.tokens_total,
        "requests_total": stats.requests_total,
        "steps_total": stats.steps_total,
        "queued_requests": stats.queued_requests,
    }


def _row(member: Member) -> list[Text]:
    stats = member.stats
    cells: list[str | Text] = [
        str(member.rank),
        Text("sick", style="red")
        if member.sick
        else Text("ready", style="green")
        if member.ready
        else Text("joining", style="yellow"),
        member.worker.uid,
        member.address,
        _experts(stats),
        format_bytes(stats.expert_bytes),
        f"{stats.tokens_per_s:,.0f}",
        f"{stats.tokens_total:,}",
        str(stats.queued_requests),
        f"{member.heartbeat_age_s:.1f} s",
    ]
    return [cell if isinstance(cell, Text) else Text(cell) for cell in cells]


def _experts(stats: WorkerStats) -> str:
    """Which ones, where that is one word; else how many slots (`crossdock experts` has them all)."""
    if stats.scattered:
        return f"{stats.num_experts} slots"
    return f"{stats.first_expert}-{stats.first_expert + stats.num_experts - 1}" if stats.num_experts else ""


def format_bytes(num_bytes: float) -> str:
    """Four digits and a binary unit: "1.25 GiB"."""
    for unit in _UNITS[:-1]:
        if num_bytes < _KIBI:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= _KIBI
    return f"{num_bytes:.4g} {_UNITS[-1]}"
