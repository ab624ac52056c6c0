"""What a rank does in these tests: make Collectives, run operations, compare each with the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels import StoreGroup
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives import collective_reference as reference

Store = Any
SUMS = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool)
POISON = 0x5A
_names = itertools.count()


@dataclass(frozen=True)
class Seat:
    """Where a rank function runs.

    Attributes:
        rank, size: in the group.
        store: of the run.
        transport: under test.
    """

    rank: int
    size: int
    store: Store
    transport: str

    def config(self, name: str = "", **fields: Any) -> CollectiveConfig:
        """Small buffers, so that large tensors travel in rounds."""
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        group = StoreGroup(self.store, self.rank, self.size, name=name or f"auto-{next(_names)}")
        usual = {"group": group, "transport": self.transport, "timeout_s": 20.0}
        return CollectiveConfig(**(usual | {"pool_bytes": 64 << 20, "staging_bytes": 1 << 20} | fields))

    def collectives(self, name: str = "", **fields: Any) -> Collectives:
        """Of all ranks of the world."""
        return Collectives(self.config(name, **fields))


def settle(coll: Collectives) -> None:
    """Raise what the operations so far have met: GPUs say it only once they have come there."""
    if coll.capabilities.device_type == "cuda":
        torch.cuda.synchronize()
    coll.check()


def values(shape: Sequence[int], dtype: torch.dtype, rank: int, seed: int) -> torch.Tensor:
    """A rank's x, the same wherever it is made; sums of it round."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in SUMS:
        return (torch.randn(*shape, generator=draw) * 3).to(dtype)
    raw = torch.randint(0, 2 if dtype is torch.bool else 120, tuple(shape), generator=draw, dtype=torch.uint8)
    return raw.to(dtype) if dtype in (torch.int64, torch.bool) else raw.view(dtype)


def everyone(coll: Collectives, shape: Sequence[int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """x of every rank."""
    return [values(shape, dtype, rank, seed) for rank in range(coll.size)]


def on_device(coll: Collectives, x: torch.Tensor) -> torch.Tensor:
    """The tensor where the operations want it."""
    return x.to(coll.capabilities.device_type)


def poisoned(coll: Collectives, shape: Sequence[int], dtype: torch.dtype, registered: bool) -> torch.Tensor:
    """An out whose bytes are known to be wrong."""
    made = coll.empty(shape, dtype) if registered else on_device(coll, torch.empty(*shape, dtype=dtype))
    made.view(-1).view(torch.uint8).fill_(POISON)
    return made


def misaligned(coll: Collectives, x: torch.Tensor) -> torch.Tensor:
    """The same values, one element into its storage: 2-byte dtypes at an odd multiple of 2."""
    room = on_device(coll, torch.empty(x.numel() + 1, dtype=x.dtype))
    view = room[1:].view(x.shape)
    view.copy_(x)
    return view


def same_bits(got: torch.Tensor, expected: torch.Tensor | None, what: str) -> None:
    """Equal in every bit, the encodings of a NaN apart."""
    assert expected is not None
    got = got.cpu()
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, what
    if got.dtype in SUMS:
        assert torch.equal(got.isnan(), expected.isnan()), f"{what}: NaN elsewhere"
        got, expected = got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    raw, want = got.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(raw, want), f"{what}: {int((raw != want).sum())} of {raw.numel()} bytes differ"


def check_gather(coll: Collectives, shape: Sequence[int], dtype: torch.dtype, seed: int, way: str = "plain") -> None:
    """One all-gather; `way`: where x and out lie."""
    xs = everyone(coll, shape, dtype, seed)
    x, n = xs[coll.rank], shape[0]
    whole = (coll.size * n, *shape[1:])
    if way == "in place":
        out = poisoned(coll, whole, dtype, registered=True)
        mine = out[coll.rank * n : (coll.rank + 1) * n]
        mine.copy_(x)
    elif way == "in place, plain":
        out = poisoned(coll, whole, dtype, registered=False)
        mine = out[coll.rank * n : (coll.rank + 1) * n]
        mine.copy_(x)
    else:
        out = poisoned(coll, whole, dtype, registered="to registered" in way)
        mine = misaligned(coll, x) if "misaligned" in way else on_device(coll, x)
        if "from registered" in way:
            mine = coll.empty(shape, dtype)
            mine.copy_(x)
    before = out.clone()
    got = coll.all_gather(mine, out=out).wait()
    assert got.data_ptr() == out.data_ptr()
    expected = reference.all_gather(xs, active=coll.active, outs=[before.cpu()] * coll.size)
    same_bits(got, expected[coll.rank], f"all_gather {list(shape)} {dtype} {way}")


def check_scatter(coll: Collectives, shape: Sequence[int], dtype: torch.dtype, seed: int, way: str = "plain") -> None:
    """One reduce-scatter; shape is that of out."""
    whole = (coll.size * shape[0], *shape[1:])
    xs = everyone(coll, whole, dtype, seed)
    x = coll.empty(whole, dtype) if "registered" in way else misaligned(coll, xs[coll.rank])
    x.copy_(xs[coll.rank])
    n = shape[0]
    in_place = x[coll.rank * n : (coll.rank + 1) * n]
    out = in_place if "in place" in way else poisoned(coll, shape, dtype, registered=False)
    got = coll.reduce_scatter(x, out=out).wait()
    expected = reference.reduce_scatter(xs, active=coll.active)[coll.rank]
    same_bits(got, expected, f"reduce_scatter {list(shape)} {dtype} {way}")


def check_reduce(coll: Collectives, shape: Sequence[int], dtype: torch.dtype, seed: int, way: str = "plain") -> None:
    """One all-reduce."""
    xs = everyone(coll, shape, dtype, seed)
    x = coll.empty(shape, dtype) if "registered" in way else misaligned(coll, xs[coll.rank])
    x.copy_(xs[coll.rank])
    out = x if "in place" in way else poisoned(coll, shape, dtype, registered="registered" in way)
    got = coll.all_reduce(x, out=out).wait()
    expected = reference.all_reduce(xs, active=coll.active)[coll.rank]
    same_bits(got, expected, f"all_reduce {list(shape)} {dtype} {way}")


def check_all(coll: Collectives, number: int, seed: int) -> None:
    """One of each, of a size that changes with `number`."""
    n = (1, 7, 300, 40_001)[number % 4]
    dtype = SUMS[number % 3]
    check_gather(coll, (n,), dtype, seed + number, ("plain", "in place")[number % 2])
    check_scatter(coll, (n,), dtype, seed + number, ("plain", "registered")[number % 2])
    check_reduce(coll, (n,), dtype, seed + number, ("plain", "registered in place")[number % 2])
