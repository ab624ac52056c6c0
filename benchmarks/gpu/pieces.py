"""What it costs the experts of a layer to work in pieces, which is what lets communication run beside them. One GPU.

    python -m benchmarks.gpu.pieces --out FOLDER [--iterations 20]

A rank's share of a layer in bf16: rows that have arrived, random experts of two shapes (`tables.LAYER_SHAPES`), K 8
over R ranks, uniform routing. `form`:

* `whole`: one grouped product up, one down.
* `tokens`: the rows in several parts, each with rows of every expert, as where the tokens of a batch travel part by
  part (overlap of operations). Each part reads all weights again.
* `experts`: several chunks of experts, as where combine begins with the rows of some while others are still at work
  (overlap of blocks). Chunks are cut at rows that the host knows, since a grouped product begins at row 0.

`sms_left` multiprocessors are left to the communication, where torch can do that. Times: events, L2 flushed, median.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import facts
from benchmarks.cases import Case, draw
from benchmarks.gpu.layer import Experts, LeftAlone
from benchmarks.gpu.measure import FLUSH_BYTES, events, sleep
from benchmarks.gpu.tables import LAYER_SHAPES
from benchmarks.parts import Parts
from ep_kernels import Layout, Mode

RANKS, TOKENS = (4, 8), (512, 1024, 2048, 4096, 8192, 16384)
FORMS = (("whole", 1), ("tokens", 2), ("tokens", 4), ("experts", 2), ("experts", 4), ("experts", 8))
SMS_LEFT = (0, 24)
WARMUP, SPIN_US = 3, 1000


@dataclass(frozen=True, slots=True)
class Row:
    """A line of pieces.csv.

    Attributes:
        hidden, experts: H and E.
        ranks, tokens: R, and T per rank.
        rows: N, of the measured rank.
        form, pieces: how the experts work.
        sms_left: multiprocessors that the products leave alone.
        p50_us, least_us: of the iterations.
    """

    hidden: int
    experts: int
    ranks: int
    tokens: int
    rows: int
    form: str
    pieces: int
    sms_left: int
    p50_us: float
    least_us: float


def drawn(num_experts: int, ranks: int, tokens: int, seed: int) -> list[int]:
    """Rows per expert of rank 0."""
    case = Case(Mode.HT, Layout.GROUPED, ranks, ranks * tokens, experts=num_experts)  # the tokens of all ranks at once
    ids, _ = draw(case, 0, seed)
    return torch.bincount(ids.flatten(), minlength=num_experts)[: num_experts // ranks].tolist()


def parts_of(experts: Experts, counts: list[int], form: str, pieces: int) -> list[Callable[[], torch.Tensor]]:
    """Calls that work on each piece of the rows."""
    chunk = len(counts) // pieces
    rows = torch.randn(sum(counts), experts.down.shape[2], device="cuda").to(torch.bfloat16)
    calls, begin = list[Callable[[], torch.Tensor]](), 0
    for number in range(pieces):
        if form == "experts":
            mine = counts[number * chunk : (number + 1) * chunk]
            some = Experts(*(weights[number * chunk : (number + 1) * chunk] for weights in (experts.up, experts.down)))
        else:
            mine = [count * (number + 1) // pieces - count * number // pieces for count in counts]
            some = experts
        ends = torch.tensor(mine).cumsum(0).to("cuda", torch.int32)
        calls.append(partial(some.of_rows, rows[begin : begin + sum(mine)], ends))
        begin += sum(mine)
    return calls


def timed(calls: list[Callable[[], torch.Tensor]], iterations: int, flushed: torch.Tensor) -> list[float]:
    """Microseconds of all calls one after the other, per iteration."""
    taken = []
    for number in range(WARMUP + iterations):
        begin, end = events(2)
        flushed.zero_()
        sleep(SPIN_US)
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        if number >= WARMUP:
            taken.append(begin.elapsed_time(end) * 1e3)
    return taken


def measured(hidden: int, num_experts: int, ranks: int, iterations: int, seed: int) -> Iterator[Row]:
    """Every case of one shape on one number of ranks."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    experts = Experts.drawn(num_experts // ranks, hidden, LAYER_SHAPES[hidden, num_experts], seed)
    for tokens in TOKENS:
        counts = drawn(num_experts, ranks, tokens, seed + tokens)
        for sms_left, (form, pieces) in itertools.product(SMS_LEFT, FORMS):
            with LeftAlone(sms_left):
                taken = timed(parts_of(experts, counts, form, pieces), iterations, flushed)
            case = (hidden, num_experts, ranks, tokens, sum(counts), form, pieces, sms_left)
            yield Row(*case, round(statistics.median(taken), 1), round(min(taken), 1))


def main(words: list[str] | None = None) -> int:
    """Measure, print, write; 1 where a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pieces", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("expected a GPU, this machine has none")
    config: dict[str, object] = {"iterations": options.iterations, "seed": options.seed, "device": "cuda"}
    about = facts.of_this_run(config, options.commit, "benchmarks.gpu.pieces") | facts.of_gpus(1)
    table = Parts(options.out, "pieces", Row, lambda: about)
    for (hidden, experts), ranks in itertools.product(LAYER_SHAPES, RANKS):
        part = partial(measured, hidden, experts, ranks, options.iterations, options.seed)
        table.measure(f"{experts} experts of {hidden}, {ranks} ranks", part)
    return table.status


if __name__ == "__main__":
    sys.exit(main())
