"""All-gather, reduce-scatter and all-reduce of every backend, one process per GPU: one csv with ratios, run.json.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 8 -m benchmarks.gpu.collective_tables
    (make bench-gpu CASES=collectives)

Rules as in `measure.py`: payload random, other sets in turn, results poisoned before and compared after, ranks aligned
on the GPU, L2 flushed before each eager operation, the slowest rank counts. A graph holds PER_GRAPH operations on one
buffer, whose contents are renewed before each replay. `ratio` is the other backend's time over ours, `ratio_to` names
ours: it stands in the lines of the others.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import bounds, facts
from benchmarks.gpu import Unavailable
from benchmarks.gpu.collective_backends import CollectiveCase, Runner, create
from benchmarks.gpu.measure import Stopwatch
from crossdock.tune.measure import captured
from ep_kernels import StoreGroup
from ep_kernels.telemetry import quantile

MODULE = "benchmarks.gpu.collective_tables"
MIB, KIB = 1 << 20, 1 << 10
SETS, PER_GRAPH, WARMUP = 3, 10, 8
BACKENDS = ("crossdock", "nccl", "nccl_symm", "nccl_ce", "torch")
GATHER_MIB, GATHER_SMS = (16, 128, 512), (8, 16, 24, 32, 64, 132)
REDUCE_SMS = (16, 32, 132)
REDUCE_BYTES = (8 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB)
SCATTER_MIB = (2, 16)
DEADLINE_S = 120.0


@dataclass
class Line:
    """One row of the csv: the columns are its fields."""

    backend: str
    op: str
    algorithm: str
    ranks: int
    bytes_per_rank: int
    dtype: str
    sms: int | str
    timing: str
    p50_us: float
    p99_us: float
    bound_us: float
    gbps: float
    iterations: int
    runs: int
    spread_pct: float | str = ""
    ratio: float | str = ""
    ratio_to: str = ""


@dataclass
class Taken:
    """Times of one backend on one case: a list of microseconds per run."""

    backend: str
    case: CollectiveCase
    runs: list[list[float]] = field(default_factory=list)

    @property
    def p50(self) -> float:
        """Median of all runs."""
        return quantile([us for run in self.runs for us in run], 0.5)


def cases(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    """(backend, case) in the order in which they are measured."""
    for mib in GATHER_MIB[:1] if quick else GATHER_MIB:
        gather = CollectiveCase("all_gather", mib * MIB)
        for sms in (0, None, *(GATHER_SMS[:2] if quick else GATHER_SMS)):
            yield "crossdock", replace(gather, num_sms=sms)
        for name, sms in (("nccl", None), ("nccl", 8), ("nccl_symm", None), ("nccl_symm", 8), ("nccl_ce", 0)):
            yield name, replace(gather, num_sms=sms)
        yield "torch", replace(gather, algorithm="copies")
    for num_bytes in REDUCE_BYTES[:2] if quick else REDUCE_BYTES:
        timing = "graph" if num_bytes <= MIB else "eager"
        reduce = CollectiveCase("all_reduce", num_bytes, timing=timing)
        for sms in REDUCE_SMS if num_bytes >= MIB else ():
            yield "crossdock", replace(reduce, num_sms=sms)
        for name in ("crossdock", "nccl", "nccl_symm"):
            yield name, reduce
        for algorithm in ("one_shot", "two_shot"):
            yield "torch", replace(reduce, algorithm=algorithm)
    for mib in SCATTER_MIB[:1] if quick else SCATTER_MIB:
        for name in ("crossdock", "nccl", "nccl_symm"):
            yield name, CollectiveCase("reduce_scatter", mib * MIB)


def bound_us(case: CollectiveCase, ranks: int) -> float:
    """The bytes that must leave a GPU at the rate of the links: of a sum, those of a reduce-scatter and a gather."""
    moved = case.num_bytes * (ranks - 1) * (2 / ranks if case.op == "all_reduce" else 1)
    return moved / bounds.gbps(ranks) / 1e3


def drawn(case: CollectiveCase, seed: int, rank: int, ranks: int) -> torch.Tensor:
    """x of a rank, random; the same on every rank that asks."""
    own = torch.Generator("cuda").manual_seed(seed * 64 + rank)
    return torch.randn(case.shape_in(ranks), generator=own, device="cuda", dtype=torch.float32).to(case.dtype)


def expected(case: CollectiveCase, seed: int, rank: int, ranks: int) -> torch.Tensor:
    """What must come out here: bytes of a gather, and sums in fp32 in ascending rank, rounded once."""
    if case.op == "all_gather":
        return torch.cat([drawn(case, seed, other, ranks) for other in range(ranks)])
    total = drawn(case, seed, 0, ranks).float()
    for other in range(1, ranks):
        total += drawn(case, seed, other, ranks).float()
    whole = total.to(case.dtype)
    return whole if case.op == "all_reduce" else whole[rank * case.numel : (rank + 1) * case.numel]


def wrong(backend: str, case: CollectiveCase, out: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with `out`; "": nothing. Gathers and our sums are compared bit by bit."""
    if case.op == "all_gather" or backend == "crossdock":
        return "" if torch.equal(out.view(torch.uint8), want.view(torch.uint8)) else "other bits than the definition"
    far = float((out.float() - want.float()).abs().max() / want.float().abs().max())
    return "" if far < 2e-2 else f"off by {far:.3g} of the largest value"


class Session:
    """What one rank keeps between cases."""

    def __init__(self, options: argparse.Namespace, store: Any, rank: int, ranks: int) -> None:
        self._options, self._store, self._rank, self._ranks = options, store, rank, ranks
        self._watch = Stopwatch(torch.device("cuda", torch.cuda.current_device()))
        self._number, self._began = 0, time.monotonic()
        self.taken: dict[tuple[str, CollectiveCase], Taken] = {}
        self.failures: list[str] = []
        self.absent: dict[str, None] = {}

    def run(self) -> None:
        """All cases, as often as it says."""
        names = self._options.backends.split(",") if self._options.backends else BACKENDS
        for run in range(self._options.runs):
            for name, case in cases(self._ranks, self._options.quick):
                if name in names and (not self._options.ops or case.op in self._options.ops.split(",")):
                    self._measure(name, case, run)

    def _measure(self, name: str, case: CollectiveCase, run: int) -> None:
        self._number += 1
        fault, runner, us = "", None, list[float]()
        group = StoreGroup(self._store, self._rank, self._ranks, name=f"collectives-{self._number}")
        try:
            runner = create(name, case, group, self._ranks)
            fault, us = self._loop(name, case, runner, self._options.seed + 1000 * run)
        except Unavailable as error:
            self.absent[str(error)] = None
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if self._rank == 0:
                traceback.print_exc()
        finally:
            if runner is not None:
                runner.close()
        self._watch.forget()
        if fault:
            self.failures.append(f"{name} {_words(case)}: {fault}")
        elif us:
            self.taken.setdefault((name, case), Taken(name, case)).runs.append(us)
            self._say(f"{name:10} {_words(case)}: {quantile(us, 0.5):9.1f} us")
        elif self._rank == 0 and not run:
            self._say(f"{name:10} {_words(case)}: not measured")

    def _loop(self, name: str, case: CollectiveCase, runner: Runner, seed: int) -> tuple[str, list[float]]:
        """(what was wrong, microseconds of the slowest rank)."""
        sets = [drawn(case, seed + n, self._rank, self._ranks) for n in range(SETS)]
        graph = self._graph(case, runner, sets[0]) if case.timing == "graph" else None
        for turn in range(WARMUP + self._options.iterations):
            runner.out.fill_(float("nan"))
            runner.x.copy_(sets[turn % SETS])
            if graph is None:
                self._watch.time("op", runner.run, flush=True)
            else:
                self._watch.time("op", graph.replay, flush=False)
        times = self._watch.times()["op"].gpu_us
        fault = ""
        for n, x in enumerate(sets):  # eager, whatever was timed: a graph repeats its operation
            runner.out.fill_(float("nan"))
            runner.x.copy_(x)
            runner.run()
            torch.cuda.synchronize()
            fault = fault or wrong(name, case, runner.out, expected(case, seed + n, self._rank, self._ranks))
        return fault, [us / (PER_GRAPH if graph else 1) for us in times]

    def _graph(self, case: CollectiveCase, runner: Runner, x: torch.Tensor) -> torch.cuda.CUDAGraph:
        def many() -> None:
            for _ in range(PER_GRAPH):
                runner.run()

        runner.x.copy_(x)
        return captured(many)

    def lines(self) -> list[Line]:
        """Rows of the csv; those of others with the ratio of their time to our best of the same op, bytes, timing."""
        best: dict[tuple[str, int, str], Taken] = {}
        for (name, case), taken in self.taken.items():
            key = (case.op, case.num_bytes, case.timing)
            if name == "crossdock" and (key not in best or taken.p50 < best[key].p50):
                best[key] = taken
        made = []
        for taken in self.taken.values():
            line = _line(taken, self._ranks)
            ours = best.get((taken.case.op, taken.case.num_bytes, taken.case.timing))
            if ours is not None and taken.backend != "crossdock":
                line.ratio, line.ratio_to = round(taken.p50 / ours.p50, 3), f"crossdock sms={_sms(ours.case)}"
            made.append(line)
        return made

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"{time.monotonic() - self._began:4.0f} s {text}", flush=True)


def _sms(case: CollectiveCase) -> int | str:
    return "auto" if case.num_sms is None else case.num_sms


def _words(case: CollectiveCase) -> str:
    return f"{case.op:14} {case.num_bytes / MIB:8.3f} MiB sms {_sms(case):>4} {case.timing} {case.algorithm}".rstrip()


def _line(taken: Taken, ranks: int) -> Line:
    case, flat = taken.case, [us for run in taken.runs for us in run]
    medians = [quantile(run, 0.5) for run in taken.runs]
    bound = bound_us(case, ranks)
    return Line(
        taken.backend, case.op, case.algorithm, ranks, case.num_bytes, str(case.dtype).removeprefix("torch."),
        _sms(case), case.timing, round(taken.p50, 2), round(quantile(flat, 0.99), 2), round(bound, 2),
        round(bound * bounds.gbps(ranks) / taken.p50, 1), len(flat), len(medians),
        round(100 * (max(medians) / min(medians) - 1), 1) if len(medians) > 1 else "",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where something was wrong."""
    options = _parse(arguments)
    store, rank, ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=rank))
    timeout, device = datetime.timedelta(seconds=DEADLINE_S), torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device)
    seeds = [options.seed]
    dist.broadcast_object_list(seeds, src=0)
    options.seed = seeds[0]
    session = Session(options, store, rank, ranks)
    session.run()
    if rank == 0:
        _write(options, session, ranks)
    dist.destroy_process_group()
    return 1 if session.failures else 0


def _write(options: argparse.Namespace, session: Session, ranks: int) -> None:
    config: dict[str, object] = {
        "iterations": options.iterations, "runs": options.runs, "seed": options.seed, "note": options.note,
        "failures": session.failures, "not_measured": list(session.absent),
    }  # fmt: skip
    said = facts.of_this_run(config, options.commit, MODULE) | facts.of_gpus(ranks)
    facts.keep(options.out, "collectives", Line, session.lines(), said)
    for line in session.lines():
        if line.ratio != "":
            print(f"{line.backend:10} {line.op:14} {line.bytes_per_rank:>10} {line.algorithm:9} sms {line.sms!s:>4}: "
                  f"{line.p50_us:9.1f} us, ratio {line.ratio} to {line.ratio_to}")  # fmt: skip
    for text in (*session.failures, *session.absent):
        print(text)
    print(f"written to {options.out}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(f"out/{datetime.date.today().isoformat()}-collectives"))
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--seed", type=int, default=int(datetime.datetime.now(datetime.UTC).timestamp()))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--backends", default="", help=f"some of {','.join(BACKENDS)}")
    parser.add_argument("--ops", default="", help="some of all_gather,reduce_scatter,all_reduce")
    parser.add_argument("--quick", action="store_true", help="few cases: a check, not a result")
    parser.add_argument("--note", default="", help="kept in run.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
