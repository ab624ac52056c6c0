"""Where results lie: one csv per table, run.json beside them (`facts.py`), and lines for the screen."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import bounds
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


ONCE_PER_RANK = ("crossdock", "nccl", "nccl_bare")
"""Backends that move a row once per token and rank; what others move is not known here."""


@dataclass(frozen=True)
class Sample:
    """What one backend gave for one operation of one case on GPUs.

    Attributes:
        gpu_us: of the slowest rank; one list per run, one entry per iteration.
        host_us: of rank 0, likewise.
        table: int64 [S, R, R], rows from -> to of each prepared set, all runs together.
        sms: multiprocessors that the kernel fills; None where nobody says.
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
    def p50_us(self) -> float:
        """Median over all iterations of all runs."""
        return quantile([value for run in self.gpu_us for value in run], 0.5)

    @property
    def bound_us(self) -> float:
        """See `bounds.bound_us`."""
        return bounds.bound_us(self.case, self.table, self.op)

    def line(self) -> Line:
        """Its row of the csv."""
        case, p50 = self.case, self.p50_us
        every = [value for run in self.gpu_us for value in run]
        medians = [quantile(run, 0.5) for run in self.gpu_us]
        physical = bounds.sent_rows(self.table) * case.moved_bytes(self.op)
        logical = case.tokens * case.topk * case.moved_bytes(self.op)
        return {
            "backend": self.backend,
            "op": self.op,
            **_shape(case),
            "sms": self.sms or "",
            "timing": self.timing,
            "p50_us": f"{p50:.2f}",
            "p99_us": f"{quantile(every, 0.99):.2f}",
            "bound_us": f"{self.bound_us:.2f}",
            "physical_gbps": f"{physical / p50 / 1e3:.1f}" if self.backend in ONCE_PER_RANK else "",
            "form": case.form,
            "l2": "flushed" if self.flushed else "warm",
            "bound_pct": f"{100 * self.bound_us / p50:.1f}",
            "logical_gbps": f"{logical / p50 / 1e3:.1f}",
            "physical_bytes": round(physical) if self.backend in ONCE_PER_RANK else "",
            "logical_bytes": logical,
            "host_us": f"{quantile([value for run in self.host_us for value in run], 0.5):.1f}",
            "spread_pct": f"{100 * (max(medians) / min(medians) - 1):.1f}" if len(medians) > 1 else "",
            "runs": len(medians),
            "iterations": len(every),
        }


def write(folder: Path, name: str, lines: Sequence[Line]) -> None:
    """`<name>.csv` with the columns that the lines have."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = GPU_COLUMNS if lines and "l2" in lines[0] else COLUMNS
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


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
    name = f"{case.mode.value:3} {case.layout.value:13}"
    return [
        f"{name} {op:9} {ours} {result.p50(ours, op) / 1e3:7.2f} ms p50 {result.p99(ours, op) / 1e3:7.2f} p99"
        f"   {baseline} {result.p50(baseline, op) / 1e3:7.2f} p50 {result.p99(baseline, op) / 1e3:7.2f} p99"
        f"   (its bare all_to_all {result.p50(baseline + PAYLOAD, op) / 1e3:6.2f},"
        f" x{ratio(result, ours, baseline + PAYLOAD, op):.2f})   ratio {ratio(result, ours, baseline, op):.2f}"
        for op in OPS
    ]
