"""The loop: one communicator, every step of the ladder by LL and by HT in turn, routing drawn afresh for each run.

* What is timed is PAIRS dispatch + combine pairs in a row, each with routing of its own; on GPUs as one CUDA graph,
  between two events, so that the host counts for nothing.
* The same work runs once more right before, untimed: no rank leaves it before its peers have sent it everything, so all
  ranks begin together, and on GPUs the host has queued what follows by then.
* A run's time is that of its slowest rank. LL and HT take turns run by run, so what drifts, drifts for both.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

import crossdock
from crossdock.tune.request import TIMEOUT_S, TuneRequest
from ep_kernels import Mode, MoECommunicator, tuning

PAIRS = {"cuda": 10, "cpu": 3}
"""Pairs of a measurement by device; the pairs of a graph share the cost of its launch."""
SETS = 3
"""Routings drawn per routing used in a run."""
WARMUP = 3
Progress = Callable[[str, int, float, float], None]
"""(layout, tokens, LL us, HT us) of each step, on rank 0."""


def measure(request: TuneRequest, layout: str, group: Any, progress: Progress) -> tuning.Record:
    """Both curves of one layout, and the crossover. Collective; the same record on every rank, but for its time.
    Raises EpError."""
    config = request.config(layout, group)
    steps, curves = tuning.ladder(request.max_tokens), []
    with MoECommunicator(config) as comm:
        key = tuning.key_of(config, comm.device_name)
        for tokens in steps:
            curves.append(_slowest(group, timed(comm, tokens, request)))
            progress(layout, tokens, *curves[-1])
    ll_us, ht_us = zip(*curves, strict=True)
    return tuning.Record(
        key=key,
        ll_max_tokens=tuning.crossover(steps, ll_us, ht_us),
        tokens=steps,
        ll_us=ll_us,
        ht_us=ht_us,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        crossdock=crossdock.__version__,
    )


def timed(comm: MoECommunicator, tokens: int, request: TuneRequest) -> dict[Mode, list[float]]:
    """Microseconds of one pair on this rank, run by run, of both algorithms."""
    feed = _Feed(comm, tokens, request.seed)
    turns = {
        Mode.LL: prepared(partial(feed.pairs, comm, tokens), feed.device),
        Mode.HT: prepared(partial(feed.pairs, comm, comm.config.max_tokens_per_rank), feed.device),
    }
    taken: dict[Mode, list[float]] = {mode: [] for mode in turns}
    for _ in range(WARMUP + request.runs):
        for mode, run in turns.items():
            taken[mode].append(run(feed.renew) / feed.num_pairs)
    if feed.device == "cuda":
        torch.cuda.synchronize()
    comm.check()
    return {mode: times[WARMUP:] for mode, times in taken.items()}


def _slowest(group: Any, mine: dict[Mode, list[float]]) -> tuple[float, float]:
    """(LL, HT): the median over runs of the slowest rank's time."""
    answers = group.all_gather(msgspec.msgpack.encode(list(mine.values())), TIMEOUT_S)
    ranks = [msgspec.msgpack.decode(answer, type=list[list[float]]) for answer in answers]
    by_mode = zip(*ranks, strict=True)
    ll_us, ht_us = (statistics.median([max(run) for run in zip(*times, strict=True)]) for times in by_mode)
    return ll_us, ht_us


class _Feed:
    """Inputs of the pairs of one step size: rows, and a routing that changes from run to run."""

    def __init__(self, comm: MoECommunicator, tokens: int, seed: int) -> None:
        c, self.device = comm.config, comm.capabilities.device_type
        self.num_pairs = PAIRS[self.device]
        draw = torch.Generator(self.device).manual_seed((seed * 64 + comm.rank) * 1_000_003 + tokens)
        rows = torch.randn(tokens, c.hidden_size, generator=draw, device=self.device, dtype=torch.float32).to(c.dtype)
        scales = torch.ones(tokens, c.scale_columns, dtype=c.scale_dtype, device=self.device)
        self._x = (rows, scales) if c.scale_columns else rows
        self._out = torch.empty(tokens, c.hidden_size, dtype=c.resolved_output_dtype, device=self.device)
        drawn = [
            torch.rand(tokens, c.num_experts, generator=draw, device=self.device, dtype=torch.float32).topk(c.topk)
            for _ in range(SETS * self.num_pairs)
        ]
        self._all_ids = torch.stack([found.indices.int() for found in drawn])
        self._all_weights = torch.stack([found.values for found in drawn])
        self._ids = self._all_ids[: self.num_pairs].clone()
        self._weights = self._all_weights[: self.num_pairs].clone()
        self._number = 0

    def renew(self) -> None:
        """Renew the routing of every pair; on GPUs asynchronously."""
        self._number += 1
        first = self._number * 7 % ((SETS - 1) * self.num_pairs + 1)
        self._ids.copy_(self._all_ids[first : first + self.num_pairs])
        self._weights.copy_(self._all_weights[first : first + self.num_pairs])

    def pairs(self, comm: MoECommunicator, step_tokens: int) -> None:
        """Dispatch and combine, PAIRS times. Experts return their rows, or the content of their output buffer."""
        for ids, weights in zip(self._ids, self._weights, strict=True):
            out, handle = comm.dispatch(self._x, ids, weights, step_tokens=step_tokens)
            same = out.tokens.dtype == self._out.dtype
            comm.combine(out.tokens if same else comm.combine_input(handle), handle, out=self._out)


Run = Callable[[Callable[[], None]], float]
"""Takes the function that renews the routing; returns the microseconds of one run."""


def prepared(work: Callable[[], None], device_type: str) -> Run:
    """Work of the current device, to be timed; on GPUs as a graph, so that the host's time is excluded."""
    return _on_gpu(work) if device_type == "cuda" else _on_host(work)


def _on_host(work: Callable[[], None]) -> Run:
    def run(renew: Callable[[], None]) -> float:
        work()
        renew()
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e6

    return run


def _on_gpu(work: Callable[[], None]) -> Run:
    graph = captured(work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def run(renew: Callable[[], None]) -> float:
        graph.replay()
        renew()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return run


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`work` as a graph. It first runs once, on a separate stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph
