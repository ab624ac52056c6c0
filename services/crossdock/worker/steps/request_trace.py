"""Traces of requests, and what they go through. Costs nothing for requests that are not traced."""

from __future__ import annotations

from crossdock.common.tracing import PendingSpan, RequestTrace, TraceContext, Tracer, parse_traceparent
from crossdock.protocol.frames import Forward
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.steps.stepper import Batch
from crossdock.worker.steps.work import Work

_SERVICE = expert_pb2.DESCRIPTOR.services_by_name["ExpertService"].full_name
_CALL = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": "Forward"}


def begin(
    tracer: Tracer | None, request: expert_pb2.ForwardRequest | Forward, parent: TraceContext | None, received_ns: int
) -> RequestTrace | None:
    """The trace of a request not yet checked. `parent`: that of its stream, for a request without its own."""
    if tracer is None:
        return None
    own = parse_traceparent(request.traceparent) if request.traceparent else parent
    # An id may be larger than the integers of a span.
    attributes: dict[str, str | int] = {**_CALL, "crossdock.request": str(request.id), "crossdock.layer": request.layer}
    return tracer.begin(f"{_SERVICE}/Forward", own, received_ns, attributes)


def admitted(work: Work, received_ns: int) -> None:
    """The request was checked, from `received_ns` until it was queued."""
    if work.trace is not None:
        tokens = {"crossdock.tokens": work.num_tokens}
        work.trace.phases.append(PendingSpan("admit", received_ns, work.arrived_ns, tokens))


def taken(work: Work, now_ns: int) -> None:
    """Record that its first step has taken the request from the queue."""
    if work.trace is not None:
        work.trace.phases.append(PendingSpan("queue", work.arrived_ns, now_ns))


def stepped(batch: Batch, rank: int, epoch: int, number: int, now_ns: int) -> None:
    """Step `number` of the epoch has ended for all requests of a batch."""
    phase: PendingSpan | None = None
    for piece in batch.slices:
        trace = piece.work.trace
        if trace is not None:
            phase = phase or _step(batch, rank, epoch, number, now_ns)
            trace.phases.append(phase)


def _step(batch: Batch, rank: int, epoch: int, number: int, now_ns: int) -> PendingSpan:
    at_ns, parts = batch.start_ns, []
    for name, took_ns in zip(("dispatch", "experts", "combine"), batch.phases_ns, strict=True):
        parts.append(PendingSpan(name, at_ns, at_ns + took_ns))
        at_ns += took_ns
    attributes = {
        "crossdock.rank": rank,
        "crossdock.epoch": epoch,
        "crossdock.step": number,
        "crossdock.step.tokens": sum(piece.num_tokens for piece in batch.slices),
        "crossdock.step.requests": len(batch.slices),
    }
    return PendingSpan("step", batch.start_ns, max(now_ns, at_ns), attributes, parts)
