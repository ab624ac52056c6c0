"""What latency records cost an operation: dispatch and combine with and without them, in turn, in one run.

    python -m tests.observability.overhead [--device cpu|cuda] [--out DIR]       (make bench-overhead)

cpu     each rank is a process with two communicators: one has a library whose sample ring takes nothing, and nobody
        collects; of the other a worker's telemetry collects the samples every quarter of a second
cuda    ranks of one GPU by loop-back, kernels with `common/trace.cuh` and with one that records nothing; and how far
        apart two values of `%globaltimer` are

The medians of both are compared; a round of one follows a round of the other, and which is first alternates.
"""

from __future__ import annotations

import argparse
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
CASES = {"ll": (128, 40), "ht": (4096, 3)}
"""Tokens of a rank, and pairs of operations in a round."""
ROUNDS = 12
WARMUP = 2
_load = native.load
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


def communicator(library: Native, store: Path, rank: int, tokens: int, mode: str) -> MoECommunicator:
    """One over this library."""
    group = StoreGroup(dist.FileStore(str(store), RANKS), rank, RANKS)  # type: ignore[attr-defined]
    config = MoEConfig(
        group=group, num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=tokens, mode=Mode(mode),
        layout=Layout.FLAT, timeout_s=100.0,
    )  # fmt: skip
    with mock.patch.object(native, "load", partial(_load, library)):
        return MoECommunicator(config)


@dataclass
class Ranked:
    """One rank's communicator of a kind, its inputs, and what collects its samples (None: nothing)."""

    comm: MoECommunicator
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    telemetry: WorkerTelemetry | None

    def pair(self) -> float:
        """Seconds of a dispatch and a combine, and of having the samples collected."""
        began = time.perf_counter()
        _, handle = self.comm.dispatch(*self.inputs)
        self.comm.combine(self.comm.combine_input(handle), handle)
        if self.telemetry is not None:
            self.telemetry.collect(self.comm)
        return time.perf_counter() - began


def times_of(rank: int, folder: Path) -> dict[str, dict[bool, list[float]]]:
    """Seconds of the pairs of one rank, in a process of its own, by mode."""
    torch.set_num_threads(1)
    without = Native(folder / "native", folder / "_native.so", native_of("cpu").included)
    found = {}
    for mode, (tokens, pairs) in CASES.items():
        ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices.int()
        inputs = torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOPK)
        kinds = {
            on: Ranked(
                communicator(native_of("cpu") if on else without, folder / f"{mode}-{on}", rank, tokens, mode),
                inputs,
                WorkerTelemetry(WorkerMetrics(), (HIDDEN * 2, HIDDEN * 2)) if on else None,
            )
            for on in (True, False)
        }

        def measured(on: bool, kinds: dict[bool, Ranked] = kinds, pairs: int = pairs) -> list[float]:
            return [kinds[on].pair() for _ in range(pairs)]

        found[mode] = alternate(measured)
        telemetry = kinds[True].telemetry
        assert telemetry is not None
        telemetry.close()
        assert telemetry.recent(), "nothing was recorded"
        assert not kinds[False].comm.samples(), "something was"
        for kind in kinds.values():
            kind.comm.close()
    return found


def cpu_rows() -> Iterator[Row]:
    """Pairs of operations on this host, of the slowest rank."""
    with tempfile.TemporaryDirectory() as name:
        library_without_records(Path(name))
        with ProcessPoolExecutor(RANKS, get_context("spawn")) as pool:
            ranks = list(pool.map(times_of, range(RANKS), [Path(name)] * RANKS))
    for mode, (tokens, _) in CASES.items():
        both = [rank[mode] for rank in ranks]
        times = {on: [max(pair) for pair in zip(*(one[on] for one in both), strict=True)] for on in (True, False)}
        yield row_of("cpu", "pair", mode, tokens, times)


def alternate(measured: Callable[[bool], Sequence[float]]) -> dict[bool, list[float]]:
    """Seconds by kind, of rounds of both kinds in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(WARMUP + ROUNDS):
        for kind in (number % 2 == 0, number % 2 == 1):
            taken = measured(kind)
            times[kind] += taken if number >= WARMUP else []
    return times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, object] = {"ranks": RANKS}
    if options.device == "cuda":
        from tests.observability import overhead_gpu

        rows, measured["ranks"] = list(overhead_gpu.rows()), overhead_gpu.RANKS
        measured["globaltimer"] = overhead_gpu.globaltimer()
    else:
        rows = list(cpu_rows())
    for row in rows:
        print(row, flush=True)
    print(measured)
    if options.out:
        config = {"hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, "rounds": ROUNDS, **measured}
        facts.keep(options.out, "overhead", Row, rows, facts.of_this_run(config, module="tests.observability.overhead"))


if __name__ == "__main__":
    main()
