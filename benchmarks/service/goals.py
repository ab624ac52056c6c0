"""What the rows of a service bench say of its goals, which are of the shape `path`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.service.rows import Row

ABOVE_MS = {1: 0.12, 128: 1.0}
"""By tokens: p50 of a call over a UNIX socket, less that of the experts in one process."""
MANY, TIMES, OF_ECHO = 128, 5.0, 0.8
"""Rows per second at that many tokens, of those by gRPC; speed of a call to another host, of an echo's."""
OF_PLAIN = {1: 1.3, 128: 1.3}
"""By tokens: p50 of a call over TLS, of one over plain TCP."""
PICKED = "far tcp"
"""The way of a client of another host."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure. `target` None: there is none; `met` likewise."""

    what: str
    tokens: int
    value: float
    unit: str
    target: float | None = None
    met: bool | None = None


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """As far as the rows are there."""
    found = [*_above(rows), *_times(rows), *_of_plain(rows)]
    for path in ("tcp", "grpc", PICKED, "far grpc"):
        for tokens in sorted({row.tokens for row in rows}):
            found += _of_echo(rows, path, tokens)
    return found


def _above(rows: Sequence[Row]) -> list[Goal]:
    """Also less the experts of the call itself, by the workers' mean: what the way to them and back takes."""
    found = []
    for tokens, most in ABOVE_MS.items():
        inside = [row.p50_ms for row in _of(rows, "in-process", tokens)]
        for row in _of(rows, "unix", tokens):
            if inside and row.clients == 1:
                value = round(row.p50_ms - min(inside), 3)
                what = "unix: above the experts in one process"
                found.append(Goal(what, tokens, value, "ms", most, value <= most))
                found.append(Goal("unix: less its own experts", tokens, _apart_ms(row), "ms"))
    return found


def _times(rows: Sequence[Row]) -> list[Goal]:
    unix, grpc = _rate(rows, "unix", MANY), _rate(rows, "grpc", MANY)
    if not (unix and grpc):
        return []
    value = round(unix / grpc, 2)
    return [Goal("unix: rows/s of those by gRPC", MANY, value, "x", TIMES, value >= TIMES)]


def _of_plain(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for tokens, most in OF_PLAIN.items():
        plain = [row.p50_ms for row in _of(rows, "tcp", tokens) if row.clients == 1]
        for row, p50_ms in zip(_of(rows, "tls", tokens), plain, strict=False):
            value = round(row.p50_ms / p50_ms, 2)
            found.append(Goal("tls: p50 of plain TCP's", tokens, value, "x", most, value <= most))
    return found


def _of_echo(rows: Sequence[Row], path: str, tokens: int) -> list[Goal]:
    """Rows per second of all clients. Since an echo has no experts, also the speed of one client's calls without the
    time of their experts, and beside an echo after which the experts follow in one process."""
    echo_path = "far echo" if path.startswith("far ") else "echo"
    service, echo = _rate(rows, path, tokens), _rate(rows, echo_path, tokens)
    if not (service and echo):
        return []
    target = OF_ECHO if path == PICKED else None

    def goal(what: str, value: float) -> Goal:
        return Goal(
            f"{path}: {what}", tokens, round(value, 3), "x", target, None if target is None else value >= target
        )

    goals = [goal("rows/s of the echo", service / echo)]
    calls, echoes = ([row for row in _of(rows, each, tokens) if row.clients == 1] for each in (path, echo_path))
    for call, one in zip(calls, echoes, strict=False):
        goals.append(goal("of the echo's speed, without the experts", one.p50_ms / _apart_ms(call)))
        if inside := [row.p50_ms for row in _of(rows, "in-process", tokens)]:
            both_ms = one.p50_ms + min(inside)
            goals.append(goal("of the speed of the echo and the experts in one process", both_ms / call.p50_ms))
    return goals


def _apart_ms(row: Row) -> float:
    """p50 of a call without the experts' mean."""
    return round(row.p50_ms - (row.experts_ms or 0.0), 3)


def _of(rows: Sequence[Row], path: str, tokens: int) -> list[Row]:
    """Closed loops, and the experts in one process, of the shape `path`."""
    return [
        row
        for row in rows
        if row.shape == "path" and row.path.partition(",")[0] == path and row.tokens == tokens and row.loop != "open"
    ]


def _rate(rows: Sequence[Row], path: str, tokens: int) -> float:
    """Most rows per second, of any number of clients; 0: not measured."""
    return max((row.rows_per_s for row in _of(rows, path, tokens)), default=0.0)
