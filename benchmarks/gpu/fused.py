"""The consumer half of `all_gather_matmul`, on one GPU: what its schedule costs, and what it hides.

    python -m benchmarks.gpu.fused --one-gpu [--out DIR]

RANKS shards of x stand on this GPU, RANK's is its own; a pacer on a stream of its own says when each of the others has
arrived, at the rate of the links: copy engines move bytes of the host for as long, so that no multiprocessor is taken.
Per shape (M rows in all, N, K), bf16:

* `cublas`: one matmul of all rows, when all are there.
* `ready`: the schedule of `matmul.follow` with all shards arrived. Target: `cublas / ready` >= READY.
* `paced`: the same behind the pacer. `efficiency` = max(cublas, gather at the rate) / paced. Target: >= SHARE of what
  `all_gather_matmul` is to reach on several GPUs (EFFICIENCY).

And `copies`: a matmul of 8192 x 8192 x 8192 fp16 beside copy engines that bring pinned host memory to the device.
Target: alone / beside >= BESIDE. Results are compared with the matmul of all rows.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import bounds, facts
from benchmarks.gpu.measure import FLUSH_BYTES, WARMUP, events, sleep
from benchmarks.parts import Parts
from ep_kernels.collectives import matmul
from ep_kernels.telemetry import quantile

MODULE = "benchmarks.gpu.fused"
RANKS, RANK = 8, 5
"""RANK: what arrives together lies in two places there, so that it takes one product more than at others."""
EFFICIENCY = {
    (1792, 4096): {4096: 0.60, 8192: 0.74, 16384: 0.82},
    (3584, 8192): {4096: 0.84, 8192: 0.91, 16384: 0.95},
    (6656, 16384): {4096: 0.86, 8192: 0.90, 16384: 0.92},
}
"""Of (N, K), by M: max(matmul, all-gather) over the fused time, on several GPUs."""
READY, SHARE, BESIDE = 0.95, 0.90, 0.97
SETS, COPY_BYTES, SQUARE = 2, 64 << 20, 8192
HOLD_US = 600
"""The host queues a whole schedule meanwhile."""


@dataclass(frozen=True)
class Row:
    """One line of the csv. `gather_us`: of the other ranks' shards at the rate of the links."""

    what: str
    m: int
    n: int
    k: int
    ranks: int
    p50_us: float
    p99_us: float
    cublas_us: float
    gather_us: float | str = ""
    value: float | str = ""
    target: float | str = ""
    met: str = ""
    iterations: int = 0


class CopyClock:
    """Copies from pinned memory that take as long as they are asked to."""

    def __init__(self) -> None:
        self._host = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8).pin_memory()
        self._here = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        short, long = COPY_BYTES // 64, COPY_BYTES // 4
        least, most = self._taken_us(short), self._taken_us(long)
        self._us_per_byte = (most - least) / (long - short)
        self._first_us = least - short * self._us_per_byte

    def _taken_us(self, num_bytes: int) -> float:
        taken = []
        for _ in range(10):
            begin, end = events(2)
            sleep(HOLD_US)
            begin.record()
            for _ in range(5):
                self._copy(num_bytes)
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / 5)
        return quantile(taken, 0.5)

    def _copy(self, num_bytes: int) -> None:
        self._here[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)

    def pass_us(self, us: float) -> None:
        """Keep the current stream for so long."""
        self._copy(min(COPY_BYTES, max(16, round((us - self._first_us) / self._us_per_byte))))

    def error(self, us: float) -> float:
        """By how much seven such spans, one after the other, are too long; 0: exact."""
        taken = []
        for _ in range(10):
            begin, end = events(2)
            sleep(HOLD_US)
            begin.record()
            for _ in range(RANKS - 1):
                self.pass_us(us)
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        return quantile(taken, 0.5) / (us * (RANKS - 1)) - 1


class Pacer:
    """Stands for a gather that is under way: shards arrive one after another, each as long as the links need for it.

    Args:
        shard_us: between arrivals; 0: all are there.
        clock: what passes the time.
    """

    halves = False

    def __init__(self, shard_us: float, clock: CopyClock) -> None:
        self._shard_us, self._stream = shard_us, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._arrived: list[Any] = []

    def start(self) -> None:
        """Begin where the current stream is."""
        self._arrived = events(RANKS - 1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for event in self._arrived:
                if self._shard_us:
                    self._clock.pass_us(self._shard_us)
                event.record()

    def shards(self) -> Iterator[list[int]]:
        """See `collective_base.PendingGather`: in the order in which they come to RANK."""
        yield [RANK]
        for step, event in enumerate(self._arrived, 1):
            torch.cuda.current_stream().wait_event(event)
            yield [(RANK - step) % RANKS]

    def wait(self) -> None:
        """See `collective_base.PendingCollective`."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def is_completed(self) -> bool:
        """See `collective_base.PendingCollective`."""
        return all(event.query() for event in self._arrived)


class Watch:
    """Times what the host has queued while a kernel held the GPU."""

    def __init__(self, iterations: int) -> None:
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._iterations = iterations

    def times(self, operation: Callable[[int], object]) -> list[float]:
        """Microseconds of each; operation(turn)."""
        taken = []
        for turn in range(WARMUP + self._iterations):
            begin, end = events(2)
            self._flushed.zero_()
            sleep(HOLD_US)
            begin.record()
            operation(turn)
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        return taken[WARMUP:]


def _row(what: str, shape: tuple[int, int, int], us: Sequence[float], cublas: float, **more: Any) -> Row:
    m, n, k = shape
    value, target = more.get("value", ""), more.get("target", "")
    met = "" if target == "" else "yes" if value >= target else "no"
    times = (round(quantile(list(us), 0.5), 2), round(quantile(list(us), 0.99), 2))
    return Row(what, m, n, k, RANKS, *times, round(cublas, 2), met=met, iterations=len(us), **more)


def shape_rows(watch: Watch, m: int, n: int, k: int, clock: CopyClock) -> list[Row]:
    """`cublas`, `ready` and `paced` of one shape."""
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    w = torch.randn(k, n, device="cuda", dtype=torch.bfloat16) * k**-0.5
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    whole = watch.times(lambda turn: torch.mm(xs[turn % SETS], w, out=y))
    cublas, active = quantile(whole, 0.5), (True,) * RANKS
    gather = (RANKS - 1) * (m // RANKS) * k * 2 / bounds.gbps(RANKS) / 1e3
    found: dict[str, list[float]] = {}
    for what, shard_us in (("ready", 0.0), ("paced", gather / (RANKS - 1))):
        pacer = Pacer(shard_us, clock)

        def fused(turn: int, pacer: Pacer = pacer) -> torch.Tensor:
            pacer.start()
            return matmul.follow(pacer, xs[turn % SETS], [w], RANKS, active)[0]

        found[what] = watch.times(fused)
        close = float((fused(0).float() - (xs[0] @ w).float()).abs().max())
        assert close < 0.1, f"{what} {m} x {n} x {k}: off by {close}"
    ready, paced = (quantile(found[what], 0.5) for what in ("ready", "paced"))
    shape, target = (m, n, k), SHARE * EFFICIENCY[n, k][m]
    share = max(cublas, gather) / paced
    return [
        _row("cublas", shape, whole, cublas),
        _row("ready", shape, found["ready"], cublas, value=round(cublas / ready, 3), target=READY),
        _row("paced", shape, found["paced"], cublas, gather_us=round(gather, 2), value=round(share, 3),
             target=round(target, 3)),
    ]  # fmt: skip


def copies_row(watch: Watch) -> Row:
    """A matmul beside copies of host memory that go on all the while."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.float16) for _ in range(2))
    y = torch.empty_like(a)
    host = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8).pin_memory()
    here = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    alone = watch.times(lambda _: torch.mm(a, b, out=y))

    def both(_: int) -> None:
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for place in here:
                place.copy_(host, non_blocking=True)
        torch.mm(a, b, out=y)

    taken = watch.times(both)
    torch.cuda.synchronize()
    assert torch.equal(here[0].cpu(), host)
    cublas = quantile(alone, 0.5)
    value = round(cublas / quantile(taken, 0.5), 3)
    return _row("copies", (SQUARE, SQUARE, SQUARE), taken, cublas, value=value, target=BESIDE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a target was missed or a part failed."""
    options = _parse(arguments)
    watch, clock = Watch(options.iterations), CopyClock()
    off = {f"{us} us": round(clock.error(us), 3) for us in (12, 49, 196)}
    config: dict[str, object] = {"iterations": options.iterations, "ranks": RANKS, "pacer_is_off_by": off}
    about = facts.of_this_run(config, options.commit, MODULE) | facts.of_gpus(1)
    table = Parts(options.out, "fused", Row, lambda: about, _show)
    for (n, k), by_m in EFFICIENCY.items():
        for m in by_m:
            table.measure(f"{m} x {n} x {k}", partial(shape_rows, watch, m, n, k, clock))
    table.measure("copies", lambda: [copies_row(watch)])
    print(f"written to {options.out}")
    return table.status or int(any(row.met == "no" for row in table.rows))


def _show(row: Row) -> None:
    shape = f"{row.m:6} x {row.n:5} x {row.k:5}"
    judged = f"{row.value} (target >= {row.target}: {row.met})" if row.met else ""
    print(f"{row.what:7} {shape}: {row.p50_us:9.1f} us {judged}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--one-gpu", action="store_true", required=True, help="the only way to run it so far")
    parser.add_argument("--out", type=Path, default=Path(f"out/{datetime.date.today().isoformat()}-fused"))
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--iterations", type=int, default=60)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
