"""The network of `nodes.py`: what must travel, the proxies' time, and the provider's own loop beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import network
from benchmarks.cases import Case, ranks_of
from ep_kernels import Layout
from ep_kernels.network import NetworkConfig
from ep_kernels.network.network import Network
from ep_kernels.telemetry import quantile
from ep_kernels.transports.nvlink.calls.plan import slice_rows
from ep_kernels.transports.nvlink.network import boxes
from ep_kernels.transports.nvlink.network.rails import Rails

DEADLINE_S = 120.0
STREAM_ROUNDS = 24
LEAST_BYTES = 64 << 20
"""So much has pages of its own, which are pinned."""
PLACES, MOST_PLACES_BYTES = 4, 256 << 20
"""Slots of dispatch and combine take turns, so an operation finds memory that was used three operations ago. Beyond so
many bytes no cache holds even one."""
HEAD_BYTES, LINE_BYTES, PACKET_BYTES, PACKET_ROOM = 16, 128, 1024, 960
COUNTS_OF_LINE, CHOICES_OF_LINE = 28, 7
"""What travels: docs/network-protocol.md, "GPUs"."""


def network_of(rank: int, ranks: int, nodes: int, provider: str, spin_us: int) -> NetworkConfig:
    """The network of one rank, with the ranks divided among `nodes` hosts."""
    return NetworkConfig(
        provider=provider, listen="127.0.0.1:0", domain=f"host {rank * nodes // ranks}", spin_us=spin_us
    )


def remote_of(rank: int, ranks: int, nodes: int) -> list[int]:
    """Ranks of other hosts."""
    return [peer for peer in range(ranks) if peer * nodes // ranks != rank * nodes // ranks]


def hosts_of(ranks: int, nodes: int) -> list[int]:
    """Lowest rank of the host of each."""
    host = [rank * nodes // ranks for rank in range(ranks)]
    return [host.index(one) for one in host]


def rows_by_rail(case: Case, topk_ids: torch.Tensor, rank: int, nodes: int) -> torch.Tensor:
    """int64 [R]: rows of these tokens of `rank` that each rank of another host gets, for all of its host."""
    hosts, owner = hosts_of(case.ranks, nodes), ranks_of(case, topk_ids)
    rails = Rails(hosts, hosts, [True] * case.ranks)
    found = torch.zeros(case.ranks, dtype=torch.int64, device=topk_ids.device)
    for host in {*hosts} - {hosts[rank]}:
        members = torch.tensor([one for one in range(case.ranks) if hosts[one] == host], device=topk_ids.device)
        rail = rails.rail(rank, host)
        assert rail is not None
        found[rail] = torch.isin(owner, members).any(1).sum()
    return found


def sizes_of(case: Case, op: str, rows: int, carried: int | None = None) -> list[int]:
    """Bytes of each message of one operation that has `rows` rows for one rank of another host. `carried`: rows that go
    to it, for all of its host; None: those alone."""
    row, carried = -(-case.moved_bytes(op) // PACKET_ROOM) * PACKET_BYTES, rows if carried is None else carried
    per_slice = slice_rows(most_rows(case, op), row) or max(1, carried)
    slices = [min(per_slice, carried - first) * row for first in range(0, carried, per_slice)]
    if op == "combine":
        return [HEAD_BYTES, *slices]
    per_expert = case.layout in (Layout.EXPERT_MAJOR, Layout.GROUPED)
    counts = -(-case.experts // case.ranks // COUNTS_OF_LINE) * LINE_BYTES
    records = -(-case.topk // CHOICES_OF_LINE) * LINE_BYTES
    return [HEAD_BYTES, *([counts] if per_expert else []), *([rows * records] if rows else []), *slices]


def most_rows(case: Case, op: str) -> int:
    """That a rank sends to another one."""
    return case.tokens * (case.topk if case.exact_combine and op == "combine" else 1)


class Proxies:
    """Processor time of the proxy threads of this process."""

    def __init__(self) -> None:
        self._begun_ns, self._wall_ns = self._now_ns(), time.monotonic_ns()

    def used(self) -> tuple[float, float]:
        """(us, share of a processor) since this was made."""
        used, wall = self._now_ns() - self._begun_ns, time.monotonic_ns() - self._wall_ns
        return used / 1e3, used / wall

    @staticmethod
    def _now_ns() -> int:
        tasks = [path for path in Path("/proc/self/task").iterdir() if _read(path / "comm") == "crossdock-net\n"]
        return sum(map(_used_ns, tasks))


def _used_ns(task: Path) -> int:
    """Of a thread; by the clock's ticks where the kernel keeps nothing finer."""
    if (task / "schedstat").exists():
        return int(_read(task / "schedstat").split()[0])
    user, system = _read(task / "stat").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class Streams:
    """The provider's own loop between ranks of different hosts, by proxies of its own.

    Args:
        most_bytes: that a rank sends in one round.
    """

    def __init__(self, config: NetworkConfig, rank: int, ranks: int, nodes: int, most_bytes: int) -> None:
        self._rank, self._ranks, self._nodes = rank, ranks, nodes
        self._peers = remote_of(rank, ranks, nodes)
        self._most, self._places = most_bytes, PLACES if PLACES * most_bytes <= MOST_PLACES_BYTES else 1
        self._network, size = Network(config), max(self._places * most_bytes, LEAST_BYTES)
        self._end = network.End(self._network, rank, ranks, size)
        self._end.write(1)
        self._own, self._landing = (torch.frombuffer(memory, dtype=torch.uint8) for memory in self._end.memory)
        for memory in (self._own, self._landing):
            boxes.pin(memory.data_ptr(), memory.numel())
        self._gpu = torch.zeros(most_bytes, dtype=torch.uint8, device="cuda")
        tickets: list[Any] = [None] * ranks
        dist.all_gather_object(tickets, self._end.channel.ticket())
        self._end.channel.connect({peer: tickets[peer] for peer in self._peers}, DEADLINE_S)

    def us(self, messages: Sequence[tuple[int, int]], expected: int, rounds: int, *, of_gpu: bool = False) -> float:
        """Median of the rounds' slowest ranks, each of which sends those (rank, bytes). `of_gpu`: the GPU has read what
        came, and has written what goes, before each round, in places that take turns."""
        took, num_bytes = [], sum(size for _, size in messages)
        for number in range(rounds + 2):
            place = number % self._places * self._most if of_gpu else 0
            if of_gpu:
                for peer in self._peers:
                    self._gpu[:num_bytes].copy_(self._landing[peer * len(self._own) + place :][:num_bytes])
                self._own[place:][:num_bytes].copy_(self._gpu[:num_bytes])
                torch.cuda.synchronize()
            self._end.stream([(peer, 0) for peer in self._peers], len(self._peers), 0)  # all are here
            took.append(self._end.stream(messages, expected, 0, place) / 1e3)
        slowest = torch.tensor(took[2:], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return quantile(slowest.tolist(), 0.5)

    def of_operation(self, case: Case, op: str, rows: torch.Tensor) -> tuple[float, float]:
        """As long as its messages take, and those of a GPU; rows int64 [R, R, 2], from -> to: for that rank, and those
        that go to it."""
        sends = [
            [(peer, size) for peer in remote_of(rank, self._ranks, self._nodes)
             for size in sizes_of(case, op, *rows[rank, peer].tolist())]
            for rank in range(self._ranks)
        ]  # fmt: skip
        expected = sum(peer == self._rank for one in sends for peer, _ in one)
        return (
            self.us(sends[self._rank], expected, STREAM_ROUNDS),
            self.us(sends[self._rank], expected, STREAM_ROUNDS // 2, of_gpu=True),
        )

    def close(self) -> None:
        """Part from all."""
        dist.barrier()
        self._end.channel.close()
        for memory in (self._own, self._landing):
            boxes.unpin(memory.data_ptr())
        self._end.channel.free()
        self._network.close()
