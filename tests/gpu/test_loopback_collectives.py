"""The collectives' kernels against the reference, many ranks on one GPU: sizes, places, alignments; graphs; faults."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.errors import AbortedError, PeerTimeout
from ep_kernels.transports.nvlink.gpu.signature import difference
from tests.cases import draw_seed
from tests.gpu.loopback import Gpu
from tests.gpu.loopback_collectives import BOTH, KINDS, PLACES, LoopbackCollectives, begun, rows, step

pytestmark = pytest.mark.gpu(1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LARGE = (1 << 20) + 3
STAGING_BYTES, POOL_BYTES = 1 << 20, 64 << 20


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(draw_seed())


def loop_of(size: int, timeout_s: float = 60.0, blocks: int | None = None) -> LoopbackCollectives:
    config: Any = SimpleNamespace(kernel_cache_dir=None)
    return LoopbackCollectives(size, Gpu(config), blocks, timeout_s, STAGING_BYTES, POOL_BYTES)


@pytest.mark.parametrize("place", ["plain", "registered", "in place"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_all_gather(size: int, place: str, generator: torch.Generator) -> None:
    loop = loop_of(size)
    for lengths in ([1], [7, 0, 300], [1 << 20], [LARGE, 4096 * 3]):
        parts = [[torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for _ in range(size)]
                 for n in lengths]  # fmt: skip
        for skew in (0, 2, 5):
            loop.all_gather(parts, place, skew)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    loop = loop_of(size)
    for n in (1, 7, 515, 1 << 17, LARGE // size):
        for in_place in (False, True):
            loop.reduce_scatter(rows(size, size * n, dtype, generator), in_place, dtype.itemsize * (n % 3))


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(size: int, dtype: torch.dtype, algorithm: Algorithm, generator: torch.Generator) -> None:
    loop = loop_of(size)
    for n in (1, 7, 481, 1 << 16, LARGE):
        for place in PLACES:
            loop.all_reduce(rows(size, n, dtype, generator), algorithm, place, dtype.itemsize * (n % 3))


def test_more_ranks_than_lanes(generator: torch.Generator) -> None:
    loop = loop_of(40)
    for kind in range(4):
        step(loop, kind, generator)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("blocks", [1, None])
def test_many_operations_in_any_order(size: int, blocks: int | None, generator: torch.Generator) -> None:
    loop = loop_of(size, blocks=blocks)
    for start in (0, (1 << 32) - 9):
        loop.preset(start)
        for kind in torch.randint(0, 4, (100,), generator=generator).tolist():
            step(loop, kind, generator)


@pytest.mark.parametrize("num_sms", [1, 2, 8])
def test_any_number_of_multiprocessors_gives_the_same_bits(num_sms: int, generator: torch.Generator) -> None:
    loop = loop_of(4)
    loop.all_gather([rows(4, 50000, torch.float16, generator)], "registered", num_sms=num_sms)
    loop.reduce_scatter(rows(4, 200000, torch.bfloat16, generator), num_sms=num_sms)
    for algorithm in BOTH:
        loop.all_reduce(rows(4, 50000, torch.bfloat16, generator), algorithm, num_sms=num_sms)


def test_graphs_count_on_the_device(generator: torch.Generator) -> None:
    """Replays of a graph with one all-reduce of each algorithm, mixed with operations outside of it."""
    size, n = 3, 5000
    loop = loop_of(size)
    xs = [loop.put(x) for x in rows(size, n, torch.bfloat16, generator)]
    outs, calls = [torch.empty_like(x) for x in xs], []
    for algorithm in BOTH:
        for rank, engine in enumerate(loop.engines):
            calls.append(engine.all_reduce(xs[rank], outs[rank], None, algorithm, None)[0])
    machine: Any = loop._machine
    graph, packed = torch.cuda.CUDAGraph(), []
    for first in (0, size):
        records = bytearray(b"".join(bytes(call.args) for call in calls[first : first + size]))
        packed.append(torch.frombuffer(records, dtype=torch.uint8).cuda())
    functions = [machine._function(call) for call in calls[::size]]
    with torch.cuda.graph(graph):
        for call, function, record in zip(calls[::size], functions, packed, strict=True):
            function.launch(
                call.launch.num_blocks * size, call.variant.num_threads, torch.cuda.current_stream().cuda_stream,
                ctypes.c_uint64(record.data_ptr()), ctypes.c_int32(call.launch.num_blocks), cooperative=True,
            )  # fmt: skip
    for _ in range(20):
        fresh = rows(size, n, torch.bfloat16, generator)
        for x, values in zip(xs, fresh, strict=True):
            x.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        loop.check()
        loop._compare(outs, reference.all_reduce(fresh))
        step(loop, int(torch.randint(0, 4, (), generator=generator)), generator)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_rank_is_named_and_the_others_go_on(kind: int, gone: bool, generator: torch.Generator) -> None:
    loop = loop_of(3, timeout_s=20.0 if gone else 0.2)
    step(loop, kind % 4, generator)
    for engine in loop.engines[:2]:
        if gone:
            engine.tables.host.mark_gone(2)
    begin = time.monotonic()
    loop.run(begun(loop, kind)[:2])
    assert time.monotonic() - begin < 5.0
    for engine in loop.engines[:2]:
        found = engine.tables.host.fault()
        assert isinstance(found, PeerTimeout)
        assert (found.peer, found.gone) == (2, gone)
        assert int(engine.tables.aborted) != 0
    loop.leave_out_last()
    for other in range(4):
        step(loop, other, generator)


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_ends_a_wait(kind: int) -> None:
    loop = loop_of(2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.run, begun(loop, kind)[:1])
        time.sleep(0.1)
        assert not waiting.done()
        loop.engines[0].tables.host.abort("for a test")
        waiting.result(20)
    assert isinstance(loop.engines[0].tables.host.fault(), AbortedError)


def test_ranks_in_different_operations_are_told() -> None:
    loop = loop_of(2)
    calls = [begun(loop, 2, n)[rank] for rank, n in enumerate((600, 602))]
    loop.run(calls)
    for rank, engine in enumerate(loop.engines):
        found = engine.tables.host.mismatch()
        assert found is not None
        assert found.peer == 1 - rank
        assert "bytes" in difference(found.mine, found.theirs)
