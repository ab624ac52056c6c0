"""Collectives of many ranks on one GPU, or on an emulated one: as `loopback`, for `CollectiveEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.copy_engines.collective_engine import CollectiveEngine, Shard
from tests.gpu.loopback import Bytes, Machine
from tests.gpu.loopback_group import LoopGroup

POOL_BYTES = 1 << 20
BOTH = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
PLACES = ("plain", "registered", "in place", "both")
"""Of an all-reduce."""
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 65504.0, 1e-8, 3.0])


class LoopbackCollectives:
    """R ranks.

    Args:
        size: R.
        machine: what runs the kernels.
        blocks: blocks of a rank that may be resident; None fills the machine.
        timeout_s: deadline of a wait.
        staging_bytes: of a slot.
        pool_bytes: registered memory of a rank.
    """

    def __init__(
        self,
        size: int,
        machine: Machine,
        blocks: int | None = None,
        timeout_s: float = 60.0,
        staging_bytes: int = 4096,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.size, self._machine = size, machine
        room = blocks or max(1, machine.num_sms // size)
        groups = [LoopGroup(rank, size) for rank in range(size)]
        self.engines = [
            CollectiveEngine(group, timeout_s, pool_bytes, staging_bytes, machine.device, room) for group in groups
        ]
        self.memory = [Bytes(e.region_bytes, e.blank_bytes, machine.device) for e in self.engines]
        for engine in self.engines:
            engine.attach([memory.data.data_ptr() for memory in self.memory])

    def put(self, tensor: torch.Tensor, skew: int = 0) -> torch.Tensor:
        """A copy where the kernels run, so many bytes past an aligned address."""
        room = torch.full((tensor.nbytes + skew + 64,), 0xA5, dtype=torch.uint8, device=self._machine.device)
        start = -room.data_ptr() % 16 + skew
        place = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        return place

    def pool(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A registered tensor."""
        return self.memory[rank].view(int(self.engines[rank].map.pool) + offset, tuple(shape), dtype)

    def run(self, calls: Sequence[Sequence[Call]]) -> None:
        """All ranks' calls, launch by launch. Fewer than R ranks: the others are silent."""
        for launches in zip(*calls, strict=True):
            self.launch(launches)

    def run_active(self, calls: Sequence[Sequence[Call]]) -> None:
        """The calls of those that rank 0 takes for active, of all ranks' calls."""
        self.run([each for each, active in zip(calls, self.engines[0].active, strict=True) if active])

    def leave_out_last(self) -> None:
        """What `set_active` does to the ranks that go on without the last one."""
        staying = self.engines[:-1]
        agreed = 1 + max(engine.tables.sequence()[1] for engine in staying)
        for engine in staying:
            engine.tables.restart(agreed, agreed, agreed)
            engine.set_active([True] * len(staying) + [False])

    def launch(self, launches: Sequence[Call]) -> None:
        """One call of each rank."""
        records = bytearray(b"".join(bytes(call.args) for call in launches))
        packed = torch.frombuffer(records, dtype=torch.uint8).to(self._machine.device, copy=True)
        blocks = launches[0].launch.num_blocks
        assert all(call.launch.num_blocks == blocks for call in launches)
        self._machine.run(launches[0], blocks * len(launches), packed, blocks)

    def check(self) -> None:
        """Raise what any rank's kernels met."""
        for engine in self.engines:
            if (found := engine.tables.host.fault() or engine.tables.host.finding()) is not None:
                raise found

    # Operations, compared with the reference.

    def all_gather(
        self, parts: Sequence[Sequence[torch.Tensor]], place: str = "plain", skew: int = 0, num_sms: int | None = None
    ) -> None:
        """parts[i][r]: x of rank r; place: plain | registered | in place (registered, x a slice of it)."""
        shards: list[list[Shard]] = [[] for _ in range(self.size)]
        at = 0
        for xs in parts:
            n = xs[0].nbytes
            for rank, x in enumerate(xs):
                if place == "plain":
                    out, offset = self.put(torch.zeros(self.size * n, dtype=torch.uint8), skew), None
                else:
                    out = self.pool(rank, at + skew, (self.size * n,), torch.uint8)
                    out.fill_(0)
                    offset = int(self.engines[rank].map.pool) + at + skew
                mine = self.put(x, skew).flatten().view(torch.uint8)
                if place == "in place":
                    mine = out[rank * n : (rank + 1) * n].copy_(mine)
                shards[rank].append(Shard(mine, out, offset, x.dtype))
            at += self.size * n + 256 - (self.size * n) % 256
        push = place != "plain"
        self.run_active([e.all_gather(shards[r], push, num_sms) for r, e in enumerate(self.engines)])
        self.check()
        for i, xs in enumerate(parts):
            told = reference.all_gather([x.flatten() for x in xs], active=self.engines[0].active)
            for rank, want in enumerate(told):
                if want is not None:
                    assert torch.equal(shards[rank][i].out.cpu(), want.view(torch.uint8)), (i, rank)

    def reduce_scatter(
        self, xs: Sequence[torch.Tensor], in_place: bool = False, skew: int = 0, num_sms: int | None = None
    ) -> None:
        """xs[r] [R * n]; skew: of x and out, bytes, a multiple of an element."""
        mine = [self.put(x, skew) for x in xs]
        n = xs[0].numel() // self.size
        outs = [
            x[rank * n : (rank + 1) * n] if in_place else self.put(torch.zeros_like(x[:n]), skew)
            for rank, x in enumerate(mine)
        ]
        self.run_active([e.reduce_scatter(mine[r], outs[r], num_sms) for r, e in enumerate(self.engines)])
        self.check()
        self._compare(outs, reference.reduce_scatter(xs, active=self.engines[0].active))

    def all_reduce(
        self,
        xs: Sequence[torch.Tensor],
        algorithm: Algorithm,
        place: str = "plain",
        skew: int = 0,
        num_sms: int | None = None,
    ) -> None:
        """xs[r] [n]; place: plain | in place | registered | both."""
        mine, outs, offset = [self.put(x, skew) for x in xs], [], None
        for rank, x in enumerate(mine):
            out = x
            if place in ("registered", "both"):
                out, offset = self.pool(rank, skew, x.shape, x.dtype), int(self.engines[rank].map.pool) + skew
                out.fill_(7)
            if place == "both":
                mine[rank] = out.copy_(x)
            elif place == "plain":
                out = self.put(torch.full_like(x, 7), skew)
            outs.append(out)
        calls = [e.all_reduce(mine[r], outs[r], offset, algorithm, num_sms) for r, e in enumerate(self.engines)]
        self.run_active(calls)
        self.check()
        self._compare(outs, reference.all_reduce(xs, active=self.engines[0].active))

    def add_terms(self, xs: Sequence[torch.Tensor], skew: int = 0, shares: bool = False) -> None:
        """xs[r] [R, n]: its terms for each rank, as copy engines leave them in slots of `copies`."""
        mine, outs, shared = [self.put(x, skew) for x in xs], [], []
        for rank, engine in enumerate(self.engines):
            slot, row = engine.copy_slot(1), int(engine.map.reduce_row)
            for other, x in enumerate(xs):
                place = self.memory[rank].view(slot + other * row, x[0].shape, x.dtype)
                place.copy_(x[rank] if other != rank else torch.full_like(x[0], float("nan")))
            outs.append(mine[rank][rank] if skew else self.put(torch.full_like(xs[0][0], 7)))
            shared.append(self.memory[rank].view(slot + rank * row, xs[0][0].shape, xs[0].dtype))
        own = [mine[rank][rank] for rank in range(self.size)]
        calls = [[e.add_terms(own[r], outs[r], e.copy_slot(1), shares)] for r, e in enumerate(self.engines)]
        self.run_active(calls)
        self.check()
        told = reference.reduce_scatter([x.flatten() for x in xs], active=self.engines[0].active)
        self._compare(outs, told)
        if shares:
            self._compare(shared, told)

    def _compare(self, outs: Sequence[torch.Tensor], told: Sequence[Any]) -> None:
        for rank, (out, want) in enumerate(zip(outs, told, strict=True)):
            if want is None:
                continue
            got = out.cpu()
            nan = want.isnan()
            assert torch.equal(got.isnan(), nan), rank
            bits = {2: torch.int16, 4: torch.int32}[want.itemsize]
            assert torch.equal(got[~nan].view(bits), want[~nan].view(bits)), rank

    def preset(self, value: int) -> None:
        """Let every rank go on from operation `value`."""
        for engine, memory in zip(self.engines, self.memory, strict=True):
            engine.tables.restart(value, value, value)
            for begin, end in engine.blank_bytes:
                memory.data[begin:end] = 0
            memory.data[: int(engine.map.arrivals)].view(torch.int64).fill_(value)
            start = abi.FLAGS.index("LEFT_OUT") * self.size
            memory.data[: int(engine.map.arrivals)].view(torch.int64)[start : start + self.size] = 0


def numbers(shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random values of many magnitudes, special ones among them."""
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 4, (shape,), generator=generator)
    marked = torch.rand(shape, generator=generator) < 0.1
    x[marked] = SPECIAL[torch.randint(0, len(SPECIAL), (int(marked.sum()),), generator=generator)]
    return x.to(dtype)


def rows(size: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    return [numbers(n, dtype, generator) for _ in range(size)]


def step(loop: LoopbackCollectives, kind: int, generator: torch.Generator) -> None:
    """One operation of kind 0..3, of a random size."""
    n = int(torch.randint(1, 1500, (), generator=generator))
    if kind == 0:
        loop.all_gather([rows(loop.size, n, torch.float16, generator)], ("plain", "registered")[n % 2])
    elif kind == 1:
        loop.reduce_scatter(rows(loop.size, n * loop.size, torch.bfloat16, generator))
    else:
        loop.all_reduce(rows(loop.size, n, torch.bfloat16, generator), BOTH[kind - 2], PLACES[n % 4])


def begun(loop: LoopbackCollectives, kind: int, n: int = 600, sms: int | None = None) -> list[list[Call]]:
    """The calls of one operation on all ranks; 1.0 everywhere."""
    calls = []
    for rank, engine in enumerate(loop.engines):
        x = loop.put(torch.ones(loop.size * n, dtype=torch.float32))
        if kind == 0:
            out = torch.empty(loop.size * x.nbytes, dtype=torch.uint8, device=x.device)
            calls.append(engine.all_gather([Shard(x.view(torch.uint8), out, None, x.dtype)], False, sms))
        elif kind == 1:
            offset = int(engine.map.pool)
            out = loop.pool(rank, 0, (loop.size * x.nbytes,), torch.uint8)
            calls.append(engine.all_gather([Shard(x.view(torch.uint8), out, offset, x.dtype)], True, sms))
        elif kind == 2:
            calls.append(engine.reduce_scatter(x, torch.empty(n, device=x.device), sms))
        else:
            calls.append(engine.all_reduce(x, torch.empty_like(x), None, BOTH[kind - 3], sms))
    return calls


KINDS = range(5)
"""Of `begun`."""
