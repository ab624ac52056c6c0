"""Copy engines between four processes on one GPU, over real regions that they map by file descriptors: no kernel waits
for a peer, but those of bring-up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_kernels.collectives import Collectives, copied_sums
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp
from ep_kernels.errors import PeerTimeout, TransportError
from tests.collectives.steps import Seat, everyone, on_device, same_bits, values
from tests.collectives.stories import exact_products
from tests.worlds import RankDied, World

pytestmark = pytest.mark.gpu(1)
SIZE, PATIENCE_S = 4, 4.0
PUSH, PULL = "registered", "plain"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    pool = World(SIZE)
    yield pool
    pool.close()


def seated(rank: int, size: int, store: Any, **fields: Any) -> Collectives:
    """A rank on the first GPU, its memory shared by file descriptor."""
    usual = {"fallback": False, "memory_handle": "posix_fd"}
    config = Seat(rank, size, store, "nvlink").config("first", **(usual | fields))
    torch.cuda.set_device(0)
    return Collectives(config)


def gather(coll: Collectives, n: int, dtype: torch.dtype, seed: int, way: str) -> tuple[Any, torch.Tensor | None]:
    """Begin an all-gather without multiprocessors; (work, what it must give)."""
    xs = everyone(coll, (n,), dtype, seed)
    x = on_device(coll, xs[coll.rank])
    whole = (coll.size * n,)
    out = coll.empty(whole, dtype) if way == PUSH else torch.empty(whole, dtype=dtype, device="cuda")
    out.view(torch.uint8).fill_(0xA5)
    if seed % 2:
        out[coll.rank * n :][:n] = x
        x = out[coll.rank * n :][:n]
    return coll.all_gather(x, out=out, num_sms=0), reference.all_gather(xs)[coll.rank]


def right(rank: int, size: int, store: Any, way: str) -> None:
    """Sizes, dtypes, in place and not, one after the other and several under way."""
    with seated(rank, size, store) as coll:
        algorithms = coll.capabilities.algorithms[CollectiveOp.ALL_GATHER]
        assert Algorithm.COPY_PUSH in algorithms
        for seed, n in enumerate((1, 7, 300, 4096, (1 << 20) + 3)):
            for dtype in (torch.bfloat16, torch.uint8, torch.float32):
                work, want = gather(coll, n, dtype, seed, way)
                same_bits(work.wait(), want, f"{n} {dtype} {way}")
                coll.check()
        under_way = [gather(coll, 5000 + 16 * i, torch.float32, 20 + i, way) for i in range(6)]
        for i, (work, want) in reversed(list(enumerate(under_way))):
            same_bits(work.wait(), want, f"under way {i} {way}")
        parts = [everyone(coll, (n,), torch.float16, n) for n in (9, 0, 70_001)]
        works = coll.all_gather_coalesced([on_device(coll, xs[rank]) for xs in parts], num_sms=0)
        for got, xs in zip(works.wait(), parts, strict=True):
            same_bits(got, reference.all_gather(xs)[rank], "coalesced")
        assert coll._transport._copies.seq >= 20  # type: ignore[attr-defined]
        coll.barrier()
        records = [record for record in coll.samples() if record.mode.startswith("copy_")]
        assert len(records) >= 20
        for record in records:
            assert record.op == "all_gather"
            assert 0 < record.send_ns <= record.total_ns < 60e9
            assert record.peer_wait_ns[rank] == 0
            assert all(0 < wait <= record.total_ns for peer, wait in enumerate(record.peer_wait_ns) if peer != rank)
        assert [record.seq for record in records] == sorted(record.seq for record in records)


@pytest.mark.parametrize("way", [PUSH, PULL])
def test_everybody_gets_everything(world: World, way: str) -> None:
    world.run(right, way, timeout_s=100)


def many(rank: int, size: int, store: Any, iterations: int) -> float:
    """Values that carry (rank, iteration), read by a kernel as soon as the wait is past; seconds."""
    with seated(rank, size, store) as coll:
        n = 40_000
        out = coll.empty((size * n,), torch.float32)
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        ranks = torch.arange(size, device="cuda").repeat_interleave(n)
        begin = time.monotonic()
        for i in range(iterations):
            mine = out[rank * n :][:n]
            mine.fill_(rank * 4096 + i % 4096)
            work = coll.all_gather(mine, out=out, num_sms=0)
            work.wait()
            wrong += (out != (ranks * 4096 + i % 4096).float()).sum()
            out.fill_(-1.0)
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        assert int(wrong) == 0
        coll.check()
        coll.barrier()
    return took


def test_a_shard_is_there_before_its_flag(world: World) -> None:
    world.run(many, 500, timeout_s=100)


def polled(rank: int, size: int, store: Any) -> None:
    """`is_completed` and the order of shards; the second rank is late by a second."""
    with seated(rank, size, store) as coll:
        coll.barrier()
        if rank == 1:
            time.sleep(1.0)
        work, want = gather(coll, 5000, torch.float32, 1, PULL)  # a registered out would have met the late rank before
        if rank != 1:
            assert not work.is_completed()
        while not work.is_completed():
            time.sleep(0.001)
        same_bits(work.wait(), want, "polled")
        x = on_device(coll, values((50, 6), torch.float32, rank, 3))
        w = on_device(coll, values((6, 8), torch.float32, 0, 4))
        ys, whole = coll.all_gather_matmul(x, [w], out=coll.empty((50 * size, 6), torch.float32), num_sms=0)
        same_bits(whole, torch.cat(everyone(coll, (50, 6), torch.float32, 3)), "x_all")
        torch.testing.assert_close(ys[0], whole @ w)
        coll.barrier()


def test_late_ranks_and_polling(world: World) -> None:
    world.run(polled, timeout_s=60)


def summed(rank: int, size: int, store: Any) -> None:
    """All terms by copies: no kernel sums last rows."""
    copied_sums.TAIL = 1 << 30
    with seated(rank, size, store, staging_bytes=1 << 16) as coll:
        coll.barrier()
        exact_products(coll, size * 160)
        assert {sample.mode for sample in coll.samples() if sample.op == "reduce_scatter"} == {"copy_push"}
        coll.barrier()


def test_terms_of_matmuls(world: World) -> None:
    world.run(summed, timeout_s=60)


def lost(rank: int, size: int, store: Any, way: str, dies: bool) -> tuple[int, bool, float] | None:
    """The last rank is silent, or is killed: the others name it and end."""
    victim = size - 1
    coll = seated(rank, size, store, timeout_s=30.0 if dies else PATIENCE_S)
    work, want = gather(coll, 3000, torch.float32, 2, way)
    same_bits(work.wait(), want, "before")
    if rank == victim:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait([f"seen-{r}" for r in range(victim)])
        coll.abort("over")
        coll.close()
        return None
    begin = time.monotonic()
    work, _ = gather_registered_alone(coll, way)
    with pytest.raises(PeerTimeout) as error:
        finish(coll, work)
    took = time.monotonic() - begin
    with pytest.raises(PeerTimeout):
        coll.all_reduce(torch.zeros(4, device="cuda"))
    assert int(coll.failed()) != 0
    store.set(f"seen-{rank}", b"1")
    if dies:
        coll.set_active([r != victim for r in range(size)], 1)
        work, want = gather_of_survivors(coll)
        assert torch.equal(work.wait().cpu(), want)
        coll.barrier()
    begin = time.monotonic()
    coll.abort("over")
    coll.close()
    assert time.monotonic() - begin < 5.0
    return error.value.peer, error.value.gone, took


def finish(coll: Collectives, work: Any) -> None:
    """Raise what the device finds, too."""
    work.wait()
    torch.cuda.synchronize()
    coll.check()


def gather_registered_alone(coll: Collectives, way: str) -> tuple[Any, Any]:
    """As `gather`; a registered out was made before, since `empty` needs all ranks."""
    n = 3000
    out = torch.empty(coll.size * n, device="cuda")
    if way == PUSH:
        out = coll._transport._domain.region.mapping.view(  # type: ignore[attr-defined]
            int(coll._transport._engine.map.pool),
            (coll.size * n,),
            torch.float32,  # type: ignore[attr-defined]
        )
    return coll.all_gather(torch.ones(n, device="cuda"), out=out, num_sms=0), None


def gather_of_survivors(coll: Collectives) -> tuple[Any, torch.Tensor]:
    n = 100
    out = torch.zeros(coll.size * n, device="cuda")
    want = torch.arange(coll.size).repeat_interleave(n).float() + 1
    want[-n:] = 0
    return coll.all_gather(torch.full((n,), coll.rank + 1.0, device="cuda"), out=out, num_sms=0), want


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("way", [PUSH, PULL])
def test_a_lost_rank_is_named(world: World, way: str, dies: bool) -> None:
    seen = world.run(lost, way, dies, timeout_s=80, may_die=(SIZE - 1,) if dies else ())
    assert isinstance(seen[-1], RankDied) if dies else seen[-1] is None
    for found in seen[:-1]:
        peer, gone, took = found
        assert (peer, gone) == (SIZE - 1, dies)
        assert took < (10.0 if dies else PATIENCE_S + 5.0)


def differing(rank: int, size: int, store: Any) -> str:
    with seated(rank, size, store) as coll:
        n = 64 if rank == 1 else 32
        out = torch.empty(size * n, device="cuda")
        work = coll.all_gather(torch.ones(n, device="cuda"), out=out, num_sms=0)
        with pytest.raises(TransportError) as error:
            finish(coll, work)
        coll.abort("over")
    return str(error.value)


def test_ranks_that_bring_different_sizes(world: World) -> None:
    said = world.run(differing, timeout_s=60)
    for rank in (0, 2, 3):
        assert "rank 1 brought bytes 256, this rank 128" in said[rank]
    assert "brought bytes 128, this rank 256" in said[1]


def graphed(rank: int, size: int, store: Any, way: str) -> None:
    """Replays of a graph, between operations outside of it; its branch runs beside other work of the graph. The two
    warps that wait take turns with the other processes' on the device."""
    with seated(rank, size, store) as coll:
        n = 30_000
        out = coll.empty((size * n,), torch.float32) if way == PUSH else torch.empty(size * n, device="cuda")
        mine = out[rank * n :][:n] if way == PUSH else torch.empty(n, device="cuda")
        twice, graph = torch.empty_like(out), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work = coll.all_gather(mine, out=out, num_sms=0)
            torch.mul(work.wait(), 2.0, out=twice)
        for turn in range(10):
            mine.fill_(rank * 100 + turn)
            graph.replay()
            want = torch.arange(size).repeat_interleave(n).float() * 100 + turn
            assert torch.equal(twice.cpu(), 2 * want), turn
            assert torch.equal(out.cpu(), want), turn
            coll.check()
            other, told = gather(coll, 777, torch.bfloat16, turn, way)
            same_bits(other.wait(), told, f"between replays {turn}")
        coll.barrier()
    graph.replay()
    torch.cuda.synchronize()  # of a closed object: nothing waits, nothing faults


@pytest.mark.parametrize("way", [PUSH, PULL])
def test_graphs(world: World, way: str) -> None:
    world.run(graphed, way, timeout_s=100)
