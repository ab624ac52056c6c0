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

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For numpy, which does not have every dtype, by bytes."""

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
    return expert_pb2.Tensor(data=bytes(bytes_of(tensor)), dtype=name_of(tensor.dtype), shape=tensor.shape)


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name on the wire. Raises WireError."""
    name = NAMES.get(dtype)
    if name is None:
        raise WireError("tensor", f"dtype one of {sorted(DTYPES)}", dtype)
    return name


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and on the host."""
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
        tensor = plain(tensor)
    return tensor.view(-1).view(torch.uint8).numpy().data


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements on the host, contiguous, without gradient; copied in this thread, by numpy."""
    host = tensor.detach().cpu().resolve_neg()
    if host.is_contiguous():
        return host
    return torch.from_numpy(host.view(_WORDS[host.itemsize]).numpy().copy()).view(host.dtype)


def decode(
    message: expert_pb2.Tensor,
    *,
    name: str,
    dtypes: Collection[torch.dtype],
    ndim: int,
) -> torch.Tensor:
    """Unpack a tensor into memory of its own (writable, contiguous, on the CPU).

    Args:
        name: the field's name, for errors.
        dtypes: what the dtype may be.
        ndim: number of dimensions it must have.

    Raises:
        WireError: as `check`, or a byte count that does not fit.
    """
    dtype, shape = check(message, name=name, dtypes=dtypes, ndim=ndim)
    num_bytes, got = math.prod(shape) * dtype.itemsize, message.data
    if len(got) != num_bytes:
        expected = f"{num_bytes} bytes for {message.dtype} {list(shape)}"
        raise WireError(name, expected, f"{len(got)} bytes")
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(got), dtype=dtype).view(shape)


def check(
    message: expert_pb2.Tensor, *, name: str, dtypes: Collection[torch.dtype], ndim: int
) -> tuple[torch.dtype, tuple[int, ...]]:
    """dtype and shape of a tensor, wherever its bytes are; arguments as `decode`.

    Raises:
        WireError: unknown or unexpected dtype, wrong number of dimensions, a negative or huge dimension.
    """
    dtype = DTYPES.get(message.dtype)
    if dtype is None or dtype not in dtypes:
        raise WireError(name, f"dtype one of {sorted(NAMES[d] for d in dtypes)}", repr(message.dtype[:32]))
    num_dims = len(message.shape)
    if num_dims != ndim:
        raise WireError(name, f"{ndim} dimensions", f"{num_dims}")
    shape = tuple(message.shape)
    if min(shape, default=0) < 0 or max(shape, default=0) > MAX_DIM:
        raise WireError(name, f"dimensions in 0..{MAX_DIM}", list(shape))
    return dtype, shape
