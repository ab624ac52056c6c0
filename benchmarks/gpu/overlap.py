"""A matrix product between the two halves of an operation: does anything of ours stay on the GPU meanwhile?

One stream per rank: send, product, receive, with events in between; and, in turn with it, the product alone. In each
iteration another rank is early and all others come late by half a product. So the early rank has sent, nobody has
answered when its product begins, and the rows of all others arrive while it runs. Figures are the early rank's:

* `send`: until the sending kernel has left the GPU. A kernel that stayed to wait for the peers would show here.
* `gemm` against `alone`: what is left of us, the arriving rows, costs the product.
* `receive`: what remains to be done after the product, rows that are still under way included.

The product fills two waves of 132 multiprocessors with tiles of 128 x 256, so even one that is taken away costs it a
third wave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.gpu import Inputs
from benchmarks.gpu.crossdock import Crossdock
from benchmarks.gpu.measure import SETS, WARMUP, Bench, events, sleep
from ep_kernels.telemetry import quantile

GEMM = (4224, 7168, 2048)
"""M, K, N: 264 tiles; 124 Gflop, some 170 us on H200."""
TRIES = 10
SPIN_US = 800
"""The host queues three operations meanwhile."""
PARTS = ("send", "gemm", "receive")


@dataclass
class Taken:
    """Events around the parts of one iteration, and whether this rank was the early one."""

    marks: list[Any]
    early: bool


@dataclass
class Product:
    """The matrix product on this GPU, always the same: random operands, and what it gave when it was alone."""

    left: torch.Tensor
    right: torch.Tensor
    out: torch.Tensor
    want: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.run()
        self.want = self.out.clone()

    def run(self) -> None:
        """Queue it."""
        torch.mm(self.left, self.right, out=self.out)

    def duration_us(self) -> float:
        """Median of a few; collective, the slowest rank's."""
        marks = events(TRIES + 1)
        for mark in marks[:-1]:
            mark.record()
            self.run()
        marks[-1].record()
        marks[-1].synchronize()
        times = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        slowest = torch.tensor(quantile(times, 0.5), device=self.out.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    @staticmethod
    def drawn(seed: int) -> Product:
        """Random operands."""
        m, k, n = GEMM
        own = torch.Generator("cuda").manual_seed(seed)
        left, right = (
            torch.randn(shape, generator=own, device="cuda").to(torch.bfloat16) for shape in ((m, k), (k, n))
        )
        return Product(left, right, torch.empty(m, n, dtype=torch.bfloat16, device="cuda"))


class Halves:
    """Times the halves of dispatch and combine around a product, on one rank. Construction is collective."""

    def __init__(self, bench: Bench) -> None:
        assert isinstance(bench.backend, Crossdock)
        self._bench, self._backend = bench, bench.backend
        self._product = Product.drawn(bench.seed + bench.rank)
        self._late_us = self._product.duration_us() / 2
        self._taken: dict[str, list[Taken]] = {}

    def run(self, iterations: int) -> dict[str, dict[str, list[list[float]]]]:
        """op -> "gemm", "alone", "send", "receive" -> microseconds, one list. Collective."""
        bench, backend = self._bench, self._backend
        total = WARMUP + iterations
        for number in range(total):
            inputs, early = bench.sets[number % SETS], number % bench.case.ranks == bench.rank
            out = backend.result(inputs).fill_(float("nan"))
            self._around("alone", early, None)
            received = self._around("dispatch", early, partial(backend.send_dispatch, inputs))
            y = bench.given(received)
            self._around("combine", early, partial(backend.send_combine, y, received, out))
            self._verify(number, total, inputs, out)
            backend.tokens(received).view(torch.uint8).fill_(0xA5)
        alone = self._times("alone")["gemm"]
        return {op: {**_listed(self._times(op)), "alone": [alone]} for op in ("dispatch", "combine")}

    def _around(self, name: str, early: bool, send: Callable[[], Callable[[], Any]] | None) -> Any:
        """Send, product, receive; what was received."""
        begin, sent, computed, end = marks = events(4)
        self._bench.watch.align(SPIN_US)
        if not early:
            sleep(self._late_us)
        begin.record()
        receive = send() if send else None
        sent.record()
        self._product.run()
        computed.record()
        received = receive() if receive else None
        end.record()
        end.synchronize()
        self._taken.setdefault(name, []).append(Taken(marks, early))
        return received

    def _verify(self, number: int, total: int, inputs: Inputs, out: torch.Tensor) -> None:
        if number < total - SETS:
            return
        self._bench.verify(out, inputs, f"halves, iteration {number}")
        if not torch.equal(self._product.out, self._product.want):
            self._bench.faults.append(f"rank {self._bench.rank}: the product differs from what it was alone")

    def _times(self, name: str) -> dict[str, list[float]]:
        """Of the early rank of each iteration, without the first WARMUP. Collective."""
        mine = [
            [a.elapsed_time(b) * 1e3 if taken.early else 0.0 for a, b in pairwise(taken.marks)]
            for taken in self._taken[name][WARMUP:]
        ]
        values = torch.tensor(mine, device=self._product.out.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return dict(zip(PARTS, values.T.tolist(), strict=True))


def _listed(times: dict[str, list[float]]) -> dict[str, list[list[float]]]:
    return {name: [run] for name, run in times.items()}


def measure(bench: Bench, iterations: int) -> dict[str, report.Overlap]:
    """op -> figure, of one case on crossdock. Collective."""
    found = Halves(bench).run(iterations)
    shape, sms = " x ".join(map(str, GEMM)), bench.backend.sms
    return {op: report.Overlap(op, bench.case, f"gemm {shape}", times, sms.get(op)) for op, times in found.items()}
