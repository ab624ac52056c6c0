"""All-gathers by copy engines without any: streams are threads that copy memory of this process, and wait for its
words."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels.errors import AbortedError, PeerTimeout, TransportError
from ep_kernels.kernels import collective_abi
from ep_kernels.transports.nvlink.copy_engines import copies
from ep_kernels.transports.nvlink.copy_engines.collective_copies import copy_by_kernel
from ep_kernels.transports.nvlink.copy_engines.copies import CopyEngines
from ep_kernels.transports.nvlink.copy_engines.copy_times import RING, CopyTimes
from ep_kernels.transports.nvlink.copy_engines.repeat_records import DISTURBED, CopyRepeat, Quiet
from ep_kernels.transports.nvlink.gpu import copy_schedule
from ep_kernels.transports.nvlink.gpu.copy_schedule import (
    COPY,
    GRAPH,
    MARK,
    WAIT,
    WRITE,
    CopyMarks,
    CopyPart,
    CopyPlaces,
)
from ep_kernels.transports.nvlink.memory.host_page import HostPage
from tests.cases import draw_seed
from tests.emulator.machine import without_driver

REGION_BYTES, SLOT_BYTES = 1 << 16, 1 << 12
READY, SHARD, HALF, SLOTS, POOL = 0, 512, 768, 1024, 1024 + 2 * SLOT_BYTES
FLAG = 16


class Streams:
    """Takes the place of the native library: one stream, which a thread runs."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self.passed: dict[int, int] = {}  # when it has passed an event
        self.graphs: dict[int, list[tuple[int, ...]]] = {}
        self.is_disturbed = False
        self.is_stopped = False  # the process that owns it is gone
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cd_copies(self, address: int, count: int, stream: int) -> int:
        words = (ctypes.c_uint64 * (4 * count)).from_address(address)
        for i in range(0, 4 * count, 4):
            step = tuple(words[i : i + 4])
            for one in self.graphs[step[1]] if step[0] == GRAPH else [step]:
                self._steps.put(one)
        return 0

    def cd_graph(self, address: int, count: int, made: int) -> int:
        words = (ctypes.c_uint64 * (4 * count)).from_address(address)
        self.graphs[number := len(self.graphs) + 1] = [tuple(words[i : i + 4]) for i in range(0, 4 * count, 4)]
        ctypes.c_uint64.from_address(made).value = number
        return 0

    def cd_graph_free(self, graph: int) -> int:
        del self.graphs[graph]
        return 0

    def cd_repeat_copies(self, address: int, seq: int, behind: int, events: int) -> int:
        if self.is_disturbed:
            return DISTURBED
        record, listed = CopyRepeat.from_address(address), ctypes.c_uint64 * 1
        steps = (ctypes.c_uint64 * (4 * record.count)).from_address(record.steps)
        for i in (ctypes.c_int64 * record.num_numbers).from_address(record.numbers):
            steps[i] = seq
        marks = (ctypes.c_int64 * record.num_marks).from_address(record.marks)
        for i, at in enumerate(marks, 1):
            steps[at] = listed.from_address(events + 8 * i)[0]
        steps[record.seen_at] = record.seen_first + seq % record.seen_slots * record.seen_bytes
        return self.cd_copies_behind(record.steps, record.count, 0, behind, listed.from_address(events)[0])

    def cd_copies_behind(self, address: int, count: int, stream: int, behind: int, event: int) -> int:
        self._steps.put((MARK, event, 0, 0))
        return self.cd_copies(address, count, stream)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            kind, to, source, amount = step
            if kind == MARK:
                self.passed[to] = time.monotonic_ns()
                continue
            word = ctypes.c_int64.from_address(to)
            if kind == COPY:
                ctypes.memmove(to, source, amount)
            elif kind == WRITE:
                word.value = amount
            while kind == WAIT and word.value < amount and not self.is_stopped:
                time.sleep(1e-4)
            if self.is_stopped:
                return

    def stop(self) -> None:
        self.is_stopped = True
        self._steps.put(None)
        self._thread.join()


class Events:
    """`copy_times.DeviceEvents` of such a stream."""

    def __init__(self, stream: Streams) -> None:
        self._passed, self._numbers = stream.passed, itertools.count(1)
        self.is_closed = False

    def create(self) -> int:
        return next(self._numbers)

    def pass_now(self, event: int) -> bool:
        self._passed[event] = time.monotonic_ns()
        return True

    def between_ns(self, first: int, second: int) -> int | None:
        both = self._passed.get(first), self._passed.get(second)
        return None if both[0] is None or both[1] is None else both[1] - both[0]

    def close(self) -> None:
        self.is_closed = True


class Flags:
    """`copies.FlagMemory` of a region in ordinary memory."""

    def __init__(self, region: torch.Tensor, size: int) -> None:
        self._rows = [region[at : at + FLAG * size].view(torch.int64)[::2] for at in (READY, SHARD, HALF)]
        self.is_aborted = False

    def read(self) -> tuple[list[int], list[int]] | None:
        return self._rows[0].tolist(), self._rows[1].tolist()

    def fill(self, value: int) -> None:
        for row in self._rows:
            row.fill_(value)

    def stop(self) -> None:
        self.is_aborted = True


class Ranks:
    """R ranks of one process."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self.regions = [torch.zeros(REGION_BYTES, dtype=torch.uint8) for _ in range(size)]
        self.hosts = [HostPage(size) for _ in range(size)]
        self.streams = [Streams() for _ in range(size)]
        self.words = torch.zeros(2 * size, dtype=torch.int64)
        self.flags = [Flags(region, size) for region in self.regions]
        self.engines = [self._engine(rank, timeout_s) for rank in range(size)]

    def _engine(self, rank: int, timeout_s: float) -> CopyEngines:
        word = self.words.data_ptr() + FLAG * rank
        addresses = tuple(region.data_ptr() for region in self.regions)
        places = CopyPlaces(rank, (True,) * self.size, addresses, READY, SHARD, word, 0, 0, 0, HALF)
        flags: Any = self.flags[rank]
        times = CopyTimes(self.size, Events(self.streams[rank]))
        return CopyEngines(places, self.hosts[rank], timeout_s, 0, self.streams[rank], flags, times)

    def begin(
        self, rank: int, shards: list[torch.Tensor], outs: list[Any], pushes: bool, signature: int = 7, half: int = 0
    ) -> int:
        """outs: offsets in the pool where it pushes, tensors else."""
        engine, parts, slot = self.engines[rank], [], SLOTS + (self.engines[rank].seq + 1) % 2 * SLOT_BYTES
        for x, out in zip(shards, outs, strict=True):
            n = x.numel()
            if not pushes:
                while engine.seq >= 2 and not engine.has_ended(engine.seq - 1):
                    time.sleep(1e-4)  # the copy to the slot is in stream order on a GPU
                self.regions[rank][slot : slot + n] = x
            own = self.regions[rank][POOL + out :][rank * n :][:n] if pushes else out[rank * n :][:n]
            own.copy_(x)
            parts.append(CopyPart(x.data_ptr(), POOL + out if pushes else out.data_ptr(), slot, n, n, half=half))
            slot += -(-n // 16) * 16
        return engine.begin(parts, signature, pushes, [shards, outs])

    def out(self, rank: int, offset: int, num_bytes: int) -> torch.Tensor:
        return self.regions[rank][POOL + offset :][:num_bytes]

    def close(self) -> None:
        for host in self.hosts:
            host.abort("closed")
        for stream in self.streams:
            stream.stop()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    """ranks(size, timeout_s)."""
    without_driver(monkeypatch)
    made: list[Ranks] = []

    def make(size: int, timeout_s: float = 60.0) -> Ranks:
        made.append(Ranks(size, timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def await_(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(1e-3)


def places(rank: int, active: tuple[bool, ...]) -> CopyPlaces:
    return CopyPlaces(rank, active, tuple(1000 * (r + 1) for r in range(len(active))), 100, 200, 5, 6, 7, 8)


def test_the_order_of_a_push() -> None:
    """Rank 1 of 4 ranks, of which rank 3 is inactive; two parts, one of them empty."""
    parts = [CopyPart(50, 300, 0, 32, 32), CopyPart(60, 600, 0, 0, 0)]
    copy, wait, write, mark = COPY, WAIT, WRITE, MARK
    marks, there = CopyMarks(12, 11, {0: 13, 2: 14}), places(1, (True, True, True, False))
    word, begun = [(write, 5, 0, 9), (write, 13, 0, 77)], (write, 6, 0, 9)
    ready = [(copy, 3000 + 100 + 16, 5, 16), (copy, 1000 + 100 + 16, 5, 16)]
    waits = [(wait, 2000 + 100 + 32, 0, 9), (wait, 2000 + 100 + 0, 0, 9)]
    shards = [
        (copy, 3000 + 300 + 32, 50, 32), (copy, 3000 + 200 + 16, 5, 16),
        (copy, 1000 + 300 + 32, 50, 32), (copy, 1000 + 200 + 16, 5, 16),
    ]  # fmt: skip
    end = [
        (mark, 11, 0, 0),
        (wait, 2000 + 200 + 0, 0, 9), (mark, 13, 0, 0), (wait, 2000 + 200 + 32, 0, 9), (mark, 14, 0, 0),
        (mark, 12, 0, 0), (copy, 8 + 9 * 64, 2000 + 200, 64), (write, 7, 0, 9),
    ]  # fmt: skip
    assert copy_schedule.push(there, 9, 77, parts, marks) == [
        *word, *ready, begun, waits[0], *shards[:2], waits[1], *shards[2:], *end
    ]  # fmt: skip
    graphs = [(GRAPH, 701, 0, 0), begun, *waits, (GRAPH, 702, 0, 0)]
    assert copy_schedule.push_by_graphs(there, 9, 77, 701, 702, marks) == [*word, *graphs, *end]
    assert copy_schedule.ready_flags(there) == ready
    assert copy_schedule.all_shards(there, parts) == shards


def test_a_shard_by_halves() -> None:
    """The second half is sent behind the flag of the first; one of no bytes is not sent."""
    there = replace(places(0, (True, True)), half=150)
    flag, half = (COPY, 2000 + 200, 5, 16), (COPY, 2000 + 150, 5, 16)
    for num_bytes, rest in ((32, [(COPY, 2000 + 312, 62, 20)]), (12, [])):
        sent = copy_schedule.all_shards(there, [CopyPart(50, 300, 0, num_bytes, 32, half=12)])
        assert sent == [(COPY, 2000 + 300, 50, 12), half, *rest, flag]
    assert copy_schedule.arrival(there, 1, 9, half=True) == (WAIT, 1000 + 150 + 16, 0, 9)
    assert copy_schedule.arrival(there, 1, 9) == (WAIT, 1000 + 200 + 16, 0, 9)


@pytest.mark.parametrize("size", [2, 3])
def test_halves_come_first(ranks: Callable[..., Ranks], size: int) -> None:
    """Whoever waits for the first half finds it; also where a rank stops behind it."""
    loop = ranks(size)
    for number in range(1, 4):
        for rank in range(size):
            loop.begin(rank, [torch.full((64,), 8 * number + rank, dtype=torch.uint8)], [0], True, half=24)
        await_(lambda: all(engine.has_ended(engine.seq) for engine in loop.engines))
        for rank, other in itertools.permutations(range(size), 2):
            told = loop.regions[rank][HALF : HALF + FLAG * size].view(torch.int64)[2 * other]
            assert (int(told), loop.out(rank, 64 * other, 64).unique().tolist()) == (number, [8 * number + other])


def test_the_order_of_a_pull() -> None:
    copy, wait, write, mark = COPY, WAIT, WRITE, MARK
    marks = CopyMarks(2, 1, {0: 3, 2: 4})
    assert copy_schedule.pull(places(1, (True,) * 3), 9, 77, [CopyPart(0, 70, 400, 16, 40)], marks) == [
        (write, 5, 0, 9), (write, 13, 0, 77),
        (copy, 3000 + 200 + 16, 5, 16), (copy, 1000 + 200 + 16, 5, 16), (mark, 1, 0, 0), (write, 6, 0, 9),
        (wait, 2000 + 200 + 32, 0, 9), (mark, 4, 0, 0), (copy, 70 + 2 * 40, 3000 + 400, 16),
        (wait, 2000 + 200 + 0, 0, 9), (mark, 3, 0, 0), (copy, 70, 1000 + 400, 16),
        (mark, 2, 0, 0), (copy, 8 + 9 * 48, 2000 + 200, 48), (write, 7, 0, 9),
    ]  # fmt: skip


def test_the_copies_of_a_graph() -> None:
    """Rank 1 of 3: from slots, and from registered outs."""
    parts = [CopyPart(0, 70, 400, 16, 40), CopyPart(0, 90, 500, 8, 8, 8), CopyPart(0, 1, 2, 0, 0)]
    assert copy_schedule.graph_copies(places(1, (True,) * 3), parts) == [
        (COPY, 70 + 80, 3000 + 400, 16), (COPY, 90 + 16, 3000 + 500 + 16, 8),
        (COPY, 70, 1000 + 400, 16), (COPY, 90, 1000 + 500, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("pushes", [True, False])
@pytest.mark.parametrize("size", range(1, 9))
def test_everybody_gets_everything(ranks: Callable[..., Ranks], size: int, pushes: bool) -> None:
    """Operations of one to three parts, two in flight, ranks in any order and pace."""
    loop, generator = ranks(size), torch.Generator().manual_seed(draw_seed())
    for _ in range(6):
        both = []
        for turn in (0, 1):
            lengths = torch.randint(0, 300, (3,), generator=generator).tolist()
            xs = [[torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in lengths]
                  for _ in range(size)]  # fmt: skip
            starts = [turn * 20000 + sum(lengths[:i]) * size for i in range(3)]
            outs = [starts if pushes else [torch.zeros(n * size, dtype=torch.uint8) for n in lengths]
                    for _ in range(size)]  # fmt: skip
            for rank in torch.randperm(size, generator=generator).tolist():
                loop.begin(rank, xs[rank], outs[rank], pushes)
            both.append((xs, outs))
        await_(lambda: all(engine.has_ended(engine.seq) for engine in loop.engines))
        for xs, outs in both:
            for rank, part in itertools.product(range(size), range(3)):
                want = torch.cat([xs[r][part] for r in range(size)])
                got = loop.out(rank, outs[rank][part], want.numel()) if pushes else outs[rank][part]
                assert torch.equal(got, want), (rank, part)
    assert all(engine.mismatch() is None for engine in loop.engines)
    assert all(host.fault() is None for host in loop.hosts)


def begin_all(loop: Ranks, who: list[int], pushes: bool) -> None:
    for rank in who:
        x = torch.full((64,), rank, dtype=torch.uint8)
        outs = [0] if pushes else [torch.zeros(64 * loop.size, dtype=torch.uint8)]
        loop.begin(rank, [x], outs, pushes)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("pushes", [True, False])
def test_a_silent_rank_is_named_and_the_stream_goes_on(ranks: Callable[..., Ranks], pushes: bool, gone: bool) -> None:
    """At the deadline, or at once where its process is dead; also where more was begun meanwhile."""
    loop = ranks(3, timeout_s=60.0 if gone else 0.3)
    begin_all(loop, [0, 1, 2], pushes)
    await_(lambda: all(engine.has_ended(1) for engine in loop.engines))
    begin_all(loop, [0, 1], pushes)
    begin_all(loop, [0, 1], pushes)
    time.sleep(0.05)
    if gone:
        loop.hosts[0].mark_gone(2)
        loop.hosts[1].mark_gone(2)
    await_(lambda: all(engine.has_ended(3) for engine in loop.engines[:2]))
    for rank in (0, 1):
        found = loop.hosts[rank].fault()
        assert isinstance(found, PeerTimeout), rank
        assert (found.peer, found.op, found.phase, found.gone) == (2, "all_gather", found.phase, gone)
        assert found.phase == ("credit" if pushes else "shards")
        assert (found.expected, found.seen) == (2, 1)
        assert loop.flags[rank].is_aborted
    agreed = 4
    for rank in (0, 1):
        loop.engines[rank].settle()
        loop.hosts[rank].clear()
        loop.engines[rank].restart(agreed, (True, True, False))
    begin_all(loop, [0, 1], pushes)
    await_(lambda: all(engine.has_ended(agreed + 1) for engine in loop.engines[:2]))
    assert all(loop.hosts[rank].fault() is None for rank in (0, 1))


def test_flags_that_cannot_be_read_are_read_again(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends waits goes on."""
    loop, tried = ranks(2, timeout_s=0.1), list[int]()
    read = loop.flags[0].read

    def refused_at_first() -> tuple[list[int], list[int]] | None:
        tried.append(1)
        if len(tried) == 1:
            raise TransportError("not now")
        return read()

    monkeypatch.setattr(loop.flags[0], "read", refused_at_first)
    begin_all(loop, [0], True)
    await_(lambda: loop.engines[0].has_ended(1))
    assert isinstance(loop.hosts[0].fault(), PeerTimeout)
    assert len(tried) > 1


def test_a_late_rank_is_no_failure(ranks: Callable[..., Ranks]) -> None:
    """The deadline counts from when a stream has come to an operation."""
    loop = ranks(2, timeout_s=30.0)
    begin_all(loop, [0], True)
    time.sleep(0.3)
    assert not loop.engines[0].has_ended(1)
    begin_all(loop, [1], True)
    await_(lambda: all(engine.has_ended(1) for engine in loop.engines))
    assert all(host.fault() is None for host in loop.hosts)


def test_a_peer_that_lowers_a_flag_again_does_not_hold_the_stream(ranks: Callable[..., Ranks]) -> None:
    """A rank that comes after the deadline stores less than what the waits of later operations were given."""
    loop = ranks(2, timeout_s=0.1)
    begin_all(loop, [0, 0, 0], False)
    stop = time.monotonic() + 0.5
    while time.monotonic() < stop and not loop.engines[0].has_ended(3):
        loop.regions[0][SHARD + FLAG : SHARD + 2 * FLAG].view(torch.int64).fill_(0)
        time.sleep(1e-3)
    await_(lambda: loop.engines[0].has_ended(3))
    assert isinstance(loop.hosts[0].fault(), PeerTimeout)


def test_an_abort_ends_it(ranks: Callable[..., Ranks]) -> None:
    loop = ranks(2)
    begin_all(loop, [0], True)
    time.sleep(0.05)
    loop.hosts[0].abort("for a test")
    await_(lambda: loop.engines[0].has_ended(1))
    assert isinstance(loop.hosts[0].fault(), AbortedError)


def test_who_brings_something_else_is_told(ranks: Callable[..., Ranks]) -> None:
    loop = ranks(3)
    x = torch.zeros(64, dtype=torch.uint8)
    for rank in range(3):
        loop.begin(rank, [x], [0], True, signature=5 if rank == 1 else 4)
    await_(lambda: all(engine.has_ended(1) for engine in loop.engines))
    assert [engine.mismatch().peer for engine in loop.engines] == [1, 0, 1]  # type: ignore[union-attr]
    assert all(engine.mismatch() is None for engine in loop.engines), "told once"


def test_flag_rows_are_where_peers_look() -> None:
    sizes = collective_abi.CollectiveSizes(3, 1, 4096, 0)
    found = collective_abi.collective_map(sizes)
    rows = [copies.flag_row(found, name, 3) for name in collective_abi.COPY_FLAGS]
    assert rows == [found.copy_flags + 48 * i for i in range(5)]
    assert rows[-1] + 48 <= found.lines


@pytest.mark.parametrize("direct", [False, True])
def test_pushes_that_repeat(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """By graphs, or copy by copy as large shards, beside ranks that list their steps anew; two places, in any order;
    what is freed, and when nothing begins."""
    loop, size = ranks(3), 3
    monkeypatch.setattr(copies, "DIRECT_BYTES", 64 if direct else 65)
    templates = []
    for rank in (0, 1):
        base, n = loop.regions[rank].data_ptr() + POOL, 64
        parts = [[CopyPart(base + at + rank * n, POOL + at, 0, n, n)] for at in (0, 4096)]
        made = [loop.engines[rank].template(part, 7, Quiet([])) for part in parts]
        assert len(loop.streams[rank].graphs) == (0 if direct else 3), "the flags', and one for each place"
        templates.append(made)
    for turn in range(6):
        at = 4096 * (turn % 3 % 2)
        for rank in range(size):
            loop.out(rank, at, size * 64).fill_(0xA5)
            loop.out(rank, at + rank * 64, 64).fill_(16 * turn + rank)
        for rank in (0, 1):
            template: Any = templates[rank][at // 4096]
            assert loop.engines[rank].push_again(template, None, 5) == turn + 1
        loop.begin(2, [torch.full((64,), 16 * turn + 2, dtype=torch.uint8)], [at], True)
        await_(lambda: all(engine.has_ended(engine.seq) for engine in loop.engines))
        want = torch.arange(size).repeat_interleave(64) + 16 * turn
        for rank in range(size):
            assert torch.equal(loop.out(rank, at, size * 64).long(), want), (turn, rank)
    assert all(engine.mismatch() is None for engine in loop.engines)
    assert [sample.seq for sample in loop.engines[0].samples()] == list(range(1, 7))
    loop.streams[0].is_disturbed = True
    assert loop.engines[0].push_again(template, None, 5) == 0
    assert loop.engines[0].seq == 6
    loop.engines[0].restart(10, (True,) * size)
    assert loop.streams[0].graphs == {}
    monkeypatch.setattr(copies, "MAX_GRAPHS", 0)
    assert (loop.engines[1].template(parts[0], 7, Quiet([])) is None) != direct


@pytest.mark.parametrize("pushes", [True, False])
def test_each_operation_leaves_a_record(ranks: Callable[..., Ranks], pushes: bool) -> None:
    """The second rank comes late: the others' records name it, one by one where its wait is marked."""
    loop = ranks(3)
    begin_all(loop, [0, 1, 2], pushes)
    await_(lambda: all(engine.has_ended(1) for engine in loop.engines))
    begin = time.monotonic_ns()
    begin_all(loop, [0, 2], pushes)
    time.sleep(0.1)
    assert [sample.seq for sample in loop.engines[0].samples()] == [1], "of what has ended"
    begin_all(loop, [1], pushes)
    await_(lambda: all(engine.has_ended(2) for engine in loop.engines))
    (sample,) = loop.engines[0].samples()
    assert (sample.op, sample.mode) == ("all_gather", "copy_push" if pushes else "copy_pull")
    assert (sample.seq, sample.tokens) == (2, 64)
    assert begin <= sample.start_ns <= time.monotonic_ns()
    assert 0 < sample.send_ns <= sample.total_ns
    assert sample.total_ns > 9e7
    assert sample.peer_wait_ns[0] == 0
    assert sample.peer_wait_ns[1] > 9e7
    assert pushes or sample.peer_wait_ns[2] >= sample.peer_wait_ns[1], "in the order in which they are waited for"
    assert loop.engines[0].samples() == []


def test_who_reads_late_loses_the_oldest_records(ranks: Callable[..., Ranks]) -> None:
    loop = ranks(2)
    for _ in range(RING + 10):
        begin_all(loop, [0, 1], True)
    await_(lambda: all(engine.has_ended(engine.seq) for engine in loop.engines))
    assert [sample.seq for sample in loop.engines[0].samples()] == list(range(11, RING + 11))
    loop.engines[1].restart(500, (True, True))
    assert loop.engines[1].samples() == [], "what was before is void"


@pytest.mark.parametrize(
    ("to", "source", "n"), [(0, 0, 80), (8, 16, 64), (0, 1, 64), (8, 0, 63), (3, 5, 17), (8, 8, 0)]
)
def test_bytes_of_any_alignment_are_copied_within_a_gpu(to: int, source: int, n: int) -> None:
    room, found = torch.randint(0, 256, (100,), dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copy_by_kernel(found[to : to + n], room[source : source + n])
    want = torch.zeros_like(found)
    want[to : to + n] = room[source : source + n]
    assert torch.equal(found, want)
