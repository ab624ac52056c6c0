"""What quantised experts take on one GPU, beside bfloat16: microseconds of a rank's expert MLPs, as a worker runs them.

    python -m benchmarks.gpu.experts [--out DIR] [--experts 32] [--rows 256 512 1024 4096 16384] [--calls 20]

The shape is a DeepSeek-V3 rank's of 8: 32 experts of 7168 x 2048; with `--experts 256` the whole layer. Rows are routed
at random, the same for all formats, and fresh for each number of rows. `bf16` is torch's grouped GEMM with the
activation between; `torch fp8 rows` are torch's scaled grouped GEMMs alone, for comparison: their input is quantised
outside the time, and there is no activation.

`bound_us`: bytes of the touched experts' weights, of rows in, between and out, over the bandwidth of a large copy in
the same run. Each format is checked first: `error` is the distance to the dequantised computation in float32, over its
norm, for the experts with the fewest and with the most rows.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import facts
from benchmarks.parts import Parts
from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import MXFP4, MXFP8, NVFP4, Format, Stack
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from ep_kernels.telemetry import quantile

MODULE = "benchmarks.gpu.experts"
EXPERTS, HIDDEN, INNER = 32, 7168, 2048
ROWS = (256, 512, 1024, 4096, 16384)
WARMUP = 3
FORMATS = {
    "bf16": Format(),
    "fp8 blocks": Format("fp8", (128, 128)),
    "fp8 channel": Format("fp8", (1, 0)),
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "int4": Format("int4", (1, 128), torch.bfloat16),
}
GOALS = {"fp8 blocks": ((1024, 1.6), (1 << 20, 1.3))}
"""By format: (rows up to which, ratio to bf16)."""


@dataclass(frozen=True)
class Row:
    """One line of experts.csv. `ratio`: time of bf16 by this one's."""

    format: str
    rows: int
    p50_us: float
    p90_us: float
    rows_per_s: int
    ratio: float
    bound_us: float
    of_bound: float
    weight_bytes: int
    error: float


@dataclass(frozen=True)
class Groups:
    """Rows of a step: tokens [N, H], offsets [L + 1] and counts [L] on the GPU, counts on the host too."""

    tokens: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    known: tuple[int, ...]

    @staticmethod
    def drawn(rows: int, experts: int) -> Groups:
        """Each row's expert at random."""
        known = torch.randint(experts, (rows,)).bincount(minlength=experts)
        counts = known.int().cuda()
        offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return Groups(torch.randn(rows, HIDDEN, device="cuda").bfloat16(), offsets, counts, tuple(known.tolist()))


def drawn_stack(format: Format, num: int, rows: int, columns: int, parts: int) -> Stack:
    """Random weights of about 1 / sqrt(columns)."""
    stack = Stack.empty(format, (num, rows, columns), torch.bfloat16, "cuda", parts=parts)
    size = columns**-0.5
    if format.element in ("e2m1", "int"):
        stack.data.random_(0, 256)
    else:
        for data in stack.data:
            weights = torch.randn(rows, columns, device="cuda")
            data.copy_(weights if format.element else weights * size)
    if stack.scales is not None:
        stack.scales.copy_(torch.empty(stack.scales.shape, device="cuda").uniform_(0.5 * size, 1.5 * size))
    if stack.whole is not None:
        stack.whole.fill_(1.0)
    return stack


def drawn_experts(format: Format, num: int) -> tuple[ExpertMLPs, tuple[Stack, Stack]]:
    """One layer."""
    weights = drawn_stack(format, num, 2 * INNER, HIDDEN, 2), drawn_stack(format, num, HIDDEN, INNER, 1)
    return ExpertMLPs({0: weights}, Gating(), torch.bfloat16), weights


def error_of(weights: tuple[Stack, Stack], groups: Groups, found: torch.Tensor) -> float:
    """Distance to the dequantised computation, over its norm."""
    torch.backends.cuda.matmul.allow_tf32 = False
    filled = [slot for slot, count in enumerate(groups.known) if count]
    worst = 0.0
    for slot in {min(filled, key=groups.known.__getitem__), max(filled, key=groups.known.__getitem__)}:
        begin = int(groups.offsets[slot])
        rows = slice(begin, begin + groups.known[slot])
        first, down = (_floats(stack[slot]) for stack in weights)
        inner = groups.tokens[rows].float() @ first.t()
        hidden = Gating()(inner, inner.new_empty(inner.shape[0], INNER))
        expected = hidden @ down.t()
        worst = max(worst, float((found[rows].float() - expected).norm() / expected.norm()))
    return worst


def _floats(expert: Stack) -> torch.Tensor:
    if expert.format.kind == "float":
        return expert.data.float()
    whole = torch.empty(expert.rows, expert.columns, device="cuda")
    scratch = torch.empty(1 << 22, device="cuda")
    for begin, end in expert.tiles():
        whole[begin:end] = expert.tile(begin, end, scratch)
    return whole


def times_us(call: Callable[[], object], calls: int) -> list[float]:
    """By events on the stream; the weights are larger than any cache."""
    for _ in range(WARMUP):
        call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # the host queues everything meanwhile
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


def bandwidth() -> float:
    """Bytes per microsecond of a copy of 2 GiB: read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / quantile(times_us(lambda: target.copy_(source), 10), 0.5)


def bound_bytes(weights: tuple[Stack, Stack], groups: Groups) -> float:
    """Weights of the experts that have rows; rows in, between and out in bfloat16, or e4m3 where products take that."""
    of_one = sum(stack.num_bytes for stack in weights) / weights[0].data.shape[0]
    item = 1 if weights[0].format.kind == "fp8" else 2
    moved = HIDDEN * 2 + 2 * INNER * item + HIDDEN * 2
    return of_one * sum(1 for count in groups.known if count) + moved * sum(groups.known)


class Bench:
    """Measures formats one after the other, with the same groups.

    Args:
        experts: L.
        sizes: numbers of rows.
        calls: timed.
    """

    def __init__(self, experts: int, sizes: Sequence[int], calls: int) -> None:
        self._groups, self._calls = {rows: Groups.drawn(rows, experts) for rows in sizes}, calls
        self._experts = experts
        self._per_us = bandwidth()
        self._plain: dict[int, float] = {}

    def format(self, name: str) -> Iterator[Row]:
        """A format's rows; "bf16" first."""
        experts, weights = drawn_experts(FORMATS[name], self._experts)
        for rows, groups in self._groups.items():
            given = 0, groups.tokens, groups.offsets, groups.counts
            error = error_of(weights, groups, experts.forward(*given))
            taken = times_us(lambda given=given: experts.forward(*given), self._calls)  # type: ignore[misc]
            bound = bound_bytes(weights, groups) / self._per_us
            yield self._row(name, rows, taken, bound, experts.num_bytes, error)

    def torch_products(self) -> Iterator[Row]:
        """torch's own scaled products, with a scale per row of each side."""
        matrices = [
            torch.randint(0, 120, (self._experts, rows, columns), device="cuda", dtype=torch.uint8).view(
                torch.float8_e4m3fn
            )
            for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        ]
        for rows, groups in self._groups.items():
            inputs = [torch.randn(rows, m.shape[2], device="cuda").to(torch.float8_e4m3fn) for m in matrices]
            scales = [torch.ones(self._experts, m.shape[1], device="cuda") for m in matrices]
            ones, ends = torch.ones(rows, device="cuda"), groups.offsets[1:]

            def products(inputs=inputs, scales=scales, ones=ones, ends=ends) -> None:  # type: ignore[no-untyped-def]
                for x, weight, scale in zip(inputs, matrices, scales, strict=True):
                    torch._scaled_grouped_mm(
                        x, weight.transpose(1, 2), ones, scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
                    )

            yield self._row("torch fp8 rows", rows, times_us(products, self._calls), 0.0, 0, 0.0)

    def _row(self, name: str, rows: int, taken: Sequence[float], bound: float, weight_bytes: int, error: float) -> Row:
        p50 = quantile(taken, 0.5)
        plain = self._plain.setdefault(rows, p50) if name == "bf16" else self._plain.get(rows, p50)
        return Row(
            name, rows, round(p50, 1), round(quantile(taken, 0.9), 1), round(rows / p50 * 1e6), round(plain / p50, 3),
            round(bound, 1), round(bound / p50, 3), weight_bytes, round(error, 5),
        )  # fmt: skip


def missed(rows: Sequence[Row]) -> list[str]:
    """Goals that are not met, in words."""
    found = []
    for row in rows:
        for most, ratio in GOALS.get(row.format, ()):
            if row.rows <= most:
                if row.ratio < ratio:
                    found.append(f"{row.format}, {row.rows} rows: {row.ratio} of bf16, goal {ratio}")
                break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a goal was missed or a part failed."""
    options = _parse(arguments)
    torch.manual_seed(options.seed)
    bench = Bench(options.experts, options.rows, options.calls)
    config: dict[str, object] = {"experts": options.experts, "hidden": HIDDEN, "inner": INNER, "seed": options.seed}
    about = facts.of_this_run(config, options.commit, MODULE) | facts.of_gpus(1)
    table = Parts(options.out, "experts", Row, lambda: about, _show)
    for name in FORMATS:
        table.measure(name, partial(bench.format, name))
        torch.cuda.empty_cache()
    table.measure("torch's products", bench.torch_products)
    late = missed(table.rows)
    print(*late, f"written to {options.out}", sep="\n")
    return table.status or int(bool(late))


def _show(row: Row) -> None:
    taken = f"{row.p50_us:9.1f} us, p90 {row.p90_us:9.1f}, {row.rows_per_s:10,} rows/s, {row.ratio:6.3f} of bf16"
    bound = f"bound {row.bound_us:8.1f} us ({row.of_bound:5.3f}), error {row.error:.5f}"
    print(f"{row.format:15} {row.rows:6} rows {taken}, {bound}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(f"out/{datetime.date.today().isoformat()}-experts"))
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--seed", type=int, default=torch.seed() % 2**31)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
