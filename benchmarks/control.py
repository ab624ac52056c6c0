"""How the control plane scales: simulated workers against the real server, in a process of its own.

    python -m benchmarks.control --out DIR [--ranks 8 64 ...]        (make bench-control)

The workers are the real `worker/group/control_client.py` (register, watch, heartbeats, reports) without a data plane
behind it: they publish a region of 128 bytes, take the table, get ready. All share one process and one event loop, so
seconds are an upper bound: on two cores one belongs to the server and one to all the workers. Bytes that all are sent
alike (the table of regions) are parsed once for all: what one real worker does in a millisecond, thousands in one
process would do for seconds, and their heartbeats would be late for no fault of the server's. CPU and memory are the
server's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.parts import Parts
from crossdock.common import announce
from crossdock.common.call_errors import CallError
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2
from crossdock.worker.group.control_client import ControlPlaneClient
from crossdock.worker.group.seat import seat_in
from crossdock.worker.steps.work import Fault

SIZES = (8, 64, 256, 512, 1024, 2048)
REGION_BYTES = 128
GPUS_PER_HOST = 8
MOST_LOST = 64
SHARED_BYTES = 4096
STEADY_S = 10.0
DEADLINE_S = 900.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Row:
    """One size.

    Attributes:
        ranks, lease_s: of the group.
        form_s, form_cpu_s: from the first Register until every worker knows that the group serves; the server's CPU.
        form_views, form_mbytes: views that all workers together were sent, and their size.
        form_calls: calls that all workers together made: Register, PublishRegion, Ready, Heartbeat.
        beat_cpu_percent, beats_per_s: of one core, while the group serves.
        lost: workers killed at once; each survivor reports one of them, and successors come at once.
        reform_s, reform_cpu_s: from the kill until every worker knows that the group serves again.
        reform_views, reform_mbytes, reform_calls: as above.
        reform_beat_s: the longest that a heartbeat took meanwhile; leases of those in danger end after lease_s.
        epochs: epochs that the loss cost.
        rss_mbytes: memory of the server, at most.
        load: of the machine when this size was begun: processes that want to run, mean of a minute.
    """

    ranks: int
    lease_s: float
    form_s: float
    form_cpu_s: float
    form_views: int
    form_mbytes: float
    form_calls: int
    beats_per_s: float
    beat_cpu_percent: float
    lost: int
    reform_s: float
    reform_cpu_s: float
    reform_views: int
    reform_mbytes: float
    reform_calls: int
    reform_beat_s: float
    epochs: int
    rss_mbytes: float
    load: float


class Traffic:
    """What all workers together were sent, and said."""

    def __init__(self) -> None:
        self.views, self.num_bytes, self.calls, self.beats, self.longest_beat_s = 0, 0, 0, 0, 0.0
        self._parsed: dict[bytes, pb.GroupView] = {}

    def take(self) -> tuple[int, float, int]:
        """Views, megabytes and calls since the last call."""
        taken = self.views, round(self.num_bytes / 1e6, 2), self.calls
        self.views, self.num_bytes, self.calls, self.longest_beat_s = 0, 0, 0, 0.0
        return taken

    def parse(self, message: bytes) -> pb.GroupView:
        """A view; long ones that many get are one object. Nobody changes a view."""
        self.views += 1
        self.num_bytes += len(message)
        if len(message) < SHARED_BYTES:
            return pb.GroupView.FromString(message)
        if message not in self._parsed:
            self._parsed = {message: pb.GroupView.FromString(message)}
        return self._parsed[message]


class SimClient(ControlPlaneClient):
    """A client that counts."""

    def __init__(self, target: str, number: int, incarnation: int, traffic: Traffic) -> None:
        self._traffic = traffic
        host = number // GPUS_PER_HOST
        self.uid = f"host-{host}/{number % GPUS_PER_HOST}"
        registration = pb.RegisterRequest(
            worker=pb.WorkerId(uid=self.uid, incarnation=incarnation),
            host=topology_pb2.HostFacts(hostname=f"host-{host}", boot_id=f"boot-{host}"),
            local_rank=number % GPUS_PER_HOST, address=f"host-{host}:{number}", http_address=f"host-{host}:{number}",
            transport="cpu", abi="abi", model="model",
        )  # fmt: skip
        super().__init__(target, registration, self._count_beat)
        self._stub.Watch = self._channel.grpc_channel.unary_stream(
            "/crossdock.v1.ControlPlane/Watch", pb.WatchRequest.SerializeToString, traffic.parse
        )

    def _count_beat(self) -> pb.WorkerStats:
        self._traffic.beats += 1
        return pb.WorkerStats(tokens_total=self._traffic.beats)

    async def _call(self, method: str, request: Any, timeout_s: float, *, retry_s: float = 0) -> Any:
        self._traffic.calls += 1
        begun = time.monotonic()
        try:
            return await super()._call(method, request, timeout_s, retry_s=retry_s)
        finally:
            if method == "Heartbeat":
                took_s = time.monotonic() - begun
                self._traffic.longest_beat_s = max(self._traffic.longest_beat_s, took_s)


class SimWorker:
    """A worker without a data plane: joins epoch after epoch."""

    def __init__(self, target: str, number: int, incarnation: int, traffic: Traffic) -> None:
        self.number, self.incarnation = number, incarnation
        self.client = SimClient(target, number, incarnation, traffic)
        self.serving = 0
        self.rank = -1
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.client.start()
        self._task = asyncio.create_task(self._live())

    async def stop(self) -> None:
        """As if killed: nothing is said."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()

    async def _live(self) -> None:
        joined = 0
        while True:
            view = await self.client.wait(lambda v, past=joined: v.epoch > past and seat_in(v, self.client) is not None)  # type: ignore[misc]
            seat = seat_in(view, self.client)
            assert seat is not None
            joined, self.rank = seat.epoch, seat.rank
            try:
                await self._join(joined)
            except CallError as error:  # as session.py does: an epoch that is not over yet is broken
                self.client.report(joined, Fault(str(error)))

    async def _join(self, epoch: int) -> None:
        await self.client.publish_region(epoch, self.rank, os.urandom(REGION_BYTES))
        if await self.client.region_table(epoch) is not None:
            await self.client.ready(epoch, self.client.view.placement)
            view = await self.client.wait(lambda v: v.epoch > epoch or v.state == pb.SERVING)
            if view.epoch == epoch:
                self.client.serving(epoch)
                self.serving = epoch


class Server:
    """The control plane as a process, and what it has used."""

    def __init__(self, ranks: int, lease_s: float) -> None:
        fields_ = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0", "world_size": ranks, "lease_s": lease_s}
        fields_ |= {"recover_s": 0.5, "log.level": "error"}
        overrides = [word for name, value in fields_.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-P", "-m", "crossdock", "control", *overrides]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = announce.parse(self._process.stdout.readline())
        if found is None:
            raise RuntimeError("the control plane did not start")
        self.address = found.address

    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        words = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS

    def rss_mbytes(self) -> float:
        """Most memory so far."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1e3, 1)
        return 0.0

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(timeout=30)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait. Raises TimeoutError that says for what."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def group(server: Server, ranks: int, traffic: Traffic) -> AsyncIterator[list[SimWorker]]:
    """All workers, started."""
    workers = [SimWorker(server.address, number, 1, traffic) for number in range(ranks)]
    for worker in workers:
        worker.start()
    try:
        yield workers
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


async def measure(ranks: int, lease_s: float) -> Row:
    """One size, from an empty control plane to a group that served, lost workers, and serves again."""
    load, server, traffic = os.getloadavg()[0], Server(ranks, lease_s), Traffic()
    try:
        begun, cpu = time.monotonic(), server.cpu_s()
        async with group(server, ranks, traffic) as workers:
            await until(lambda: all(worker.serving for worker in workers), "all serve")
            form_s, form_cpu = time.monotonic() - begun, server.cpu_s() - cpu
            form = traffic.take()
            beats, cpu = traffic.beats, server.cpu_s()
            await asyncio.sleep(STEADY_S)
            steady = (traffic.beats - beats) / STEADY_S, (server.cpu_s() - cpu) / STEADY_S * 100
            traffic.take()
            lost = min(MOST_LOST, max(1, ranks // 8))
            first, begun, cpu = workers[0].serving, time.monotonic(), server.cpu_s()
            await lose(server, workers, lost, traffic)
            await until(lambda: all(worker.serving > first for worker in workers), "all serve again")
            reform_s, reform_cpu = time.monotonic() - begun, server.cpu_s() - cpu
            beat_s, reform = traffic.longest_beat_s, traffic.take()
            epochs = workers[0].serving - first
            rss = server.rss_mbytes()
    finally:
        server.stop()
    return Row(
        ranks, lease_s, round(form_s, 2), round(form_cpu, 2), *form, round(steady[0], 1), round(steady[1], 1), lost,
        round(reform_s, 2), round(reform_cpu, 2), *reform, round(beat_s, 2), epochs, rss, round(load, 1),
    )  # fmt: skip


async def lose(server: Server, workers: list[SimWorker], lost: int, traffic: Traffic) -> None:
    """Kill `lost` workers spread over the group; every survivor reports one of them; successors start at once."""
    stride = len(workers) // lost
    gone = [index * stride for index in range(lost)]
    ranks = [workers[index].rank for index in gone]
    await asyncio.gather(*(workers[index].stop() for index in gone))
    for index, worker in enumerate(workers):
        if index not in gone:
            silent = ranks[index % lost]
            worker.client.report(worker.serving, Fault(f"rank {silent} is silent", (silent,)))
    for index in gone:
        workers[index] = SimWorker(server.address, workers[index].number, 2, traffic)
        workers[index].start()


def lease_of(ranks: int) -> float:
    """The default up to 256 ranks; then one that keeps heartbeats at about 300 a second."""
    return max(3.0, round(ranks / 100, 1))


def show(row: Row) -> str:
    """One line."""
    return "  ".join(f"{field.name} {getattr(row, field.name)}" for field in fields(Row))


def main(words: Sequence[str] | None = None) -> int:
    """Measure all sizes; print each as it is done; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Measure how the control plane scales.")
    parser.add_argument("--out", type=Path, help="folder for control.csv and run.json; none: print only")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES), help="sizes of groups")
    parser.add_argument(
        "--lease", type=float, default=0.0, help="seconds, at least; for a machine that is busy otherwise"
    )
    arguments = parser.parse_args(words)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config: dict[str, object] = {"region_bytes": REGION_BYTES, "steady_s": STEADY_S}
    about = facts.of_control(sys.argv[1:] if words is None else words, config)
    table = Parts(arguments.out, "control", Row, lambda: about, lambda row: print(show(row), flush=True))
    with asyncio.Runner() as loop:  # one: grpc keeps to the first that it sees
        for ranks in arguments.ranks:
            lease_s = max(arguments.lease, lease_of(ranks))
            table.measure(f"{ranks} ranks", lambda ranks=ranks, s=lease_s: [loop.run(measure(ranks, s))])  # type: ignore[misc]
    return table.status


if __name__ == "__main__":
    sys.exit(main())
