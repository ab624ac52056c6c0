"""Where requests go, whichever way they come: a gRPC stream or a request buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import grpc

from crossdock.common.access import RateLimiter
from crossdock.common.config import WorkerConfig
from crossdock.common.tracing import RequestTrace, Tracer
from crossdock.protocol.request_buffer import RequestRows
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.admission import RequestValidator, Tokens
from crossdock.worker.budget import Budget
from crossdock.worker.engine import Engine
from crossdock.worker.work import Done, Failure, Refused, Work
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

    def check_rate(self, client: Hashable) -> None:
        """Count a request of that client. Raises Refused: too many in this second."""
        if not self.limiter.allow(client):
            limit = f"requests: expected at most {self.limiter.rate:g} a second of one client, got more"
            raise Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, limit))

    def timeout_s(self, request: expert_pb2.ForwardRequest) -> float:
        """Deadline of a request: its own, or the configured one."""
        return request.timeout_ms * 1e-3 or self.config.request_timeout_s

    def work_of(
        self,
        request: expert_pb2.ForwardRequest,
        tokens: Tokens,
        client: Hashable,
        stream: Hashable,
        reply: Callable[[Done | Failure], None],
        trace: RequestTrace | None,
        shared: RequestRows | None = None,
    ) -> Work:
        """A checked request that arrives now. shared: its answer goes there."""
        now_ns = time.monotonic_ns()
        return Work(
            client=client,
            stream=stream,
            layer=request.layer,
            x=tokens.x,
            topk_ids=tokens.topk_ids,
            topk_weights=tokens.topk_weights,
            deadline_ns=now_ns + int(self.timeout_s(request) * 1e9),
            arrived_ns=now_ns,
            reply=reply,
            y=None if shared is None else shared.y,
            first_column=None if shared is None else shared.first_column,
            trace=trace,
        )
