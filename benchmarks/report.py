"""Where results lie: one csv per table, run.json beside them (`facts.py` writes both), and lines for the screen."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import bounds, facts
from benchmarks.cases import Case
from benchmarks.measure import COPY, PAYLOAD, Result
from ep_kernels.telemetry import quantile

COLUMNS = [
    "backend",
    "op",
    "mode",
    "layout",
    "tokens",
    "hidden",
    "experts",
    "topk",
    "ranks",
    "dispatch_dtype",
    "combine_dtype",
    "sms",
    "routing",
    "timing",
    "p50_us",
    "p99_us",
    "bound_us",
    "physical_gbps",
]
GPU_COLUMNS = [
    *COLUMNS,
    "form",
    "l2",
    "bound_pct",
    "logical_gbps",
    "physical_bytes",
    "logical_bytes",
    "host_us",
    "spread_pct",
    "runs",
    "iterations",
]
"""What the columns mean: docs/benchmarks.md."""
OPS = ("dispatch", "combine")
Line = dict[str, object]


def _shape(case: Case) -> Line:
    return {
        "mode": case.mode.value,
        "layout": case.layout.value,
        "tokens": case.tokens,
        "hidden": case.hidden,
        "experts": case.experts,
        "topk": case.topk,
        "ranks": case.ranks,
        "dispatch_dtype": case.dtype_of("dispatch"),
        "combine_dtype": case.dtype_of("combine"),
        "routing": case.routing,
    }


def rows(result: Result) -> list[Line]:
    """csv rows of one case on processors. `bound_us` is a plain memcpy of the sent bytes by all ranks at once, same
    rounds; `physical_gbps` counts the bytes that leave a rank; `sms` is threads per rank."""
    return [
        {
            "backend": backend,
            "op": op,
            **_shape(result.case),
            "sms": 1,
            "timing": "eager",
            "p50_us": f"{result.p50(backend, op):.1f}",
            "p99_us": f"{result.p99(backend, op):.1f}",
            "bound_us": f"{result.p50(COPY, op):.1f}",
            "physical_gbps": f"{result.bytes_per_op / result.p50(backend, op) / 1e3:.3f}",
        }
        for backend, op in result.slowest_us
        if backend != COPY
    ]


class Figure(Protocol):
    """One line of a csv, of as many runs as have been merged into it."""

    def line(self) -> Line:
        """Its row of the csv."""

    def merged(self, other: Any) -> Any:
        """This one's runs and then those of `other`, a figure of the same thing."""

    def words(self) -> str:
        """For the screen."""


def _flat(runs: list[list[float]]) -> list[float]:
    return [value for run in runs for value in run]


def _median(runs: list[list[float]]) -> float:
    return quantile(_flat(runs), 0.5)


def _figures(runs: list[list[float]]) -> Line:
    """The columns that say how long and how surely."""
    medians = [quantile(run, 0.5) for run in runs]
    return {
        "p50_us": f"{_median(runs):.2f}",
        "p99_us": f"{quantile(_flat(runs), 0.99):.2f}",
        "spread_pct": f"{100 * (max(medians) / min(medians) - 1):.1f}" if len(medians) > 1 else "",
        "runs": len(medians),
        "iterations": len(_flat(runs)),
    }


ONCE_PER_RANK = ("crossdock", "nccl", "nccl_bare")
"""Backends that move a row once per token and rank; what others move is not known here."""


@dataclass(frozen=True)
class Sample:
    """What one backend gave for one operation of one case on GPUs.

    Attributes:
        gpu_us: of the slowest rank; one list per run, one entry per iteration.
        host_us: of rank 0, likewise.
        table: int64 [S, R, R], rows from -> to of each prepared set, all runs together.
        sms: multiprocessors that the kernel fills; None: unknown.
    """

    backend: str
    op: str
    case: Case
    timing: str
    flushed: bool
    gpu_us: list[list[float]]
    host_us: list[list[float]]
    table: torch.Tensor
    sms: int | None

    @property
    def bound_us(self) -> float:
        """See `bounds.bound_us`."""
        return bounds.bound_us(self.case, self.table, self.op)

    def merged(self, other: Sample) -> Sample:
        """See `Figure`."""
        return replace(
            self,
            gpu_us=self.gpu_us + other.gpu_us,
            host_us=self.host_us + other.host_us,
            table=torch.cat([self.table, other.table]),
        )

    def line(self) -> Line:
        """See `Figure`."""
        case, p50 = self.case, _median(self.gpu_us)
        physical = bounds.sent_rows(self.table) * case.moved_bytes(self.op)
        logical = case.tokens * case.topk * case.moved_bytes(self.op)
        return {
            "backend": self.backend,
            "op": self.op,
            **_shape(case),
            "sms": self.sms or "",
            "timing": self.timing,
            "bound_us": f"{self.bound_us:.2f}",
            "physical_gbps": f"{physical / p50 / 1e3:.1f}" if self.backend in ONCE_PER_RANK else "",
            "form": case.form,
            "l2": "flushed" if self.flushed else "warm",
            "bound_pct": f"{100 * self.bound_us / p50:.1f}",
            "logical_gbps": f"{logical / p50 / 1e3:.1f}",
            "physical_bytes": round(physical) if self.backend in ONCE_PER_RANK else "",
            "logical_bytes": logical,
            "host_us": f"{_median(self.host_us):.1f}",
            **_figures(self.gpu_us),
        }

    def words(self) -> str:
        """See `Figure`."""
        line = self.line()
        return (
            f"{self.backend:9} {self.op:8} {title(self.case)} {self.timing} {line['l2']}: {line['p50_us']} us p50 "
            f"{line['p99_us']} p99, bound {line['bound_us']} ({line['bound_pct']} %), host {line['host_us']}, spread "
            f"{line['spread_pct'] or '-'} %"
        )


@dataclass(frozen=True)
class Floor:
    """Two kernels of `gpu/floor.py` in a row, per such pair.

    Attributes:
        op: "launch", "exchange" or "release".
        overlapped: launched while the kernel in front ends.
        gpu_us: as in Sample.
    """

    op: str
    overlapped: bool
    num_blocks: int
    ranks: int
    gpu_us: list[list[float]]

    @property
    def p50_us(self) -> float:
        """Median over all iterations of all runs."""
        return _median(self.gpu_us)

    def merged(self, other: Floor) -> Floor:
        """See `Figure`."""
        return replace(self, gpu_us=self.gpu_us + other.gpu_us)

    def line(self) -> Line:
        """See `Figure`."""
        return {
            "backend": "floor",
            "op": self.op,
            "mode": "ll",
            "ranks": self.ranks,
            "sms": self.num_blocks,
            "timing": "graph",
            "form": "overlapped" if self.overlapped else "plain",
            "l2": "warm",
            **_figures(self.gpu_us),
        }

    def words(self) -> str:
        """See `Figure`."""
        line = self.line()
        return f"{self.op:8} {line['form']:10} {self.num_blocks:3} SMs: {line['p50_us']} us p50 {line['p99_us']} p99"


def floor_us(floors: Iterable[Figure]) -> float | None:
    """The fixed cost of an LL pair: two exchanges in a row, in the form and number of blocks that are fastest here."""
    return min((f.p50_us for f in floors if isinstance(f, Floor) and f.op == "exchange"), default=None)


def above_floor(line: Line, floor: float | None) -> Line:
    """The line; of an LL pair in a graph with `floor_us` and `multiple`, its time over floor + bound, where known."""
    if (line["mode"], line["op"], line["timing"]) != ("ll", "pair", "graph"):
        return line
    known = floor is not None
    multiple = float(str(line["p50_us"])) / (floor + float(str(line["bound_us"]))) if floor is not None else 0.0
    return line | {"floor_us": f"{floor:.2f}" if known else "", "multiple": f"{multiple:.2f}" if known else ""}


@dataclass(frozen=True)
class Overlap:
    """A matrix product while an operation of the case has been sent and not yet received; see `gpu/overlap.py`.

    Attributes:
        op: "dispatch" or "combine".
        gemm: its shape, as text.
        times: "gemm", "alone", "send", "receive" -> one list of microseconds per run.
    """

    op: str
    case: Case
    gemm: str
    times: dict[str, list[list[float]]]
    sms: int | None

    def merged(self, other: Overlap) -> Overlap:
        """See `Figure`."""
        return replace(self, times={name: runs + other.times[name] for name, runs in self.times.items()})

    def line(self) -> Line:
        """See `Figure`. `p50_us` is the product's."""
        medians = {name: _median(runs) for name, runs in self.times.items()}
        return {
            "backend": "crossdock",
            "op": self.op,
            **_shape(self.case),
            "sms": self.sms or "",
            "timing": "eager",
            "form": self.gemm,
            "l2": "warm",
            **_figures(self.times["gemm"]),
            "alone_us": f"{medians['alone']:.2f}",
            "ratio": f"{medians['gemm'] / medians['alone']:.3f}",
            "send_us": f"{medians['send']:.2f}",
            "receive_us": f"{medians['receive']:.2f}",
        }

    def words(self) -> str:
        """See `Figure`."""
        line = self.line()
        return (
            f"{self.op:8} {title(self.case)}: GEMM {line['p50_us']} us beside it, {line['alone_us']} alone (x "
            f"{line['ratio']}), send {line['send_us']}, receive {line['receive_us']}"
        )


@dataclass(frozen=True)
class Layer:
    """A whole MoE layer; see `gpu/layer.py`.

    Attributes:
        level: "experts", "sequential", "op" or "op_shared".
        gpu_us: as in Sample.
        sms: multiprocessors of the communication.
    """

    level: str
    case: Case
    gpu_us: list[list[float]]
    sms: int

    def merged(self, other: Layer) -> Layer:
        """See `Figure`."""
        return replace(self, gpu_us=self.gpu_us + other.gpu_us)

    def line(self) -> Line:
        """See `Figure`."""
        return {
            "backend": "crossdock",
            "op": "layer",
            **_shape(self.case),
            "sms": self.sms,
            "timing": "eager",
            "form": self.level,
            "l2": "flushed",
            **_figures(self.gpu_us),
        }

    def words(self) -> str:
        """See `Figure`."""
        line = self.line()
        return f"{self.level:10} {title(self.case)}: {line['p50_us']} us p50 {line['p99_us']} p99, {self.sms} SMs"


def title(case: Case) -> str:
    """The case in a few words."""
    sms = f" {case.num_sms} SMs" if case.num_sms else ""
    types = f"{case.dtype_of('dispatch')}+{case.dtype_of('combine')}"
    size = f"T={case.tokens}" + ("" if case.hidden == Case.hidden else f" H={case.hidden}")
    return f"{case.mode.value} {case.layout.value} {size} {types} {case.routing}{sms} {case.form}".strip()


def write(folder: Path, name: str, lines: Sequence[Line]) -> None:
    """`<name>.csv` with the columns that the lines have."""
    usual = GPU_COLUMNS if lines and "l2" in lines[0] else COLUMNS
    columns = list(dict.fromkeys([*usual, *(name for line in lines for name in line)]))
    facts.write_table(folder, name, columns, lines)


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """The lines of `<name>.csv`; none if there is no such table."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ratio(result: Result, ours: str, baseline: str, op: str) -> float:
    """How many times faster ours is, by medians."""
    return result.p50(baseline, op) / result.p50(ours, op)


def lines(result: Result, ours: str, baseline: str) -> list[str]:
    """The screen's lines of one case on processors; each ends with `ratio <x>`."""
    case = result.case
    name = f"{case.mode.value:3} {case.layout.value:13} T={case.tokens:<4}"
    return [
        f"{name} {op:9} {ours} {result.p50(ours, op) / 1e3:7.2f} ms p50 {result.p99(ours, op) / 1e3:7.2f} p99"
        f"   {baseline} {result.p50(baseline, op) / 1e3:7.2f} p50 {result.p99(baseline, op) / 1e3:7.2f} p99"
        f"   (its bare all_to_all {result.p50(baseline + PAYLOAD, op) / 1e3:6.2f},"
        f" x{ratio(result, ours, baseline + PAYLOAD, op):.2f})   ratio {ratio(result, ours, baseline, op):.2f}"
        for op in OPS
    ]
