"""Answers of the engine as messages."""

from __future__ import annotations

from crossdock.common import rpc
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.work import Done, Failure


def response_of(request_id: int, answer: Done | Failure) -> expert_pb2.ForwardResponse:
    """The message, without y."""
    if isinstance(answer, Failure):
        error = expert_pb2.Error(
            code=rpc.code_number(answer.code),
            message=answer.message,
            lost_ranks=answer.lost_ranks,
            epoch=answer.epoch,
        )
        return expert_pb2.ForwardResponse(id=request_id, error=error)
    timing = expert_pb2.Timing(
        queue_ns=answer.timing.queue_ns,
        dispatch_ns=answer.timing.dispatch_ns,
        experts_ns=answer.timing.experts_ns,
        combine_ns=answer.timing.combine_ns,
        steps=answer.timing.steps,
    )
    return expert_pb2.ForwardResponse(id=request_id, timing=timing)
