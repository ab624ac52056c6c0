"""Answers of the engine as messages."""

from __future__ import annotations

from crossdock.common import rpc
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.steps.work import Done, Failure, Timing


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
    message = expert_pb2.ForwardResponse(id=request_id, model=answer.model)
    fill(message.timing, answer.timing)
    return message


def fill(message: expert_pb2.Timing, timing: Timing) -> None:
    """Set every field of the message."""
    message.queue_ns = timing.queue_ns
    message.dispatch_ns = timing.dispatch_ns
    message.experts_ns = timing.experts_ns
    message.combine_ns = timing.combine_ns
    message.steps = timing.steps
