"""Where the time of one call goes: a client, a worker that serves it, and a worker that takes part.

    python -m benchmarks.service.path [--out DIR] [--tokens 1,128] [--seconds S] [--way tcp]

Real workers and a real control plane of this host, with time stamps around the parts of a call: all processes have one
clock. One client, closed loop, over a UNIX socket or, by `--way tcp`, over TCP; all
rows go to one worker, and each chooses an expert of either rank. `floor` is what two ranks cannot do without: the same
exchange, dispatch and combine in a tight loop, without experts, queue, client or other threads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing as mp
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the stubs lack it

from benchmarks import facts
from benchmarks.parts import Parts
from benchmarks.service.beside import InProcess
from benchmarks.service.control import ControlProcess, free_port
from benchmarks.service.load import Sizes, Way, choose
from benchmarks.service.model import write_experts
from crossdock.client import Client
from crossdock.common import rpc
from crossdock.common.call_errors import CallError
from crossdock.common.config import LogConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.protocol.v1.control_pb2 import SERVING
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.process import run_worker
from crossdock.worker.requests.served_connection import ServedConnection
from crossdock.worker.steps.engine import Engine
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig, StoreGroup

WORKERS, SIZES, INNER = 2, Sizes(7168, 8, 2), 16
FORM_S, FLOOR_CALLS = 120.0, 2000
SERVED = ("read", "submit", "exchange", "dispatch", "experts", "combine", "answer")
"""Parts of a call on the worker that serves it, in their order."""
Stamps = list[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """Median and mean microseconds of one part of a call of that many tokens."""

    tokens: int
    part: str
    p50_us: float
    mean_us: float


def stamp(stamps: Stamps, owner: Any, name: str, part: str) -> None:
    """From now on, calls of that function leave (part, begin, end) in `stamps`."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            stamps.append((part, begin, time.monotonic()))

    setattr(owner, name, stamped)


def _work(pipe: Connection, config: WorkerConfig) -> None:
    """A worker process that answers each message of the pipe with its stamps since the last."""
    stamps: Stamps = []
    for owner, name, part in (
        (ServedConnection, "read", "read"),
        (Engine, "submit", "submit"),
        (MoECommunicator, "exchange", "exchange"),
        (MoECommunicator, "begin_step", "dispatch"),
        (ExpertMLPs, "forward", "experts"),
        (MoECommunicator, "end_step", "combine"),
        (ServedConnection, "_send", "answer"),
    ):
        stamp(stamps, owner, name, part)

    def tell() -> None:
        with contextlib.suppress(EOFError):
            while pipe.recv():
                taken, stamps[:] = list(stamps), []
                pipe.send(taken)

    threading.Thread(target=tell, daemon=True).start()
    run_worker(config)


class Group:
    """A control plane and workers with stamps."""

    def __init__(self, folder: Path) -> None:
        model = write_experts(folder / "model", SIZES.hidden, INNER, SIZES.experts, SIZES.topk)
        self.experts = InProcess(model)
        anywhere = "127.0.0.1:0"
        self._control, context = ControlProcess(WORKERS), mp.get_context("spawn")
        self.address = self._control.address
        self.pipes: list[Connection] = []
        self._processes = list[Any]()
        for rank in range(WORKERS):
            here, there = context.Pipe()
            config = WorkerConfig(
                model=str(model), control=self.address, listen=anywhere, http_listen=anywhere, local_rank=rank,
                uid=f"w{rank}", log=LogConfig(level="error"),
            )  # fmt: skip
            self._processes.append(context.Process(target=_work, args=(there, config), daemon=True))
            self._processes[-1].start()
            self.pipes.append(here)

    def stop(self) -> None:
        """Kill all."""
        for process in self._processes:
            process.kill()
            process.join()
        self._control.stop()

    def taken(self) -> list[Stamps]:
        """The stamps of each worker since the last call."""
        for pipe in self.pipes:
            pipe.send(True)
        return [pipe.recv() for pipe in self.pipes]


def of_both_ranks(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `Sizes.draw`, with an expert of each rank for every token."""
    x, _, weights = SIZES.draw(tokens)
    each = SIZES.experts // WORKERS
    return x, torch.randint(each, (tokens, WORKERS)) + each * torch.arange(WORKERS), weights


def calls(group: Group, tokens: int, seconds: float, way: Way) -> list[tuple[float, float]]:
    """(begin, end) of each call of one client, which is warm."""
    found, own = list[tuple[float, float]](), of_both_ranks(tokens)
    choose(way)
    with Client(group.address, min_tokens_per_worker=tokens) as client:
        for _ in range(100):
            client.forward(0, *own)
        group.taken()
        until = time.monotonic() + seconds
        while (begin := time.monotonic()) < until:
            client.forward(0, *own)
            found.append((begin, time.monotonic()))
    return found


def parts_of(call: tuple[float, float], stamps: Stamps) -> dict[str, float]:
    """Seconds of the parts of one call on the worker that served it; empty: not all stamps are there."""
    begin, end = call
    first = bisect_left(stamps, begin, key=lambda each: each[1])
    inside = [each for each in stamps[first : first + 40] if each[1] < end]
    times = {part: next(((a, b) for name, a, b in inside if name == part), None) for part in SERVED}
    if None in times.values():
        return {}
    at = {part: span for part, span in times.items() if span is not None}
    return {
        "client: until the worker reads": at["read"][0] - begin,
        "check and queue": at["submit"][1] - at["read"][0],
        "hand-over to the step's thread": max(0.0, at["exchange"][0] - at["submit"][1]),
        "exchange with the other rank": at["exchange"][1] - max(at["exchange"][0], at["submit"][1]),
        "until dispatch": at["dispatch"][0] - at["exchange"][1],
        "dispatch": at["dispatch"][1] - at["dispatch"][0],
        "experts": at["experts"][1] - at["experts"][0],
        "combine": at["combine"][1] - at["combine"][0],
        "until the answer is sent": at["answer"][0] - at["combine"][1],
        "client: answer until returned": end - at["answer"][0],
        "whole call": end - begin,
    }


def _floor_rank(pipe: Connection, rank: int, port: int, tokens: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    comm = MoECommunicator(
        MoEConfig(
            group=StoreGroup(store, rank, WORKERS), num_experts=SIZES.experts, hidden_size=SIZES.hidden,
            topk=SIZES.topk, max_tokens_per_rank=max(tokens, 128), mode=Mode.LL, layout=Layout.GROUPED,
            dtype=torch.bfloat16, output_dtype=torch.float32, timeout_s=60,
        )
    )  # fmt: skip
    x, ids, weights = SIZES.draw(tokens if rank == 0 else 0)
    z, took = torch.empty(x.shape), list[float]()
    for _ in range(FLOOR_CALLS):
        begin = time.monotonic()
        comm.exchange((0,) * 8)
        _, handle = comm.dispatch(x, ids.int(), weights)
        comm.combine(comm.combine_input(handle), handle, out=z)
        took.append(time.monotonic() - begin)
    comm.barrier()
    comm.close()
    pipe.send(took[FLOOR_CALLS // 10 :])


def floor(tokens: int) -> list[float]:
    """Seconds of each exchange, dispatch and combine of two ranks in a tight loop."""
    context, pipes, processes = mp.get_context("spawn"), list[Connection](), list[Any]()
    port = free_port()
    for rank in range(WORKERS):
        here, there = context.Pipe()
        processes.append(context.Process(target=_floor_rank, args=(there, rank, port, tokens), daemon=True))
        processes[-1].start()
        pipes.append(here)
    took: list[float] = pipes[0].recv()
    for process in processes:
        process.join()
    return took


def measured(group: Group, tokens: int, seconds: float, way: Way) -> Iterator[Row]:
    """All rows of one number of tokens."""
    torch.set_num_threads(1)
    got = calls(group, tokens, seconds, way)
    stamps = [sorted(each, key=lambda one: one[1]) for each in group.taken()]
    parts = [found for call in got for each in stamps if (found := parts_of(call, each))]
    for part in parts[0] if parts else ():
        values = [1e6 * each[part] for each in parts]
        yield Row(tokens, part, round(statistics.median(values), 1), round(statistics.fmean(values), 1))
    inside = group.experts.measure(SIZES, 0, tokens, seconds / 2)
    for part, took in (("in one process", inside), ("floor", floor(tokens))):
        values = [1e6 * each for each in took]
        yield Row(tokens, part, round(statistics.median(values), 1), round(statistics.fmean(values), 1))


def main(words: Sequence[str] | None = None) -> int:
    """Measure; print each row; 1 where a part failed."""
    parser = argparse.ArgumentParser(description="Where the time of one call goes.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree has no history of its own")
    parser.add_argument("--tokens", default="1,128")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--way", choices=("auto", "tcp"), default="auto")
    arguments = parser.parse_args(words)
    config: dict[str, object] = {"seconds": arguments.seconds, "way": arguments.way}
    about = facts.of_this_run(config, arguments.commit, "benchmarks.service.path")
    table = Parts(arguments.out, "path", Row, lambda: about, _show)
    with tempfile.TemporaryDirectory() as name:
        group = Group(Path(name))
        try:
            _wait_serving(group)
            for tokens in map(int, arguments.tokens.split(",")):
                part = functools.partial(measured, group, tokens, arguments.seconds, arguments.way)
                table.measure(f"{tokens} tokens", part)
        finally:
            group.stop()
    return table.status


def _show(row: Row) -> None:
    print(f"T={row.tokens:<4} {row.part:32} p50 {row.p50_us:9.1f} us, mean {row.mean_us:9.1f}", flush=True)


def _wait_serving(group: Group) -> None:
    until = time.monotonic() + FORM_S
    with rpc.channel(group.address) as channel:
        while _state(channel) != SERVING:
            if time.monotonic() > until:
                raise RuntimeError(f"the group does not serve after {FORM_S:g} s")
            time.sleep(0.1)


def _state(channel: grpc.Channel) -> int:
    try:
        return current_view(channel, 10.0).state
    except CallError:  # it does not listen yet
        return -1


if __name__ == "__main__":
    sys.exit(main())
