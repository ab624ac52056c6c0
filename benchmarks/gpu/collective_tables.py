"""Collectives of every backend, one process per GPU: `collectives.csv` with ratios, `targets.csv`, run.json.

    torchrun --nproc-per-node 8 -m benchmarks.gpu.collective_tables     (make bench-gpu CASES=collectives)

Multicast is off: NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1; why CUBLAS_WORKSPACE_CONFIG is set: fsdp.py.

Rules as in `measure.py`: payload random, other sets in turn, results poisoned before and compared after, ranks aligned
on the GPU, L2 flushed before each eager operation, the slowest rank counts. A graph holds PER_GRAPH operations on one
buffer, whose contents are renewed before each replay. What is measured: collective_cases.py; what is wanted of it:
collective_targets.py.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import facts
from benchmarks.gpu import Unavailable, measure
from benchmarks.gpu import collective_targets as targets
from benchmarks.gpu.collective_backends import Runner, create
from benchmarks.gpu.collective_cases import (
    BACKENDS,
    MIB,
    OPS,
    ORDERS,
    PRODUCTS,
    CollectiveCase,
    bound_us,
    cases,
    moved_bytes,
)
from benchmarks.gpu.collective_products import Beside, create_product, weights
from benchmarks.gpu.collective_steps import Steps
from benchmarks.gpu.collective_targets import Line
from benchmarks.gpu.measure import Stopwatch
from crossdock.tune.measure import captured
from ep_kernels import StoreGroup
from ep_kernels.telemetry import quantile

MODULE = "benchmarks.gpu.collective_tables"
SETS, PER_GRAPH, WARMUP = 3, 10, 8
SPIN_US = dict.fromkeys(PRODUCTS, 3000.0)
"""In which the host queues an operation, by op; else `measure.SPIN_US`."""
GATHERS = ("all_gather", "matmul_beside_gather")
DEADLINE_S = 120.0


@dataclass
class Taken:
    """Times of one backend on one case: a list of microseconds per run."""

    backend: str
    case: CollectiveCase
    runs: list[list[float]] = field(default_factory=list)


def drawn(case: CollectiveCase, seed: int, rank: int, ranks: int) -> torch.Tensor:
    """x of a rank, random; the same on every rank that asks."""
    own = torch.Generator("cuda").manual_seed(seed * 64 + rank)
    return torch.randn(case.shape_in(ranks), generator=own, device="cuda", dtype=torch.float32).to(case.dtype)


def expected(case: CollectiveCase, seed: int, rank: int, ranks: int) -> torch.Tensor:
    """What must come out here: bytes of a gather, a product, and sums in fp32 in ascending rank, rounded once."""
    if case.op in ("matmul", "all_gather_matmul"):
        rows = [rank] if case.op == "matmul" else range(ranks)
        return torch.cat([drawn(case, seed, other, ranks) for other in rows]) @ weights(case, rank)
    if case.shape_out(ranks)[0] == case.numel * ranks:
        return torch.cat([drawn(case, seed, other, ranks) for other in range(ranks)])
    total = _term(case, seed, 0, ranks).float()
    for other in range(1, ranks):
        total += _term(case, seed, other, ranks).float()
    whole, rows_out = total.to(case.dtype), case.shape_out(ranks)[0]
    return whole if len(whole) == rows_out else whole[rank * rows_out : (rank + 1) * rows_out]


def _term(case: CollectiveCase, seed: int, rank: int, ranks: int) -> torch.Tensor:
    x = drawn(case, seed, rank, ranks)
    return x @ weights(case, rank) if case.op in PRODUCTS else x


def wrong(backend: str, case: CollectiveCase, out: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with `out`; "": nothing. Gathers and our sums are compared bit by bit, products by size."""
    if case.op in GATHERS or (backend == "crossdock" and case.op not in PRODUCTS):
        return "" if torch.equal(out.view(torch.uint8), want.view(torch.uint8)) else "other bits than the definition"
    far = float((out.float() - want.float()).abs().max() / want.float().abs().max())
    return "" if far < 2e-2 else f"off by {far:.3g} of the largest value"


def runner_of(name: str, case: CollectiveCase, group: Any, ranks: int) -> Runner:
    """Backend `name` on a case; collective. Raises Unavailable with the reason."""
    if case.op == "matmul_beside_gather":
        return Beside(case, create(name, case.gather(), group, ranks, beside=case.algorithm in ORDERS))
    return (create_product if case.op in PRODUCTS else create)(name, case, group, ranks)


class Session:
    """What one rank keeps between cases."""

    def __init__(self, options: argparse.Namespace, store: Any, rank: int, ranks: int) -> None:
        self._options, self._store, self._rank, self._ranks = options, store, rank, ranks
        self._watch = Stopwatch(torch.device("cuda", torch.cuda.current_device()))
        self._number, self._began = 0, time.monotonic()
        self.taken: dict[tuple[str, CollectiveCase], Taken] = {}
        self.failures: list[str] = []
        self.absent: dict[str, None] = {}
        self.kernels: dict[str, int | str] = {}
        self.steps = Steps(options.steps, self.failures, self.absent, self._say)

    def run(self) -> None:
        """All cases, as often as it says."""
        options = self._options
        names = options.backends.split(",") if options.backends else BACKENDS
        ops = options.ops.split(",") if options.ops else OPS
        for run in range(options.runs):
            for name, case in cases(self._ranks, options.quick):
                if name in names and case.op in ops and not self._is_late():
                    self._measure(name, case, run)
            self._write()
        if "fsdp_step" in ops and not options.quick and not self._is_late():
            self.steps.run(names, self._is_late)
            self._write()
        for name, case in cases(self._ranks, options.quick):  # last: a profiler may leave something behind
            if name in names and case.op in ops and case.num_sms == 0 and not case.m and not self._is_late():
                self._count(name, case)
        self._write()

    def _count(self, name: str, case: CollectiveCase) -> None:
        self._number += 1
        group = StoreGroup(self._store, self._rank, self._ranks, name=f"collectives-{self._number}")
        try:
            runner = runner_of(name, case, group, self._ranks)
            runner.x.zero_()
            runner.run()
            self.kernels[f"{name} {words(case)}"] = kernels_of(runner.run)
            runner.close()
        except Unavailable:
            return
        except Exception as error:  # a backend that failed above fails again
            self.kernels[f"{name} {words(case)}"] = f"unknown ({error})"

    def _write(self) -> None:
        if self._rank == 0:
            write(self._options, self, self._ranks)  # a late failure costs no earlier figure

    def _is_late(self) -> bool:
        """Whether the time is over, by the clock of rank 0."""
        late = [time.monotonic() - self._began > self._options.seconds]
        dist.broadcast_object_list(late, src=0)
        if late[0]:
            self.absent["out of time: a part of the last run"] = None
        return bool(late[0])

    def _measure(self, name: str, case: CollectiveCase, run: int) -> None:
        self._number += 1
        fault, runner, us = "", None, list[float]()
        group = StoreGroup(self._store, self._rank, self._ranks, name=f"collectives-{self._number}")
        try:
            runner = runner_of(name, case, group, self._ranks)
            fault, us = self._loop(name, case, runner, self._options.seed + 1000 * run)
        except Unavailable as error:
            self.absent[str(error)] = None
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if self._rank == 0:
                traceback.print_exc()
        closing = self._closed(runner)
        self._watch.forget()
        fault = self._agreed(fault or closing)
        if fault:
            self.failures.append(f"{name} {words(case)}: {fault}")
            self.taken.pop((name, case), None)
        elif us:
            self.taken.setdefault((name, case), Taken(name, case)).runs.append(us)
            self._say(f"{name:10} {words(case)}: {quantile(us, 0.5):9.1f} us")
        elif self._rank == 0 and not run:
            self._say(f"{name:10} {words(case)}: not measured")

    def _agreed(self, fault: str) -> str:
        """The first fault of any rank."""
        faults: list[str] = [""] * self._ranks
        dist.all_gather_object(faults, fault)
        return next(filter(None, faults), "")

    def _closed(self, runner: Runner | None) -> str:
        """Close it; what it said against that."""
        try:
            if runner is not None:
                runner.close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            torch.cuda.empty_cache()
        return ""

    def _loop(self, name: str, case: CollectiveCase, runner: Runner, seed: int) -> tuple[str, list[float]]:
        """(what was wrong, microseconds of the slowest rank)."""
        sets = [drawn(case, seed + n, self._rank, self._ranks) for n in range(SETS)]
        graph = self._graph(case, runner, sets[0]) if case.timing == "graph" else None
        for turn in range(WARMUP + self._options.iterations):
            runner.out.fill_(float("nan"))
            runner.x.copy_(sets[turn % SETS])
            if graph is None:
                spin_us = SPIN_US.get(case.op, measure.SPIN_US)
                self._watch.time("op", runner.run, flush=True, spin_us=spin_us)
            else:
                self._watch.time("op", graph.replay, flush=False)
        times = self._watch.times()["op"].gpu_us
        fault = ""
        for n, x in enumerate(sets):  # eager, whatever was timed: a graph repeats its operation
            runner.out.fill_(float("nan"))
            runner.x.copy_(x)
            runner.run()
            torch.cuda.synchronize()
            want = expected(case, seed + n, self._rank, self._ranks).reshape(-1)
            fault = fault or wrong(name, case, runner.out.reshape(-1), want)
        return fault, [us / (PER_GRAPH if graph else 1) for us in times]

    def _graph(self, case: CollectiveCase, runner: Runner, x: torch.Tensor) -> torch.cuda.CUDAGraph:
        def many() -> None:
            for _ in range(PER_GRAPH):
                runner.run()

        runner.x.copy_(x)
        return captured(many)

    def lines(self) -> list[Line]:
        """Rows of the csv, with ratios."""
        made = [line_of(taken, self._ranks) for taken in self.taken.values()] + self.steps.lines(self._ranks)
        return targets.with_ratios(made)

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"{time.monotonic() - self._began:4.0f} s {text}", flush=True)


def _sms(case: CollectiveCase) -> int | str:
    return "auto" if case.num_sms is None else case.num_sms


def words(case: CollectiveCase) -> str:
    """A case in a line."""
    shape = f" {case.m} x {case.n} x {case.k}" if case.m else ""
    size = f"{case.num_bytes / MIB:8.3f} MiB sms {_sms(case):>4}"
    return f"{case.op:14} {size} {case.timing}{shape} {case.algorithm}".rstrip()


def line_of(taken: Taken, ranks: int) -> Line:
    """A row of the csv, without its ratio."""
    case, flat = taken.case, [us for run in taken.runs for us in run]
    medians, p50 = [quantile(run, 0.5) for run in taken.runs], quantile(flat, 0.5)
    return Line(
        t=case.t, backend=taken.backend, op=case.op, algorithm=case.algorithm, ranks=ranks,
        bytes_per_rank=case.num_bytes, m=case.m, n=case.n, k=case.k, dtype=str(case.dtype).removeprefix("torch."),
        sms=_sms(case), timing=case.timing, p50_us=round(p50, 2), p99_us=round(quantile(flat, 0.99), 2),
        bound_us=round(bound_us(case, ranks), 2), gbps=round(moved_bytes(case, ranks) / p50 / 1e3, 1),
        iterations=len(flat), runs=len(medians),
        spread_pct=round(100 * (max(medians) / min(medians) - 1), 1) if len(medians) > 1 else "",
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
        tell(options, session, ranks)
    dist.destroy_process_group()
    return 1 if session.failures else 0


def kernels_of(run: Callable[[], None]) -> int | str:
    """Kernels that it puts on the GPU, copies left out, as torch's profiler counts them."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        names = [event.name for event in seen.events() if "CUDA" in str(event.device_type)]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    except Exception as error:  # whatever the profiler lacks here, the figures are still good
        return f"unknown ({error})"


def write(options: argparse.Namespace, session: Session, ranks: int) -> None:
    """Both tables and run.json."""
    config: dict[str, object] = {
        "iterations": options.iterations, "runs": options.runs, "seed": options.seed, "note": options.note,
        "failures": session.failures, "not_measured": list(session.absent), "fsdp": session.steps.told,
        "kernels": session.kernels,
    }  # fmt: skip
    said = facts.of_this_run(config, options.commit, MODULE) | facts.of_gpus(ranks)
    lines = session.lines()
    facts.keep(options.out, "collectives", Line, lines, said)
    judged = targets.judged(lines, ranks)
    facts.keep(options.out, "targets", targets.Target, judged, said)


def tell(options: argparse.Namespace, session: Session, ranks: int) -> None:
    """The figures that are judged, what failed, what was not there."""
    for target in targets.judged(session.lines(), ranks):
        print(f"T{target.t} {target.what}: {target.value} (target {target.sign} {target.target}: {target.met})")
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
    parser.add_argument("--ops", default="", help=f"some of {','.join(OPS)}")
    parser.add_argument("--seconds", type=float, default=1500.0, help="no case is begun later")
    parser.add_argument("--steps", type=int, default=100, help="of FSDP2, for each backend and batch")
    parser.add_argument("--quick", action="store_true", help="few cases: a check, not a result")
    parser.add_argument("--note", default="", help="kept in run.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
