"""One rank's collectives by kernels: argument records and launches. Knows addresses and the byte map; knows neither
processes nor how regions came to be mapped, so that tests can run many ranks on one GPU, or on none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp
from ep_kernels.config import Group
from ep_kernels.kernels import abi, collective_abi
from ep_kernels.kernels.collective_abi import NO_OFFSET, CollectiveArgs
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.calls.plan import Launch
from ep_kernels.transports.nvlink.calls.tables import RankTables
from ep_kernels.transports.nvlink.copy_engines import collective_plan as plan
from ep_kernels.transports.nvlink.gpu.signature import signature


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of an all-gather.

    Attributes:
        x: uint8 [n], flat.
        out: uint8 [R * n], flat; may have x at [rank * n :][:n].
        offset: of out in every rank's region; None where it is not registered.
        dtype: of the caller's tensors.
    """

    x: torch.Tensor
    out: torch.Tensor
    offset: int | None
    dtype: torch.dtype


class CollectiveEngine:
    """Prepares the operations of one rank.

    Attributes:
        tables: counters, host page.
        active: which ranks take part, as the host knows it.
        available: fewest multiprocessors of any rank; set before the first operation.

    Args:
        available: multiprocessors of this one.
    """

    def __init__(
        self, group: Group, timeout_s: float, pool_bytes: int, staging_bytes: int, device: torch.device, available: int
    ) -> None:
        self.group, self.available = group, available
        self.sizes = plan.sizes_of(group.size, pool_bytes, staging_bytes)
        self.map: Any = collective_abi.collective_map(self.sizes)
        self._shared_map: Any = collective_abi.shared_map(self.sizes)
        self.tables = RankTables(group, timeout_s, device)
        self.active = [True] * group.size
        self._words = torch.zeros(abi.OP_WORDS + 2, dtype=torch.int64, device=device)

    @property
    def region_bytes(self) -> int:
        return int(self.map.num_bytes)

    @property
    def blank_bytes(self) -> tuple[tuple[int, int], ...]:
        """[begin, end) of what must be zero before peers write: flags, and packets with flags in their data."""
        return ((0, int(self.map.reduce)),)

    @property
    def copy_word(self) -> int:
        """Address of two device words that copy engines' flags are copied from; aligned to 16 bytes."""
        return self._words.data_ptr() + 8 * abi.OP_WORDS

    @property
    def graph_slot(self) -> int:
        """Offset in the region of the slot from which peers' copy engines read in CUDA graphs."""
        return int(self.map.copies) + collective_abi.SLOTS * int(self.map.slot_stride)

    def copy_wait(self, word: int, phase: int) -> Call:
        """What stands before (phase 0) and behind (1) the copies of an all-gather in a CUDA graph."""
        args = self._record(word, 0)
        args.num_parts = phase
        return Call(plan.copy_wait_variant(), plan.launch_of(plan.copy_wait_variant(), self.group.size), args)

    def copy_slot(self, seq: int) -> int:
        """Offset in the region of the slot from which peers' copy engines read in operation `seq`."""
        return int(self.map.copies) + seq % collective_abi.SLOTS * int(self.map.slot_stride)

    def attach(self, addresses: Sequence[int]) -> None:
        self.tables.set_peers(addresses)

    def set_active(self, mask: Sequence[bool]) -> None:
        self.active = list(mask)
        self.tables.set_active(mask)

    def _record(self, word: int, x_bytes: int) -> Any:
        return CollectiveArgs(
            world=self.tables.world, map=self.map, signature=word, words=self._words.data_ptr(),
            x_bytes=x_bytes, out_offset=NO_OFFSET,
        )  # fmt: skip

    def barrier(self, left_out_epoch: int = 0) -> Call:
        args = abi.BarrierArgs(self.tables.world, left_out_epoch)
        return Call(plan.barrier_variant(), Launch(1, 0, 0, 0), args)

    def all_gather(self, shards: Sequence[Shard], push: bool, num_sms: int | None) -> list[Call]:
        """Launches of an all-gather, in order. push: every out is registered."""
        lengths = [shard.x.numel() for shard in shards]
        algorithm = Algorithm.KERNEL_PUSH if push else Algorithm.KERNEL_PULL
        more = [(shard.dtype, length) for shard, length in zip(shards[1:], lengths[1:], strict=True)]
        places = [push and shard.offset for shard in shards]
        rounds = list(plan.gather_rounds(lengths, None if push else int(self.map.slot_stride)))
        bytes_of = [sum(each.num_bytes for each in ranges) for ranges in rounds]
        grids = [self._blocks(moved * (self.group.size - 1), plan.GATHER_BLOCKS, num_sms) for moved in bytes_of]
        alike = more, places, max(grids, default=0)
        word = signature(CollectiveOp.ALL_GATHER, algorithm, shards[0].dtype, sum(lengths), alike)
        calls = []
        for ranges, moved, blocks in zip(rounds, bytes_of, grids, strict=True):
            args = self._record(word, moved)
            args.push, args.num_parts = int(push), len(ranges)
            for i, part in enumerate(ranges):
                shard, record = shards[part.index], args.parts[i]
                record.x, record.out = shard.x.data_ptr() + part.begin, shard.out.data_ptr() + part.begin
                record.out_offset = (shard.offset or 0) + part.begin
                record.stride, record.num_bytes = shard.x.numel(), part.num_bytes
            launch = plan.gather_launch(blocks, self.group.size)
            calls.append(Call(plan.gather_variant(), launch, args, [shards]))
        return calls

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, num_sms: int | None) -> list[Call]:
        """Launches of a reduce-scatter of x [R * n] into out [n]."""
        num_bytes, total = out.numel() * out.itemsize, x.numel() * x.itemsize
        rounds = list(plan.reduce_rounds(num_bytes, self.sizes.reduce_row))
        grids = [self._blocks(length * (self.group.size - 1), plan.REDUCE_BLOCKS, num_sms) for _, length in rounds]
        alike = max(grids, default=0)
        word = signature(CollectiveOp.REDUCE_SCATTER, Algorithm.KERNEL_PULL, x.dtype, total, alike)
        calls = []
        for (begin, length), blocks in zip(rounds, grids, strict=True):
            args = self._record(word, length * self.group.size)
            args.x, args.out = x.data_ptr() + begin, out.data_ptr() + begin
            args.stride, args.num_bytes = num_bytes, length
            launch = plan.reduce_launch(blocks, self.group.size)
            calls.append(Call(plan.reduce_variant("reduce_scatter", x.dtype), launch, args, [x, out]))
        return calls

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor, offset: int | None, algorithm: Algorithm, num_sms: int | None
    ) -> list[Call]:
        """Launches of an all-reduce of x [n] into out [n], which `offset` says the place of where it is registered."""
        # How: out written where it lies, read at the peers, or shared through staging.
        one_shot = algorithm is Algorithm.ONE_SHOT
        num_bytes, size = x.numel() * x.itemsize, self.group.size
        direct = offset is not None and offset % 16 == 0 and not one_shot
        reads = direct and x.data_ptr() == out.data_ptr() and num_bytes <= plan.READ_MAX_BYTES
        shares = not one_shot and not direct
        # Rounds: as much as the staging takes.
        row = self.sizes.shared_row if shares else self.sizes.reduce_row
        most = self.sizes.line_packets * abi.PACKET_DATA if one_shot else row * sum(self.active)
        most = num_bytes if reads else most
        # Kernel and grids.
        variant = plan.reduce_variant("all_reduce", x.dtype, plan.ONE_SHOT if one_shot else plan.TWO_SHOT)
        worth = plan.ONE_SHOT_BLOCK_BYTES if one_shot else None
        rounds = list(plan.reduce_rounds(num_bytes, most))
        grids = [
            self._blocks(length * (size - 1) if one_shot else 2 * length, plan.REDUCE_BLOCKS, num_sms, worth)
            for _, length in rounds
        ]
        # What all ranks must have in common.
        alike = reads, direct and offset, max(grids, default=0)
        word = signature(CollectiveOp.ALL_REDUCE, algorithm, x.dtype, num_bytes, alike)
        # A launch for each round.
        calls = []
        for (begin, length), blocks in zip(rounds, grids, strict=True):
            args = self._record(word, length)
            args.x, args.out, args.num_bytes = x.data_ptr() + begin, out.data_ptr() + begin, length
            args.reads = int(reads)
            if direct and offset is not None:
                args.out_offset = offset + begin
            if shares:
                args.map = self._shared_map
            launch = plan.reduce_launch(blocks, size)
            calls.append(Call(variant, launch, args, [x, out]))
        return calls

    def add_terms(self, own: torch.Tensor, out: torch.Tensor, slot: int, shares: bool) -> Call:
        """Sum of this rank's own terms [...] and those that stand in a slot, by rank, into out [...]; shares: into the
        own row of the slot as well."""
        args = self._record(0, own.nbytes)
        args.x, args.out, args.num_bytes = own.data_ptr(), out.data_ptr(), own.nbytes
        args.map.reduce = slot
        if shares:
            args.out_offset = slot + self.group.rank * int(self.map.reduce_row)
        launch = plan.add_launch(self._blocks(own.nbytes, plan.REDUCE_BLOCKS, None), self.group.size)
        return Call(plan.reduce_variant("add_terms", own.dtype), launch, args, [own, out])

    def _blocks(self, num_bytes: int, most: int, num_sms: int | None, worth: int | None = None) -> int:
        return plan.num_blocks(num_bytes, most, num_sms, self.available, worth)
