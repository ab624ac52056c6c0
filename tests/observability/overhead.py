"""What latency records cost an operation: dispatch and combine with and without them, in one run of two minutes.

    python -m tests.observability.overhead [--device cpu|cuda] [--seconds S] [--turns N] [--out DIR]
                                                                                             (make bench-overhead)

cpu     two ranks are processes, their threads of operations pinned to a processor each; in one communicator, and so in
        the same memory, a switch of the native half says whether an operation reads clocks for its record and keeps it
cuda    ranks of one GPU by loop-back, kernels with `common/trace.cuh` and with one that records nothing; and how far
        apart two values of `%globaltimer` are

overhead.csv, cpu:

control     as `records`, with none in both halves: what such a table cannot tell apart
records     a turn is a pair of operations with and one without, right after each other; which is first alternates. The
            median of the turns' ratios, with the interval that has the true median with 95 %
telemetry   records are kept in all operations and collected as in a worker, every quarter of a second: how much longer
            than the others before the next collection those took in which a telemetry thread ran; the mean of the
            collections, with its interval
both        the sum of the two

cost.csv has the same directly: of a record in a loop, and the processor time of the telemetry thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import facts
from benchmarks.parts import Parts

RANKS, EXPERTS, TOPK, HIDDEN = 2, 256, 8, 7168
CASES = {"ll": 128, "ht": 4096}
"""Tokens of a rank."""
TURNS = 60
"""On a GPU."""
SECONDS = 90.0
"""Of all operations, on cpu."""
WARMUP = 3

Turn = tuple[float, float]
"""Seconds of an operation without and with records."""


@dataclass(frozen=True)
class Row:
    """A line of overhead.csv, of a pair of operations (cpu) or of one: medians, and the overhead with its interval."""

    device: str
    op: str
    mode: str
    tokens: int
    off_us: float
    on_us: float
    overhead_percent: float
    low_percent: float
    high_percent: float
    turns: int
    """Or collections."""
    metrics_percent: float | None = None
    """How far the mean of the exported histograms is from that of the bench's own clock, over the same operations."""


@dataclass(frozen=True)
class Cost:
    """A line of cost.csv."""

    what: str
    mode: str
    value: float
    unit: str


@dataclass(frozen=True)
class Collected:
    """A rank's pairs of operations with telemetry: seconds of each, whether its telemetry thread ran meanwhile, and
    before which ones it was asked to collect."""

    pairs_s: list[float]
    ran: list[bool]
    asked: list[int]
    cpu_percent: float
    us_per_record: float
    metrics_percent: float


def row_of(device: str, op: str, mode: str, tokens: int, turns: Sequence[Turn]) -> Row:
    """Of the turns."""
    off, on = (round(1e6 * statistics.median(times), 2) for times in zip(*turns, strict=True))
    ratios = sorted(100 * (with_records / without - 1) for without, with_records in turns)
    shares = (round(share, 2) for share in (statistics.median(ratios), *median_interval(ratios)))
    return Row(device, op, mode, tokens, off, on, *shares, len(turns))


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Values between which the median of what these are samples of lies with 95 %: by their order only."""
    number = len(ordered)
    below, at = 0.0, 0
    while (below := below + math.comb(number, at) / (1 << number)) <= 0.025:
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


def collections(
    pairs_s: Sequence[float], ran: Sequence[bool], asked: Sequence[int]
) -> Iterator[tuple[float, float, float]]:
    """Of each collection: how much longer its pairs took than as many of those until the next one, the seconds until
    then, and those of a pair without. `ran`: whether a telemetry thread ran in that pair; `asked`: where they begin."""
    for begin, end in pairwise(asked):
        disturbed = [seconds for seconds, here in zip(pairs_s[begin:end], ran[begin:end], strict=True) if here]
        others = [seconds for seconds, here in zip(pairs_s[begin:end], ran[begin:end], strict=True) if not here]
        if others:
            typical = statistics.fmean(others)
            yield sum(disturbed) - len(disturbed) * typical, sum(pairs_s[begin:end]), typical


def telemetry_row(mode: str, ranks: Sequence[Collected]) -> Row:
    """What collecting costs: a pair takes as long as its slowest rank; a thread of either disturbs it."""
    pairs_s = [max(each) for each in zip(*(rank.pairs_s for rank in ranks), strict=True)]
    ran = [any(each) for each in zip(*(rank.ran for rank in ranks), strict=True)]
    found = list(collections(pairs_s, ran, ranks[0].asked))
    shares = [100 * longer / (seconds - longer) for longer, seconds, _ in found]
    mean, half = statistics.fmean(shares), 1.96 * statistics.stdev(shares) / math.sqrt(len(shares))
    off_us = 1e6 * statistics.median(typical for *_, typical in found)
    apart = max((rank.metrics_percent for rank in ranks), key=abs)
    numbers = (round(number, 2) for number in (off_us, off_us * (1 + mean / 100), mean, mean - half, mean + half))
    return Row("cpu", "telemetry", mode, CASES[mode], *numbers, len(found), round(apart, 2))


def both_row(records: Row, telemetry: Row) -> Row:
    """Records and their collection: the sum; the intervals' halves are those of independent numbers."""
    total = records.overhead_percent + telemetry.overhead_percent
    lower, upper = (
        math.hypot(*(getattr(row, bound) - row.overhead_percent for row in (records, telemetry)))
        for bound in ("low_percent", "high_percent")
    )
    on_us = round(records.off_us * (1 + total / 100), 2)
    numbers = (round(number, 2) for number in (total, total - lower, total + upper))
    return Row("cpu", "both", records.mode, records.tokens, records.off_us, on_us, *numbers, records.turns)


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where operations failed, whose rows until then are kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    measured: dict[str, object] = {"ranks": RANKS}
    costs: list[Cost] = []
    config = {"hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK}

    def about() -> dict[str, object]:
        return facts.of_this_run(config | measured, module="tests.observability.overhead")

    table = Parts(options.out, "overhead", Row, about, partial(print, flush=True))
    if options.device == "cuda":
        from tests.observability import overhead_gpu

        measured["ranks"], measured["turns"] = overhead_gpu.RANKS, options.turns
        measured["globaltimer"] = overhead_gpu.globaltimer()
        table.measure("operations", partial(overhead_gpu.rows, options.turns))
    else:
        from tests.observability import overhead_cpu

        measured["seconds"] = options.seconds
        table.measure("operations", partial(overhead_cpu.rows, options.seconds, costs))
    print(*costs, measured, sep="\n")
    if options.out and costs:
        facts.write_table(options.out, "cost", [field.name for field in fields(Cost)], map(asdict, costs))
    return table.status


if __name__ == "__main__":
    sys.exit(main())
