"""Where requests go, whichever way they come: a gRPC stream or a request buffer."""

from __future__ import annotations

from dataclasses import dataclass

from crossdock.common.access import RateLimiter
from crossdock.common.config import WorkerConfig
from crossdock.common.tracing import Tracer
from crossdock.worker.admission import RequestValidator
from crossdock.worker.budget import Budget
from crossdock.worker.engine import Engine
from crossdock.worker.worker_telemetry import WorkerTelemetry


@dataclass(frozen=True, slots=True)
class Backend:
    """Shared parts of all streams and request buffers."""

    config: WorkerConfig
    validator: RequestValidator
    engine: Engine
    telemetry: WorkerTelemetry
    budget: Budget
    limiter: RateLimiter
    """Requests of one client per second."""
    tracer: Tracer | None = None
