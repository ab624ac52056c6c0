"""Runs the ranks and takes the times: backends in turn within each round, fresh routing each round."""

from __future__ import annotations

import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.backends import Setup, load
from benchmarks.cases import Case, Step, make_steps, rows_sent

WARMUP = 6
NUM_ROUTINGS = 8
"""Prepared routings that take turns."""
DEADLINE_S = 300
COPY = "memcpy"
"""Pseudo-backend: every rank copies as many bytes as it sends, from one private buffer to another."""
PAYLOAD = "-payload"
"""Suffix of the pseudo-backend that has a baseline's bare collective, taken within its operations."""

Times = dict[str, dict[str, list[float]]]
"""backend -> op -> seconds, one per round."""


@dataclass
class Result:
    """What one case gave: slowest rank of each round in microseconds by (backend, op); remote bytes per rank."""

    case: Case
    slowest_us: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    bytes_per_op: float = 0.0

    def p50(self, backend: str, op: str) -> float:
        """Median over rounds, microseconds."""
        return statistics.median(self.slowest_us[backend, op])

    def p99(self, backend: str, op: str) -> float:
        """99th percentile over rounds, microseconds."""
        ordered = sorted(self.slowest_us[backend, op])
        return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]


def measure(case: Case, backends: tuple[str, ...], rounds: int, seed: int) -> Result:
    """Run one case on `case.ranks` fresh processes. Raises RuntimeError when a rank fails or is silent."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(case.ranks):
            mine, theirs = context.Pipe()
            arguments = (case, backends, rounds, seed, rank, str(Path(folder) / "store"), theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            times = [_receive(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return _summary(case, times, seed)


def _receive(rank: int, pipe: Connection) -> Times:
    try:
        if pipe.poll(DEADLINE_S):
            return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise RuntimeError(f"rank {rank} died; see its traceback above") from None
    raise RuntimeError(f"rank {rank} was silent for {DEADLINE_S} s")


def _summary(case: Case, times: list[Times], seed: int) -> Result:
    result = Result(case)
    for backend, ops in times[0].items():
        for op in ops:
            rounds = zip(*(rank[backend][op] for rank in times), strict=True)
            result.slowest_us[backend, op] = [max(t) * 1e6 for t in rounds]
    steps = make_steps(case, NUM_ROUTINGS, seed)
    rows = [rows_sent(case, step, 0, remote_only=True) for step in steps]
    result.bytes_per_op = statistics.mean(rows) * case.row_bytes
    return result


def _rank(
    case: Case, names: tuple[str, ...], rounds: int, seed: int, rank: int, store_path: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    store: Any = dist.FileStore(store_path, case.ranks)  # type: ignore[attr-defined]
    stores = {n: dist.PrefixStore(n, store) for n in names}  # type: ignore[attr-defined]
    backends = {n: load(n, Setup(case, rank, stores[n])) for n in names}
    align = backends[names[0]].barrier
    steps = make_steps(case, NUM_ROUTINGS, seed)
    x = torch.randn(case.tokens, case.hidden, generator=torch.Generator().manual_seed(seed + rank)).to(case.dtype)
    times: Times = {name: {"dispatch": [], "combine": []} for name in (*names, COPY)}

    def timed(name: str, op: str, run: Callable[[], object]) -> None:
        align()
        began = time.perf_counter()
        run()
        times[name][op].append(time.perf_counter() - began)
        align()  # nobody's next work runs into a slower rank's time

    for number in range(WARMUP + rounds):
        step = steps[number % NUM_ROUTINGS]
        copied, source = _copy_buffers(case, step, rank)
        for name, backend in backends.items():
            backend.prepare(x, step)
            timed(name, "dispatch", backend.dispatch)
            backend.experts()
            timed(name, "combine", backend.combine)
        for op in ("dispatch", "combine"):
            timed(COPY, op, partial(copied.copy_, source))
    align()
    for name, backend in backends.items():
        if backend.payload_s:
            times[f"{name}{PAYLOAD}"] = backend.payload_s
    pipe.send({name: {op: values[WARMUP:] for op, values in ops.items()} for name, ops in times.items()})
    for backend in reversed(backends.values()):
        backend.close()


_buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def _copy_buffers(case: Case, step: Step, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = case.tokens * min(case.topk, case.ranks)
    if "copy" not in _buffers:
        filled = torch.ones(2, most, case.hidden).to(case.dtype)
        _buffers["copy"] = (filled[0], filled[1])
    rows = rows_sent(case, step, rank, remote_only=False)
    to, source = _buffers["copy"]
    return to[:rows], source[:rows]
