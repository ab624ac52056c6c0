"""What latency records cost an operation: dispatch and combine with and without them, in turn, in one run.

    python -m tests.observability.overhead [--device cpu|cuda] [--out DIR]       (make bench-overhead)

cpu     ranks are threads, and so are two kinds of communicators: `off` has a library whose sample ring takes nothing,
        and nobody collects; `on` is as in a worker, with its telemetry collecting every quarter of a second
cuda    ranks of one GPU by loop-back, kernels with `common/trace.cuh` and with one that records nothing; and how far
        apart two values of `%globaltimer` are

The medians of both are compared; a round of one follows a round of the other, and which is first alternates.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import facts
from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.worker_telemetry import StepRecord, WorkerTelemetry
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.transports.build import Native, native_of
from ep_kernels.transports.cpu import native

RANKS, EXPERTS, TOPK, HIDDEN = 2, 256, 8, 7168
CASES = {"ll": (128, 40), "ht": (4096, 3)}
"""Tokens of a rank, and pairs of operations in a round."""
ROUNDS = 12
WARMUP = 2
PUSH = "void SampleRing::push(const Sample& sample) {"


@dataclass(frozen=True)
class Row:
    """A line of overhead.csv: medians of a pair (cpu) or of an operation."""

    device: str
    op: str
    mode: str
    tokens: int
    off_us: float
    on_us: float
    overhead_percent: float


def row_of(device: str, op: str, mode: str, tokens: int, times: dict[bool, list[float]]) -> Row:
    """Of seconds with (True) and without records."""
    off, on = (1e6 * statistics.median(times[kind]) for kind in (False, True))
    return Row(device, op, mode, tokens, round(off, 2), round(on, 2), round(100 * (on / off - 1), 2))


def library_without_records(folder: Path) -> Native:
    """The native half of `cpu` whose ring takes no record."""
    ours = native_of("cpu")
    sources = folder / "native"
    shutil.copytree(ours.sources, sources)
    member = sources / "member.cpp"
    text = member.read_text()
    assert text.count(PUSH) == 1
    member.write_text(text.replace(PUSH, PUSH + "\n  if (sizeof(sample) != 0) return;"))
    made = Native(sources, folder / "_native.so", ours.included)
    made.build()
    return made


@contextmanager
def ranks_of(library: Native, tokens: int, mode: str) -> Iterator[list[MoECommunicator]]:
    """A group of threads' communicators over this library."""
    store = dist.HashStore()
    with mock.patch.object(native, "load", partial(native.load, library)), ThreadPoolExecutor(RANKS) as pool:
        made = list(
            pool.map(lambda rank: MoECommunicator(_config(StoreGroup(store, rank, RANKS), tokens, mode)), range(RANKS))
        )
        try:
            yield made
        finally:
            list(pool.map(MoECommunicator.close, made))


def _config(group: StoreGroup, tokens: int, mode: str) -> MoEConfig:
    return MoEConfig(
        group=group, num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=tokens, mode=Mode(mode),
        layout=Layout.GROUPED, timeout_s=100.0,
    )  # fmt: skip


@dataclass
class Worker:
    """One rank's inputs, communicator, and telemetry (None: off)."""

    comm: MoECommunicator
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    telemetry: WorkerTelemetry | None

    def pair(self) -> float:
        """Seconds of a dispatch and a combine, and of what a worker does for its telemetry."""
        began = time.perf_counter()
        out, handle = self.comm.dispatch(*self.inputs)
        self.comm.combine(self.comm.combine_input(handle), handle)
        if self.telemetry is not None:
            counts = out.counts.int().clone()
            self.telemetry.step(StepRecord(len(self.inputs[0]), counts, 1, 1, 1, 1))
            self.telemetry.collect(self.comm)
        return time.perf_counter() - began


def cpu_rows() -> Iterator[Row]:
    """Pairs of operations on this host."""
    with tempfile.TemporaryDirectory() as folder:
        libraries = {True: native_of("cpu"), False: library_without_records(Path(folder))}
        for mode, (tokens, pairs) in CASES.items():
            with ranks_of(libraries[True], tokens, mode) as on, ranks_of(libraries[False], tokens, mode) as off:
                workers = {
                    kind: [_worker(comm, tokens, kind) for comm in comms] for kind, comms in ((True, on), (False, off))
                }
                times = alternate(lambda kind, workers=workers, pairs=pairs: _round(workers[kind], pairs))
                for worker in workers[True]:
                    assert worker.telemetry is not None
                    worker.telemetry.close()
                    assert worker.telemetry.recent(), "nothing was recorded"
                assert not any(worker.comm.samples() for worker in workers[False])
            yield row_of("cpu", "pair", mode, tokens, times)


def alternate(measured: Callable[[bool], Sequence[float]]) -> dict[bool, list[float]]:
    """Seconds by kind, of rounds of both kinds in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(WARMUP + ROUNDS):
        for kind in (number % 2 == 0, number % 2 == 1):
            taken = measured(kind)
            times[kind] += taken if number >= WARMUP else []
    return times


def _worker(comm: MoECommunicator, tokens: int, on: bool) -> Worker:
    ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices.int()
    inputs = torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOPK)
    row_bytes = HIDDEN * 2, HIDDEN * 2
    return Worker(comm, inputs, WorkerTelemetry(WorkerMetrics(), row_bytes) if on else None)


def _round(workers: list[Worker], pairs: int) -> list[float]:
    """Seconds of each pair, of the slowest rank."""
    found: list[list[float]] = [[] for _ in workers]

    def run(rank: int) -> None:
        found[rank] = [workers[rank].pair() for _ in range(pairs)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [max(both) for both in zip(*found, strict=True)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, object] = {}
    if options.device == "cuda":
        from tests.observability import overhead_gpu

        rows, measured = list(overhead_gpu.rows()), {"globaltimer": overhead_gpu.globaltimer()}
    else:
        rows = list(cpu_rows())
    for row in rows:
        print(row, flush=True)
    print(measured or "")
    if options.out:
        config = {"ranks": RANKS, "hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, "rounds": ROUNDS, **measured}
        facts.keep(options.out, "overhead", Row, rows, facts.of_this_run(config, module="tests.observability.overhead"))


if __name__ == "__main__":
    main()
