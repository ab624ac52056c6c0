"""Stories of whole objects; each runs on every rank."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_kernels import StoreGroup, TorchGroup
from ep_kernels.collectives import CollectiveConfig, Collectives, collectives, matmul
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.choose import CollectiveShape, choose
from ep_kernels.errors import ArgumentError, ConfigError, HandleError, TransportError
from ep_kernels.transports import collective_base
from ep_kernels.transports.collective_base import GatherArgs
from tests.collectives.steps import (
    BYTES,
    SUMS,
    Seat,
    Store,
    check_all,
    check_gather,
    check_reduce,
    check_scatter,
    everyone,
    on_device,
    poisoned,
    same_bits,
    settle,
    values,
)
from tests.transports.lives import holdings

LARGE = (1 << 20) + 3
GATHER_WAYS = ("plain", "misaligned", "in place", "in place, plain", "from registered", "from registered to registered")


def every_size(rank: int, size: int, store: Store, transport: str, sizes: tuple[int, ...]) -> None:
    """All operations, dtypes and places of buffers."""
    seat = Seat(rank, size, store, transport)
    with seat.collectives() as coll:
        for seed, n in enumerate(sizes):
            for dtype in SUMS:
                check_scatter(coll, (n,), dtype, seed)
                check_scatter(coll, (n, 3), dtype, seed, "registered in place")
                for way in ("plain", "in place", "registered", "registered in place"):
                    check_reduce(coll, (n,), dtype, seed, way)
            for dtype in (*SUMS, *BYTES):
                check_gather(coll, (n,), dtype, seed)
            for way in GATHER_WAYS:
                check_gather(coll, (n, 5), torch.bfloat16, seed, way)
        coll.barrier()


def large(rank: int, size: int, store: Store, transport: str) -> None:
    """Several rounds through staging, and registered memory beside it."""
    with Seat(rank, size, store, transport).collectives() as coll:
        for seed, way in enumerate(("plain", "misaligned", "in place", "from registered")):
            check_gather(coll, (LARGE,), torch.bfloat16, seed, way)
        check_scatter(coll, (LARGE,), torch.bfloat16, 5)
        check_scatter(coll, (LARGE // 7,), torch.float32, 6, "registered in place")
        check_reduce(coll, (LARGE,), torch.float16, 7)
        check_reduce(coll, (LARGE,), torch.bfloat16, 8, "registered in place")


def special_values(rank: int, size: int, store: Store, transport: str) -> None:
    """NaN, infinities of both signs, -0, subnormals and overflow."""
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 65504.0, 3e38, 6e-8, 1.0]
    with Seat(rank, size, store, transport).collectives() as coll:
        for dtype in SUMS:
            xs = [torch.tensor(odd[r % len(odd) :] + odd[: r % len(odd)]).to(dtype) for r in range(size)]
            minus = [torch.full_like(x, -0.0) for x in xs]
            for given in (xs, minus, [xs[0]] * size):
                got = coll.all_reduce(on_device(coll, given[rank])).wait()
                same_bits(got, reference.all_reduce(given)[rank], f"all_reduce {dtype}")
                wide = [x.repeat(size) for x in given]
                got = coll.reduce_scatter(on_device(coll, wide[rank])).wait()
                same_bits(got, reference.reduce_scatter(wide)[rank], f"reduce_scatter {dtype}")
                raw = [x.view(torch.uint8) for x in given]
                got = coll.all_gather(on_device(coll, given[rank])).wait().view(torch.uint8)
                same_bits(got, reference.all_gather(raw)[rank], f"all_gather {dtype}")


def coalesced(rank: int, size: int, store: Store, transport: str) -> None:
    """Parts of several shapes and dtypes, some empty, some registered; the parts of one call share a handshake."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3, 5), torch.bfloat16), ((0, 4), torch.float32), ((1,), torch.uint8), ((70_001,), torch.float16),
        ((2, 2, 2), torch.int64), ((7,), torch.float8_e4m3fn),
    ]  # fmt: skip
    with Seat(rank, size, store, transport).collectives(staging_bytes=1 << 16) as coll:
        for seed in range(3):
            parts = [everyone(coll, shape, dtype, 10 * seed + i) for i, (shape, dtype) in enumerate(shapes)]
            mine = [on_device(coll, xs[rank]) for xs in parts]
            if seed:
                for i in range(len(mine)) if seed == 2 else (0, 3):
                    mine[i] = coll.empty(mine[i].shape, mine[i].dtype).copy_(mine[i])
            outs = [poisoned(coll, (size * x.shape[0], *x.shape[1:]), x.dtype, seed == 2) for x in mine]
            got = coll.all_gather_coalesced(mine, outs=outs if seed else None).wait()
            for i, xs in enumerate(parts):
                same_bits(got[i], reference.all_gather(xs)[rank], f"part {i}")
        many = [on_device(coll, values((i % 5,), torch.float32, rank, i)) for i in range(600)]
        for i, out in enumerate(coll.all_gather_coalesced(many).wait()):
            same_bits(out, reference.all_gather(everyone(coll, (i % 5,), torch.float32, i))[rank], f"part {i} of many")


def several_under_way(rank: int, size: int, store: Store, transport: str, in_flight: int) -> None:
    """Works waited for in any order, or never; larger than staging, so that they need their peers to go on."""
    with Seat(rank, size, store, transport).collectives(max_in_flight=in_flight, staging_bytes=1 << 15) as coll:
        for turn in range(4):
            xs = [everyone(coll, (50_000 + i,), torch.bfloat16, 10 * turn + i) for i in range(5)]
            works: list[Any] = []
            for i, given in enumerate(xs):
                x = on_device(coll, given[rank])
                works.append(coll.all_gather(x) if i % 2 else coll.all_reduce(x))
            order = sorted(range(5), key=lambda i: (i * 7 + rank + turn) % 5)
            for i in order[: 5 - turn]:
                expected = (reference.all_gather if i % 2 else reference.all_reduce)(xs[i])
                same_bits(works[i].wait(), expected[rank], f"work {i}")
                assert works[i].is_completed()
            del works
        coll.barrier()


def polled(rank: int, size: int, store: Store, transport: str) -> float:
    """is_completed goes on by itself, never waits, and is False while a peer is missing."""
    with Seat(rank, size, store, transport).collectives() as coll:
        coll.barrier()
        if rank == 0:
            time.sleep(0.5)
        xs = everyone(coll, (1000,), torch.float32, 1)
        work = coll.all_reduce(on_device(coll, xs[rank]))
        begin = time.monotonic()
        first = work.is_completed()
        longest = time.monotonic() - begin
        assert rank == 0 or not first
        while not work.is_completed():
            time.sleep(0.001)
        same_bits(work.wait(), reference.all_reduce(xs)[rank], "polled")
        return longest


def follows_arrivals(rank: int, size: int, store: Store, transport: str) -> list[int]:
    """Shards come in the order in which ranks bring them; the products are those of the whole."""
    with Seat(rank, size, store, transport).collectives() as coll:
        coll.barrier()
        time.sleep(0.3 * ((size - rank) % size))  # rank 0 first, then the last, ...
        shape = (4, 6)
        xs = everyone(coll, shape, torch.float32, 3)
        _, pending = coll._gather([on_device(coll, xs[rank])], None, None)
        order = [rank for together in pending.shards() for rank in together]
        weights = [values((6, n), torch.float32, 0, n) for n in (3, 8)]
        ys, whole = coll.all_gather_matmul(on_device(coll, xs[rank]), [on_device(coll, w) for w in weights])
        same_bits(whole, torch.cat(xs), "x_all")
        for y, w in zip(ys, weights, strict=True):
            torch.testing.assert_close(y.cpu().double(), torch.cat(xs).double() @ w.double(), rtol=1e-4, atol=1e-4)
        return order


def matmuls(rank: int, size: int, store: Store, transport: str) -> None:
    """Against float64; rows that chunks do not divide, no rows, more chunks than rows."""
    with Seat(rank, size, store, transport).collectives() as coll:
        w = on_device(coll, values((32, 24), torch.float32, rank, 1))
        for seed, (rows, chunks) in enumerate(((5, 1), (5, 2), (7, 3), (0, 4), (2, 8))):
            xs = everyone(coll, (size * rows, 32), torch.float32, seed)
            ws = everyone(coll, (32, 24), torch.float32, 1)
            whole = sum((x.double() @ v.double() for x, v in zip(xs, ws, strict=True)), torch.zeros(1).double())
            got = coll.matmul_reduce_scatter(on_device(coll, xs[rank]), w, chunks=chunks)
            expected = whole.expand(size * rows, 24)[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-3)
            got = coll.matmul_all_reduce(on_device(coll, xs[rank]), w, chunks=chunks)
            torch.testing.assert_close(got.cpu().double(), whole.expand(size * rows, 24), rtol=1e-4, atol=1e-3)
        for rows, inner, columns in ((0, 32, 24), (4, 0, 24), (4, 32, 0), (0, 0, 0)):
            x, v = (on_device(coll, torch.ones(shape)) for shape in ((size * rows, inner), (inner, columns)))
            gathered = coll.all_gather_matmul(x, [v])
            for chunks in (1, 2):
                summed = coll.matmul_reduce_scatter(x, v, chunks=chunks), coll.matmul_all_reduce(x, v, chunks=chunks)
                assert [made.shape for made in summed] == [(rows, columns), (size * rows, columns)]
                assert not any(made.any() for made in (summed if not inner else ()))
            assert gathered[0][0].shape == (size * size * rows, columns)
            assert gathered[1].shape == (size * size * rows, inner)
        learned = torch.nn.Parameter(w.clone())
        x = on_device(coll, values((size, 32), torch.float32, rank, 9)).requires_grad_()
        ys, whole = coll.all_gather_matmul(x, [learned])
        made = [*ys, whole, coll.matmul_all_reduce(x, learned), coll.matmul_reduce_scatter(x, learned)]
        made += [coll.all_gather(x).wait(), coll.all_reduce(x).wait(), coll.reduce_scatter(x).wait()]
        assert not any(tensor.requires_grad for tensor in made)
        with pytest.raises(ArgumentError, match="w: expected a tensor"):
            coll.matmul_all_reduce(w, w)
        with pytest.raises(ArgumentError, match="chunks: expected an int"):
            coll.matmul_all_reduce(w, w.t().contiguous(), chunks=0)


def exact_matmuls(rank: int, size: int, store: Store, transport: str) -> None:
    """Bit by bit, by copy engines where there are any, in many pieces of little staging."""
    with Seat(rank, size, store, transport).collectives(staging_bytes=1 << 16) as coll:
        exact_products(coll, size * 40)
        exact_products(coll, size * 161)
        if size == 2 and coll.capabilities.device_type == "cuda":
            exact_halves(coll)


def exact_halves(coll: Collectives) -> None:
    """Shards that come by halves, of an odd number of rows, into a registered tensor."""
    shape, out = (2 * matmul.HALF_ROWS + 3, 512), coll.empty((2 * (2 * matmul.HALF_ROWS + 3), 512), torch.bfloat16)
    w = values((512, 24), torch.bfloat16, 0, 1).clamp(-1, 1).round()
    assert matmul.half_bytes(out[: shape[0]], coll.size)
    for seed in range(5):
        xs = [x.clamp(-1, 1).round() for x in everyone(coll, shape, torch.bfloat16, seed)]
        x = on_device(coll, xs[coll.rank])
        ys, whole = coll.all_gather_matmul(x, [on_device(coll, w)], out=out, num_sms=0)
        same_bits(whole, torch.cat(xs), "x_all")
        same_bits(ys[0], torch.cat(xs) @ w, "y")


def products_of_other_widths(rank: int, size: int, store: Store, transport: str) -> tuple[int, bool]:
    """Weights on either side of the columns from which no half is waited for: one rank takes halves, the other does
    not. (half_bytes, takes_halves) of this one."""
    told: list[GatherArgs] = []
    with Seat(rank, size, store, transport).collectives() as coll, pytest.MonkeyPatch.context() as monkeypatch:
        gather = coll._transport.all_gather
        monkeypatch.setattr(coll._transport, "all_gather", lambda args: (told.append(args), gather(args))[1])
        rows = 2 * matmul.HALF_ROWS + 3
        out = coll.empty((size * rows, 32), torch.float32)
        for turn in range(4):
            w = values((32, (1536, 4096)[(rank + turn // 2) % 2]), torch.float32, rank, 1).round()
            xs = [x.clamp(-1, 1).round() for x in everyone(coll, (rows, 32), torch.float32, turn)]
            ys, whole = coll.all_gather_matmul(
                on_device(coll, xs[rank]), [on_device(coll, w)], out=out if turn % 2 else None, num_sms=0
            )
            same_bits(whole, torch.cat(xs), "x_all")
            same_bits(ys[0], torch.cat(xs) @ w, "y")
        settle(coll)
        coll.barrier()
    return told[0].half_bytes, told[0].takes_halves


def columns(rank: int, size: int, store: Store, transport: str) -> None:
    """Along the last dimension, of small whole numbers, bit by bit what plain torch makes of the parts together; terms
    of sums by copy engines where there are any. Of random ones, against float64."""
    with Seat(rank, size, store, transport).collectives(staging_bytes=1 << 16) as coll:
        can = coll._transport.capabilities
        for least in (can.term_min_bytes, min(1, can.term_min_bytes)):
            coll._transport.capabilities = replace(can, term_min_bytes=least, beside_min_bytes=min(1, least))
            for rows in (0, 1, 7, 300):
                for dtype in (torch.bfloat16, torch.float32):
                    gathered_columns(coll, rows, dtype)
                    scattered_columns(coll, rows, dtype)
        xs, ws = everyone(coll, (5, 8), torch.float32, 1), everyone(coll, (8 * size, 3 * size), torch.float32, 2)
        (y,), _ = coll.all_gather_matmul(on_device(coll, xs[rank]), [on_device(coll, ws[rank])], dim=-1)
        torch.testing.assert_close(
            y.cpu(), (torch.cat(xs, 1).double() @ ws[rank].double()).float(), rtol=1e-4, atol=1e-3
        )


def gathered_columns(coll: Collectives, rows: int, dtype: torch.dtype) -> None:
    """x [rows, 6] of every rank, with and without an out, by two weights."""
    xs = [x.clamp(-1, 1).mul(3).round() for x in everyone(coll, (rows, 6), dtype, rows)]
    ws = [values((6 * coll.size, n), dtype, coll.rank, n).clamp(-1, 1).round() for n in (4, 9)]
    whole, x = torch.cat(xs, dim=1), on_device(coll, xs[coll.rank])
    for out in (None, poisoned(coll, whole.shape, dtype, registered=bool(rows))):
        ys, made = coll.all_gather_matmul(x, [on_device(coll, w) for w in ws], dim=1, out=out)
        assert out is None or made.data_ptr() == out.data_ptr()
        same_bits(made, whole, "x_all")
        for y, w in zip(ys, ws, strict=True):
            same_bits(y, whole @ w, "y")


def scattered_columns(coll: Collectives, rows: int, dtype: torch.dtype) -> None:
    """The sum of x [rows, 8] @ w [8, 5 R]: 5 columns for each rank."""
    xs, ws = (
        [each.clamp(-1, 1).mul(3).round() for each in everyone(coll, shape, dtype, seed)]
        for seed, shape in ((rows, (rows, 8)), (1, (8, 5 * coll.size)))
    )
    total = reference.all_reduce([x @ w for x, w in zip(xs, ws, strict=True)])[coll.rank]
    assert total is not None
    want = total[:, 5 * coll.rank : 5 * (coll.rank + 1)].contiguous()
    for chunks in (1, 3):
        got = coll.matmul_reduce_scatter(
            on_device(coll, xs[coll.rank]), on_device(coll, ws[coll.rank]), dim=-1, chunks=chunks
        )
        same_bits(got, want, f"matmul_reduce_scatter of columns in {chunks}")


def told_beside(rank: int, size: int, store: Store, transport: str) -> list[bool]:
    """What the choice is told of what else runs: as the caller says, and for a gather that a product follows that it
    does not where shards are staged."""
    told: list[CollectiveShape] = []
    with Seat(rank, size, store, transport).collectives() as coll, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "only", lambda *_: None)
        patch.setattr(collectives, "choose", lambda shape, can: (told.append(shape), choose(shape, can))[1])
        x = on_device(coll, torch.ones(4, 4))
        for beside in (False, True):
            coll.all_gather(x, beside=beside).wait()
            coll.all_gather_coalesced([x, x], beside=beside).wait()
        coll.all_gather_matmul(x, [x])
        return [shape.beside for shape in told]


def exact_products(coll: Collectives, rows: int) -> None:
    """Sums of products of small whole numbers, which no GEMM rounds, in bf16, which the sums do; copy engines bring
    terms of any size."""
    can = coll._transport.capabilities
    if can.term_min_bytes:
        coll._transport.capabilities = replace(can, term_min_bytes=1)
    for dtype in (torch.bfloat16, torch.float32):
        xs, ws = (
            [each.clamp(-1, 1).mul(3).round() for each in everyone(coll, shape, dtype, seed)]
            for seed, shape in ((rows, (rows, 32)), (1, (32, 100)))
        )
        products = [x @ w for x, w in zip(xs, ws, strict=True)]
        x, w = on_device(coll, xs[coll.rank]), on_device(coll, ws[coll.rank])
        for chunks in (1, 3):
            got = coll.matmul_reduce_scatter(x, w, chunks=chunks)
            want = reference.reduce_scatter([product.flatten() for product in products])[coll.rank]
            same_bits(got.flatten(), want, f"matmul_reduce_scatter in {chunks}")
            got = coll.matmul_all_reduce(x, w, chunks=chunks)
            same_bits(got, reference.all_reduce(products)[coll.rank], f"matmul_all_reduce in {chunks}")


def refused(rank: int, size: int, store: Store, transport: str) -> None:
    """Wrong arguments are refused before anything is sent, and break nothing."""
    with Seat(rank, size, store, transport).collectives(max_in_flight=1) as coll:
        x = on_device(coll, torch.zeros(4 * size, 6, dtype=torch.bfloat16))
        other = torch.device("meta")
        wide, far = torch.cat([x] * size), torch.cat([x] * size)
        mine, together = wide[4 * size * rank :][: 4 * size], coll.all_gather_coalesced
        tall = on_device(coll, torch.zeros(6 * size, 6, dtype=torch.bfloat16))
        cases: list[tuple[str, Any]] = [
            ("x: expected a torch.Tensor, got list", lambda: coll.all_gather([1.0])),  # type: ignore[arg-type]
            ("x: expected a contiguous tensor", lambda: coll.all_gather(x.t())),
            ("x: expected a tensor on", lambda: coll.all_reduce(x.to(other))),
            ("out: expected shape", lambda: coll.all_gather(x, out=x.clone())),
            ("out: expected torch.bfloat16 as x", lambda: coll.all_reduce(x, out=x.float())),
            ("out: expected a contiguous tensor", lambda: coll.all_reduce(x, out=x.t().contiguous().t())),
            ("out: expected memory apart from x", lambda: coll.all_reduce(x[:2], out=x[1:3])),
            ("x: expected a first dimension that", lambda: coll.reduce_scatter(x[: 4 * size - 1])),
            ("op: expected one of", lambda: coll.all_reduce(x, op="mean")),
            ("num_sms: expected None or an int in 0", lambda: coll.all_gather(x, num_sms=-1)),
            ("beside: expected a bool", lambda: coll.all_gather(x, beside=1)),  # type: ignore[arg-type]
            ("num_sms: expected None or an int in 1", lambda: coll.all_reduce(x, num_sms=0)),
            ("xs: expected a list or tuple of tensors", lambda: coll.all_gather_coalesced([])),
            ("outs: expected a list or tuple of 1 tensors", lambda: coll.all_gather_coalesced([x], outs=[])),
            (r"outs\[1\]: expected memory apart from outs", lambda: together([x, x], outs=[wide, wide])),
            (r"outs\[0\]: expected memory apart from xs", lambda: together([x, mine], outs=[wide, far])),
            ("shape: expected ints", lambda: coll.empty((-1,), torch.int8)),
            ("dtype: expected a torch.dtype", lambda: coll.empty((1,), "int8")),  # type: ignore[arg-type]
            ("shape: expected room in the pool", lambda: coll.empty((1 << 40,), torch.uint8)),
            ("shape: expected room in the pool", lambda: coll.empty((1 << 32, 1 << 32), torch.uint8)),
            ("w: expected a dense tensor", lambda: coll.matmul_all_reduce(x, torch.eye(6, dtype=x.dtype).to_sparse())),
            ("dim: expected 0, or 1 or -1", lambda: coll.all_gather_matmul(x, [x.t().contiguous()], dim=2)),
            (r"w: expected a tensor \[", lambda: coll.all_gather_matmul(x, [torch.cat([x] * 7)], dim=-1)),
            ("out: expected shape", lambda: coll.all_gather_matmul(x, [tall], dim=-1, out=x[:1])),
            ("w: expected a last dimension that", lambda: coll.matmul_reduce_scatter(x, tall[:6, :5], dim=1)),
            ("x: expected what transport", lambda: coll.all_reduce(x.int())),
            ("x: expected what transport", lambda: coll.all_reduce(x, op="max")),
        ]
        if size == 1:
            alone = ("first dimension", "last dimension", "expected shape")
            cases = [case for case in cases if not any(words in case[0] for words in alone)]
        for match, call in cases:
            with pytest.raises(ArgumentError, match=match):
                call()
            check_reduce(coll, (5,), torch.float32, 1)
        assert coll.empty((), torch.float32).shape == ()
        coll.check()


def differing(rank: int, size: int, store: Store, transport: str, what: str) -> str:
    """Rank 1 brings something else; every rank hears which rank differs, and set_active heals the group."""
    with Seat(rank, size, store, transport).collectives() as coll:
        odd = rank == 1
        x = on_device(coll, torch.zeros(8, dtype=torch.float32))
        calls = {
            "bytes": lambda: coll.all_gather(x[:4] if odd else x),
            "none": lambda: coll.all_gather_coalesced([x, x[:0] if odd else x]),
            "dtype": lambda: coll.all_gather(x.view(torch.int32) if odd else x),
            "sum": lambda: coll.all_reduce(x.bfloat16() if odd else x[:4].contiguous()),
            "operation": lambda: coll.all_reduce(x) if odd else coll.all_gather(x),
            "parts": lambda: coll.all_gather_coalesced([x[:2], x[2:]] if odd else [x[:6], x[6:]]),
        }

        def brought() -> None:
            calls[what]().wait()
            settle(coll)

        with pytest.raises(TransportError) as error:
            brought()
        with pytest.raises(TransportError):
            coll.all_reduce(x)
        coll.set_active([True] * size, 1)
        check_all(coll, 3, 0)
        coll.barrier()
    return str(error.value)


def differing_empty(rank: int, size: int, store: Store, transport: str) -> str:
    """Ranks ask for registered tensors of different sizes: refused on all alike, and nothing is lost."""
    with Seat(rank, size, store, transport).collectives() as coll:
        with pytest.raises(ArgumentError) as error:
            coll.empty((8 + (rank == 1),), torch.uint8)
        check_gather(coll, (100,), torch.float32, 0, "in place")
    return str(error.value)


def pool_reused(rank: int, size: int, store: Store, transport: str) -> list[int]:
    """Memory returns when the last view has died on all ranks, not before; offsets stay equal."""
    with Seat(rank, size, store, transport).collectives(pool_bytes=1 << 21) as coll:
        kept: list[torch.Tensor] = []
        offsets = []
        for turn in range(60):
            made = coll.empty((300, 500), torch.uint8)
            offsets.append(coll._transport.offset_of(made) or 0)
            if turn % 7 == rank:  # another rank keeps another tensor a while
                kept.append(made[5:6])
            if len(kept) > 2:
                kept.pop(0)
            del made
        view = coll.empty((1000,), torch.float32).view(10, 100)[3]
        view.fill_(rank)
        del coll
        assert bool((view == rank).all()), "a view outlives the object"
    return offsets


def inactive(rank: int, size: int, store: Store, transport: str) -> None:
    """A rank leaves; sums go without it, and its shard is not written."""
    seat = Seat(rank, size, store, transport)
    with seat.collectives() as coll:
        check_all(coll, 0, 0)
        begun = coll.all_reduce(on_device(coll, torch.ones(3)))
        coll.barrier()
        if rank == 1:
            return
        same_bits(begun.wait(), torch.full((3,), float(size)), "begun before the barrier")
        late = coll.all_gather(on_device(coll, torch.ones(3)))
        coll.set_active([r != 1 for r in range(size)], 5)
        assert (coll.epoch, coll.active[1]) == (5, False)
        with pytest.raises(HandleError, match="begun in epoch 0"):
            late.wait()
        for number in range(8):
            check_all(coll, number, 100)
        fresh = coll.all_gather(on_device(coll, torch.ones(4))).wait().cpu()
        assert fresh.view(size, 4)[:, 0].tolist() == [float(r != 1) for r in range(size)]
        x, eye, out = torch.ones(2, 3), torch.eye(3 * size), poisoned(coll, (2, 3 * size), torch.float32, False)
        kept = out[:, 3:6].clone()
        (y,), whole = coll.all_gather_matmul(on_device(coll, x), [on_device(coll, eye)], dim=-1)
        same_bits(y, torch.tensor([float(r != 1) for r in range(size)]).repeat_interleave(3).expand(2, -1), "columns")
        coll.all_gather_matmul(on_device(coll, x), [on_device(coll, eye)], dim=-1, out=out)
        assert torch.equal(out[:, 3:6], kept)
        assert (whole.shape, out[:, :3].unique().tolist()) == (out.shape, [1.0])
        coll.barrier()


def born_and_closed(rank: int, size: int, store: Store, transport: str, times: int) -> list[str]:
    """Objects come and go; returns what the process holds more than after the first few."""
    seat, before = Seat(rank, size, store, transport), {}
    for turn in range(times):
        with seat.collectives(f"life-{turn}") as coll:
            check_gather(coll, (200,), torch.bfloat16, turn, "in place")
            check_reduce(coll, (200,), torch.bfloat16, turn)
            coll.barrier()
        if turn == 4:
            before = holdings()
    return [f"{name}: {before[name]} -> {n}" for name, n in holdings().items() if n > before[name]]


def config_mismatch(rank: int, size: int, store: Store, transport: str) -> str:
    """One rank is configured differently: all refuse, with the same words."""
    seat = Seat(rank, size, store, transport)
    with pytest.raises(ConfigError) as error:
        seat.collectives("first", pool_bytes=(1 << 20) + (4096 if rank == 1 else 0))
    return str(error.value)


def versions_mixed(rank: int, size: int, store: Store, transport: str) -> str:
    """A limit by which an algorithm is chosen is another one on rank 1."""
    seat, made = Seat(rank, size, store, transport), collective_base.create

    def create(config: CollectiveConfig) -> collective_base.CollectiveTransport:
        found = made(config)
        found.capabilities = replace(found.capabilities, copy_min_bytes=found.capabilities.copy_min_bytes + rank)
        return found

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(collective_base, "create", create)
        with pytest.raises(TransportError) as error:
            seat.collectives()
    return str(error.value)


class Grouped(StoreGroup):
    """As if it had a process group."""

    process_group = object()


def groups_of_two_kinds(rank: int, size: int, store: Store, transport: str) -> str:
    """Ranks without a process group would wait for those that call it."""
    group = (StoreGroup, Grouped)[rank](store, rank, size)
    seat = Seat(rank, size, store, transport)
    with pytest.raises(ConfigError) as error:
        seat.collectives(group=group)
    seat.collectives("without", fallback=False).close()
    return str(error.value)


def many_iterations(rank: int, size: int, store: Store, transport: str, iterations: int) -> None:
    """Values that carry (rank, iteration), in buffers that are poisoned before: a stale or misplaced byte shows."""
    with Seat(rank, size, store, transport).collectives(staging_bytes=1 << 14) as coll:
        n = 40
        whole = coll.empty((size * n,), torch.float32)
        plain = on_device(coll, torch.empty(size * n))
        ranks = torch.arange(size).repeat_interleave(n)
        for i in range(iterations):
            out = whole if i % 2 else plain
            out.fill_(float("nan"))
            mine = out[rank * n : (rank + 1) * n]
            mine.fill_(rank * 4096 + i % 4096)
            work = coll.all_gather(mine, out=out)
            if i % 3 == 0:
                total = coll.all_reduce(on_device(coll, torch.full((n,), float(rank + i)))).wait()
                assert bool((total == sum(range(size)) + size * i).all()), f"all_reduce {i}"
            got = work.wait()
            assert torch.equal(got.cpu(), (ranks * 4096 + i % 4096).float()), f"all_gather {i}"
            if i % 5 == 0:
                row = coll.reduce_scatter(got.clone()).wait()
                assert bool((row == size * (rank * 4096 + i % 4096)).all()), f"reduce_scatter {i}"


def groups(rank: int, size: int, store: Store, transport: str) -> None:
    """A gloo world of 4: a subgroup, two disjoint groups at once, two overlapping ones, and ranks in another order."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        members = {"low": [0, 1], "high": [2, 3], "three": [3, 0, 2], "turned": [3, 2, 1, 0], "world": [0, 1, 2, 3]}
        made = {name: dist.new_group(ranks, use_local_synchronization=False) for name, ranks in members.items()}
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        colls: dict[str, Collectives] = {}
        for name in ("low", "high", "three", "turned", "world"):
            if rank in members[name]:
                config = CollectiveConfig(group=TorchGroup(made[name]), transport=transport, pool_bytes=1 << 20)
                colls[name] = Collectives(config)
                assert colls[name].size == len(members[name])
                assert colls[name].rank == dist.get_group_rank(made[name], rank)
        for turn in range(3):
            works = {}
            for name, coll in colls.items():  # all under way at once
                x = on_device(coll, torch.tensor([float(rank), turn]))
                works[name] = coll.all_gather(x), coll.all_reduce(x)
            for name, (gathered, reduced) in works.items():
                order = sorted(members[name], key=lambda r, pg=made[name]: dist.get_group_rank(pg, r))
                assert gathered.wait().cpu().tolist() == [v for r in order for v in (float(r), turn)]
                assert reduced.wait().cpu().tolist() == [sum(order), turn * len(order)]
        for coll in colls.values():
            check_all(coll, 3, 7)
        dist.barrier()
        for coll in reversed(list(colls.values())):
            coll.close()
    finally:
        dist.destroy_process_group()


def samples(rank: int, size: int, store: Store, transport: str) -> list[tuple[str, int]]:
    """Each operation leaves a record."""
    with Seat(rank, size, store, transport).collectives() as coll:
        x = on_device(coll, torch.zeros(4 * size))
        coll.all_gather(x).wait()
        coll.reduce_scatter(x).wait()
        coll.all_reduce(x).wait()
        coll.barrier()
        records = coll.samples()
        assert all(record.total_ns > 0 and len(record.peer_wait_ns) == size for record in records)
        return [(record.op, record.tokens) for record in records]


def after_fork(rank: int, size: int, store: Store, transport: str) -> None:
    """A forked child's copy is closed and harms nobody."""
    with Seat(rank, size, store, transport).collectives() as coll:
        view = coll.empty((100,), torch.float32)
        check_all(coll, 1, 1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                coll.all_reduce(view)
            except Exception as error:
                code = 0 if "forked child" in str(error) else 2
            coll.close()
            del view
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        check_all(coll, 2, 1)
        coll.barrier()
