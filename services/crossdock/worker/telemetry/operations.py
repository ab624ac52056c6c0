"""Samples of operations as messages, for `crossdock trace`."""

from __future__ import annotations

from collections.abc import Sequence

from crossdock.common.rpc import InvalidArgument
from crossdock.protocol.v1 import expert_pb2
from ep_kernels import LatencySample

MAX_STEPS, OPS_PER_STEP = 1000, 3
"""Steps of a trace; a step is an exchange, a dispatch and a combine."""


def trace_of(
    samples: Sequence[LatencySample], request: expert_pb2.TraceRequest, rank: int, epoch: int
) -> expert_pb2.TraceResponse:
    """The operations of the last steps. Raises InvalidArgument."""
    if not 1 <= request.steps <= MAX_STEPS:
        raise InvalidArgument(f"steps: expected 1..{MAX_STEPS}, got {request.steps}")
    operations = [
        expert_pb2.Operation(
            op=one.op, mode=one.mode, seq=one.seq, tokens=one.tokens, start_ns=one.start_ns, send_ns=one.send_ns,
            total_ns=one.total_ns, wait_ns=one.peer_wait_ns,
        )
        for one in samples[-request.steps * OPS_PER_STEP :]
    ]  # fmt: skip
    return expert_pb2.TraceResponse(rank=rank, epoch=epoch, operations=operations)
