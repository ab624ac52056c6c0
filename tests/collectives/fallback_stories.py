"""What ranks do in test_collective_fallback.py: torch.distributed serves what the transport cannot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_kernels import TorchGroup
from ep_kernels.collectives import Collectives
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.collective_types import CollectiveCapabilities, CollectiveOp
from ep_kernels.collectives.fallback import TorchCollectives
from ep_kernels.errors import ArgumentError, PeerTimeout, TransportError
from ep_kernels.transports import collective_base
from ep_kernels.transports.cpu import region
from tests.collectives.steps import (
    BYTES,
    SUMS,
    Seat,
    Store,
    check_all,
    check_scatter,
    everyone,
    on_device,
    same_bits,
    values,
)


@contextmanager
def gloo(rank: int, size: int, store: Store) -> Iterator[None]:
    """A default process group; NCCL's for GPU tensors, where each rank has a GPU."""
    has_gpus = torch.cuda.device_count() >= size
    backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
    if has_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fails_at(monkeypatch: pytest.MonkeyPatch, step: str, rank: int) -> None:
    """This rank cannot take that step of bring-up."""

    def refuse(*args: Any) -> Any:
        raise TransportError(f"no {step} here")

    if step == "other host":
        monkeypatch.setattr(region, "boot_id", lambda: f"another boot {rank}")
    elif step == "create":
        monkeypatch.setattr(collective_base, "create", refuse)
    else:
        made = collective_base.create

        def create(config: Any) -> Any:
            transport = made(config)
            setattr(transport, step, refuse)
            return transport

        monkeypatch.setattr(collective_base, "create", create)


def exact(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int) -> torch.Tensor:
    """Small integers: their sums round in no order."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-8, 9, shape, generator=draw).to(dtype)


def check_values(coll: Collectives) -> None:
    """The same values as the reference, whoever computes them."""
    rank, size = coll.rank, coll.size
    for seed, n in enumerate((0, 1, 7, 300)):
        for dtype in SUMS:
            xs = [exact((n, 2), dtype, r, seed) for r in range(size)]
            same_bits(coll.all_reduce(xs[rank]).wait(), reference.all_reduce(xs)[rank], "all_reduce")
            mine = xs[rank].clone()
            same_bits(coll.all_reduce(mine, out=mine).wait(), reference.all_reduce(xs)[rank], "all_reduce in place")
            wide = [exact((size * n, 2), dtype, r, seed) for r in range(size)]
            same_bits(coll.reduce_scatter(wide[rank]).wait(), reference.reduce_scatter(wide)[rank], "reduce_scatter")
        for dtype in (*SUMS, *BYTES):
            xs = everyone(coll, (n,), dtype, seed)
            work = coll.all_gather(xs[rank])
            same_bits(work.wait(), reference.all_gather(xs)[rank], f"all_gather {dtype}")
            assert work.is_completed()
            out = coll.empty((size * n,), dtype)
            out[rank * n : (rank + 1) * n] = xs[rank]
            got = coll.all_gather(out[rank * n : (rank + 1) * n], out=out).wait()
            same_bits(got, reference.all_gather(xs)[rank], f"all_gather in place {dtype}")
    parts = [everyone(coll, (n,), torch.float32, n) for n in (3, 0, 5)]
    for got, xs in zip(coll.all_gather_coalesced([xs[rank] for xs in parts]).wait(), parts, strict=True):
        same_bits(got, reference.all_gather(xs)[rank], "coalesced")
    x, w = exact((size * 2, 4), torch.float32, rank, 1), exact((4, 3), torch.float32, 0, 2)
    total = sum(exact((size * 2, 4), torch.float32, r, 1) @ w for r in range(size))
    assert torch.equal(coll.matmul_all_reduce(x, w), total)
    assert torch.equal(coll.matmul_reduce_scatter(x, w), total[rank * 2 : rank * 2 + 2])
    ys, whole = coll.all_gather_matmul(x, [w])
    assert torch.equal(ys[0], whole @ w)


def whole_group(rank: int, size: int, store: Store, step: str, odd: int) -> tuple[str, list[str]]:
    """Bring-up fails on one rank: all ranks fall back, with one warning each; (reason, warnings)."""
    with gloo(rank, size, store), pytest.MonkeyPatch.context() as monkeypatch:
        if rank == odd:
            fails_at(monkeypatch, step, rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coll = Collectives(Seat(rank, size, store, "cpu").config(group=TorchGroup(), timeout_s=4.0))
            check_values(coll)
            coll.barrier()
            coll.exchange([rank] * 8)
        assert coll.samples() == []
        with pytest.raises(ArgumentError, match="mask: expected all ranks"):
            coll.set_active([True] + [r == rank for r in range(1, size)] if rank else [True] + [False] * (size - 1), 1)
        reason = coll.capabilities.reason
        coll.give_up([(rank + 1) % size])
        with pytest.raises(PeerTimeout):
            coll.all_reduce(torch.zeros(1))
        coll.close()
        return reason, [str(w.message) for w in caught]


def nothing_to_fall_back_on(rank: int, size: int, store: Store, grouped: bool) -> str:
    """No process group, or fallback=False: a clear error on all ranks."""
    with gloo(rank, size, store), pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            fails_at(monkeypatch, "other host", rank)
        fields = {"group": TorchGroup(), "fallback": False} if grouped else {}
        with pytest.raises(TransportError) as error:
            Seat(rank, size, store, "cpu").collectives("first", **fields)
        dist.barrier()
        return str(error.value)


def single_operations(rank: int, size: int, store: Store, transport: str) -> list[str]:
    """Other dtypes and reductions, beside operations that the transport runs; the warnings."""
    with gloo(rank, size, store), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Collectives(Seat(rank, size, store, transport).config(group=TorchGroup())) as coll:
            for seed in range(3):
                ints = [on_device(coll, exact((size * 2,), torch.int64, r, seed)) for r in range(size)]
                stacked = torch.stack(ints)
                assert torch.equal(coll.all_reduce(ints[rank]).wait(), stacked.sum(0))
                got = coll.reduce_scatter(ints[rank]).wait()
                assert torch.equal(got, stacked.sum(0)[rank * 2 : rank * 2 + 2])
                floats = [on_device(coll, values((5,), torch.float32, r, seed)) for r in range(size)]
                assert torch.equal(coll.all_reduce(floats[rank], op="max").wait(), torch.stack(floats).amax(0))
                assert torch.equal(coll.all_reduce(floats[rank], op="min").wait(), torch.stack(floats).amin(0))
                doubles = [x.double() for x in floats]
                assert torch.allclose(coll.all_reduce(doubles[rank]).wait(), torch.stack(doubles).sum(0))
                check_all(coll, seed, seed)
            with pytest.raises(ArgumentError, match="op: expected one of"):
                coll.all_reduce(ints[rank], op="xor")
            short = ints[rank].to(torch.int16)
            for call in (coll.all_reduce, coll.reduce_scatter):  # gloo would say so in `wait`
                with pytest.raises(ArgumentError, match="x: expected a dtype of which torch"):
                    call(short)
            check_all(coll, 5, 5)
            assert coll.capabilities.reason == ""
            coll.barrier()
    return [str(w.message) for w in caught if "by torch.distributed" in str(w.message)]


def handed_over(rank: int, size: int, store: Store, transport: str) -> None:
    """Large sums are torch's where they need not be exact, without a warning, and not while a rank is left out."""
    with gloo(rank, size, store), warnings.catch_warnings():
        warnings.simplefilter("error")
        for exact_sums in (True, False):
            config = Seat(rank, size, store, transport).config(group=TorchGroup(), exact_sums=exact_sums)
            with Collectives(config) as coll:
                few = {CollectiveOp.REDUCE_SCATTER: {2: 4 * 20}}
                coll._transport.capabilities = replace(coll._transport.capabilities, library_min_bytes=few)
                for n, handed in ((19, False), (20, not exact_sums)):
                    wide = [exact((size * n,), torch.float32, r, n) for r in range(size)]
                    got = coll.reduce_scatter(on_device(coll, wide[rank])).wait()
                    same_bits(got, reference.reduce_scatter(wide)[rank], f"{n}")
                    assert (coll._torch is not None) is handed
                check_all(coll, 3, 3)


def handed_over_beside_others(rank: int, size: int, store: Store, transport: str) -> int:
    """What torch sums is right within rounding, again and again, and ours beside it have the reference's bits; how
    many calls torch had. Where multiprocessors are named it has none."""
    with gloo(rank, size, store), pytest.MonkeyPatch.context() as monkeypatch:
        config = Seat(rank, size, store, transport).config(group=TorchGroup(), exact_sums=False)
        with Collectives(config) as coll:
            monkeypatch.setattr(coll._transport, "capabilities", handing_over(coll._transport.capabilities, size))
            scatter, calls = TorchCollectives.reduce_scatter, list[int]()
            counted = lambda self, *rest: (calls.append(1), scatter(self, *rest))[1]  # noqa: E731
            monkeypatch.setattr(TorchCollectives, "reduce_scatter", counted)
            for turn in range(6):
                dtype = SUMS[turn % 3]
                wide = everyone(coll, (size * 30_001, 3), dtype, turn)
                xs = everyone(coll, (5001 + turn,), dtype, turn)
                x, own = on_device(coll, wide[rank]), on_device(coll, xs[rank])
                exact, want = reference.reduce_scatter(wide)[rank], reference.all_reduce(xs)[rank]
                handed, ours = coll.reduce_scatter(x), coll.all_reduce(own)
                kept = coll.reduce_scatter(x, num_sms=4)
                assert exact is not None
                for work in (ours, handed, kept) if turn % 2 else (kept, handed, ours):
                    work.wait()
                torch.testing.assert_close(handed.wait().cpu(), exact, rtol=2e-2, atol=2e-2)
                same_bits(ours.wait(), want, "all_reduce beside it")
                same_bits(kept.wait(), exact, "reduce_scatter by named multiprocessors")
            monkeypatch.setattr(coll, "_hands_over", False)
            check_scatter(coll, (30_001, 3), torch.bfloat16, 9)
            check_all(coll, 3, 3)
            coll.barrier()
            return len(calls)


def outlived(rank: int, size: int, store: Store, transport: str) -> None:
    """A process group that is destroyed first: what does not need it goes on."""
    with gloo(rank, size, store):
        coll = Collectives(Seat(rank, size, store, transport).config(group=TorchGroup()))
    assert (coll.rank, coll.size) == (rank, size)
    check_all(coll, 2, 2)
    coll.barrier()
    coll.close()


def handing_over(can: CollectiveCapabilities, size: int) -> CollectiveCapabilities:
    """Reduce-scatters of any size are torch's."""
    return replace(can, library_min_bytes={CollectiveOp.REDUCE_SCATTER: {size: 1}})


def not_while_a_rank_is_left_out(rank: int, size: int, store: Store, transport: str) -> None:
    """The process group has all ranks in it."""
    with gloo(rank, size, store):
        coll = Collectives(Seat(rank, size, store, transport).config(group=TorchGroup(), exact_sums=False))
        coll._transport.capabilities = handing_over(coll._transport.capabilities, 2)
        if rank < 2:
            coll.set_active([r < 2 for r in range(size)], 1)
            with pytest.raises(ArgumentError, match="while a rank is left out"):
                coll.all_reduce(on_device(coll, torch.ones(2, dtype=torch.int32)))
            check_all(coll, 1, 1)
            coll.barrier()
        coll.abort("over")
        coll.close()
        dist.barrier()
