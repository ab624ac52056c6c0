"""What the service bench measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Times in ms.

    Attributes:
        shape: "model" or "path".
        path: "grpc", "shared", "echo", "far grpc", "far echo", "in-process, threads=1", "attached by grpc", ...
        loop: "closed", "open", or "".
        clients, tokens: of the case.
        p50_ms, p99_ms: of a call.
        rows_per_s: of all clients.
        queue_ms, dispatch_ms, experts_ms, combine_ms: means on the serving ranks.
        agree_ms: the rest of a request's time there: exchanges between ranks, hand-over of its answer.
        outside_ms: mean time of a call less that of its request on the worker.
    """

    shape: str
    path: str
    loop: str
    clients: int
    tokens: int
    p50_ms: float
    p99_ms: float
    rows_per_s: float
    queue_ms: float | None = None
    dispatch_ms: float | None = None
    experts_ms: float | None = None
    combine_ms: float | None = None
    agree_ms: float | None = None
    outside_ms: float | None = None
