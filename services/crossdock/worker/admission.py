"""Validation of requests: a ForwardRequest becomes tensors that no step can fail on, or a Failure with field, expected
and got.

Nothing is checked again later: a rank that fails alone in the middle of a step would break the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import torch

from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.checkpoint import ModelSpec
from crossdock.worker.work import Failure, Refused

REQUEST_BYTES = 1024
"""Accounted overhead of one request, so that empty ones are not free."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tensors of a valid request: x [T, H] served dtype, topk_ids int32 [T, K], topk_weights float32 [T, K]."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the request while it waits; its answer is as large as x."""
        return REQUEST_BYTES + 2 * self.x.nbytes + self.topk_ids.nbytes + self.topk_weights.nbytes


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """Checks requests for one model, served in `dtype`."""

    spec: ModelSpec
    dtype: torch.dtype

    def validate(self, request: expert_pb2.ForwardRequest) -> Tokens:
        """Check and unpack. Raises Refused: INVALID_ARGUMENT, or FAILED_PRECONDITION for another model."""
        spec = self.spec
        if request.model and request.model != spec.fingerprint:
            message = f"model: expected {spec.fingerprint}, got {request.model[:64]}"
            raise Refused(Failure(grpc.StatusCode.FAILED_PRECONDITION, message))
        if request.layer not in spec.moe_layers:
            raise _invalid(f"layer: expected one of {_ranges(spec.moe_layers)}, got {request.layer}")
        try:
            x = wire.decode(request.x, name="x", dtypes=(self.dtype,), ndim=2)
            ids = wire.decode(request.topk_ids, name="topk_ids", dtypes=(torch.int32, torch.int64), ndim=2)
            weights = wire.decode(request.topk_weights, name="topk_weights", dtypes=(torch.float32,), ndim=2)
        except wire.WireError as error:
            raise _invalid(str(error)) from None
        if x.shape[1] != spec.hidden_size:
            raise _invalid(f"x: expected shape [T, {spec.hidden_size}], got {list(x.shape)}")
        for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
            if tensor.shape != (x.shape[0], spec.topk):
                raise _invalid(f"{name}: expected shape [{x.shape[0]}, {spec.topk}], got {list(tensor.shape)}")
        self._check_values(ids, weights)
        return Tokens(x, ids.to(torch.int32), weights)

    def _check_values(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if not ids.numel():
            return
        low, high = (int(value) for value in ids.aminmax())
        if low < -1 or high >= self.spec.num_experts:
            got = low if low < -1 else high
            raise _invalid(f"topk_ids: expected -1..{self.spec.num_experts - 1}, got {got}")
        if not bool(weights.isfinite().all()):
            raise _invalid("topk_weights: expected finite numbers, got NaN or infinity")


def _invalid(message: str) -> Refused:
    return Refused(Failure(grpc.StatusCode.INVALID_ARGUMENT, message))


def _ranges(numbers: tuple[int, ...]) -> str:
    """ "1..4, 7" for (1, 2, 3, 4, 7)."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}..{last}" if first < last else str(first) for first, last in parts)
