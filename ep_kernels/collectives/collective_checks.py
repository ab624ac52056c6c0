"""Checks of a collective's arguments, made once per call and before anything is sent. Each raises ArgumentError."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_kernels.checks import share_memory, without_memory
from ep_kernels.collectives.collective_types import SUM_DTYPES
from ep_kernels.errors import ArgumentError

REDUCTIONS = ("sum", "avg", "min", "max", "product")
"""The first by the transport, all by torch.distributed."""


@dataclass(frozen=True, slots=True)
class OwnRank:
    """Whose arguments these are.

    Attributes:
        inactive: whether some rank takes no part.
    """

    rank: int
    size: int
    device_type: str
    inactive: bool


def contiguous(name: str, value: object, device_type: str) -> torch.Tensor:
    """A contiguous tensor on that kind of device, of which the elements are what its memory says."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(name, "a torch.Tensor", type(value).__name__)
    if value.device.type != device_type:
        raise ArgumentError(name, f"a tensor on {device_type}", value.device)
    if value.layout is not torch.strided or not value.is_contiguous():
        strides = list(value.stride()) if value.layout is torch.strided else value.layout
        raise ArgumentError(name, "a contiguous tensor", f"strides {strides}")
    if value.data_ptr() == 0 and value.numel():
        raise without_memory(name, value)
    if value.is_neg() or value.is_conj():
        raise ArgumentError(name, "a resolved tensor", "a lazy negation or conjugate: resolve_neg(), resolve_conj()")
    return value.detach()


def made(out: torch.Tensor) -> torch.Tensor:
    """An out that torch has just made, if it has memory: under a mode like FakeTensorMode none has."""
    if out.data_ptr() == 0 and out.numel():
        raise without_memory("out", out)
    return out


def gathered(index: str, x: object, out: object, own: OwnRank) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, ...] and its out [R * n, ...], made where the caller gave none (zeros for inactive ranks)."""
    shard = contiguous(f"x{index}", x, own.device_type)
    lead = shard.shape[0] if shard.ndim else 1
    shape = (own.size * lead, *shard.shape[1:])
    if out is None:
        make = torch.zeros if own.inactive else torch.empty
        return shard, made(make(shape, dtype=shard.dtype, device=shard.device))
    whole = _like(f"out{index}", out, shape, shard, own)
    _apart(f"out{index}", shard, whole, own.rank * num_bytes(shard))
    return shard, whole


def joined(x: torch.Tensor, out: object, own: OwnRank) -> torch.Tensor:
    """out [n, R * k] for the columns x [n, k] of every rank, made where the caller gave none (zeros for inactive
    ranks)."""
    shape = (x.shape[0], own.size * x.shape[1])
    if out is None:
        make = torch.zeros if own.inactive else torch.empty
        return made(make(shape, dtype=x.dtype, device=x.device))
    whole = _like("out", out, shape, x, own)
    if share_memory(x, whole):
        raise ArgumentError("out", "memory apart from x", "bytes in common")
    return whole


def disjoint(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Check that among gathers of one call no out shares memory with another's out or x."""
    spans = sorted((*_span(out), i) for i, (_, out) in enumerate(pairs) if out.numel())
    for (_, end, i), (begin, _, j) in itertools.pairwise(spans):
        if begin < end:
            raise ArgumentError(f"outs[{j}]", f"memory apart from outs[{i}]", f"{end - begin} bytes in common")
    starts = [begin for begin, _, _ in spans]
    for i, (x, _) in enumerate(pairs):
        begin, end = _span(x)
        for first, last, j in spans[max(0, bisect.bisect_right(starts, begin) - 1) :] if x.numel() else ():
            if first >= end:
                break
            if begin < last and j != i:
                raise ArgumentError(f"outs[{j}]", f"memory apart from xs[{i}]", "bytes in common")


def scattered(x: object, out: object, own: OwnRank) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R * n, ...] and its out [n, ...]."""
    whole = contiguous("x", x, own.device_type)
    if whole.ndim == 0 or whole.shape[0] % own.size:
        raise ArgumentError("x", f"a first dimension that {own.size} ranks divide", list(whole.shape))
    shape = (whole.shape[0] // own.size, *whole.shape[1:])
    if out is None:
        return whole, made(torch.empty(shape, dtype=whole.dtype, device=whole.device))
    shard = _like("out", out, shape, whole, own)
    _apart("out", shard, whole, own.rank * num_bytes(shard))
    return whole, shard


def reduced(x: object, out: object, own: OwnRank) -> tuple[torch.Tensor, torch.Tensor]:
    """x [...] and its out [...], which may be x."""
    given = contiguous("x", x, own.device_type)
    if out is None:
        return given, made(torch.empty_like(given))
    total = _like("out", out, tuple(given.shape), given, own)
    _apart("out", total, given, 0)
    return given, total


def reduction(op: object) -> str:
    if op not in REDUCTIONS:
        raise ArgumentError("op", f"one of {REDUCTIONS}", repr(op))
    return str(op)


def num_sms(value: int | None, default: int | None, least: int) -> int | None:
    """Multiprocessors, None for a choice of ours. `least`: 0 where copy engines alone can do it."""
    if value is None:
        return None if default is not None and default < least else default
    if type(value) is not int or not least <= value < 1 << 16:
        raise ArgumentError("num_sms", f"None or an int in {least}..65535", repr(value))
    return value


def flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise ArgumentError(name, "a bool", repr(value))
    return value


def sequence(name: str, values: object, length: int | None) -> Sequence[object]:
    """A list or tuple, not empty, of that length."""
    if not isinstance(values, list | tuple) or not values or (length is not None and len(values) != length):
        expected = "tensors" if length is None else f"{length} tensors"
        got = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise ArgumentError(name, f"a list or tuple of {expected}", got)
    return values


def why_not_summed(op: str, dtype: torch.dtype) -> str:
    """Why transports leave this sum to torch.distributed; "" where they do not."""
    if op != "sum":
        return f"op {op!r}; transports sum only"
    if dtype not in SUM_DTYPES:
        return f"dtype {dtype}; transports sum {', '.join(map(str, SUM_DTYPES))}"
    return ""


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8)


def _like(name: str, out: object, shape: tuple[int, ...], x: torch.Tensor, own: OwnRank) -> torch.Tensor:
    given = contiguous(name, out, own.device_type)
    if tuple(given.shape) != shape:
        raise ArgumentError(name, f"shape {list(shape)}", list(given.shape))
    if given.dtype != x.dtype:
        raise ArgumentError(name, f"{x.dtype} as x", given.dtype)
    if given.device != x.device:
        raise ArgumentError(name, f"a tensor on {x.device} as x", given.device)
    return given


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [begin, end) of its bytes; one device's."""
    return tensor.data_ptr(), tensor.data_ptr() + num_bytes(tensor)


def _apart(name: str, part: torch.Tensor, whole: torch.Tensor, offset: int) -> None:
    """`part` lies at that byte of `whole`, or nowhere in it."""
    at = part.data_ptr() - whole.data_ptr()
    if at != offset and share_memory(part, whole):
        raise ArgumentError(name, f"memory apart from x, or in place {offset} bytes into the larger", f"{at} bytes")
