"""Clients of the service bench: processes with threads that call `forward`, and measure.

Closed loop: each client has one call in flight, of `crossdock.client.Client`, in a thread. Open loop: calls begin at
random times of a given mean rate, whether or not earlier ones have ended, by `AsyncClient`; a call's time counts from
when it was to begin.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing as mp
import random
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Self

import grpc
import torch

from benchmarks.service.foreign import ForeignClient
from crossdock.client import AsyncClient, Client, dialling
from crossdock.common.security import load_security
from crossdock.protocol.same_host import host_identity

Way = Literal["auto", "tcp", "grpc"]
"""How rows go: as `crossdock.client` picks it; over TCP, on the same host too; by gRPC, as from any other client."""

DEADLINE_S = 600.0
WARM_CALLS, FEW_WARM_CALLS, MANY_CLIENTS, WARM_PAUSE_S = 5, 2, 16, 0.02
"""Warm-up calls of each client, FEW_ from MANY_CLIENTS on; pause."""
ECHO = "/Bench/Echo"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a call carries: rows of `hidden` columns in bf16, `topk` of `experts` for each."""

    hidden: int
    experts: int
    topk: int

    def draw(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] bf16, topk_ids int64 [T, K], topk_weights float32 [T, K]; fresh."""
        x = torch.randn(tokens, self.hidden).to(torch.bfloat16)
        return x, torch.rand(tokens, self.experts).topk(self.topk).indices, torch.rand(tokens, self.topk)

    def num_bytes(self, tokens: int) -> tuple[int, int]:
        """Of a request and of its answer, without names and shapes."""
        rows = 2 * tokens * self.hidden
        return rows + 12 * tokens * self.topk, rows


@dataclass(frozen=True, slots=True)
class Job:
    """What clients do.

    Attributes:
        target: address; of the echo server if `echo`.
        sizes, tokens: of each call.
        layer: with experts.
        clients: of all processes.
        seconds: no call begins after that, but for one of an open loop whose first was to begin later.
        rate: calls a second of all clients, open loop; 0: closed loop.
        echo: send bytes to the bare gRPC echo.
        way: of the rows.
        security: file of the clients' certificates; empty: plain text.
    """

    target: str
    sizes: Sizes
    tokens: int
    layer: int
    clients: int
    seconds: float
    rate: float = 0.0
    echo: bool = False
    way: Way = "auto"
    security: str = ""


@dataclass(slots=True)
class Measured:
    """Seconds that each call took, and from the first to the last."""

    took: list[float]
    elapsed: float


class LoadProcesses:
    """Processes that run jobs together, each with its part of the clients."""

    def __init__(self, number: int) -> None:
        context = mp.get_context("spawn")
        self._started = list[tuple[Any, Connection]]()
        for index in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, index), daemon=True)
            process.start()
            there.close()
            self._started.append((process, here))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self._started:
            process.kill()
            process.join()

    def run(self, job: Job) -> Measured:
        """All clients' calls. Raises RuntimeError: a call failed."""
        parts = min(job.clients, len(self._started))
        for index in range(parts):
            self._started[index][1].send((job, len(range(index, job.clients, parts)), parts))
        got: list[Measured | str] = []
        for _, pipe in self._started[:parts]:
            if not pipe.poll(DEADLINE_S + job.seconds):
                raise RuntimeError("a load process is silent")
            got.append(pipe.recv())
        if failed := [one for one in got if isinstance(one, str)]:
            raise RuntimeError(f"{job}: {failed[0]}")
        measured = [one for one in got if isinstance(one, Measured)]
        return Measured([took for one in measured for took in one.took], max(one.elapsed for one in measured))


def choose(way: Way) -> None:
    """Clients of this process connect in that way from now on."""
    dialling._own_host = str if way == "tcp" else host_identity  # "" is the identity of no host


def _serve(pipe: Connection, index: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # grpc.aio polls for a loop that has ended, and says so
    while True:
        job, clients, parts = pipe.recv()
        choose(job.way)
        try:
            pipe.send(asyncio.run(_echo(job, clients)) if job.echo else _asked(job, clients, parts))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _closed(job: Job, clients: int) -> Measured:
    callers = [_Caller(job) for _ in range(clients)]
    took: list[float] = []
    failures: list[Exception] = []
    for _ in range(_warm_calls(clients)):
        for caller in callers:
            caller.call()
        time.sleep(WARM_PAUSE_S)
    began = time.monotonic()

    def ask(caller: _Caller) -> None:
        try:
            while time.monotonic() - began < job.seconds:
                start = time.perf_counter()
                caller.call()
                took.append(time.perf_counter() - start)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - began
    for caller in callers:
        caller.close()
    if failures:
        raise failures[0]
    return Measured(took, elapsed)


def _client(job: Job) -> Client:
    return Client(job.target, security=load_security(job.security) if job.security else None)


class _Caller:
    def __init__(self, job: Job) -> None:
        self._client = ForeignClient(job.target) if job.way == "grpc" else _client(job)
        self._layer, self._drawn = job.layer, itertools.cycle([job.sizes.draw(job.tokens) for _ in range(4)])

    def call(self) -> None:
        self._client.forward(self._layer, *next(self._drawn), timeout_s=DEADLINE_S)

    def close(self) -> None:
        self._client.close()


async def _echo(job: Job, clients: int) -> Measured:
    """Closed loop of bytes: one stream for each client, all in one event loop."""
    request, answer = job.sizes.num_bytes(job.tokens)
    sent, took = answer.to_bytes(8, "little") + bytes(request - 8), list[float]()
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(job.target, options=options) for _ in range(clients)]
    streams: list[Any] = [channel.stream_stream(ECHO, None, None)(None) for channel in channels]
    for stream in streams:
        await stream.write(sent)
        await stream.read()
    began = time.monotonic()

    async def ask(stream: Any) -> None:
        while time.monotonic() - began < job.seconds:
            start = time.perf_counter()
            await stream.write(sent)
            await stream.read()
            took.append(time.perf_counter() - start)

    await asyncio.gather(*map(ask, streams))
    elapsed = time.monotonic() - began
    for channel in channels:
        await channel.close(None)
    return Measured(took, elapsed)


def _warm_calls(clients: int) -> int:
    return WARM_CALLS if clients < MANY_CLIENTS else FEW_WARM_CALLS


def _asked(job: Job, clients: int, parts: int) -> Measured:
    return asyncio.run(_at_random_times(job, clients, job.rate / parts)) if job.rate else _closed(job, clients)


async def _at_random_times(job: Job, clients: int, rate: float) -> Measured:
    made = [AsyncClient(job.target) for _ in range(clients)]
    drawn, took = itertools.cycle([job.sizes.draw(job.tokens) for _ in range(4)]), list[float]()
    for _ in range(_warm_calls(clients)):
        for client in made:
            await client.forward(job.layer, *next(drawn), timeout_s=DEADLINE_S)
        await asyncio.sleep(WARM_PAUSE_S)

    async def call(client: AsyncClient, due: float) -> None:
        await client.forward(job.layer, *next(drawn), timeout_s=DEADLINE_S)
        took.append(time.monotonic() - due)

    began = due = time.monotonic()
    turns, calls = itertools.cycle(made), list[asyncio.Task[None]]()
    while (due := due + random.expovariate(rate)) - began < job.seconds or not calls:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        calls.append(asyncio.create_task(call(next(turns), due)))
    await asyncio.gather(*calls)
    elapsed = time.monotonic() - began
    for client in made:
        await client.close()
    return Measured(took, elapsed)
