"""Tensors on the wire: raw little-endian bytes, a dtype name and a shape. No pickle, nothing is trusted.

Both ends use this page: the client encodes requests and decodes answers, the worker the other way round. What a dtype
may be, and how many dimensions there are, is the caller's to say; that the bytes fit the shape is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from crossdock.protocol.v1 import expert_pb2

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Every dtype the protocol knows, by its name on the wire."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

MAX_DIM = (1 << 31) - 1
"""No dimension is larger: keeps hostile shapes away from torch's own arithmetic."""


class WireError(ValueError):
    """A message's tensor is not what its field must be; says field, expected, got.

    Attributes:
        field: name of the field, e.g. "topk_ids".
    """

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field


def encode(tensor: torch.Tensor) -> expert_pb2.Tensor:
    """Pack a tensor of any device and stride.

    Raises:
        WireError: the dtype has no name on the wire.
    """
    name = NAMES.get(tensor.dtype)
    if name is None:
        raise WireError("tensor", f"dtype one of {sorted(DTYPES)}", tensor.dtype)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return expert_pb2.Tensor(data=flat.view(torch.uint8).numpy().tobytes(), dtype=name, shape=tensor.shape)


def decode(message: expert_pb2.Tensor, *, name: str, dtypes: Collection[torch.dtype], ndim: int) -> torch.Tensor:
    """Unpack a tensor into memory of its own (writable, contiguous, on the CPU).

    Args:
        message: what came in.
        name: the field's name, for errors.
        dtypes: what the dtype may be.
        ndim: number of dimensions it must have.

    Raises:
        WireError: unknown or unexpected dtype, wrong number of dimensions, a negative or huge dimension, or a byte
            count that does not fit.
    """
    dtype = DTYPES.get(message.dtype)
    if dtype is None or dtype not in dtypes:
        raise WireError(name, f"dtype one of {sorted(NAMES[d] for d in dtypes)}", repr(message.dtype[:32]))
    num_dims = len(message.shape)
    if num_dims != ndim:
        raise WireError(name, f"{ndim} dimensions", f"{num_dims}")
    shape = tuple(message.shape)
    if not all(0 <= size <= MAX_DIM for size in shape):
        raise WireError(name, f"dimensions in 0..{MAX_DIM}", list(shape))
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(message.data) != num_bytes:
        expected = f"{num_bytes} bytes for {message.dtype} {list(shape)}"
        raise WireError(name, expected, f"{len(message.data)} bytes")
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(message.data), dtype=dtype).view(shape)
