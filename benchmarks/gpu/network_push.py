"""From a kernel to the proxy and back, without a network between.

    python -m benchmarks.gpu.network_push --out FOLDER

A kernel stores a descriptor to the ring in pinned memory; a thread of the host takes it and stores a word, which the
kernel polls. `fence`: of the system, behind one store to pinned memory, in front of the push. `round`: from there to
the word's arrival, that is push to popped and word to seen. `read`: one load of such a word, which a poll is.
Writes network_push.csv (microseconds) and run.json.
"""

from __future__ import annotations

import argparse
import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import facts
from ep_kernels import jit
from ep_kernels.kernels import abi
from ep_kernels.network import proxy
from ep_kernels.telemetry import quantile
from ep_kernels.transports.nvlink import driver

ROUNDS, WARMUP = 20_000, 1000
TIMEOUT_S = 5.0


class Ping(ctypes.Structure):
    """`Ping` of network_push.cuh."""

    _fields_ = (
        ("world", abi.World),
        ("word", ctypes.c_uint64),
        ("fences_ns", ctypes.c_uint64),
        ("rounds_ns", ctypes.c_uint64),
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


def measure(device: torch.device) -> list[list[int]]:
    """Fences, rounds, reads, nanoseconds. Raises RuntimeError: the kernel pushed nothing, or was not answered."""
    lib: Any = proxy.load()
    sizes = lib.cn_bench_box_bytes() // 8 + 8, 1, 128
    box, word, payload = (torch.zeros(size, dtype=torch.int64, pin_memory=True) for size in sizes)
    state = torch.zeros(ctypes.sizeof(abi.State) // 8, dtype=torch.int64, device=device)
    ring = -(-box.data_ptr() // 64) * 64
    network = abi.Network(ring=ring, popped=ring + abi.RING_SIZE * 16)
    at = abi.State.network.offset // 8
    state[at:].copy_(torch.frombuffer(bytearray(bytes(network)), dtype=torch.int64))
    times = torch.zeros(3, ROUNDS, dtype=torch.int64, device=device)
    world = abi.World(rank=0, size=2, timeout_ns=int(TIMEOUT_S * 1e9), state=state.data_ptr())
    args = Ping(world, word.data_ptr(), *(row.data_ptr() for row in times), payload.data_ptr(), ROUNDS)
    cubin = jit.compile_source(source(), "network_push", driver.architecture(device.index)).cubin
    function = driver.Function(cubin, "ping", 0)
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(lib.cn_bench_echo, ring, word.data_ptr(), ROUNDS, int(TIMEOUT_S * 1e9))
        function.launch(1, jit.NUM_THREADS, torch.cuda.current_stream().cuda_stream, args)
        if host.result():
            raise RuntimeError("the kernel pushed nothing")
    torch.cuda.synchronize(device)
    found: list[list[int]] = times[:, WARMUP:].tolist()
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


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    found = measure(torch.device("cuda", torch.cuda.current_device()))
    lines = [line(what, times) for what, times in zip(("fence", "round", "read"), found, strict=True)]
    told = facts.of_this_run({"rounds": ROUNDS, "warmup": WARMUP}, module="benchmarks.gpu.network_push")
    facts.keep(out, "network_push", Line, lines, told | facts.of_gpus(1))
    for one in lines:
        print(one)


if __name__ == "__main__":
    main()
