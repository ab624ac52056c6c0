"""All cases on all backends, one process per GPU, started by torchrun. Writes after every table, so a late failure
costs no earlier figure."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import bounds, facts, gpu, report
from benchmarks.cases import Case
from benchmarks.gpu import floor, layer, overlap
from benchmarks.gpu.measure import Bench, Stopwatch, gathered
from benchmarks.gpu.tables import FLOOR, NAMES, Loop, Measured, cases_of, chosen
from ep_kernels import StoreGroup

DEADLINE_S = 120.0
QUICK_ITERATIONS = 12
NOT_OF_THE_RUN = ("out", "commit", "rounds", "tokens", "ranks", "promise")
"""Options that run.json tells elsewhere, or that only the other half of the benchmark has."""


def main(options: argparse.Namespace) -> int:
    """Measure every table; returns the exit code."""
    if options.quick:
        options.runs, options.iterations, options.extent = 1, QUICK_ITERATIONS, "quick"
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=rank))
    device = torch.device("cuda", torch.cuda.current_device())
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
    seeds = [options.seed]  # by default of the clock, which ranks look at one after the other
    dist.broadcast_object_list(seeds, src=0)
    options.seed = seeds[0]
    session = Session(options, store, rank, size, device)
    try:
        session.run()
    finally:
        dist.destroy_process_group()
    return 1 if session.failures else 0


class Session:
    """What one rank keeps between cases. Every rank does the same; rank 0 prints and writes."""

    def __init__(self, options: argparse.Namespace, store: Any, rank: int, size: int, device: torch.device) -> None:
        self._options, self._store, self._rank, self._size = options, store, rank, size
        self._device, self._watch = device, Stopwatch(device)
        self._tables = chosen(options.tables, options.cases)
        self._figures: dict[str, dict[tuple[Any, ...], report.Figure]] = {}
        self._absent: dict[str, None] = {}
        self.failures: list[tuple[str, str]] = []
        self._wrong: set[tuple[str, str, Case]] = set()
        self._number = 0
        self._began = time.monotonic()
        self._took: dict[str, float] = {}
        self._written: set[str] = set()
        whole = bool(options.cases) or set(self._tables) == set(NAMES)
        kept = whole and not options.quick and not options.backends
        # A check, or a table by itself, must not replace what is kept.
        self._out = options.out or facts.folder_of_gpus(size, "docs/results" if kept else "out")
        self._earlier = facts.standing(self._out)

    def run(self) -> None:
        """All tables, as often as was asked."""
        for run in range(self._options.runs):
            for table in self._tables:
                began = time.monotonic()
                if table == FLOOR:
                    self._floor()
                else:
                    self._cases(table, run)
                self._took[table] = self._took.get(table, 0.0) + time.monotonic() - began
                self._write(table)
        self._say("seconds of each table: " + ", ".join(f"{name} {took:.0f}" for name, took in self._took.items()))
        self._say(f"{time.monotonic() - self._began:.0f} s, written to {self._out}")
        for reason in self._absent:
            self._say(f"not measured: {reason}")
        if self._rank == 0:
            self._picture()

    def _cases(self, table: str, run: int) -> None:
        for measured in cases_of(table, self._size, self._options.extent):
            for name in self._backends(measured):
                self._measure(table, measured, name, run)

    def _groups(self, *kinds: str) -> list[StoreGroup]:
        """Fresh ones, one per kind."""
        self._number += 1
        return [StoreGroup(self._store, self._rank, self._size, name=f"{kind}-{self._number}") for kind in kinds]

    def _floor(self) -> None:
        """The table of what any LL pair costs at least. A machine that cannot say has LL figures all the same."""
        group, talk = self._groups("floor", "talk")
        found: list[report.Floor] = []
        fault = ""
        try:
            found = floor.measure(group, self._watch, self._options.iterations, self._device)
        except Exception:
            fault = traceback.format_exc()
        self._watch.forget()
        if not self._agree(talk, fault, FLOOR):
            self._figures.pop(FLOOR, None)  # failed once, no figures
        else:
            for figure in found:
                self._keep(FLOOR, (figure.op, figure.overlapped, figure.num_blocks), figure)

    def _floor_us(self) -> float | None:
        return report.floor_us(self._figures.get(FLOOR, {}).values())

    def _backends(self, measured: Measured) -> list[str]:
        chosen = self._options.backends.split(",") if self._options.backends else gpu.BACKENDS
        return [name for name in chosen if name in (measured.backends or gpu.BACKENDS)]

    def _measure(self, table: str, measured: Measured, name: str, run: int) -> None:
        group, talk = self._groups("case", "talk")
        what = f"{name} {report.title(measured.case)}"
        if (table, name, measured.case) in self._wrong:
            return
        if self._too_late(talk):
            self._absent[f"out of time: run {run + 1} of {table}"] = None
            return
        backend: gpu.Backend | None = None
        bench: Bench | None = None
        fault = ""
        try:
            backend = gpu.load(name, measured.case, self._rank, group)
        except gpu.Unavailable as reason:
            self._absent[str(reason)] = None
            return
        except Exception:
            fault = traceback.format_exc()
        if self._agree(talk, fault, what) and backend is not None:
            try:
                bench = Bench(backend, measured.case, self._rank, self._options.seed + 100_000 * run, self._watch)
                self._loops(table, measured, name, bench)
            except Exception:
                fault = traceback.format_exc()
            self._watch.forget()
            against_closing = _closed(backend)
            if not self._agree(talk, fault or against_closing, what):
                self._drop(table, name, measured.case)
        bench = backend = None
        gc.collect()
        torch.cuda.empty_cache()

    def _drop(self, table: str, name: str, case: Case) -> None:
        """A case that failed once has no figures, whatever its other run gave."""
        self._wrong.add((table, name, case))
        kept = self._figures.get(table, {})
        self._figures[table] = {k: v for k, v in kept.items() if (k[0], k[2]) != (name, case)}

    def _too_late(self, group: StoreGroup) -> bool:
        """Whether the time is over, by the clock of rank 0."""
        late = time.monotonic() - self._began > self._options.seconds
        return group.all_gather(b"late" if late else b"", DEADLINE_S)[0] == b"late"

    def _agree(self, group: StoreGroup, fault: str, what: str) -> bool:
        """Share failures among all ranks; True if there was none on any of them."""
        faults = [text.decode() for text in group.all_gather(fault.encode()[-4000:], DEADLINE_S)]
        for text in dict.fromkeys(filter(None, faults)):
            self.failures.append((what, text))
            self._say(f"FAILED {what}: {text}")
        return not any(faults)

    def _loops(self, table: str, measured: Measured, name: str, bench: Bench) -> None:
        found: list[tuple[tuple[Any, ...], report.Figure]] = []
        bench.round_trips("before")
        rows = _all_rows(measured.case, bench)
        for loop in measured.loops:
            for op, figure in self._take(loop, name, bench, rows).items():
                found.append(((name, op, measured.case, loop), figure))
        bench.round_trips("after")
        wrong = torch.tensor([len(bench.faults)], device="cuda")
        dist.all_reduce(wrong)
        if int(wrong):
            raise AssertionError("\n".join(bench.faults) or "wrong on another rank")
        for key, figure in found:
            self._keep(table, key, figure)

    def _take(self, loop: Loop, name: str, bench: Bench, rows: torch.Tensor) -> Mapping[str, report.Figure]:
        """Figures of one loop, by operation."""
        case, sms, iterations = bench.case, bench.backend.sms, self._options.iterations
        if loop.timing == "overlap":
            return overlap.measure(bench, iterations)
        if loop.timing == "layer":
            return layer.measure(bench, iterations)
        take = bench.graph if loop.timing == "graph" else bench.eager
        return {
            op: report.Sample(
                name, op, case, loop.timing, loop.flush, [times.gpu_us], [times.host_us], rows,
                max(sms.values(), default=None) if op == "pair" else sms.get(op),
            )
            for op, times in take(iterations, flush=loop.flush).items()
        }  # fmt: skip

    def _keep(self, table: str, key: tuple[Any, ...], figure: report.Figure) -> None:
        figures = self._figures.setdefault(table, {})
        figures[key] = figures[key].merged(figure) if key in figures else figure
        multiple = report.above_floor(figures[key].line(), self._floor_us()).get("multiple")
        above = f", x {multiple} of floor + bound" if multiple else ""
        self._say(f"{time.monotonic() - self._began:4.0f} s {table:7} {figures[key].words()}{above}")

    def _write(self, table: str) -> None:
        if self._rank:
            return
        figures = self._figures.get(table, {}).values()
        if figures or table in self._written:
            self._written.add(table)
            report.write(self._out, table, [report.above_floor(figure.line(), self._floor_us()) for figure in figures])
        else:  # what an earlier run left of it in the folder stands
            self._took.pop(table, None)
        if not self._written:
            return
        options = {name: str(value) for name, value in vars(self._options).items() if name not in NOT_OF_THE_RUN}
        failures = [f"{what}: {text.strip().splitlines()[-1]}" for what, text in self.failures]
        config: dict[str, object] = {**options, "failures": failures, "not_measured": list(self._absent)}
        said = facts.of_this_run(config, self._options.commit) | facts.of_gpus(self._size)
        own = {"tables": list(self._took), "seconds": {name: round(took, 1) for name, took in self._took.items()}}
        facts.write(self._out, said | own | {"earlier": facts.without(self._earlier, self._took)})

    def _picture(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            print(f"no plots: matplotlib is not installed; `python -m benchmarks.plot {self._out}` makes them anywhere")
            return
        from benchmarks import plot

        plot.main([str(self._out)])

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)


def _closed(backend: gpu.Backend) -> str:
    """Close it; what it said against that."""
    try:
        backend.close()
    except Exception:
        return traceback.format_exc()
    return ""


def _all_rows(case: Case, bench: Bench) -> torch.Tensor:
    """int64 [S, R, R]: rows from -> to, of every prepared set."""
    mine = torch.stack([bounds.rows_to(case, inputs.topk_ids) for inputs in bench.sets])
    return gathered(mine, case.ranks)
