"""What latency records cost an operation: dispatch and combine with and without them, in turn, in one run.

    python -m tests.observability.overhead [--device cpu|cuda] [--turns N] [--out DIR]       (make bench-overhead)

cpu     ranks are processes; in one communicator, and so in the same memory, a switch of the native half says whether
        records are kept. `records`: nobody collects them; `pair`: a worker's telemetry does, every quarter of a second;
        `control`: both halves of a turn without records, which shows what such a table cannot tell apart
cuda    ranks of one GPU by loop-back, kernels with `common/trace.cuh` and with one that records nothing; and how far
        apart two values of `%globaltimer` are

A turn is one stretch with records and one without, right after each other; which is first alternates. The overhead is
the median of the turns' ratios, with the interval that has the true median with 95 %.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import facts
from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.worker_telemetry import WorkerTelemetry
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.transports.build import Native, native_of
from ep_kernels.transports.cpu import native

RANKS, EXPERTS, TOPK, HIDDEN = 2, 256, 8, 7168
CASES = {"ll": 128, "ht": 4096}
"""Tokens of a rank."""
TURNS = 60
WARMUP = 3
STRETCH_S, SHORT_S = 0.3, 0.02
"""Of a stretch of a turn: longer than telemetry's interval, so that each one with records has them collected; where
nobody collects them."""
SHORT_TURNS = 4
"""Times as many turns of short stretches."""
_load = native.load
PUSH = "void SampleRing::push(const Sample& sample) {"
SWITCH = "crossdock_test_records"

Turn = tuple[float, float]
"""Seconds of an operation without and with records."""


@dataclass(frozen=True)
class Row:
    """A line of overhead.csv, of a pair of operations (cpu) or of one: medians, and of the ratios their interval."""

    device: str
    op: str
    mode: str
    tokens: int
    off_us: float
    on_us: float
    overhead_percent: float
    low_percent: float
    high_percent: float
    floor_percent: float
    """The same of the times that a tenth of either kind does not exceed: what other work on the machine left alone."""
    turns: int
    metrics_percent: float | None = None
    """How far the mean of the exported histograms is from that of the bench's own clock, over the same operations."""


def row_of(
    device: str, op: str, mode: str, tokens: int, turns: Sequence[Turn], metrics_percent: float | None = None
) -> Row:
    """Of the turns."""
    off, on = (round(1e6 * statistics.median(times), 2) for times in zip(*turns, strict=True))
    ratios = sorted(100 * (with_records / without - 1) for without, with_records in turns)
    low, high = median_interval(ratios)
    floor_off, floor_on = (statistics.quantiles(times, n=10)[0] for times in zip(*turns, strict=True))
    floor = 100 * (floor_on / floor_off - 1)
    shares = (round(share, 2) for share in (statistics.median(ratios), low, high, floor))
    return Row(device, op, mode, tokens, off, on, *shares, len(turns), metrics_percent)


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Values between which the median of what these are samples of lies with 95 %: by their order only."""
    number = len(ordered)
    below, at = 0.0, 0
    while (below := below + math.comb(number, at) / 2**number) <= 0.025:
        at += 1
    return ordered[max(0, at - 1)], ordered[min(number - 1, number - at)]


def alternate(measured: Callable[[bool], float], turns: int) -> list[Turn]:
    """The turns; `measured`: seconds with (True) or without records."""
    found = []
    for number in range(WARMUP + turns):
        first = number % 2 == 0
        times = {kind: measured(kind) for kind in (first, not first)}
        found.append((times[False], times[True]))
    return found[WARMUP:]


def library_with_switch(folder: Path) -> Native:
    """The native half of `cpu` with a switch: at 0 its ring takes no record."""
    ours = native_of("cpu")
    sources = folder / "native"
    shutil.copytree(ours.sources, sources)
    member = sources / "member.cpp"
    text = member.read_text()
    assert text.count(PUSH) == 1
    switch = f'extern "C" {{ __attribute__((visibility("default"))) int {SWITCH} = 1; }}\n'
    member.write_text(text.replace(PUSH, f"}}\n{switch}namespace cd {{\n{PUSH}\n  if (!{SWITCH}) return;"))
    made = Native(sources, folder / "_native.so", ours.included)
    made.build()
    return made


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
        self._switch = ctypes.c_int.in_dll(ctypes.CDLL(str(library.library)), SWITCH)
        ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices.int()
        self._inputs = torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOPK)
        self._metrics = WorkerMetrics()
        self.telemetry = WorkerTelemetry(self._metrics, (HIDDEN * 2, HIDDEN * 2))
        self._mode, self._clocked_s, self._recorded = mode, 0.0, 0
        self._switch.value = False
        once = min(self._pair()[0] for _ in range(WARMUP))
        store = dist.FileStore(str(folder / f"{mode}-pairs"), RANKS)  # type: ignore[attr-defined]
        if rank == 0:
            store.set("once", str(once))
        once = float(store.get("once"))
        self._pairs, self._few = (max(1, round(stretch_s / once)) for stretch_s in (STRETCH_S, SHORT_S))

    def short(self, records: bool) -> float:
        """Seconds of a dispatch and a combine: the mean of a short stretch."""
        self._switch.value = records
        return statistics.fmean(self._pair()[0] for _ in range(self._few))

    def stretch(self, records: bool) -> float:
        """The same of a stretch in which records are collected."""
        self._switch.value = records
        began = time.perf_counter()
        for _ in range(self._pairs):
            clocked_s = self._pair()[1]
            if records:
                self._clocked_s, self._recorded = self._clocked_s + clocked_s, self._recorded + 1
                self.telemetry.collect(self.comm)
        return (time.perf_counter() - began) / self._pairs

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

    def metrics_percent(self) -> float:
        """See `Row`. The bench's clock counts the Python around the two operations, too."""
        value = self._metrics.registry.get_sample_value
        exported_s = 0.0
        for op in ("dispatch", "combine"):
            labels = {"op": op, "mode": self._mode, "phase": "total", "transport": "cpu"}
            exported_s += value("crossdock_operation_duration_seconds_sum", labels) or 0.0
            assert value("crossdock_operation_duration_seconds_count", labels) == self._recorded, "samples are lost"
        return 100 * (exported_s / self._clocked_s - 1)


def turns_of(rank: int, folder: Path, turns: int) -> tuple[dict[tuple[str, str], list[Turn]], dict[str, float]]:
    """The turns of one rank, in a process of its own, by mode and what they show; `metrics_percent` by mode."""
    torch.set_num_threads(1)
    found, apart = {}, {}
    for mode in CASES:
        ranked = Ranked(rank, folder, mode)
        found[mode, "control"] = alternate(lambda _, r=ranked: r.short(False), turns * SHORT_TURNS)  # type: ignore[misc]
        assert not ranked.comm.samples(), "something was recorded"
        found[mode, "records"] = alternate(ranked.short, turns * SHORT_TURNS)
        assert ranked.comm.samples(), "nothing was recorded"
        found[mode, "pair"] = alternate(ranked.stretch, turns)
        ranked.telemetry.parted(ranked.comm)
        ranked.telemetry.close()
        apart[mode] = ranked.metrics_percent()
        ranked.comm.close()
    return found, apart


def cpu_rows(turns: int) -> Iterator[Row]:
    """Pairs of operations on this host, of the slowest rank."""
    with tempfile.TemporaryDirectory() as name:
        library_with_switch(Path(name))
        with ProcessPoolExecutor(RANKS, get_context("spawn")) as pool:
            ranks = list(pool.map(turns_of, range(RANKS), [Path(name)] * RANKS, [turns] * RANKS))
    found, apart = zip(*ranks, strict=True)
    for mode, op in found[0]:
        same_turn = zip(*(rank[mode, op] for rank in found), strict=True)
        slowest = [(max(off for off, _ in turn), max(on for _, on in turn)) for turn in same_turn]
        furthest = round(max((rank[mode] for rank in apart), key=abs), 2) if op == "pair" else None
        yield row_of("cpu", op, mode, CASES[mode], slowest, furthest)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, object] = {"ranks": RANKS, "turns": options.turns, "stretch_s": STRETCH_S}
    if options.device == "cuda":
        from tests.observability import overhead_gpu

        rows, measured["ranks"] = list(overhead_gpu.rows(options.turns)), overhead_gpu.RANKS
        measured["globaltimer"] = overhead_gpu.globaltimer()
    else:
        rows = list(cpu_rows(options.turns))
    for row in rows:
        print(row, flush=True)
    print(measured)
    if options.out:
        config = {"hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, **measured}
        facts.keep(options.out, "overhead", Row, rows, facts.of_this_run(config, module="tests.observability.overhead"))


if __name__ == "__main__":
    main()
