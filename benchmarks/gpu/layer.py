"""A whole MoE layer: dispatch, grouped matrix products of SwiGLU experts, combine. In one run, per number of
multiprocessors that the communication may fill:

* `experts`: the experts alone, on rows that have arrived.
* `sequential`: one operation after the other.
* `op`: the tokens in two halves; while the experts are at one half, the other one is dispatched or combined on a stream
  of its own. The products leave the multiprocessors of the communication alone (torch's carveout, where torch has it).
* `op_shared`: the same, and the products leave none alone.

Experts are random. The halves' results must be those of the whole within rounding: a product may sum in another order
when it has other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu import Inputs
from benchmarks.gpu.measure import SETS, WARMUP, Bench, Times
from benchmarks.gpu.tables import LAYER_SHAPES

SPIN_US = 3000
"""The host queues some twenty launches meanwhile."""
CLOSE = 2e-2
"""Largest difference of two results, over the largest value."""


@dataclass
class Experts:
    """This rank's experts: up [L, H, 2 * inner], down [L, inner, H], bf16."""

    up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def drawn(num_local: int, hidden: int, inner: int, seed: int, device: str = "cuda") -> Experts:
        """Random, so that values keep their size."""
        own = torch.Generator(device).manual_seed(seed)

        def weights(columns: int, rows: int) -> torch.Tensor:
            made = torch.empty(num_local, columns, rows, dtype=torch.bfloat16, device=device)
            return made.normal_(0, rows**-0.5, generator=own).transpose(1, 2)

        return Experts(weights(2 * inner, hidden), weights(hidden, inner))

    def __call__(self, received: Any) -> torch.Tensor:
        """Rows [N, H] of a GROUPED dispatch through their experts."""
        out = received[0]
        return self.of_rows(out.tokens, out.offsets[1:])

    def of_rows(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows [N, H], those of one expert together, through their experts; `ends`: int32 [L], where each one's end."""
        gate, up = torch._grouped_mm(rows, self.up, offs=ends).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate, inplace=False).mul_(up)
        return torch._grouped_mm(inner, self.down, offs=ends)


class Layer:
    """Runs the layer in each way, on one rank."""

    def __init__(self, bench: Bench) -> None:
        case = bench.case
        self._bench, self._backend = bench, bench.backend
        inner = LAYER_SHAPES[case.hidden, case.experts]
        self._experts = Experts.drawn(case.experts // case.ranks, case.hidden, inner, bench.seed + bench.rank)
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._kept: list[Any] = []

    def sequential(self, inputs: Inputs, out: torch.Tensor) -> None:
        """One after the other."""
        received = self._backend.dispatch(inputs)
        self._backend.combine(self._experts(received), received, inputs, out)
        self._kept = [received]

    def halves(self, parts: tuple[Inputs, Inputs], out: torch.Tensor) -> None:
        """Half of the tokens travels while the experts are at the other half."""
        main, backend = torch.cuda.current_stream(), self._backend
        self._side.wait_stream(main)
        received, arrived = [], []
        with torch.cuda.stream(self._side):
            for part in parts:
                received.append(backend.dispatch(part))
                arrived.append(self._side.record_event())
        made, done = [], []
        for rows, event in zip(received, arrived, strict=True):
            main.wait_event(event)
            made.append(self._experts(rows))
            done.append(main.record_event())
        with torch.cuda.stream(self._side):
            for n, (part, half) in enumerate(zip(parts, out.chunk(2), strict=True)):
                self._side.wait_event(done[n])
                backend.combine(made[n], received[n], part, half)
        main.wait_stream(self._side)
        self._kept = [received, made]

    def run(self, iterations: int) -> dict[str, Times]:
        """level -> times. Collective."""
        bench, backend, watch = self._bench, self._backend, self._bench.watch
        total, sms = WARMUP + iterations, max(backend.sms.values())
        for number in range(total):
            inputs = bench.sets[number % SETS]
            whole, in_two, shared = (backend.result(inputs).fill_(float("nan")) for _ in range(3))
            timed = partial(watch.time, flush=True, spin_us=SPIN_US)
            timed("sequential", partial(self.sequential, inputs, whole))
            received = backend.dispatch(inputs)
            timed("experts", partial(self._experts, received))
            self._dropped(received)
            with LeftAlone(sms):
                timed("op", partial(self.halves, halved(inputs), in_two))
            timed("op_shared", partial(self.halves, halved(inputs), shared))
            if number >= total - SETS:
                self._compare(whole, in_two, number)
                self._compare(whole, shared, number)
        return watch.times()

    def _dropped(self, received: Any) -> None:
        if int(received[0].num_dropped):
            self._bench.faults.append(f"rank {self._bench.rank}: {int(received[0].num_dropped)} rows had no room")

    def _compare(self, whole: torch.Tensor, in_two: torch.Tensor, number: int) -> None:
        apart = float((whole.float() - in_two.float()).abs().max() / whole.float().abs().max())
        if not apart <= CLOSE:  # NaN is not
            self._bench.faults.append(f"rank {self._bench.rank}, layer {number}: halves are {apart:.3g} off the whole")


class LeftAlone:
    """torch's matrix products leave `sms` multiprocessors free, where torch supports it."""

    def __init__(self, num_sms: int) -> None:
        self._set: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)
        self._num_sms = num_sms

    def __enter__(self) -> None:
        if self._set is not None:
            self._set(self._num_sms)

    def __exit__(self, *_: object) -> None:
        if self._set is not None:
            self._set(None)


def halved(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The first half of the tokens, and the second."""
    halves = zip(inputs.x.chunk(2), inputs.topk_ids.chunk(2), inputs.topk_weights.chunk(2), strict=True)
    first, second = (Inputs(*half) for half in halves)
    return first, second


def measure(bench: Bench, iterations: int) -> dict[str, report.Layer]:
    """level -> figure, of one case on crossdock. Collective."""
    times, sms = Layer(bench).run(iterations), bench.backend.sms
    return {level: report.Layer(level, bench.case, [found.gpu_us], max(sms.values())) for level, found in times.items()}
