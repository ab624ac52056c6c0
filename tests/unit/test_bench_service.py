"""The goals of the service bench, from rows as it writes them."""

from __future__ import annotations

from benchmarks.service.goals import Goal, goals_of
from benchmarks.service.rows import Row


def row(
    path: str,
    tokens: int,
    p50_ms: float,
    rows_per_s: float,
    loop: str = "closed",
    clients: int = 1,
    experts_ms: float | None = None,
) -> Row:
    return Row("path", path, loop, clients, tokens, p50_ms, p50_ms, rows_per_s, experts_ms=experts_ms)


ROWS = [
    row("in-process, threads=1", 1, 0.5, 2000, ""),
    row("in-process, threads=2", 1, 0.4, 2500, ""),
    row("in-process, threads=2", 128, 4, 32000, ""),
    row("unix", 1, 0.5, 1900, experts_ms=0.2),
    row("unix", 1, 9, 100, clients=8),
    row("unix", 128, 6, 15000, experts_ms=2.0),
    row("unix", 128, 0.1, 90000, "open"),
    row("tcp", 1, 0.5, 1900, experts_ms=0.2),
    row("tls", 1, 0.6, 1600, experts_ms=0.2),
    row("tcp", 128, 8, 12000, clients=8),
    row("tls", 128, 9, 11000),
    row("grpc", 128, 20, 4000),
    row("grpc", 128, 90, 5000, clients=8),
    row("far echo", 128, 4, 40000),
    row("far grpc", 128, 20, 8000, experts_ms=4.0),
    row("far tcp", 128, 9, 14000, experts_ms=4.0),
    row("far tcp", 128, 30, 20000, clients=8, experts_ms=9.0),
    Row("model", "unix", "closed", 1, 128, 0.0, 0.0, 1e6),
]


def test_each_goal_is_of_the_rows_that_it_names() -> None:
    above, apart = "unix: above the experts in one process", "unix: less its own experts"
    assert goals_of(ROWS) == [
        Goal(above, 1, 0.1, "ms", 0.12, True),
        Goal(apart, 1, 0.3, "ms"),
        Goal(above, 128, 2, "ms", 1.0, False),
        Goal(apart, 128, 4.0, "ms"),
        Goal("unix: rows/s of those by gRPC", 128, 3.0, "x", 5.0, False),
        Goal("tls: p50 of plain TCP's", 1, 1.2, "x", 1.3, True),
        Goal("far tcp: rows/s of the echo", 128, 0.5, "x", 0.8, False),
        Goal("far tcp: of the echo's speed, without the experts", 128, 0.8, "x", 0.8, True),
        Goal("far tcp: of the speed of the echo and the experts in one process", 128, 0.889, "x", 0.8, True),
        Goal("far grpc: rows/s of the echo", 128, 0.2, "x"),
        Goal("far grpc: of the echo's speed, without the experts", 128, 0.25, "x"),
        Goal("far grpc: of the speed of the echo and the experts in one process", 128, 0.4, "x"),
    ]


def test_what_was_not_measured_is_no_goal() -> None:
    assert goals_of([]) == []
    assert [goal.what for goal in goals_of(ROWS[-1:])] == []
