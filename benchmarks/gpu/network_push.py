"""From a kernel to the proxy and back, without a network between.

    python -m benchmarks.gpu.network_push --out FOLDER

A kernel stores a descriptor to the ring in pinned memory; a thread of the host takes it and stores a word, which the
kernel polls. `fence`: a place in the ring and the fence of the system, behind one store to pinned memory, in front of
the push. `round`: from there to the word's arrival. `read`: one load of such a word, which a poll is. `push`: until the
host has taken the descriptor; `see`: from then until the kernel sees the word; together they are the round.

The first poll begins at a time that changes from round to round, up to a poll's length, so that answers find polls at
every place. Where in a round the host's clock stands, the two clocks alone do not tell: within 64 rounds, in which they
drift by nanoseconds, neither half is below 0, which bounds it (`at most`). `push` and `see` hold if the fastest answer
of the 64 took half of the shortest read. Writes network_push.csv (microseconds) and run.json.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import facts, native
from ep_kernels import jit
from ep_kernels.kernels import abi
from ep_kernels.telemetry import quantile
from ep_kernels.transports.nvlink.gpu import driver

ROUNDS, WARMUP, WINDOW = 20_000, 992, 64
TIMEOUT_S = 5.0


class Ping(ctypes.Structure):
    """`Ping` of network_push.cuh."""

    _fields_ = (
        ("world", abi.World),
        ("word", ctypes.c_uint64),
        ("fences_ns", ctypes.c_uint64),
        ("begun_ns", ctypes.c_uint64),
        ("seen_ns", ctypes.c_uint64),
        ("reads_ns", ctypes.c_uint64),
        ("payload", ctypes.c_uint64),
        ("rounds", ctypes.c_uint64),
    )


def source() -> str:
    """The whole C++ text of the kernel."""
    variant = jit.Variant("barrier", network=True)
    supplied = {"types.h": abi.header(), "variant.h": jit.variant_header(variant)}
    return "\n".join(
        (
            jit.flatten("common/push.cuh", supplied),
            "using namespace ep;",
            Path(__file__).with_name("network_push.cuh").read_text(),
            f'static_assert(sizeof(Ping) == {ctypes.sizeof(Ping)}, "Ping: host and GPU differ");',
        )
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Of the rounds after the warm-up, nanoseconds.

    Attributes:
        fences, reads: how long they took.
        begun, seen: the GPU's clock at both ends of a round.
        host: the host's in between.
    """

    fences: list[int]
    begun: list[int]
    seen: list[int]
    reads: list[int]
    host: list[int]


def measure(device: torch.device) -> Times:
    """Raises RuntimeError: the kernel pushed nothing, or was not answered."""
    lib: Any = native.load()
    sizes = lib.cd_bench_box_bytes() // 8 + 8, 1, 128
    box, word, payload = (torch.zeros(size, dtype=torch.int64, pin_memory=True) for size in sizes)
    state = torch.zeros(ctypes.sizeof(abi.State) // 8, dtype=torch.int64, device=device)
    ring = -(-box.data_ptr() // 64) * 64
    network = abi.Network(ring=ring, popped=ring + abi.RING_SIZE * 16)
    at = abi.State.network.offset // 8
    state[at:].copy_(torch.frombuffer(bytearray(bytes(network)), dtype=torch.int64))
    times = torch.zeros(4, ROUNDS, dtype=torch.int64, device=device)
    world = abi.World(rank=0, size=2, timeout_ns=int(TIMEOUT_S * 1e9), state=state.data_ptr())
    args = Ping(world, word.data_ptr(), *(row.data_ptr() for row in times), payload.data_ptr(), ROUNDS)
    cubin = jit.compile_source(source(), "network_push", driver.architecture(device.index)).cubin
    function, host = driver.Function(cubin, "ping", 0), (ctypes.c_int64 * ROUNDS)()
    with ThreadPoolExecutor(1) as pool:
        echo = pool.submit(lib.cd_bench_echo, ring, word.data_ptr(), ROUNDS, int(TIMEOUT_S * 1e9), host)
        function.launch(1, jit.NUM_THREADS, torch.cuda.current_stream().cuda_stream, args)
        if echo.result():
            raise RuntimeError("the kernel pushed nothing")
    torch.cuda.synchronize(device)
    fences, begun, seen, reads = times[:, WARMUP:].tolist()
    return Times(fences, begun, seen, reads, host[WARMUP:])


def halves(times: Times) -> dict[str, list[int]]:
    """push, see, and the most that each can be (this module's docstring)."""
    found: dict[str, list[int]] = {"push": [], "see": [], "push, at most": [], "see, at most": []}
    answer = min(times.reads) // 2
    for start in range(0, len(times.host), WINDOW):
        part = slice(start, start + WINDOW)
        rounds = list(zip(times.begun[part], times.host[part], times.seen[part], strict=True))
        least, most = max(host - seen for _, host, seen in rounds), min(host - begun for begun, host, _ in rounds)
        offset = least + answer
        for begun, host, seen in rounds:
            found["push"].append(host - begun - offset)
            found["see"].append(seen - host + offset)
            found["push, at most"].append(host - begun - least)
            found["see, at most"].append(seen - host + most)
    return found


@dataclass(frozen=True)
class Line:
    """One line of the table, microseconds."""

    what: str
    p50_us: float
    p99_us: float
    min_us: float
    samples: int


def line(what: str, values_ns: list[int]) -> Line:
    """Figures of some times."""
    return Line(
        what, quantile(values_ns, 0.5) / 1e3, quantile(values_ns, 0.99) / 1e3, min(values_ns) / 1e3, len(values_ns)
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.network_push", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(words).out
    times = measure(torch.device("cuda", torch.cuda.current_device()))
    rounds = [seen - begun for begun, seen in zip(times.begun, times.seen, strict=True)]
    found = {"fence": times.fences, "round": rounds, "read": times.reads, **halves(times)}
    lines = [line(what, values) for what, values in found.items()]
    told = facts.of_this_run({"rounds": ROUNDS, "warmup": WARMUP}, module="benchmarks.gpu.network_push")
    facts.keep(out, "network_push", Line, lines, told | facts.of_gpus(1))
    for one in lines:
        print(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
