"""What `crossdock status` shows: a group view as a plain dict (for --json) and as a table. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, JustifyMethod
from rich.text import Text

from crossdock.cli.latency_view import verdict_dict, verdict_line
from crossdock.common.addresses import is_loopback, split_targets
from crossdock.common.plural import span
from crossdock.host.group_table import format_bytes, headline, plain_text_warning, rank_table, state_of
from crossdock.protocol.v1.control_pb2 import (
    Barred,
    GroupState,
    GroupView,
    Member,
    WorkerStats,
)
from crossdock.protocol.v1.topology_pb2 import Network


def plain_text(view: GroupView, target: str) -> list[str]:
    """Addresses of a group without TLS that other hosts may reach: of control planes, then of workers."""
    addresses = [*split_targets(target), *(member.address for member in view.members)]
    return [address for address in addresses if address and not is_loopback(address)]


def as_dict(view: GroupView, exposed: Sequence[str] = ()) -> dict[str, object]:
    """The view with plain JSON types; names as in the proto, the region tickets left out. `exposed`: see
    `plain_text`."""
    return {
        "state": GroupState.Name(view.state),
        "epoch": view.epoch,
        "world_size": view.world_size,
        "wanted": view.wanted.workers,
        "scaling": view.scaling,
        "lost_ranks": list(view.lost_ranks),
        "reason": view.reason,
        "model": view.model,
        "plain_text": list(exposed),
        "members": [_member(member) for member in view.members],
        "barred": [_barred(one) for one in view.barred],
        "verdict": verdict_dict(view.verdict),
    }


def as_table(view: GroupView, target: str, exposed: Sequence[str] = (), width: int = 0) -> Group:
    """One headline, one row per rank (lost ones too), why the last change happened, and which addresses are exposed
    (see `plain_text`).

    Args:
        width: of the terminal, in columns; what does not fit is left out and named. 0: any.
    """
    rows = {member.rank: _row(member) for member in view.members}
    columns, left_out = _fitting(rows, width)
    reason = [Text(f"last change: {view.reason}", style="dim")] if view.reason else []
    scaling = [Text(view.scaling, style="yellow")] if view.scaling else []
    sick = [
        Text(f"rank {member.rank} ({member.worker.uid}) is sick and keeps its slot: {member.sick}", style="red")
        for member in view.members
        if member.sick
    ]
    out = [Text(_out(one), style="yellow") for one in view.barred]
    ways = [*_models(view), *_networks(view), *_clients(view)]
    changes = [*out, *scaling, *reason, *plain_text_warning(exposed)]
    notes = [*left_out, *ways, *verdict_line(view.verdict), *sick, *changes]
    return Group(headline(view, target), Text(), rank_table(view, columns, rows), *notes)


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
_LEFT_OUT = ("tokens", "address", "memory", "heartbeat", "experts")
_FOLDED, _GAP = 24, 2
_STYLES = {"sick": "red", "ready": "green", "joining": "yellow"}
_SETS = 8


def _fitting(rows: dict[int, list[Text]], width: int) -> tuple[dict[str, JustifyMethod], list[Text]]:
    """The columns that fit, and a line that names the others; takes their cells out of `rows`."""
    kept = dict(_COLUMNS)
    at = {title: place for place, title in enumerate(_COLUMNS)}
    needed = {title: max([cell_len(title), *(row[at[title]].cell_len for row in rows.values())]) for title in kept}
    needed["worker"] = min(needed["worker"], _FOLDED)
    while width and sum(needed[title] + _GAP for title in kept) > width + _GAP and set(kept) & set(_LEFT_OUT):
        del kept[next(title for title in _LEFT_OUT if title in kept)]
    left_out = [title for title in _COLUMNS if title not in kept]
    for rank, row in rows.items():
        rows[rank] = [row[at[title]] for title in kept]
    words = f"not shown: {', '.join(left_out)} (wider terminal, or --json)"
    return kept, [Text(words, style="dim")] if left_out else []


def _networks(view: GroupView) -> list[Text]:
    """How ranks reach each other where they have a network: shared memory inside a domain, the provider between."""
    domains: dict[str, list[Member]] = {}
    for member in view.members:
        if member.HasField("network"):
            domains.setdefault(member.network.domain or f"{member.rank}", []).append(member)
    if not domains:
        return []
    sets = [f"{span([one.rank for one in members])} on {members[0].hostname}" for members in domains.values()]
    provider = next(iter(domains.values()))[0].network.provider
    between = f", {provider} between" if len(sets) > 1 else f"; no rank is reached by {provider}"
    shown = "; ".join(sets[:_SETS]) + ("; ..." if len(sets) > _SETS else "")
    return [Text(f"shared memory among ranks {shown}{between}", style="dim")]


def _clients(view: GroupView) -> list[Text]:
    """How requests come: by request connections, or gRPC streams."""
    names = ("request_connections", "streams")
    connections, streams = (sum(getattr(member.stats, name) for member in view.members) for name in names)
    if not (connections or streams):
        return []
    return [Text(f"clients: {connections} request connections, {streams} gRPC streams", style="dim")]


def _models(view: GroupView) -> list[Text]:
    """Which checkpoints the layers are of, where it is not the one that the workers were started with, and whether all
    ranks were compared."""
    held = {tuple((one.fingerprint, one.layers) for one in member.stats.models) for member in view.members}
    held.discard(())
    whole = next((member.stats.weights for member in view.members if member.stats.weights), "")
    same = [Text(f"weights of all ranks are those of rank 0's files: {whole}", style="dim")] if whole else []
    if held <= {((view.model, layers),) for each in held for _, layers in each}:
        return same
    shown = " | ".join(", ".join(f"{name[:12]} in {layers} layers" for name, layers in each) for each in sorted(held))
    return [Text(f"weights: {shown} (started with {view.model[:12]})"), *same]


def _network(network: Network) -> dict[str, str]:
    return {"provider": network.provider, "address": network.address, "domain": network.domain}


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
    until = f"for {one.left_s:.0f} s more" if one.left_s else f"until `crossdock uncordon {one.uid}`"
    return f"{one.uid} on {one.hostname}: {one.cause}: {one.reason}, {until}"


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
        "network": _network(member.network) if member.HasField("network") else None,
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
        "weights": stats.weights,
        "models": {one.fingerprint: one.layers for one in stats.models},
        "request_connections": stats.request_connections,
        "streams": stats.streams,
    }


def _row(member: Member) -> list[Text]:
    stats = member.stats
    cells: list[str | Text] = [
        str(member.rank),
        Text(state_of(member), style=_STYLES[state_of(member)]),
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
