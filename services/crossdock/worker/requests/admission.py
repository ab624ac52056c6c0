"""Validation of requests: a ForwardRequest, or a frame with its rows, becomes tensors that no step can fail on, or a
Failure with field, expected and got.

Nothing is checked again later: a rank that fails alone in the middle of a step would break the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import grpc
import torch

from crossdock.protocol import native, wire
from crossdock.protocol.frames import Forward
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.checkpoints.checkpoint import ModelSpec
from crossdock.worker.requests.request_slots import RequestSlot
from crossdock.worker.steps.work import Failure, Refused

REQUEST_BYTES = 1024
"""Accounted overhead of one request, so that empty ones are not free."""
_LARGEST = (1 << 31) - 1


class Tokens(NamedTuple):
    """Tensors of a valid request: x [T, H] served dtype, topk_ids int32 [T, K], topk_weights float32 [T, K]."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of a request in a message: x, and its answer, which gRPC has twice while it sends it."""
        return REQUEST_BYTES + 3 * self.x.nbytes + self.topk_ids.nbytes + self.topk_weights.nbytes


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """Checks requests for one model, served in `dtype`, but for the fingerprint that a request expects: its layer may
    get another checkpoint before its step (engine.py)."""

    spec: ModelSpec
    dtype: torch.dtype

    def validate(self, request: expert_pb2.ForwardRequest) -> Tokens:
        """Check and unpack a message. Raises Refused: INVALID_ARGUMENT."""
        self._check_layer(request.layer)
        try:
            x, ids, weights = self._in_message(request)
        except wire.WireError as error:
            raise _invalid(str(error)) from None
        narrow = ids if ids.dtype is torch.int32 else ids.clip(-2, _LARGEST).to(torch.int32)
        addresses = (narrow.data_ptr(), weights.data_ptr()) * 2
        if wrong := native.load_held().cd_copy_routing(*addresses, ids.numel(), self.spec.num_experts - 1):
            raise self._wrong(wrong, ids)
        return Tokens(x, narrow, weights)

    def check_frame(self, request: Forward) -> None:
        """Check what a frame says of its rows, before they come. Raises Refused, as `validate`."""
        self._check_layer(request.layer)
        if request.dtype is not self.dtype:
            raise _invalid(f"x: expected dtype {wire.NAMES[self.dtype]}, got {wire.NAMES[request.dtype]}")
        shapes = (request.num_tokens, request.hidden), (request.num_tokens, request.topk)
        self._check_shapes(shapes[0], shapes[1], shapes[1])

    def check_taken(self, slot: RequestSlot) -> None:
        """Check rows that came with a checked frame. Raises Refused."""
        if wrong := slot.check_routing(self.spec.num_experts):
            raise self._wrong(wrong, slot.ids)

    def _check_layer(self, layer: int) -> None:
        if layer not in self.spec.moe_layers:
            raise _invalid(f"layer: expected one of {_ranges(self.spec.moe_layers)}, got {layer}")

    def _in_message(self, request: expert_pb2.ForwardRequest) -> tuple[torch.Tensor, ...]:
        wanted = {"x": (self.dtype,), "topk_ids": (torch.int32, torch.int64), "topk_weights": (torch.float32,)}
        x, ids, weights = (
            wire.decode(getattr(request, name), name=name, dtypes=dtypes, ndim=2) for name, dtypes in wanted.items()
        )
        self._check_shapes(tuple(x.shape), tuple(ids.shape), tuple(weights.shape))
        return x, ids, weights

    def _check_shapes(self, x: tuple[int, ...], ids: tuple[int, ...], weights: tuple[int, ...]) -> None:
        if x[1] != self.spec.hidden_size:
            raise _invalid(f"x: expected shape [T, {self.spec.hidden_size}], got {list(x)}")
        for name, shape in (("topk_ids", ids), ("topk_weights", weights)):
            if shape != (x[0], self.spec.topk):
                raise _invalid(f"{name}: expected shape [{x[0]}, {self.spec.topk}], got {list(shape)}")

    def _wrong(self, wrong: int, ids: torch.Tensor) -> Refused:
        if wrong != native.WRONG_ID:
            return _invalid("topk_weights: expected finite numbers, got NaN or infinity")
        low, high = (int(value) for value in ids.aminmax())
        return _invalid(f"topk_ids: expected -1..{self.spec.num_experts - 1}, got {low if low < -1 else high}")


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
