"""The loops. Everything between a kernel and a published figure is on this page.

* Routing and payload are drawn afresh: SETS prepared sets take turns, other ones in each run.
* Before each timed operation a spinning kernel holds the GPU until the host has queued everything, then a barrier on
  the GPU lines the ranks up. Events stand right around the operation.
* An iteration's time is that of the slowest rank.
* Before each HT operation L2 is flushed. LL is measured both ways: "warm" (the sets were just copied into place) and
  "flushed" (all input of the graph's pairs is out of L2).
* Graphs hold PAIRS dispatch + combine pairs on inputs of their own, and get other routing before each replay; the time
  is divided by PAIRS.
* Results are poisoned before and checked after (`check.py`), rows that arrived are poisoned once they have been used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case, draw
from benchmarks.gpu import Backend, Inputs, check
from crossdock.tune.measure import captured

SETS, PAIRS, WARMUP = 12, 10, 8
SPIN_US = 400
"""The host needs less to queue any operation that does not wait for the GPU itself."""
CLOCK_MHZ = 2000
FLUSH_BYTES = 256 << 20
"""Several times the L2 of any GPU."""


@dataclass
class Times:
    """Microseconds, one entry per iteration: `gpu_us` of the slowest rank; `host_us` of this rank's host call."""

    gpu_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)


def gathered(mine: torch.Tensor, ranks: int) -> torch.Tensor:
    """[S, R, R] on the host, of each rank's [S, R]."""
    table = mine.new_empty(ranks * len(mine), ranks)
    dist.all_gather_into_tensor(table, mine)
    return table.view(ranks, *mine.shape).transpose(0, 1).cpu()


def events(count: int) -> list[Any]:
    """`count` events with timing."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def sleep(duration_us: float) -> None:
    """A kernel that does nothing for about so long."""
    torch.cuda._sleep(int(duration_us * CLOCK_MHZ))  # type: ignore[no-untyped-call]


class Stopwatch:
    """Times operations that all ranks run together."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._one = torch.ones(1, device=device)
        self._taken: dict[str, list[tuple[Any, Any, float]]] = {}

    def align(self, spin_us: float = SPIN_US) -> None:
        """Hold the GPU for so long, in which the host queues what follows; then let the ranks begin together."""
        self._one.fill_(1)
        sleep(spin_us)
        dist.all_reduce(self._one)

    def time(self, name: str, operation: Callable[[], Any], *, flush: bool, spin_us: float = SPIN_US) -> Any:
        """Run and time one operation, which the host queues in `spin_us`; returns what it returns."""
        begin, end = events(2)
        if flush:
            self._flushed.zero_()
        self.align(spin_us)
        begin.record()
        started = time.perf_counter()
        result = operation()
        host_us = (time.perf_counter() - started) * 1e6
        end.record()
        end.synchronize()
        self._taken.setdefault(name, []).append((begin, end, host_us))
        return result

    def times(self) -> dict[str, Times]:
        """All that was taken since the last call, without the first WARMUP; collective."""
        found = {}
        for name, taken in self._taken.items():
            kept = taken[WARMUP:]
            values = torch.tensor([begin.elapsed_time(end) * 1e3 for begin, end, _ in kept], device=self._one.device)
            dist.all_reduce(values, dist.ReduceOp.MAX)
            found[name] = Times(values.tolist(), [host_us for *_, host_us in kept])
        self.forget()
        return found

    def forget(self) -> None:
        """Drop what was taken."""
        self._taken = {}


class Bench:
    """One backend on one case, on one rank.

    Args:
        seed: other seeds, other routing and payload; equal on all ranks.
        watch: None where nothing is to be timed (`round_trips` alone).
        device: torch device type of the backend's tensors.
    """

    def __init__(
        self, backend: Backend, case: Case, rank: int, seed: int, watch: Stopwatch | None, device: str = "cuda"
    ) -> None:
        self.backend, self.case, self.rank, self.seed = backend, case, rank, seed
        self._watch, self._device = watch, device
        self.sets = [self._draw(seed + 1000 * n) for n in range(SETS)]
        for inputs in self.sets:
            backend.prepare(inputs)
        self.faults: list[str] = []
        self._pattern: torch.Tensor | None = None

    def _draw(self, seed: int) -> Inputs:
        ids, weights = draw(self.case, self.rank, seed, self._device)
        own = torch.Generator(self._device).manual_seed(seed * 64 + self.rank + 32)
        x = torch.randn(self.case.tokens, self.case.hidden, generator=own, device=self._device)
        return Inputs(x.to(self.case.dtype), ids, weights)

    @property
    def watch(self) -> Stopwatch:
        """The stopwatch of a bench that has one."""
        assert self._watch is not None
        return self._watch

    # What combine is given in the timed loops, and what it then must give.

    def given(self, received: Any) -> torch.Tensor:
        """The rows as they arrived; where they were quantised, rows of this rank's random vector."""
        tokens = self.backend.tokens(received)
        if tokens.dtype == self.case.dtype:
            return tokens
        if self._pattern is None or self._pattern.shape[:-1] != tokens.shape[:-1]:
            vector = check.vector(self.case, self.rank, self.seed, tokens.device)
            self._pattern = vector.expand(*tokens.shape[:-1], self.case.hidden).contiguous()
        return self._pattern

    def verify(self, out: torch.Tensor, inputs: Inputs, what: str, *, toy: bool = False) -> None:
        """Note a fault unless `out` is right for `inputs`. Noted, not raised: the other ranks go on."""
        row = check.given_x(inputs)
        if toy:
            row = check.toy(self.case, inputs)
        elif self.case.quantize:
            row = check.pattern(self.case, inputs, self.seed)
        fault = self.backend.fault(inputs, out, row)
        if fault:
            self.faults.append(f"rank {self.rank}, {what}: {fault}")

    def round_trips(self, what: str) -> None:
        """Two untimed steps with experts that tell rows apart, checked."""
        for inputs in self.sets[:2]:
            out = self.backend.result(inputs).fill_(float("nan"))
            received = self.backend.dispatch(inputs)
            if self.case.form == "cached":
                received = self.backend.dispatch(inputs, received)
            self.backend.combine(self.backend.experts(received), received, inputs, out)
            self.verify(out, inputs, what, toy=True)

    # The timed loops.

    def eager(self, iterations: int, *, flush: bool) -> dict[str, Times]:
        """ "dispatch" and "combine", each called alone."""
        backend, watch = self.backend, self.watch
        total = WARMUP + iterations
        for number in range(total):
            inputs = self.sets[number % SETS]
            out = backend.result(inputs).fill_(float("nan"))
            earlier = backend.dispatch(inputs) if self.case.form == "cached" else None
            received = watch.time("dispatch", partial(backend.dispatch, inputs, earlier), flush=flush)
            y = self.given(received)
            watch.time("combine", partial(backend.combine, y, received, inputs, out), flush=flush)
            if number >= total - SETS:
                self.verify(out, inputs, f"eager iteration {number}")
            backend.tokens(received).view(torch.uint8).fill_(0xA5)
        return watch.times()

    def graph(self, replays: int, *, flush: bool) -> dict[str, Times]:
        """ "pair": dispatch + combine, PAIRS of them replayed as one graph."""
        backend, statics = self.backend, [inputs.like() for inputs in self.sets[:PAIRS]]
        for inputs in statics:
            backend.prepare(inputs)
        outs = [backend.result(inputs) for inputs in statics]

        def pairs() -> None:
            for inputs, out in zip(statics, outs, strict=True):
                received = backend.dispatch(inputs)
                backend.combine(self.given(received), received, inputs, out)

        graph = captured(pairs)
        for number in range(WARMUP + replays):
            for place, (inputs, out) in enumerate(zip(statics, outs, strict=True)):
                if backend.rotates:
                    inputs.load(self.sets[(number + 5 * place) % SETS])
                out.fill_(float("nan"))
            self.watch.time("pair", graph.replay, flush=flush)
        for place, (inputs, out) in enumerate(zip(statics, outs, strict=True)):
            self.verify(out, inputs, f"pair {place} of the last replay")
        return per_pair(self.watch.times())


def per_pair(times: dict[str, Times]) -> dict[str, Times]:
    """Of graphs of PAIRS pairs."""
    return {
        name: Times([value / PAIRS for value in found.gpu_us], [value / PAIRS for value in found.host_us])
        for name, found in times.items()
    }
