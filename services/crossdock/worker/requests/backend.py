"""Where requests go, whichever way they come: frames or a gRPC stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import grpc

from crossdock.common.access import RateLimiter
from crossdock.common.config import WorkerConfig
from crossdock.common.tracing import RequestTrace, Tracer
from crossdock.protocol.frames import Forward
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.requests.admission import RequestValidator, Tokens
from crossdock.worker.requests.budget import Budget
from crossdock.worker.requests.request_slots import RequestSlot
from crossdock.worker.steps.engine import Engine
from crossdock.worker.steps.work import Done, Failure, Refused, Work
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry

Asked = expert_pb2.ForwardRequest | Forward
"""A request, without its tensors."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Shared parts of all connections and streams."""

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
        if self.limiter.rate > 0 and not self.limiter.allow(client):
            limit = f"requests: expected at most {self.limiter.rate:g} a second of one client, got more"
            raise Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, limit))

    def timeout_s(self, request: Asked) -> float:
        """Deadline of a request: its own, or the configured one."""
        return request.timeout_ms * 1e-3 or self.config.request_timeout_s

    def work_of(
        self,
        request: Asked,
        tokens: Tokens | RequestSlot,
        client: Hashable,
        stream: Hashable,
        reply: Callable[[Done | Failure], None],
        trace: RequestTrace | None,
    ) -> Work:
        """A checked request that arrives now. tokens: its rows; in a slot, its answer goes there, too."""
        now_ns, timeout_ms = time.monotonic_ns(), request.timeout_ms
        deadline_ns = now_ns + (timeout_ms * 1_000_000 if timeout_ms else int(self.config.request_timeout_s * 1e9))
        if isinstance(tokens, RequestSlot):
            return Work(
                client, request.layer, tokens.x, tokens.ids, tokens.weights, deadline_ns, now_ns, reply, stream,
                y=tokens.x, kept=tokens.kept, trace=trace, model=request.model, num_tokens=tokens.num_tokens,
            )  # fmt: skip
        about = client, request.layer, *tokens, deadline_ns, now_ns, reply, stream
        return Work(*about, trace=trace, model=request.model)
