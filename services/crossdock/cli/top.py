"""`crossdock top`: a group while it works. Ranks and rates, time by operation, who waits for whom, the verdict.

`as_dict` and `as_screen` are pure; figures are those of the verdict's interval, from heartbeats of members.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crossdock.cli.console import DEFAULT_TARGET, Json, SecurityFile, Timeout, console, security_of, show_json
from crossdock.cli.latency_view import verdict_dict, verdict_line, waits
from crossdock.host.group_table import headline, state_of
from crossdock.protocol.v1.control_pb2 import SERVING, GroupState, GroupView, LatencyReport, Member

_OPS = ("exchange", "dispatch", "combine")
_SHADES = ((0.4, "white on red3"), (0.2, "black on orange3"), (0.1, "black on yellow3"), (0.05, "grey11 on grey62"))
"""Colour of a cell of the heat map from that share on."""
_CELL, _MARGIN = 4, 12


def top(
    target: Annotated[str, typer.Option("--target", "-t", help="host:port of the control plane.")] = DEFAULT_TARGET,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    as_json: Json = False,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two screens.")] = 1.0,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Show a group while it works: ranks, rates, p50 and p99 by operation, who waits for whom, what is slow.

    --json prints one object and ends, as --once does one screen. Exit status 1 unless the group is serving.
    While the control plane does not answer, the last screen stays.
    """
    from crossdock.common.call_errors import CallError

    view = fetch(target, timeout_s, security)
    printer = console()
    if as_json:
        show_json(as_dict(view))
    elif once or not printer.is_terminal:
        printer.print(as_screen(view, target, printer.width))
    else:
        with Live(as_screen(view, target, printer.width), console=printer, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                trouble = ""
                try:
                    view = fetch(target, timeout_s, security)
                except CallError as error:
                    trouble = str(error)
                live.update(as_screen(view, target, printer.width, trouble), refresh=True)
    raise typer.Exit(0 if view.state == SERVING else 1)


def fetch(target: str, timeout_s: float, security: Path | None) -> GroupView:
    """The group as it is now. Raises CallError."""
    from crossdock.common.control_channel import call_leader, current_view

    return call_leader(target, security_of(security), lambda channel: current_view(channel, timeout_s))


def as_dict(view: GroupView) -> dict[str, object]:
    shares = waits(view)
    return {
        "state": GroupState.Name(view.state),
        "epoch": view.epoch,
        "world_size": view.world_size,
        "lost_ranks": list(view.lost_ranks),
        "verdict": verdict_dict(view.verdict),
        "ranks": [_rank(member, shares[member.rank]) for member in view.members],
    }


def _rank(member: Member, shares: dict[int, float]) -> dict[str, object]:
    latency = member.stats.latency
    return {
        "rank": member.rank,
        "uid": member.worker.uid,
        "hostname": member.hostname,
        "state": state_of(member),
        "interval_s": round(latency.interval_s, 3),
        "tokens_per_s": round(_per_s(latency, latency.tokens), 3),
        "rows_per_s": round(_per_s(latency, latency.rows), 3),
        "steps_per_s": round(_per_s(latency, latency.steps), 3),
        "queued_requests": member.stats.queued_requests,
        "busy_share": round(_per_s(latency, latency.step_s), 4),
        "experts_share": round(latency.experts_s / latency.step_s, 4) if latency.step_s else 0.0,
        "operations": {
            one.op: {"count": one.count, "p50_s": one.p50_s, "p99_s": one.p99_s, "wait_s": one.wait_s}
            for one in latency.operations
        },
        "waits_for": {str(peer): round(share, 4) for peer, share in sorted(shares.items())},
    }


def as_screen(view: GroupView, target: str, width: int = 120, trouble: str = "") -> RenderableType:
    """The headline, a row per rank, the heat map, the verdict. `trouble`: why there is no newer view."""
    from crossdock.common.log import printable

    verdict = verdict_line(view.verdict) or [Text(f"latency: {view.verdict.text}", style="dim")]
    old = [Text(f"no answer, this is the last view: {printable(trouble)}", style="red")] if trouble else []
    return Group(headline(view, target), *old, Text(), _ranks(view), Text(), *_heat(view, width), Text(), *verdict)


def _ranks(view: GroupView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("rank", "state", "tokens/s", "steps/s", "queued", "busy", *(f"{op} p50/p99" for op in _OPS)):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for member in view.members:
        latency = member.stats.latency
        quantiles = {one.op: f"{_time(one.p50_s)}/{_time(one.p99_s)}" for one in latency.operations}
        table.add_row(
            str(member.rank),
            state_of(member),
            f"{_per_s(latency, latency.tokens):,.0f}",
            f"{_per_s(latency, latency.steps):,.1f}",
            str(member.stats.queued_requests),
            f"{_per_s(latency, latency.step_s):.0%}",
            *(quantiles.get(op, "-") for op in _OPS),
        )
    return table


def _heat(view: GroupView, width: int) -> list[Text]:
    """A row per rank, a cell per peer: per cent of the rank's steps in which it waits for that peer beyond others."""
    shares = waits(view)
    ranks = sorted(shares)
    shown = ranks[: max(1, (width - _MARGIN) // _CELL)]
    lines = [Text("waits for   " + "".join(f"{peer:>{_CELL}}" for peer in shown) + "   % of its steps", style="dim")]
    for rank in ranks:
        line = Text(f"rank {rank:<7}")
        for peer in shown:
            share = shares[rank].get(peer, 0.0)
            style = next((style for least, style in _SHADES if share >= least), "dim")
            line.append("   ." if peer == rank else f"{share * 100:>{_CELL}.0f}", style if peer != rank else "dim")
        lines.append(line)
    if len(shown) < len(ranks):
        lines.append(Text(f"not shown: peers {shown[-1] + 1} and up (wider terminal, or --json)", style="dim"))
    return lines


def _per_s(latency: LatencyReport, amount: float) -> float:
    return amount / latency.interval_s if latency.interval_s else 0.0


def _time(seconds: float) -> str:
    """Three digits and a unit: "41.2us"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g}us"
    return f"{seconds * 1e3:.3g}ms" if seconds < 1 else f"{seconds:.3g}s"
