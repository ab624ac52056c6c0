"""Ranks of `cpu` in processes of their own, operations with records and without, and what their collection takes."""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.transports.build import Native, native_of
from ep_kernels.transports.cpu import native
from tests.observability.overhead import (
    CASES,
    EXPERTS,
    HIDDEN,
    RANKS,
    TOPK,
    WARMUP,
    Collected,
    Cost,
    Row,
    Turn,
    alternate,
    both_row,
    row_of,
    telemetry_row,
)
from tests.observability.overhead_switch import LOOP, SWITCH, library_with_switch

SHARES = {
    "ll": {"control": 0.08, "records": 0.16, "telemetry": 0.12},
    "ht": {"control": 0.12, "records": 0.28, "telemetry": 0.24},
}
"""Of the seconds."""
LOOPS, BATCHES = 20_000, (40, 400, 4000)
"""Records that are timed in a loop; collected at once."""
_load = native.load


def communicator(library: Native, store: Path, rank: int, tokens: int, mode: str) -> MoECommunicator:
    """One over this library."""
    group = StoreGroup(dist.FileStore(str(store), RANKS), rank, RANKS)  # type: ignore[attr-defined]
    config = MoEConfig(
        group=group, num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=tokens, mode=Mode(mode),
        layout=Layout.FLAT, timeout_s=100.0,
    )  # fmt: skip
    with mock.patch.object(native, "load", partial(_load, library)):
        return MoECommunicator(config)


class Ranked:
    """One rank of a group of processes, and its telemetry."""

    def __init__(self, rank: int, folder: Path, mode: str) -> None:
        library = Native(folder / "native", folder / "_native.so", native_of("cpu").included)
        tokens = CASES[mode]
        self.comm = communicator(library, folder / mode, rank, tokens, mode)
        self._library = ctypes.CDLL(str(library.library))
        self._switch = ctypes.c_int.in_dll(self._library, SWITCH)
        ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices.int()
        self._inputs = torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOPK)
        self._mode = mode
        self._switch.value = False
        once = min(self._pair()[0] for _ in range(WARMUP))
        store = dist.FileStore(str(folder / f"{mode}-pairs"), RANKS)  # type: ignore[attr-defined]
        if rank == 0:
            store.set("once", str(once))
        self._once = float(store.get("once"))

    def count(self, seconds: float) -> int:
        """Pairs of operations in so many seconds; the same on all ranks."""
        return max(10, round(seconds / self._once))

    def pair(self, records: bool) -> float:
        """Seconds of a dispatch and a combine."""
        self._switch.value = records
        return self._pair()[0]

    def collected(self, number: int, cpu: int) -> Collected:
        """As many pairs with telemetry, whose thread runs where it may."""
        metrics = WorkerMetrics()
        telemetry = WorkerTelemetry(metrics, (HIDDEN * 2, HIDDEN * 2))
        clock = telemetry_clock(telemetry)
        self._switch.value = True
        self.comm.samples()
        pairs_s, ran, asked, clocked_s = list[float](), list[bool](), list[int](), 0.0
        with pinned(cpu):
            began, begun_s = time.perf_counter(), time.clock_gettime(clock)
            used_s = begun_s
            for at in range(number):
                due_s = telemetry._next_collect_s
                telemetry.collect(self.comm)
                asked += [at] if telemetry._next_collect_s != due_s else []
                pair_s, operations_s = self._pair()
                before_s, used_s = used_s, time.clock_gettime(clock)
                pairs_s.append(pair_s)
                ran.append(used_s > before_s)
                clocked_s += operations_s
            elapsed_s = time.perf_counter() - began
        used_s -= begun_s
        telemetry.epoch_ended(self.comm)
        telemetry.close()
        percent = self._metrics_percent(metrics, clocked_s, number)
        return Collected(pairs_s, ran, asked, 100 * used_s / elapsed_s, 1e6 * used_s / (2 * number), percent)

    def record_ns(self) -> float:
        """Of one record in a loop; the median of several loops."""
        self._switch.value = True
        loop = getattr(self._library, LOOP)
        loop.restype, loop.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int64)
        pointer = self.comm._transport.comm.pointer
        times = [loop(pointer, LOOPS) / LOOPS for _ in range(11)]
        self.comm.samples()
        return statistics.median(times)

    def batch_us(self, number: int) -> float:
        """Processor time of collecting so many records that have come since the last time; the median of several."""
        telemetry = WorkerTelemetry(WorkerMetrics(), (HIDDEN * 2, HIDDEN * 2))
        loop, pointer, times = getattr(self._library, LOOP), self.comm._transport.comm.pointer, []
        for _ in range(11):
            loop(pointer, number)
            began_s = time.thread_time()
            telemetry._count_samples(self.comm.samples())
            times.append(time.thread_time() - began_s)
        telemetry.close()
        return 1e6 * statistics.median(times)

    def _pair(self) -> tuple[float, float]:
        """Seconds of a dispatch and a combine; without what is between them."""
        began = time.perf_counter()
        _, handle = self.comm.dispatch(*self._inputs)
        delivered = time.perf_counter()
        y = self.comm.combine_input(handle)  # waits until the peers have read the one before
        begun = time.perf_counter()
        z = self.comm.combine(y, handle)
        ended = time.perf_counter()
        del z  # not before: giving back large memory takes time
        return ended - began, delivered - began + ended - begun

    def _metrics_percent(self, metrics: WorkerMetrics, clocked_s: float, pairs: int) -> float:
        """See `Row`. The bench's clock counts the Python around the two operations, too."""
        value = metrics.registry.get_sample_value
        exported_s = 0.0
        for op in ("dispatch", "combine"):
            labels = {"op": op, "mode": self._mode, "phase": "total", "transport": "cpu"}
            exported_s += value("crossdock_operation_duration_seconds_sum", labels) or 0.0
            assert value("crossdock_operation_duration_seconds_count", labels) == pairs, "samples are lost"
        return 100 * (exported_s / clocked_s - 1)


@contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """This thread runs on that processor."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def telemetry_clock(telemetry: WorkerTelemetry) -> int:
    """Of the processor time of its thread."""
    ident = telemetry._thread.ident
    assert ident is not None
    return time.pthread_getcpuclockid(ident)


@dataclass(frozen=True)
class Measured:
    """What one rank found in one mode."""

    turns: dict[str, list[Turn]]
    collected: Collected
    record_ns: float
    batches: dict[int, float]


def measured_by(rank: int, folder: Path, mode: str, seconds: float, cpu: int) -> Measured:
    """By one rank, in a process of its own; `cpu`: where its thread of operations runs."""
    torch.set_num_threads(1)
    ranked = Ranked(rank, folder, mode)
    count = {op: ranked.count(share * seconds) for op, share in SHARES[mode].items()}
    turns = {}
    with pinned(cpu):
        turns["control"] = alternate(lambda _: ranked.pair(False), count["control"] // 2)
        assert not ranked.comm.samples(), "something was recorded"
        turns["records"] = alternate(ranked.pair, count["records"] // 2)
        assert ranked.comm.samples(), "nothing was recorded"
    collected = ranked.collected(count["telemetry"], cpu)
    record_ns = ranked.record_ns()
    batches = {number: ranked.batch_us(number) for number in BATCHES}
    ranked.comm.close()
    return Measured(turns, collected, record_ns, batches)


def rows(seconds: float, costs: list[Cost]) -> Iterator[Row]:
    """Pairs of operations on this host, of the slowest rank; what is measured beside them goes to `costs`."""
    cpus = sorted(os.sched_getaffinity(0))[-RANKS:]
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(RANKS, get_context("spawn")) as pool:
        library_with_switch(Path(name))
        for mode, tokens in CASES.items():
            same = [[Path(name)] * RANKS, [mode] * RANKS, [seconds] * RANKS]
            found = list(pool.map(measured_by, range(RANKS), *same, cpus))
            made = {}
            for op in ("control", "records"):
                turns = zip(*(rank.turns[op] for rank in found), strict=True)
                slowest = [(max(off for off, _ in turn), max(on for _, on in turn)) for turn in turns]
                made[op] = row_of("cpu", op, mode, tokens, slowest)
                yield made[op]
            yield (telemetry := telemetry_row(mode, [rank.collected for rank in found]))
            yield both_row(made["records"], telemetry)
            costs += costs_of(mode, found)


def costs_of(mode: str, found: Sequence[Measured]) -> Iterator[Cost]:
    """Of the slowest rank."""
    yield Cost("a record in a loop", mode, round(max(rank.record_ns for rank in found), 1), "ns")
    cpu, record = (max(getattr(rank.collected, name) for rank in found) for name in ("cpu_percent", "us_per_record"))
    yield Cost("telemetry thread, of one processor", mode, round(cpu, 3), "%")
    yield Cost("telemetry thread, per record", mode, round(record, 2), "us")
    for number in BATCHES:
        taken = max(rank.batches[number] for rank in found)
        yield Cost(f"collecting {number} records at once", mode, round(taken, 1), "us")
