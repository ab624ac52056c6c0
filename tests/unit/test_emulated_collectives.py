"""The collectives' kernels, run on the CPU, against the reference. What a GPU must show besides: tests/gpu."""

from __future__ import annotations

import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ep_kernels import jit
from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.errors import AbortedError, PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.copy_engines import collective_plan
from ep_kernels.transports.nvlink.gpu.signature import difference
from tests.cases import draw_seed
from tests.emulator.build import build
from tests.emulator.machine import Emulated, without_driver
from tests.gpu.loopback_collectives import BOTH, KINDS, PLACES, LoopbackCollectives, begun, rows, step
from tests.tools import needs

pytestmark = [
    needs("g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64"),
    pytest.mark.timeout(600),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    monkeypatch.setattr(collective_plan, "BLOCK_BYTES", 512)  # small operations take several blocks


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled side by side, before the clock of any test runs."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (replace(v, loopback=True) for v in jit.collective_variants())))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(draw_seed())


@pytest.mark.parametrize("place", ["plain", "registered", "in place"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_gather(size: int, place: str, generator: torch.Generator) -> None:
    """Sizes that fill no vector, many vectors, several rounds; several parts, an empty one among them."""
    loop = LoopbackCollectives(size, Emulated())
    for lengths in ([1], [7, 0, 300], [2048], [5000, 16]):
        parts = [[torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for _ in range(size)]
                 for n in lengths]  # fmt: skip
        for skew in (0, 2, 5):
            loop.all_gather(parts, place, skew)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    loop = LoopbackCollectives(size, Emulated(8))
    for n in (1, 7, 8, 515, 1100):
        for in_place in (False, True):
            loop.reduce_scatter(rows(size, size * n, dtype, generator), in_place, dtype.itemsize * (n % 3))


PAIRS = [
    (dtype, size, BOTH[(row + column) % 2])
    for row, dtype in enumerate(DTYPES)
    for column, size in enumerate((1, 2, 3, 4, 8))
]
"""Every pair of a type, a size and an algorithm."""


@pytest.mark.parametrize(("dtype", "size", "algorithm"), PAIRS)
def test_all_reduce(size: int, dtype: torch.dtype, algorithm: Algorithm, generator: torch.Generator) -> None:
    loop = LoopbackCollectives(size, Emulated(8))
    for n in (1, 7, 481, 1500, 2600):
        for place in PLACES:
            loop.all_reduce(rows(size, n, dtype, generator), algorithm, place, dtype.itemsize * (n % 3))


@pytest.mark.parametrize("size", [2, 3])
def test_terms_of_a_registered_tensor_are_sent_from_a_size_on(
    size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = LoopbackCollectives(size, Emulated(8))
    x = rows(size, 1500, torch.float16, generator)
    offset, out = int(loop.engines[0].map.pool), loop.pool(0, 0, x[0].shape, x[0].dtype)
    for most, reads in ((x[0].nbytes, 1), (x[0].nbytes - 1, 0)):
        monkeypatch.setattr(collective_plan, "READ_MAX_BYTES", most)
        assert loop.engines[0].all_reduce(out, out, offset, Algorithm.TWO_SHOT, None)[0].args.reads == reads
        loop.all_reduce(x, Algorithm.TWO_SHOT, "both")


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_terms_that_copies_have_brought(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """In a slot that nobody blanks; in place where x is skewed; the own row of the slot is nobody's."""
    loop = LoopbackCollectives(size, Emulated(8))
    for n in (1, 7, 8, 100, 256 // dtype.itemsize):
        for shares in (False, True):
            xs = [x.view(size, n) for x in rows(size, size * n, dtype, generator)]
            loop.add_terms(xs, dtype.itemsize * (n % 3), shares)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_many_operations_in_any_order(size: int, generator: torch.Generator) -> None:
    """Each leaves its bytes in slots that another kind uses two operations later; numbers of operations pass 32
    bits."""
    loop = LoopbackCollectives(size, Emulated(7))
    for start in (0, (1 << 32) - 9):
        loop.preset(start)
        for kind in torch.randint(0, 4, (20,), generator=generator).tolist():
            step(loop, kind, generator)
        seqs = [int(e.tables.sequence()[1]) for e in loop.engines]
        assert seqs[0] >= start + 20
        assert len(set(seqs)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_rank_is_waited_for(kind: int) -> None:
    loop = LoopbackCollectives(3, Emulated(3))
    calls = begun(loop, kind)
    with ThreadPoolExecutor() as pool:
        early = pool.submit(loop.run, calls[:2])
        time.sleep(0.5)
        assert not early.done()
        loop.run(calls[2:])
        early.result(60)
    loop.check()
    for other in range(4):
        step(loop, other, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_rank_is_named_and_the_others_go_on(kind: int, gone: bool, generator: torch.Generator) -> None:
    loop = LoopbackCollectives(3, Emulated(3), timeout_s=60.0 if gone else 0.05)
    step(loop, kind % 4, generator)
    for engine in loop.engines[:2]:
        if gone:
            engine.tables.host.mark_gone(2)
    loop.run(begun(loop, kind)[:2])
    for rank, engine in enumerate(loop.engines[:2]):
        found = engine.tables.host.fault()
        assert isinstance(found, PeerTimeout), rank
        assert (found.peer, found.gone) == (2, gone), rank
        assert found.op == ("all_gather", "all_gather", "reduce_scatter", "all_reduce", "all_reduce")[kind]
        assert found.phase in ("credit", "shards")
        assert (found.expected, found.seen) == (found.expected, found.expected - 1) or gone or found.seen == 0
        assert int(engine.tables.aborted) == abi.STOPS.index("GONE" if gone else "TIMED_OUT")
    before = [memory.data.clone() for memory in loop.memory]
    loop.run(begun(loop, kind)[:2])
    assert all(torch.equal(a, b.data) for a, b in zip(before, loop.memory, strict=True)), "a stopped rank sends nothing"
    loop.leave_out_last()
    for other in range(4):
        step(loop, other, generator)


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_ends_a_wait(kind: int) -> None:
    loop = LoopbackCollectives(2, Emulated(2))
    loop.engines[0].tables.host.abort("for a test")
    loop.run(begun(loop, kind)[:1])
    assert isinstance(loop.engines[0].tables.host.fault(), AbortedError)


@pytest.mark.parametrize("first", KINDS)
def test_ranks_in_different_operations_are_told(first: int) -> None:
    """Of the same operation with another size, which needs no wait, and of another one, which ends in a deadline."""
    for other, n in ((first, 601), ((first + 2) % 5, 600)):
        loop = LoopbackCollectives(2, Emulated(2), timeout_s=0.05)
        mine, theirs = begun(loop, first)[0], begun(loop, other, n)[1]
        with ThreadPoolExecutor() as pool:
            there = pool.submit(loop.run, [theirs[:1]])
            loop.run([mine[:1]])
            there.result(60)
        for rank, engine in enumerate(loop.engines):
            found = engine.tables.host.mismatch()
            assert found is not None, (rank, other)
            assert found.peer == 1 - rank
            assert difference(found.mine, found.theirs) != "nothing else"
            assert engine.tables.host.mismatch() is None, "told once"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_other_multiprocessors_are_told(kind: int) -> None:
    """A block waits for the same block of a peer alone: the rank with fewer would give out what has not come."""
    loop = LoopbackCollectives(2, Emulated(8), timeout_s=0.05)
    mine, theirs = begun(loop, kind, sms=1)[0], begun(loop, kind, sms=2)[1]
    assert [calls[0].launch.num_blocks for calls in (mine, theirs)] == [1, 2]
    with ThreadPoolExecutor() as pool:
        there = pool.submit(loop.run, [theirs[:1]])
        loop.run([mine[:1]])
        there.result(60)
    found = [engine.tables.host.mismatch() for engine in loop.engines]
    assert [each and difference(each.mine, each.theirs).startswith("sizes of parts") for each in found] == [True] * 2


def test_a_record_of_more_ranks_touches_nothing() -> None:
    """As a graph has it that was captured before a rank was lost: among fewer ranks the chunks outgrow their rows."""
    loop = LoopbackCollectives(4, Emulated(4))
    xs = [loop.put(torch.ones(4096 // 2 // 4)) for _ in range(4)]  # half a slot, as much as a plain out takes at once
    calls = [e.all_reduce(xs[r], xs[r], None, Algorithm.TWO_SHOT, None) for r, e in enumerate(loop.engines)]
    assert [len(each) for each in calls] == [1] * 4
    for engine in loop.engines:
        engine.set_active([True, True, False, False])
    before = [memory.data[int(loop.engines[0].map.lines) :].clone() for memory in loop.memory]
    loop.run(calls[:2])
    for engine in loop.engines[:2]:
        with pytest.raises(AbortedError, match="capture it again"):
            raise engine.tables.host.fault() or AssertionError("it ran")
    after = [memory.data[int(loop.engines[0].map.lines) :] for memory in loop.memory]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_left_out_rank_is_told() -> None:
    """Ranks 0 and 1 go on; rank 2, which lives, comes to an operation of the old epoch."""
    loop = LoopbackCollectives(3, Emulated(3), timeout_s=60.0)
    for engine in loop.engines[:2]:
        engine.set_active([True, True, False])
        loop.run([[engine.barrier(left_out_epoch=4)]])
    loop.run(begun(loop, 1)[2:])
    found = loop.engines[2].tables.host.fault()
    assert isinstance(found, TransportError)
    assert "has gone on in epoch 4 without this rank" in str(found)


def copy_waits(loop: LoopbackCollectives, phase: int, words: list[int]) -> list[list[Call]]:
    return [[engine.copy_wait(words[rank], phase)] for rank, engine in enumerate(loop.engines)]


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_waits_between_the_copies_of_a_graph(size: int) -> None:
    """Nobody is past a phase before all have come to it; a replay, of the same records, counts on."""
    loop, words = LoopbackCollectives(size, Emulated(size)), [7] * size
    calls = [copy_waits(loop, phase, words) for phase in (0, 1)]
    for turn in (1, 2, 3):
        for phase in (0, 1):
            with ThreadPoolExecutor() as pool:
                early = [pool.submit(loop.run, calls[phase][:-1])] if size > 1 else []
                time.sleep(0.1)
                assert not any(each.done() for each in early)
                loop.run(calls[phase][-1:])
                for each in early:
                    each.result(60)
        loop.check()
        assert {engine.tables.sequence()[0] for engine in loop.engines} == {turn}
        assert all(engine.tables.host.mismatch() is None for engine in loop.engines)


@pytest.mark.parametrize("phase", [0, 1])
def test_a_silent_rank_in_a_graph_of_copies(phase: int) -> None:
    loop = LoopbackCollectives(3, Emulated(3), timeout_s=0.05)
    if phase:
        loop.run(copy_waits(loop, 0, [7, 7, 7]))
    loop.run(copy_waits(loop, phase, [7, 7, 7])[:2])
    for engine in loop.engines[:2]:
        found = engine.tables.host.fault()
        assert isinstance(found, PeerTimeout)
        assert (found.peer, found.op, found.phase) == (2, "all_gather", ("shards", "credit")[phase])
        assert engine.tables.sequence()[0] == 0


def test_graphs_of_copies_that_differ() -> None:
    loop = LoopbackCollectives(3, Emulated(3))
    loop.run(copy_waits(loop, 0, [7, 8, 7]))
    told = [engine.tables.host.mismatch() for engine in loop.engines]
    assert [(each.mine, each.theirs) for each in told if each] == [(7, 8), (8, 7), (7, 8)]


def test_latency_records(generator: torch.Generator) -> None:
    loop = LoopbackCollectives(2, Emulated(2), staging_bytes=1 << 16)  # no second round
    for kind in range(4):
        step(loop, kind, generator)
    for engine in loop.engines:
        samples = engine.tables.samples()
        assert [sample.op for sample in samples] == ["all_gather", "reduce_scatter", "all_reduce", "all_reduce"]
        assert [sample.seq for sample in samples] == [1, 2, 3, 4]
        assert all(0 < sample.send_ns <= sample.total_ns for sample in samples)
