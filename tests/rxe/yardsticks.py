"""In the guest: ring, proxy and provider beside what others measure on the same devices. Prints lines of JSON.

    python tests/rxe/yardsticks.py BARE_LOOPS BLOCKS PROVIDER...

verbs: beside ib_write_lat and ib_write_bw, and, alike, a bare loop of writes with immediate. libfabric: beside a bare
loop of fi_writedata, and, alike, one whose queue can wake a sleeper. Short blocks take turns, ours first in every other
one, so whatever else the machine does, it does to all. A message is one that each end's proxy thread answers; for
latency both spin, as the yardsticks' ends do; for a stream of libfabric, too. A stream of verbs has the proxies as they
are by default: the guest has two processors, one of which ib_write_bw's other end leaves to the kernel. A stream's
memory was written before, here and in the bare loops.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing as mp
import re
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import inside  # noqa: F401  makes ep_kernels importable without torch

from benchmarks import native
from ep_kernels.network import NetworkConfig
from ep_kernels.network.network import Channel, ChannelMemory, Network
from ep_kernels.network.providers import Mark
from tests.unit.network_ends import devices_of

PING_BYTES, BULK_BYTES, ROUNDS, COUNT, WAIT_S = 8, 65536, 400, 160, 120.0
MIB, NAP_NS = 1 << 20, 200_000
SETTLE_S = 0.2
"""Between turns: longer than a proxy spins."""


def spin_us(provider: str, what: str) -> int:
    """As the ends of the yardstick do."""
    return 100_000 if what == "us" or provider != "verbs" else NetworkConfig().spin_us


class Pong(ctypes.Structure):
    """`Pong` of benchmarks/native/bench.cpp."""

    _fields_ = (
        ("box", ctypes.c_void_p),
        ("ns", ctypes.c_void_p),
        ("rounds", ctypes.c_int64),
        ("at_ns", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("bytes", ctypes.c_uint32),
    )


class Side:
    """One of two ranks."""

    def __init__(self, rank: int, provider: str, spin_us: int) -> None:
        self.rank = rank
        fields: dict[str, Any] = {"listen": "127.0.0.1:0", "spin_us": spin_us, **devices_of(provider, rank)}
        self.network = Network(NetworkConfig(provider=provider, **fields))
        size = COUNT * BULK_BYTES
        self._own, self._landing = ctypes.create_string_buffer(size), ctypes.create_string_buffer(2 * size)
        self.ns = (ctypes.c_int64 * ROUNDS)()
        self.pong = Pong(None, ctypes.addressof(self.ns) if rank == 0 else None, ROUNDS, 0, 0, 1 - rank, PING_BYTES)
        ctypes.memset(self._own, 1, size)
        ctypes.memset(self._landing, 1, 2 * size)
        own, landing = ctypes.addressof(self._own), ctypes.addressof(self._landing)
        handler, context = native.load().cd_bench_ponger(), ctypes.addressof(self.pong)
        memory = ChannelMemory(own, size, landing, size, handler, context)
        self.channel = Channel(self.network, rank, 2, memory, WAIT_S)
        self.pong.box = self.channel.outbox

    def join(self, pipe: Connection) -> None:
        """Connect with the other one."""
        pipe.send(self.channel.ticket())
        self.channel.connect({1 - self.rank: pipe.recv()}, WAIT_S)

    def latency_us(self) -> float:
        """Median of one way."""
        self.pong.done = 0
        native.load().cd_bench_ping(ctypes.byref(self.pong))
        until = time.monotonic() + WAIT_S
        while self.pong.done < ROUNDS:
            time.sleep(0.05)
            if time.monotonic() > until:
                raise TimeoutError(self.channel.why(1))
        return sorted(self.ns)[ROUNDS // 2] / 2e3

    def mib_per_s(self) -> float:
        """Of a stream, until all of it has been acknowledged."""
        to, sizes = (ctypes.c_int32 * COUNT)(*[1] * COUNT), (ctypes.c_uint32 * COUNT)(*[BULK_BYTES] * COUNT)
        stream = native.load().cd_bench_stream
        took = stream(self.channel.pointer, ctypes.byref(Mark()), to, sizes, COUNT, 0, 0, NAP_NS)
        if took < 0:
            raise TimeoutError(self.channel.why(1))
        return COUNT * BULK_BYTES / MIB / (took / 1e9)


def answer(pipe: Connection, provider: str, what: str) -> None:
    """The other rank. Of a stream, it answers nothing."""
    side = Side(1, provider, spin_us(provider, what))
    if what != "us":
        side.pong.rank = -1
    side.join(pipe)
    pipe.recv()


class Ours:
    """Both ranks, for one of the two figures."""

    def __init__(self, provider: str, what: str) -> None:
        context = mp.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.other = context.Process(target=answer, args=(there, provider, what), daemon=True)
        self.other.start()
        self.side = Side(0, provider, spin_us(provider, what))
        self.side.join(self.pipe)
        self.measure = self.side.latency_us if what == "us" else self.side.mib_per_s

    def end(self) -> None:
        """Let the other process go."""
        self.pipe.send("over")
        self.other.join()
        self.side.channel.close()
        self.side.network.close()


def perftest(tool: str, *arguments: str) -> list[str]:
    """The figures of one of perftest's tools, from rxe0 to rxe1."""
    for port in range(18515, 18525):  # the last one may still be held
        common = ["-x", "1", "-F", "-p", str(port), *arguments]
        server = subprocess.Popen([tool, "-d", "rxe1", *common], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while not _listens(port) and time.monotonic() < until:
            time.sleep(0.1)
        command = [tool, "-d", "rxe0", *common, "127.0.0.1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        server.kill()
        server.wait()
        if done.returncode == 0:
            figures: list[str] = re.findall(r"^ \d+ .*$", done.stdout, re.MULTILINE)
            return figures[-1].split()
    raise RuntimeError(f"{tool}: {done.stdout}{done.stderr}")


def _listens(port: int) -> bool:
    return any(f":{port:04X} 00000000:0000 0A" in line for line in Path("/proc/net/tcp").read_text().splitlines())


def theirs(provider: str, what: str, bare: str) -> float:
    """Latency in us, or bandwidth in MiB/s, of the yardstick."""
    if provider == "verbs" and what == "us":
        return float(perftest("ib_write_lat", "-s", str(PING_BYTES), "-n", str(ROUNDS))[4])
    if provider == "verbs":
        return float(perftest("ib_write_bw", "-s", str(BULK_BYTES), "-n", str(COUNT))[3])
    return loop(provider, what, bare)


def loop(provider: str, what: str, bare: str, *options: str) -> float:
    """The same of a bare loop."""
    rounds, count = (ROUNDS, 1) if what == "us" else (1, COUNT)
    if provider == "verbs":
        ends = [f"{bare}/bare_verbs", "rxe0", "rxe1"]
    else:
        address = devices_of(provider, 0)["listen"].split(":")[0]
        ends = [f"{bare}/bare_fabric", provider[len("libfabric(") : -1], address]
    command = [*ends, *map(str, (rounds, PING_BYTES, BULK_BYTES, count)), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    latency, mb = map(float, done.stdout.split())
    return latency if what == "us" else mb * 1e6 / MIB


def alike(provider: str, what: str, bare: str) -> float:
    """Of a loop whose messages and queues are as ours."""
    return loop(provider, what, bare, *([] if provider == "verbs" else ["waits"]))


def main(bare: str, blocks: int, providers: list[str]) -> None:
    """Every provider and figure, block by block."""
    for provider in providers:
        for what in ("us", "mib_per_s"):
            ours = Ours(provider, what)
            ours.measure()  # code is translated when it first runs
            for block in range(blocks):
                turns = [("ours", ours.measure)]
                turns += [
                    (of, partial(one, provider, what, bare)) for of, one in (("yardstick", theirs), ("alike", alike))
                ]
                for name, measure in turns if block % 2 == 0 else reversed(turns):
                    time.sleep(SETTLE_S)
                    row = {"provider": provider, "block": block, "of": name, "what": what, "value": measure()}
                    print("ROW " + json.dumps(row), flush=True)
            ours.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
