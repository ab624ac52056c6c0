"""What two kernels in a row cost on this machine though they do next to nothing: the fixed part of any LL pair.

Graphs of PAIRS pairs, as the LL pairs themselves are measured; times are per pair, of the slowest rank. Three kernels
(`floor.cuh`): an empty one, one that exchanges a line with every peer, one that does it by release and acquire. Each
plain and overlapped with the kernel in front (programmatic dependent launch), as one block and as many as there are
multiprocessors. What arrived is checked after the loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu.measure import PAIRS, WARMUP, Stopwatch, per_pair
from benchmarks.gpu.peers import Peers
from crossdock.tune.measure import captured
from ep_kernels import jit
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.gpu import driver

NODES = 2 * PAIRS
LINE_BYTES = 128
TIMEOUT_S = 2.0
KERNELS = {"launch": "empty", "exchange": "exchange", "release": "release"}
"""op of the csv -> entry point."""


class Exchange(ctypes.Structure):
    """`Exchange` of floor.cuh."""

    _fields_ = (
        ("peers", ctypes.c_uint64 * abi.MAX_RANKS),
        ("offset", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Kind:
    """One line of the table: which kernel (key of KERNELS), how many blocks, overlapped with the one in front?"""

    op: str
    num_blocks: int
    overlapped: bool


def kinds(num_sms: int) -> Iterator[Kind]:
    """All lines."""
    for op in KERNELS:
        for num_blocks in (1, num_sms):
            for overlapped in (False, True):
                yield Kind(op, num_blocks, overlapped)


def source() -> str:
    """The whole C++ text of the three kernels."""
    return "\n".join(
        (
            jit.flatten("common/ptx.cuh", {"types.h": abi.header()}),
            "using namespace ep;",
            Path(__file__).with_name("floor.cuh").read_text(),
            f'static_assert(sizeof(Exchange) == {ctypes.sizeof(Exchange)}, "Exchange: host and GPU differ");',
        )
    )


class Nodes:
    """The kernels of one graph: each has lines and counters of its own.

    Args:
        kind: which.
        addresses: [R] of each rank's memory.
        start: where in it their lines begin: NODES * `node_bytes` that are zero and nobody else's.
        rank: this rank.
        device: its GPU.
    """

    def __init__(self, kind: Kind, addresses: list[int], start: int, rank: int, device: torch.device) -> None:
        self.kind, self.size, self._rank = kind, len(addresses), rank
        blocks = kind.num_blocks
        self.counts = torch.zeros(NODES, blocks, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(NODES, blocks, self.size, dtype=torch.int64, device=device)
        self.failed = torch.zeros(1, dtype=torch.int64, device=device)
        self._records = [
            self._record(node, addresses, start + node * node_bytes(kind, self.size)) for node in range(NODES)
        ]

    def _record(self, node: int, addresses: list[int], offset: int) -> Exchange:
        return Exchange(
            peers=(ctypes.c_uint64 * abi.MAX_RANKS)(*addresses),
            offset=offset,
            counts=self.counts[node].data_ptr(),
            arrived=self.arrived[node].data_ptr(),
            failed=self.failed.data_ptr(),
            timeout_ns=int(TIMEOUT_S * 1e9),
            rank=self._rank,
            size=self.size,
        )

    def launch(self, function: Any) -> None:
        """All of them, in order, on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        for record in self._records:
            function.launch(self.kind.num_blocks, jit.NUM_THREADS, stream, record, overlapped=self.kind.overlapped)

    def fault(self, rounds: int) -> str:
        """What is wrong after `rounds` rounds, "" if nothing."""
        return "" if self.kind.op == "launch" else fault(self.counts, self.arrived, int(self.failed), rounds)


def node_bytes(kind: Kind, ranks: int) -> int:
    """Bytes of each rank's memory that one kernel of the graph uses."""
    return kind.num_blocks * ranks * LINE_BYTES


def word(rank: int, block: int, count: int) -> int:
    """What `rank` sends in an exchange; `word_of` of floor.cuh."""
    return (rank + 1) << 48 | block << 32 | count


def fault(counts: torch.Tensor, arrived: torch.Tensor, failed: int, rounds: int) -> str:
    """What is wrong with counts int64 [nodes, blocks] and arrived int64 [nodes, blocks, R]; "" if nothing."""
    if failed:
        return f"{failed} waits for a peer ended at the deadline"
    if bool((counts != rounds).any()):
        return f"{int((counts != rounds).sum())} blocks did not exchange {rounds} times"
    _, blocks, ranks = arrived.shape
    want = torch.tensor([[word(rank, block, rounds) for rank in range(ranks)] for block in range(blocks)])
    wrong = int((arrived.cpu() != want).sum())
    return f"{wrong} of {arrived.numel()} words are not what the peers sent last" if wrong else ""


def measure(group: Any, watch: Stopwatch, iterations: int, device: torch.device) -> list[report.Floor]:
    """All lines. Collective, to the end whatever goes wrong on the way; then raises AssertionError if something else
    arrived than was sent."""
    every = list(kinds(torch.cuda.get_device_properties(device).multi_processor_count))
    cubin = jit.compile_source(source(), "floor", driver.architecture(device.index)).cubin
    functions = {op: driver.Function(cubin, name, 0) for op, name in KERNELS.items()}
    starts = list(accumulate((NODES * node_bytes(kind, group.size) for kind in every), initial=0))
    peers = Peers(group, starts[-1], device.index)
    found, faults = [], []
    try:
        for kind, start in zip(every, starts[:-1], strict=True):
            nodes = Nodes(kind, peers.addresses, start, group.rank, device)
            found.append(_measured(nodes, functions[kind.op], watch, iterations))
            faults.append(nodes.fault(1 + WARMUP + iterations))
    finally:
        torch.cuda.synchronize(device)
        peers.close()
    wrong = [f"rank {group.rank}, {kind}: {what}" for kind, what in zip(every, faults, strict=True) if what]
    if wrong:
        raise AssertionError("\n".join(wrong))
    return found


def _measured(nodes: Nodes, function: Any, watch: Stopwatch, iterations: int) -> report.Floor:
    kind = nodes.kind
    graph = captured(partial(nodes.launch, function))  # runs them once, too
    for _ in range(WARMUP + iterations):
        watch.time(kind.op, graph.replay, flush=False)
    found = per_pair(watch.times())[kind.op]
    return report.Floor(kind.op, kind.overlapped, kind.num_blocks, nodes.size, [found.gpu_us])
